"""The whole Spark write job to TFRecord as a share of its ceiling; writing without a shuffle against Spark's Parquet.

    python -m benchmarks.write_job [--rows N] [--repeats N] [--master local[2]]

The ceiling is the same job (leak check, sizes, shuffle, sort, staging, manifest) with functions that only count the
bytes that they get: its rows carry records that were encoded before, and it writes no shard. --plain adds the same job
with the plain encoder. Without a shuffle, the kernel encodes and writes each partition's rows with digests and index;
spark-tfrecord's jar is not available here, so its figure is its ratio to Parquet from another run, 0.78.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

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
from lockstep.etl import columns as c
from lockstep.etl.spark.tasks import upload
from lockstep.etl.split.assign import Assign, Stored
from lockstep.etl.write.dataset import write_dataset
from lockstep.etl.write.shards import RESULT, WriteShards
from lockstep.features.examples.codec import RecordEncoder
from lockstep.features.sample_id import shard_keys
from lockstep.features.schema.fields import SAMPLE_ID
from lockstep.features.schema.schema import Schema
from lockstep.spark.session import spark_session
from lockstep.storage.dataset.layout import shard_path
from lockstep.storage.formats.tfrecord import FramedWriter, frame
from tests.builders.records import encode_batch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SHARD_BYTES = 64 << 20
CANNED_ROWS = 2000
PARTS, SHAPES = ("job", "unshuffled"), ("columns", "images")


class CountedAssign(Assign):
    """Takes ids from positions and records from a few that were encoded before."""

    canned: pa.BinaryArray

    def rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        ids = np.asarray(batch.column(c.POSITION))
        keys = shard_keys(ids, self.seed)
        records = self.canned.take(pa.array(np.arange(len(ids)) % len(self.canned)))
        splits = pa.array(["train", "test"]).take(pa.array((keys % np.uint64(5) == 4).astype(np.int8)))
        columns = {
            c.SPLIT: splits,
            c.DROPPED: pa.nulls(len(ids), pa.string()),
            c.KEY: pa.array((keys ^ np.uint64(1 << 63)).view(np.int64)),
            c.LEAK: batch.column(c.LEAK),
            c.SOURCE: batch.column(c.SOURCE),
            c.POSITION: batch.column(c.POSITION),
            c.BYTES: pa.compute.binary_length(records).cast(pa.int64()),
            c.RECORD: records,
            SAMPLE_ID: pa.array(ids),
            **{field.name: batch.column(field.name) for field in c.counted_fields(self.schema)},
        }
        return pa.RecordBatch.from_pydict(columns)


class CountedShards(WriteShards):
    """Counts records and bytes; its shards are empty files."""

    def write(self, partition: int, batches: Iterable[pa.RecordBatch]) -> pa.RecordBatch:
        records = size = keys = 0
        for batch in batches:
            keys ^= int(np.bitwise_xor.reduce(np.asarray(batch.column(c.KEY))))
            column = batch.column(c.RECORD)
            offsets = np.frombuffer(column.buffers()[1], dtype=np.int32)
            size += int(offsets[column.offset + len(column)] - offsets[column.offset])
            records += len(column)
        with tempfile.TemporaryFile() as file:
            path, index = (upload(self.attempts, f"{name}-{partition}", file) for name in ("shard", "index"))
        block_records = self.table.locate(partition)[3]
        return pa.RecordBatch.from_pylist(
            [
                {
                    "shard": partition,
                    "path": path,
                    "records": records,
                    "bytes": size,
                    "sha256": "0" * 64,
                    "crc32c": "0" * 8,
                    "blocks": list(range(0, records, block_records)),
                    "index_path": index,
                    "index_bytes": 0,
                    "index_sha256": "0" * 64,
                    "keys": keys,
                }
            ],
            schema=RESULT,
        )


class PlainStored(Stored):
    """Encodes and frames a row at a time."""

    def _records(self, rows: pa.RecordBatch) -> pa.BinaryArray:
        return pa.array([frame(record) for record in encode_batch(self.schema, rows)], pa.binary())


class PlainAssign(Assign):
    """Assigns with the plain encoder, in the same job."""

    @functools.cached_property
    def _stored(self) -> PlainStored:
        return PlainStored(self.schema, self.fmt, also=c.counted_fields(self.schema))


class LateAssign(Assign):
    """Leaves the columns as they are, for LateShards to encode; only sizes are worked out."""

    @property
    def output(self) -> pa.Schema:
        return self._columns().output

    def rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        found = self._columns().rows(batch)
        sizes = pa.array(self._encoder.sizes(found.select([field.name for field in self.schema])))
        return found.set_column(found.schema.get_field_index(c.BYTES), c.BYTES, sizes)

    def _columns(self) -> Assign:
        return Assign(self.schema, self.id_columns, self.split, self.seed, "parquet")


class LateShards(WriteShards):
    """Encodes behind the shuffle."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        object.__setattr__(self, "fmt", "parquet")  # all columns are wanted

    def write(self, partition: int, batches: Iterable[pa.RecordBatch]) -> pa.RecordBatch:
        encoder, schema = RecordEncoder(self.schema), self.schema

        def encoded() -> Iterator[pa.RecordBatch]:
            for batch in batches:
                data, offsets = encoder.encode(batch.select([field.name for field in schema]))
                buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)]
                records = pa.Array.from_buffers(pa.binary(), batch.num_rows, buffers)
                yield batch.select([c.SHARD, c.KEY, c.SOURCE, c.POSITION, SAMPLE_ID]).append_column(c.RECORD, records)

        write = WriteShards(schema, "tfrecord", self.table, self.attempts, self.source_urls)
        return write.write(partition, encoded())


