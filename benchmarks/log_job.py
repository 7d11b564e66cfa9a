"""A log to a dataset, against only Spark on the same file; and 2,000 small files against one with the same bytes.

    python -m benchmarks.log_job [--files N] [--repeats N] [--master local[2]] [--cold | --jobs]

Both pairs are measured in turns in one warm session; with --cold each in a new process, as users run a job. Only Spark
means: it reads the demo's log as text, extracts its fields by one regular expression, repartitions the rows to as many
partitions as there are cores and writes Parquet, without ids, splits, checks, statistics, digests and publication.
--jobs lists the Spark jobs of one run, with their descriptions and times.
"""

from __future__ import annotations

import argparse
import gzip
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.shared.shapes import interleaved, machine, seconds
from lockstep.etl.logs import job as logs
from lockstep.etl.logs.config import LogsConfig
from lockstep.spark.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOG = Path(__file__).resolve().parents[1] / "data" / "weblogs" / "nasa_access_log_1995-07-09.log.gz"
FIELDS = r'^(\S+) (\S+) (\S+) \[([^\]]+)\] "([^"]*)" (\d+|-) (\d+|-)'


def etl(spark: SparkSession, source: Path, folder: Path) -> Callable[[], object]:
    """lockstep etl_logs of `source` as the demo calls it."""

    def work() -> None:
        out = folder / secrets.token_hex(8)
        logs.run(spark, LogsConfig(inputs=(str(source),), output=str(out), split="group:visitor:80/20"))
        shutil.rmtree(out)

    return work


def plain(spark: SparkSession, source: Path, folder: Path) -> Callable[[], object]:
    """Read, regular expression, repartition and write, by Spark alone."""
    from pyspark.sql import functions as f

    def work() -> None:
        out = folder / secrets.token_hex(8)
        fields = [f.regexp_extract("value", FIELDS, number).alias(f"f{number}") for number in range(1, 8)]
        rows = spark.read.text(str(source)).select(*fields)
        rows.repartition(spark.sparkContext.defaultParallelism, "f1").write.parquet(str(out))
        shutil.rmtree(out)

    return work


def in_process(*command: str) -> Callable[[], object]:
    """A process from its start to its end."""
    return lambda: subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True, timeout=3600)


def cold(folder: Path, many: Path, one: Path, args: argparse.Namespace) -> None:
    """Both comparisons by processes."""

    def job(source: Path) -> Callable[[], object]:
        def work() -> None:
            out, split = str(folder / secrets.token_hex(8)), ["--split", "group:visitor:80/20"]
            in_process(
                "lockstep.jobs.etl_logs", "--input", str(source), "--output", out, *split, "--master", args.master
            )()
            shutil.rmtree(out)

        return work

    alone = in_process("benchmarks.log_job", "--plain", str(folder), "--master", args.master)
    compared("the demo's log, cold", {"lockstep.jobs.etl_logs": job(LOG), "Spark alone": alone}, args.repeats)
    compared("small files, cold", {f"{args.files} files": job(many), "one file": job(one)}, args.repeats)


def cut(source: Path, folder: Path, files: int) -> tuple[Path, Path]:
    """The first lines of a log as `files` files of 3 KB each, and as one file of the same bytes."""
    many, one = folder / "many", folder / "one.log"
    many.mkdir()
    data = gzip.decompress(source.read_bytes())
    data *= -(-files * 3200 // len(data))  # as often as it takes
    start = 0
    for number in range(files):
        end = data.index(b"\n", start + 3000) + 1
        (many / f"{number:05d}.log").write_bytes(data[start:end])
        start = end
    one.write_bytes(data[:start])
    return many, one


def compared(name: str, works: dict[str, Callable[[], object]], repeats: int) -> None:
    """Measure two works in turns and print their seconds and the ratio of the first to the second in each round."""
    times = interleaved({label: partial(seconds, work) for label, work in works.items()}, repeats)
    for label, found in times.items():
        print(f"{name}, {label}: median {median(found):.2f} s, {min(found):.2f} to {max(found):.2f}")
    first, second = times.values()
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    print(
        f"{name}, ratio: median {median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}, {repeats} rounds",
        flush=True,
    )


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def tell_jobs(spark: SparkSession, work: Callable[[], object]) -> None:
    """Run `work` and print each Spark job of it: what it does, when it began and how long it took, its tasks."""
    store = spark.sparkContext._jsc.sc().statusStore()
    before = store.jobsList(None).size()
    work()
    found = store.jobsList(None)  # newest first
    new = [found.apply(number) for number in range(found.size() - before)][::-1]
    begun = new[0].submissionTime().get().getTime()
    for one in new:
        start, end = one.submissionTime().get().getTime(), one.completionTime().get().getTime()
        what = one.description().get() if one.description().isDefined() else one.name()
        print(
            f"{(start - begun) / 1000:7.2f} s {(end - start) / 1000:6.2f} s {one.numCompletedTasks():5d} tasks  {what}"
        )


def main(argv: list[str]) -> int:
    """Print both comparisons; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5, help="counted rounds, after a dropped one")
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--cold", action="store_true", help="each run in a separate process")
    parser.add_argument("--plain", metavar="FOLDER", help="run only Spark's part of --cold, once")
    parser.add_argument("--jobs", action="store_true", help="only list the Spark jobs of one run")
    args = parser.parse_args(argv)
    if args.plain:
        from pyspark.sql import SparkSession

        spark = SparkSession.builder.master(args.master).getOrCreate()  # as Spark is without Lockstep
        plain(spark, LOG, Path(args.plain))()
        spark.stop()
        return 0
    print(machine("pyspark", "pyarrow", "numpy"), args.master, flush=True)
    if args.cold:
        with tempfile.TemporaryDirectory() as name:
            cold(Path(name), *cut(LOG, Path(name), args.files), args)
        return 0
    with tempfile.TemporaryDirectory() as name, spark_session("log job", args.master) as spark:
        folder = Path(name)
        many, one = cut(LOG, folder, args.files)
        if args.jobs:
            for source in (LOG, one, many):
                work = etl(spark, source, folder)
                work()
                print(source.name)
                tell_jobs(spark, work)
            return 0
        works = {"lockstep.jobs.etl_logs": etl(spark, LOG, folder), "Spark alone": plain(spark, LOG, folder)}
        compared("the demo's log", works, args.repeats)
        works = {f"{args.files} files": etl(spark, many, folder), "one file": etl(spark, one, folder)}
        compared("small files", works, args.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
