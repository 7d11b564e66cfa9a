"""Check a dataset, checkpoint, model or run byte by byte: `lockstep verify URL`."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.jobs._cli import JobParser, run_job
from lockstep.jobs._verify import IntactFiles
from lockstep.storage.errors import CorruptionError, DataError
from lockstep.storage.fs import filesystem
from lockstep.storage.progress import Progress

SHOWN_FAULTS = 100


def parser() -> JobParser:
    """The command line."""
    found = JobParser("verify", __doc__ or "", table="verify")
    where = "a local path, hdfs:// or webhdfs:// URL of a dataset, checkpoint, model or run"
    found.add_argument("url", metavar="URL", help=where)
    found.add_argument(
        "--all",
        action="store_true",
        help=f"a line for each intact file and each fault (default: {SHOWN_FAULTS} faults, and numbers of the others)",
    )
    found.epilog = "exit 0: whole; 1: damaged, each fault on a line with file, record and offset; 2: nothing to verify"
    return found


def main(argv: Sequence[str]) -> int:
    """Verify; returns 0 if everything is intact, else 1."""
    args = parser().parse(argv)
    from lockstep.storage.verify import kind_of, total_bytes, verify

    url, intact = args.url, IntactFiles(args.all)
    kind = kind_of(filesystem(url), url)
    total = total_bytes(url)
    with Progress(f"verify {kind}", total, "bytes") as progress:
        findings = verify(
            url,
            on_ok=intact.add,
            on_bytes=lambda count: progress.update(count),
        )
    intact.end()
    faults = [str(finding) for finding in findings]
    if kind == "run" and not faults:
        faults = audit_faults(url)
    shown = faults if args.all else faults[:SHOWN_FAULTS]
    for fault in shown:
        print(f"WRONG {fault}", flush=True)
    if len(shown) < len(faults):
        print(f"WRONG {len(faults) - len(shown)} more faults, which --all shows", flush=True)
    print(f"{kind} {url}: {f'{len(faults)} faults found' if faults else 'whole'}")
    return 1 if faults else 0


def audit_faults(run: str) -> list[str]:
    """Faults in chain and audit of an intact run: none if each sample of each epoch counted exactly once.

    Without an audit or the run's dataset, the comparison is skipped with a note, which is no fault.
    """
    from lockstep.training.results.audit import NotAuditedError, check_run_audit

    try:
        report = check_run_audit(run)
    except NotAuditedError as error:
        print(f"note  audit not checked: {error.what} ({error.got})", flush=True)
        return []
    except CorruptionError as error:
        return [error.what]
    except DataError as error:
        return [f"{error.what}: {error.got}"]
    samples = {"missing": report.missing, "repeated": report.repeated, "unknown": report.unknown}
    faults = [f"audit: {line}" for line in report.places]
    faults += [f"audit: epoch {epoch}, sample {name}: {what}" for what, ids in samples.items() for epoch, name in ids]
    faults += [f"audit: step {step}: not a full global batch" for step in report.short_steps]
    if not faults:
        print(f"ok    audit: {report}")
    return faults


if __name__ == "__main__":
    run_job(main)
