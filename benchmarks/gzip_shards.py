"""Gzip shards against plain ones, on one core: bytes, and the time to write and read them.

    python -m benchmarks.gzip_shards [--rows N] [--repeats N]

40 columns with 5 % nulls, images of Fashion-MNIST (data/) and images of noise. Written: encoded records to a file in
memory with digests (and, for plain ones, the index), at level 6 and, for comparison, at 1. Read: split_arrays in
batches of 1,024, and tf.data's records of the same file. Times are CPU seconds, since other work may share the machine.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa

from benchmarks.shared.arrays import split_arrays
from benchmarks.shared.shapes import (
    cpu_seconds,
    image_rows,
    image_schema,
    interleaved,
    machine,
    print_rates,
    tab_rows,
    tab_schema,
)
from lockstep.features.examples.codec import RecordEncoder
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.storage.formats.gzip_blocks import GzipWriter
from lockstep.storage.formats.tfrecord import FramedWriter
from tests.storage.repacked import repacked
from tests.training._tiny import write_rows

BLOCK_BYTES = 2 << 20
BATCH_ROWS = 1024
FASHION = Path(__file__).resolve().parent.parent / "data" / "fashion-mnist" / "train-images-idx3-ubyte.gz"


def fashion(rows: int) -> tuple[Schema, pa.RecordBatch]:
    """Real images of 28 x 28 grey pixels, over again where there are too few."""
    pixels = np.frombuffer(gzip.decompress(FASHION.read_bytes())[16:], dtype=np.uint8).reshape(-1, 784)
    images = [pixels[number % len(pixels)].tobytes() for number in range(rows)]
    schema = Schema((sample_id_field(), Field(name="image", dtype="uint8", shape=(28, 28, 1))))
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, rows)
    return schema, pa.RecordBatch.from_arrays(
        [pa.array(ids), pa.array(images, pa.binary())], schema=schema.arrow_schema()
    )


def plain(data: np.ndarray, block_records: int) -> None:
    """Write a plain shard as a task does."""
    FramedWriter(io.BytesIO(), io.BytesIO(), block_records).write(data)


def packed(data: np.ndarray, block_records: int, level: int) -> int:
    """Write a gzip shard as a task does; returns its bytes."""
    with mock.patch("lockstep.storage.formats.gzip_blocks.LEVEL", level):
        writer = GzipWriter(io.BytesIO(), block_records)
        writer.write(data)
        writer.finish()
    return writer.bytes


def arrays(root: str, rows: int) -> None:
    """Our reader's batches."""
    assert sum(len(batch["sample_id"]) for batch in split_arrays(root, "train", BATCH_ROWS)) == rows


def by_tensorflow(root: str, compression: str, rows: int) -> None:
    """tf.data's records, in batches."""
    import tensorflow as tf

    files = sorted(map(str, Path(root).glob("split=train/*")))
    dataset = tf.data.TFRecordDataset(files, compression_type=compression).batch(BATCH_ROWS)
    options = tf.data.Options()
    options.autotune.enabled = False
    assert sum(len(batch) for batch in dataset.with_options(options)) == rows


def compare(name: str, schema: Schema, rows: pa.RecordBatch, repeats: int, folder: str | None) -> None:
    """Print the bytes and the two tables of one shape."""
    count, block_records = rows.num_rows, max(1, BLOCK_BYTES * rows.num_rows // rows.nbytes)
    data = RecordEncoder(schema).encode(rows)[0].copy()
    sizes = {level: packed(data, block_records, level) for level in (1, 6)}
    shares = ", ".join(f"{size / len(data):.3f} at level {level}" for level, size in sizes.items())
    print(f"\n{name}: {len(data):,} bytes plain; gzip {shares}")
    writing: dict[str, Callable[[], object]] = {
        "plain": partial(plain, data, block_records),
        "gzip, level 1": partial(packed, data, block_records, 1),
        "gzip, level 6": partial(packed, data, block_records, 6),
    }
    spent = interleaved({label: partial(cpu_seconds, work) for label, work in writing.items()}, repeats)
    print_rates(f"{name}, written", count, spent, "plain")
    with tempfile.TemporaryDirectory(dir=folder) as place:
        roots = {"plain": f"{place}/plain", "gzip": f"{place}/gzip"}
        write_rows(roots["plain"], schema, rows, {"train": count}, "tfrecord", 1, block_records, 0)
        repacked(roots["plain"], roots["gzip"])
        reading: dict[str, Callable[[], object]] = {}
        for kind, root in roots.items():
            reading[f"ours, {kind}"] = partial(arrays, root, count)
            reading[f"tf.data, {kind}"] = partial(by_tensorflow, root, "GZIP" if kind == "gzip" else "", count)
        spent = interleaved({label: partial(cpu_seconds, work) for label, work in reading.items()}, repeats)
        print_rates(f"{name}, read", count, spent, "ours, plain")


def main(argv: list[str]) -> int:
    """Print sizes and two tables a shape; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000, help="rows of each shape")
    parser.add_argument("--repeats", type=int, default=3, help="counted rounds, after a dropped one")
    args = parser.parse_args(argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    pa.set_cpu_count(1)
    print(machine("tensorflow", "pyarrow", "numba", "numpy"), flush=True)
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    shapes = (
        ("40 columns", tab_schema(True), tab_rows(args.rows, 0.05)),
        ("images of Fashion-MNIST", *fashion(args.rows)),
        ("images of noise", image_schema(), image_rows(args.rows)),
    )
    for name, schema, rows in shapes:
        compare(name, schema, rows, args.repeats, memory)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
