"""The cost of reading with format("tfrecord") against Spark's Parquet: the same rows to a noop write, interleaved.

    python -m benchmarks.spark_read [--rows N] [--images N] [--repeats N] [--shards N] [--master M]

Each measurement is the whole job: load(), plan, read, noop. The table and the images are those of shared/shapes.py;
before measuring, both forms are compared row by row. Spark writes the Parquet files, uncompressed, as many as there are
shards. CPU seconds are those of the JVM and all its Python workers; they are more reliable than wall seconds on a
shared machine.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable

import psutil
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from benchmarks.shared.shapes import (
    image_rows,
    image_schema,
    interleaved,
    machine,
    print_rates,
    seconds,
    tab_rows,
    tab_schema,
)
from lockstep.features.examples.codec import RecordEncoder
from lockstep.features.schema.schema import Schema
from lockstep.spark.session import spark_session
from lockstep.storage.dataset.layout import DatasetPaths, index_path, shard_path
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.dataset.manifest_entries import Counts, FileInfo, ShardInfo, SourceInfo, SplitInfo
from lockstep.storage.documents import sha256_hex
from lockstep.storage.formats.tfrecord import index_bytes
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.urls import join
from tests.builders.records import crc32c_hex

BLOCK_BYTES = 2 << 20
BATCH_ROWS = 10_000


def publish(root: str, schema: Schema, rows: pa.RecordBatch, shards: int) -> None:
    """A dataset of one split, written without Spark."""
    fs, encoder = filesystem(root), RecordEncoder(schema)
    files: dict[str, FileInfo] = {}
    infos = []
    mean = int(encoder.sizes(rows.slice(0, 1000)).mean())
    block = max(1, BLOCK_BYTES // mean)
    for number in range(shards):
        first, stop = (rows.num_rows * at // shards for at in (number, number + 1))
        data, offsets = bytearray(), []
        for start in range(first, stop, BATCH_ROWS):
            part, places = encoder.encode(rows.slice(start, min(BATCH_ROWS, stop - start)))
            offsets += (places[:-1] + len(data)).tolist()
            data += part.data
        path, index = shard_path("train", number, "tfrecord"), index_bytes(offsets, len(data))
        write_file(fs, join(root, path), bytes(data))
        write_file(fs, join(root, index_path("train", number)), index)
        files[index_path("train", number)] = FileInfo(len(index), sha256_hex(index))
        digests = sha256_hex(data), crc32c_hex(data)
        infos.append(ShardInfo(path, stop - first, len(data), *digests, None, tuple(offsets[::block])))
    manifest = DatasetManifest.build(
        format="tfrecord",
        created_by={"version": "0.1.0", "config": {}, "seed": 0},
        schema=schema.to_json(),
        splits={"train": SplitInfo(block, tuple(infos))},
        files=files,
        counts=Counts(rows.num_rows, rows.num_rows, 0, {}),
        source=(SourceInfo("made", 0, sha256_hex(b"")),),
    )
    write_file(fs, DatasetPaths(root).manifest, manifest.to_bytes())


def measure(spark: SparkSession, title: str, schema: Schema, rows: pa.RecordBatch, args: argparse.Namespace) -> None:
    """Write both forms, hold them against each other, and time reading them."""
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        ours, theirs = os.path.join(folder, "tfrecord"), os.path.join(folder, "parquet")
        publish(ours, schema, rows, args.shards)

        def tfrecord() -> DataFrame:
            return spark.read.format("tfrecord").option("split", "train").load(ours)

        def parquet() -> DataFrame:
            return spark.read.parquet(theirs)

        tfrecord().coalesce(args.shards).write.option("compression", "none").parquet(theirs)
        sizes = [sum(entry.stat().st_size for entry in os.scandir(path)) for path in (theirs, f"{ours}/split=train")]
        print(f"\n{title}: Parquet {sizes[0] / 1e6:.1f} MB, TFRecord {sizes[1] / 1e6:.1f} MB")
        one, other = tfrecord(), parquet()
        assert one.count() == other.count() == rows.num_rows
        assert one.exceptAll(other).isEmpty() and other.exceptAll(one).isEmpty(), "the two forms differ"
        walls: dict[str, list[float]] = {"spark.read.parquet": [], "format tfrecord": []}
        reads = {"spark.read.parquet": parquet, "format tfrecord": tfrecord}

        def work(name: str, make: Callable[[], DataFrame]) -> Callable[[], float]:
            def once() -> float:
                before = _cpu_seconds()
                wall = seconds(lambda: make().write.format("noop").mode("overwrite").save())
                walls[name].append(wall)
                return _cpu_seconds() - before

            return once

        spent = interleaved({name: work(name, make) for name, make in reads.items()}, args.repeats)
        print_rates(
            f"{title}, wall", rows.num_rows, {name: values[1:] for name, values in walls.items()}, "spark.read.parquet"
        )
        print_rates(f"{title}, CPU", rows.num_rows, spent, "spark.read.parquet")


def _cpu_seconds() -> float:
    """CPU seconds of this process's children so far, ended ones of theirs included."""
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:  # a worker that has just ended: its parent counts it
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400_000, help="rows of 40 columns (default 400,000)")
    parser.add_argument("--images", type=int, default=60_000, help="rows of a 3 KB image (default 60,000)")
    parser.add_argument("--repeats", type=int, default=5, help="counted rounds (default 5)")
    parser.add_argument("--shards", type=int, default=4, help="files of each format (default 4)")
    parser.add_argument("--master", default="local[2]", help="Spark master (default local[2])")
    args = parser.parse_args()
    print(machine("pyspark", "pyarrow", "numba", "numpy"), args.master)
    os.environ.setdefault("PYSPARK_SUBMIT_ARGS", "--driver-memory 4g pyspark-shell")
    with spark_session("spark_read", args.master) as spark:
        if args.rows:
            measure(spark, "40 columns", tab_schema(False), tab_rows(args.rows, 0.0), args)
        if args.images:
            measure(spark, "images", image_schema(), image_rows(args.images), args)


if __name__ == "__main__":
    main()