class WriteFiles:
    """Writes each partition as it comes: records, digests and index into files of their own."""

    def __init__(self, schema: Schema, folder: str) -> None:
        self._schema, self._folder = schema, folder

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        encoder = RecordEncoder(self._schema)
        name = f"{self._folder}/{secrets.token_hex(8)}"
        with open(name, "wb") as file, open(name + ".idx", "wb") as index:
            writer = FramedWriter(file, index, 1000)
            for batch in batches:
                writer.write(encoder.encode(batch)[0])
        yield pa.RecordBatch.from_pydict({"sha256": [writer.sha256]})


def job(df: DataFrame, schema: Schema, folder: str) -> Callable[[], object]:
    """The whole write job into a folder that is removed afterwards."""

    def work() -> None:
        out = f"{folder}/{secrets.token_hex(8)}"
        write_dataset(df, out, schema=schema, id_columns=("key",), shard_bytes=SHARD_BYTES)
        shutil.rmtree(out)

    return work


def patched(work: Callable[[], object], **classes: type) -> Callable[[], object]:
    """Return `work` with other classes in lockstep.etl.write.dataset."""

    def run() -> None:
        with contextlib.ExitStack() as stack:
            for name, kind in classes.items():
                stack.enter_context(mock.patch(f"lockstep.etl.write.dataset.{name}", kind))
            stack.enter_context(
                mock.patch(
                    "lockstep.etl.write.shards.shard_path", lambda split, n, *_: shard_path(split, n, "tfrecord")
                )
            )
            work()

    return run


def unshuffled(df: DataFrame, schema: Schema, folder: str, fmt: str) -> Callable[[], object]:
    """Each partition to a file of its own, TFRecord by our kernel or Parquet by Spark."""

    def work() -> None:
        with tempfile.TemporaryDirectory(dir=folder) as out:
            if fmt == "tfrecord":
                df.mapInArrow(WriteFiles(schema, out), "sha256 string").collect()
            else:
                df.write.option("compression", "none").mode("overwrite").parquet(f"{out}/parquet")

    return work


