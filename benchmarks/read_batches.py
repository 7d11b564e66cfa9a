"""A split to batches of arrays on one core: TFRecord beside tf.data, Parquet beside pyarrow's own batches.

    python -m benchmarks.read_batches [--rows N] [--repeats N]

Both shapes of benchmarks.shapes, written once by our own writers in four shards, in the page cache. tf.data reads with
and without autotuning (never with num_parallel_reads, which is its slow way) and parses whole batches by
tf.io.parse_example; images stay bytes there, while ours are arrays of (n, 32, 32, 3). CPU seconds of the process are
counted, since other work may share the machine.
"""

from __future__ import annotations

import argparse
import glob
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.shapes import cpu_seconds, image_rows, image_schema, interleaved, machine, tab_rows, tab_schema, told
from features.schema import Schema
from tests.training._tiny import write_rows
from training.arrays import split_arrays

BATCH_ROWS = 1024
BLOCK_BYTES = 2 << 20
SHARDS = 4


def ours(root: str, expected: int) -> Callable[[], None]:
    """Our reader's batches."""

    def work() -> None:
        rows = sum(len(next(iter(batch.values()))) for batch in split_arrays(root, "train", BATCH_ROWS))
        assert rows == expected

    return work


def by_tensorflow(root: str, schema: Schema, expected: int, form: str) -> Callable[[], None]:
    """tf.data's batches, parsed whole."""
    import tensorflow as tf

    dtypes = {"int64": tf.int64, "float32": tf.float32, "uint8": tf.string}
    spec = {field.name: tf.io.FixedLenFeature([], dtypes[field.dtype]) for field in schema}
    files = sorted(glob.glob(f"{root}/split=train/*.tfrecord"))

    def parsed(names: Any, parallel: int | None) -> Any:
        batches = tf.data.TFRecordDataset(names).batch(BATCH_ROWS)
        return batches.map(lambda records: tf.io.parse_example(records, spec), num_parallel_calls=parallel)

    def pipeline() -> Any:
        auto = tf.data.AUTOTUNE
        if form == "interleave":
            each = tf.data.Dataset.from_tensor_slices(files)
            return each.interleave(lambda name: parsed(name, None), num_parallel_calls=auto).prefetch(auto)
        dataset = parsed(files, auto if form == "autotune" else None)
        options = tf.data.Options()
        options.autotune.enabled = form == "autotune"
        return (dataset.prefetch(auto) if form == "autotune" else dataset).with_options(options)

    def work() -> None:
        assert sum(len(batch["label"]) for batch in pipeline()) == expected

    return work


def by_pyarrow(root: str, expected: int) -> Callable[[], None]:
    """pyarrow's batches as arrays; page checksums checked as ours are."""
    files = sorted(glob.glob(f"{root}/split=train/*.parquet"))

    def work() -> None:
        rows = 0
        for name in files:
            with pq.ParquetFile(name, page_checksum_verification=True) as file:
                for batch in file.iter_batches(BATCH_ROWS, use_threads=False):
                    for column in batch.columns:
                        if not pa.types.is_binary(column.type):
                            column.to_numpy()
                    rows += batch.num_rows
        assert rows == expected

    return work


def compare(name: str, schema: Schema, rows: pa.RecordBatch, repeats: int) -> None:
    """Write one shape in both formats, time the readers in turn, print two tables."""
    count = rows.num_rows
    block_records = max(1, BLOCK_BYTES * count // rows.nbytes)
    for fmt in ("tfrecord", "parquet"):
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
            root = f"{folder}/dataset"
            write_rows(root, schema, rows, {"train": count}, fmt, SHARDS, block_records, 0)
            if fmt == "parquet":
                works = {"pyarrow's iter_batches": by_pyarrow(root, count), "ours": ours(root, count)}
            else:
                forms = ("serial", "autotune", "interleave")
                works = {f"tf.data, {form}": by_tensorflow(root, schema, count, form) for form in forms}
                works["ours"] = ours(root, count)
            spent = interleaved(
                {label: (lambda work=work: cpu_seconds(work)) for label, work in works.items()}, repeats
            )
            told(f"{name}, {fmt}", count, spent, next(iter(works)))


def main(argv: list[str]) -> int:
    """Print two tables a shape; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000, help="rows of each shape")
    parser.add_argument("--repeats", type=int, default=5, help="counted rounds, after one that is dropped")
    args = parser.parse_args(argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    pa.set_cpu_count(1)
    print(machine("tensorflow", "pyarrow", "numba", "numpy"), flush=True)
    compare("40 columns", tab_schema(False), tab_rows(args.rows, 0.0), args.repeats)
    compare("images", image_schema(), image_rows(args.rows), args.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
