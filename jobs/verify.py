"""Check a dataset, checkpoint, model or run byte by byte: `python -m jobs.verify URL`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)
if sys.path[0] != ROOT:
    sys.path[:1] = [ROOT]

from jobs._cli import JobParser, run_job
from storage.fs import filesystem
from storage.progress import Progress
from storage.verify import kind_of, total_bytes, verify


def parser() -> JobParser:
    """The command line."""
    found = JobParser("verify", __doc__ or "", table="verify")
    found.add_argument("url", metavar="URL", help="a local path or hdfs:// URL of a dataset, checkpoint, model or run")
    found.epilog = "exit 0: whole; 1: damaged, each fault on a line with file, record and offset; 2: nothing to verify"
    return found


def main(argv: Sequence[str]) -> int:
    """Verify; returns 0 where everything is right and 1 where something is not."""
    url = parser().parse(argv).url
    kind = kind_of(filesystem(url), url)
    total = total_bytes(url)
    with Progress(f"verify {kind}", total, "bytes") as progress:
        findings = verify(
            url,
            on_ok=lambda path, text: print(f"ok    {path}: {text}", flush=True),
            on_bytes=lambda count: progress.update(count),
        )
    for finding in findings:
        print(f"WRONG {finding}", flush=True)
    print(f"{kind} {url}: {f'{len(findings)} faults found' if findings else 'whole'}")
    return 1 if findings else 0


if __name__ == "__main__":
    run_job(main)
