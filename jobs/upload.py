"""Put local files on HDFS or in a store, whole or not at all: `lockstep upload --input LOCAL... --output URL`."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.jobs._cli import JobParser, run_job
from lockstep.jobs._upload import line, summary, target
from lockstep.storage.errors import require
from lockstep.storage.progress import Progress
from lockstep.storage.upload import find_files, upload

MAX_PARALLEL = 32


def parser() -> JobParser:
    """The command line."""
    job = JobParser("upload", __doc__ or "", "upload")
    text = "files, each put below --output by its name, and folders, whose content is put there with its paths"
    job.add_argument("--input", nargs="+", required=True, metavar="LOCAL", help=text)
    job.add_argument(
        "--output", required=True, metavar="URL", help="a directory, hdfs://..., webhdfs://HOST:PORT/... or s3://..."
    )
    text = "webhdfs (HTTP) or hdfs (HDFS's own protocol); by default what --output begins with"
    job.add_argument("--via", choices=["webhdfs", "hdfs"], help=text)
    text = "never (default): a file there with another content ends the job; changed: it is replaced"
    job.add_argument("--overwrite", choices=["never", "changed"], default="never", help=text)
    text = f"files sent at a time, up to {MAX_PARALLEL} (default 4)"
    job.add_argument("--parallel", type=int, default=4, metavar="N", help=text)
    job.epilog = (
        "A file has its name only after its content was compared. Run again after an interruption: what is there"
        " with equal length and digest is not sent again. exit 0: all files are there; 1: the storage or a file failed;"
        " 2: invalid arguments, or a file exists with another content"
    )
    return job


def main(argv: Sequence[str]) -> int:
    """Upload; returns the exit code."""
    args = parser().parse(argv)
    require(1 <= args.parallel <= MAX_PARALLEL, "--parallel", str(args.parallel), f"1 to {MAX_PARALLEL}")
    output = target(args.output, args.via)
    items = find_files(args.input, output)
    with Progress("upload", sum(item.size_bytes for item in items), "bytes") as progress:
        outcomes = upload(
            items,
            output,
            replace=args.overwrite == "changed",
            parallel=args.parallel,
            on_bytes=progress.update,
            on_done=lambda outcome: print(line(outcome), flush=True),
        )
    print(summary(outcomes, output))
    return 0


if __name__ == "__main__":
    run_job(main)