def all_cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of this process and all below it: Spark's Java process and its Python workers."""

    def spent() -> float:
        total = 0.0
        for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += sum(process.cpu_times()[:4])  # those of children that have ended are in their parent's
        return total

    before = spent()
    work()
    return spent() - before


def timed(works: dict[str, Callable[[], object]], cpu: bool) -> dict[str, Callable[[], float]]:
    """Each work as one that returns its seconds, of the clock or of all processors."""
    measure = all_cpu_seconds if cpu else seconds
    return {name: functools.partial(measure, work) for name, work in works.items()}


def main(argv: list[str]) -> int:
    """Print two tables a shape; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400_000, help="rows of 40 columns; 0.15 times as many images")
    parser.add_argument("--repeats", type=int, default=5, help="counted rounds, after a dropped one")
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="tables to print")
    parser.add_argument("--late", action="store_true", help="also the job that encodes after the shuffle")
    parser.add_argument("--cpu", action="store_true", help="count CPU seconds of all processes, not wall seconds")
    parser.add_argument("--plain", action="store_true", help="also the job with the plain encoder, which takes long")
    args = parser.parse_args(argv)
    print(machine("pyspark", "pyarrow", "numba", "numpy"), args.master, flush=True)
    with tempfile.TemporaryDirectory() as folder, spark_session("write job", args.master) as spark:
        for name, schema, rows in (
            ("40 columns", tab_schema(False), tab_rows(args.rows, 0.0)),
            ("images", image_schema(), image_rows(args.rows * 15 // 100)),
        ):
            if name.split()[-1] in args.shapes:
                compare(spark, folder, name, schema, rows, args)
    return 0


def compare(spark: Any, folder: str, name: str, schema: Schema, rows: pa.RecordBatch, args: argparse.Namespace) -> None:
    """Time the jobs of one shape and print them."""
    from pyspark.sql import functions as f

    source, count = f"{folder}/{name.replace(' ', '-')}", rows.num_rows
    for number in range(4):
        start = count * number // 4
        pq.write_table(pa.Table.from_batches([rows.slice(start, count // 4)]), f"{source}-{number}.parquet")
    wide = spark.read.parquet(f"{source}-*.parquet")
    places = {c.SOURCE: f.lit(0), c.POSITION: f.monotonically_increasing_id(), c.OCCURRENCE: f.lit(0).cast("bigint")}
    placed = f"{source}-placed"  # stored: a job refuses rows whose places depend on how they are read
    wide.withColumnRenamed(SAMPLE_ID, "key").withColumns(places).write.parquet(placed)
    df = spark.read.parquet(placed).cache()
    full = wide.select(*[field.name for field in schema]).cache()
    for cached in (df, full):
        cached.count()
        cached.write.format("noop").mode("overwrite").save()
    sample = rows.slice(0, min(CANNED_ROWS, count))
    CountedAssign.canned = pa.array([frame(record) for record in encode_batch(schema, sample)], pa.binary())
    write = job(df, schema, folder)
    works = {"ceiling": patched(write, Assign=CountedAssign, WriteShards=CountedShards), "job": write}
    if args.late:
        works["job, encoded behind the shuffle"] = patched(write, Assign=LateAssign, WriteShards=LateShards)
    if args.plain:
        works["job, plain encoder"] = patched(write, Assign=PlainAssign)
    if "job" in args.parts:
        print_rates(f"{name}, whole job", count, interleaved(timed(works, args.cpu), args.repeats), "ceiling")
    works = {
        "Spark's Parquet, uncompressed": unshuffled(full, schema, folder, "parquet"),
        "TFRecord by the kernel": unshuffled(full, schema, folder, "tfrecord"),
    }
    if "unshuffled" in args.parts:
        print_rates(
            f"{name}, without a shuffle", count, interleaved(timed(works, args.cpu), args.repeats), next(iter(works))
        )
    df.unpersist()
    full.unpersist()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
