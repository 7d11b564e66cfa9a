"""A split to batches of arrays on one core: TFRecord against tf.data, Parquet against pyarrow's own batches.

    python -m benchmarks.read_batches [--rows N] [--repeats N] [--formats tfrecord parquet]

Both shapes of shared/shapes.py, written once by this project's writers in four shards, in memory; Parquet also on
disk, in the page cache. tf.data reads with and without autotuning (never with num_parallel_reads, which is slower) and
parses whole batches by tf.io.parse_example; its images stay bytes, while this project's are arrays of (n, 32, 32, 3).
Times are CPU seconds of the process, since other work may share the machine; of two runs in a row the second counts,
since the first after another reader gets its memory from the system.
"""

from __future__ import annotations

import argparse
import glob
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import pyarrow as pa

from benchmarks.shared.arrays import split_arrays
from benchmarks.shared.arrow_peer import arrow_batches, fixed_batches, split_files
from benchmarks.shared.shapes import (
    image_rows,
    image_schema,
    interleaved,
    machine,
    print_rates,
    tab_rows,
    tab_schema,
    warm_cpu_seconds,
)
from lockstep.features.schema.schema import Schema
from tests.training._tiny import write_rows

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
    """pyarrow's own batches, neither arrays nor joined at the ends of files; page checksums checked as ours are."""

    def work() -> None:
        assert sum(batch.num_rows for batch in arrow_batches(split_files(root), BATCH_ROWS)) == expected

    return work


def by_pyarrow_fixed(root: str, schema: Schema, expected: int) -> Callable[[], None]:
    """Read by pyarrow into what ours gives: fixed batches of arrays."""

    def work() -> None:
        batches = fixed_batches(split_files(root), schema, BATCH_ROWS)
        assert sum(len(batch["label"]) for batch in batches) == expected

    return work


def compare(name: str, schema: Schema, rows: pa.RecordBatch, repeats: int, fmt: str, folder: str | None) -> None:
    """Write one shape in one format, time the readers in turn, print a table. `folder` is where, None the disk's."""
    count = rows.num_rows
    block_records = max(1, BLOCK_BYTES * count // rows.nbytes)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        root = f"{place}/dataset"
        write_rows(root, schema, rows, {"train": count}, fmt, SHARDS, block_records, 0)
        if fmt == "parquet":
            works = {
                "iter_batches": by_pyarrow(root, count),
                "iter_batches as fixed batches of arrays": by_pyarrow_fixed(root, schema, count),
            }
        else:
            forms = ("serial", "autotune", "interleave")
            works = {f"tf.data, {form}": by_tensorflow(root, schema, count, form) for form in forms}
        works["ours"] = ours(root, count)
        spent = interleaved({label: partial(warm_cpu_seconds, work) for label, work in works.items()}, repeats)
        print_rates(f"{name}, {fmt}, from {'memory' if folder else 'disk'}", count, spent, next(iter(works)))


def main(argv: list[str]) -> int:
    """Print three tables a shape; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000, help="rows of each shape")
    parser.add_argument("--repeats", type=int, default=5, help="counted rounds, after a dropped one")
    parser.add_argument("--formats", nargs="+", default=["tfrecord", "parquet"], help="formats to read")
    args = parser.parse_args(argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    pa.set_cpu_count(1)
    print(machine("tensorflow", "pyarrow", "numba", "numpy"), flush=True)
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    shapes = (
        ("40 columns", tab_schema(False), tab_rows(args.rows, 0.0)),
        ("images", image_schema(), image_rows(args.rows)),
    )
    for name, schema, rows in shapes:
        for fmt, folder in (("tfrecord", memory), ("parquet", memory), ("parquet", None)):
            if fmt in args.formats:
                compare(name, schema, rows, args.repeats, fmt, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
