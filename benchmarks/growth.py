"""How time, bytes and memory of the whole write job grow with the rows: 40 columns and an id, digests included.

    python -m benchmarks.growth [--rows 100000 1000000 10000000] [--repeats N] [--master local[2]]

Memory is the largest resident set of one of Spark's Python workers, sampled five times a second. Spark computes the
rows from their numbers, so no input is held in memory; each dataset is deleted before the next is written. With linear
growth, CPU seconds for a million rows (Java and all workers) and bytes for a row are equal; with flat memory, MiB are.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING

import psutil

from benchmarks.shared.shapes import FLOATS, INTS, machine
from benchmarks.write_job import all_cpu_seconds
from lockstep.etl.write.dataset import write_dataset
from lockstep.spark.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SAMPLE_S = 0.2


class Peak:
    """The largest resident set seen, in bytes."""

    bytes = 0


@contextmanager
def watched_workers() -> Iterator[Peak]:
    """Look at this process' Python workers, which Spark's daemon starts, until the block ends."""
    peak, done = Peak(), threading.Event()

    def watch() -> None:
        while not done.wait(SAMPLE_S):
            for process in psutil.Process().children(recursive=True):
                try:
                    if "pyspark.daemon" in process.cmdline():
                        peak.bytes = max(peak.bytes, process.memory_info().rss)
                except psutil.NoSuchProcess:
                    continue  # ended since the list was made

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def table(spark: SparkSession, rows: int) -> DataFrame:
    """`rows` rows of 26 whole numbers, 13 float32 and a label, functions of their number."""
    ints = [f"pmod(xxhash64(id, {n}), 1000000) AS int_{n:02d}" for n in range(INTS)]
    shares = (f"pmod(xxhash64(id, {100 + n}), 100000) / 100000" for n in range(FLOATS))
    floats = [f"CAST({share} AS FLOAT) AS float_{n:02d}" for n, share in enumerate(shares)]
    return spark.range(rows, numPartitions=max(2, rows // 250_000)).selectExpr(
        "id", *ints, *floats, "id % 2 = 0 AS label"
    )


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--master", default="local[2]")
    args = parser.parse_args(argv)
    print(machine("pyspark", "pyarrow", "numpy", "numba"))
    with spark_session("growth", args.master) as spark, tempfile.TemporaryDirectory() as folder:
        url = f"{folder}/dataset"

        def write(rows: int) -> None:
            rmtree(url, ignore_errors=True)
            write_dataset(table(spark, rows), url, id_columns=["id"], label="label")

        write(min(args.rows))  # compiles and warms up
        print(f"{'rows':>12}{'CPU s':>10}{'s/million':>12}{'bytes/row':>12}{'shards':>8}{'worker MiB':>12}")
        for rows in args.rows:
            with watched_workers() as peak:
                spent = statistics.median(all_cpu_seconds(partial(write, rows)) for _ in range(args.repeats))
            files = list(Path(url).rglob("*.tfrecord"))
            size = sum(file.stat().st_size for file in files)
            million = spent / rows * 1e6
            print(f"{rows:12,}{spent:10.1f}{million:12.2f}{size / rows:12.1f}{len(files):8}{peak.bytes / 2**20:12.0f}")


if __name__ == "__main__":
    main(sys.argv[1:])
