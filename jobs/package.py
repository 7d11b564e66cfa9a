"""Pack Lockstep for a cluster: its code as a zip, and Python with all packages as two archives (`make package`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.jobs._archives import ARCHIVES, build, named_by_digest, shell_lines
from lockstep.jobs._cli import JobParser, run_job
from lockstep.jobs._upload import summary, target
from lockstep.storage.upload import upload


def parser() -> JobParser:
    """The command line."""
    job = JobParser("package", __doc__ or "", "package")
    text = "folder of lockstep.zip, lockstep-etl.tar.gz and lockstep-training.tar.gz (default dist)"
    job.add_argument("--output", default="dist", metavar="DIR", help=text)
    text = "archives to make: etl is without TensorFlow (default: both)"
    job.add_argument("--archives", nargs="+", choices=[*ARCHIVES], default=[*ARCHIVES], help=text)
    text = "installed packages to add to the archives, with all that they require"
    job.add_argument("--add", nargs="+", default=[], metavar="PACKAGE", help=text)
    text = "also make own-code.zip of the Python modules in this folder, for --py-files"
    job.add_argument("--code", metavar="DIR", help=text)
    text = "also put the files here, named by their digests, and write DIR/package.sh, which exports their URLs"
    job.add_argument("--upload", metavar="URL", help=text)
    job.epilog = (
        "An archive is made again only if a file in it has changed, and sent only if HDFS has none of its digest."
        " exit 0: all files are there; 1: HDFS or a file failed; 2: invalid arguments or a missing package"
    )
    return job


def main(argv: Sequence[str]) -> int:
    """Make the files and upload them; returns the exit code."""
    args = parser().parse(argv)
    output = target(args.upload, None) if args.upload else None
    made = build(Path(args.output), args.archives, args.add, args.code)
    for file in made:
        print(f"{file.path}: {file.size_bytes / 2**20:.1f} MiB, {'made' if file.new else 'unchanged'}")
    if output is not None:
        items = named_by_digest(made, output)
        print(summary(upload(items, output), output))
        lines = shell_lines(made, items)
        Path(args.output, "package.sh").write_text(lines, encoding="utf-8")
        print(lines, end="")
    return 0


if __name__ == "__main__":
    run_job(main)
