"""Encoding, framing, both checksums and the index of records, on one core: the kernel and what is common today.

    python -m benchmarks.codec [--rows N] [--repeats N] [--tfx-python PATH]

Two shapes: 40 columns with 5 % nulls, and 3 KB images. Every writer writes the same Arrow batches of 4,096 rows to one
file in /dev/shm or the temporary folder; what each wrote is first parsed back and compared. Times are CPU seconds,
since other work may share the machine. `--tfx-python` is a Python with tfx-bsl 1.21.0; without it tfx-bsl is left out.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

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
from lockstep.features.examples.foreign import decode_foreign_frames
from lockstep.features.schema.schema import Schema
from lockstep.storage.formats.tfrecord import FramedWriter, record_offsets
from lockstep.storage.kernels import frames

BATCH_ROWS = 4096
NULL_SHARE = 0.05
PEER = Path(__file__).with_name("peers") / "tfx_peer.py"


def by_kernel(schema: Schema, batches: list[pa.RecordBatch], out: str) -> Callable[[], None]:
    """Records and index by the kernels."""
    encoder = RecordEncoder(schema)
    lines = np.empty(BATCH_ROWS * frames.LINE_MAX_BYTES, dtype=np.uint8)

    def work() -> None:
        at = 0
        with open(out, "wb") as file, open(f"{out}.idx", "wb") as index:
            for batch in batches:
                data, offsets = encoder.encode(batch)
                file.write(data.data)
                end = frames.index_lines(offsets, at, lines.ctypes.data)
                index.write(lines[: end - lines.ctypes.data].data)
                at += len(data)

    return work


def with_digests(schema: Schema, batches: list[pa.RecordBatch], out: str) -> Callable[[], None]:
    """Encode as a task of the write job does: SHA-256 and CRC-32C of the file, checksums looked at once more."""
    encoder = RecordEncoder(schema)

    def work() -> None:
        with open(out, "wb") as file, open(f"{out}.idx", "wb") as index:
            writer = FramedWriter(file, index, BATCH_ROWS)
            for batch in batches:
                writer.write(encoder.encode(batch)[0])

    return work


def row_by_row(schema: Schema, batches: list[pa.RecordBatch], out: str) -> Callable[[], None]:
    """A new tf.train.Example a row, as TensorFlow's guide does it."""
    import tensorflow as tf

    train = tf.train

    def feature(dtype: str, value: Any) -> Any:
        if dtype == "int64":
            return train.Feature(int64_list=train.Int64List(value=[value]))
        if dtype == "float32":
            return train.Feature(float_list=train.FloatList(value=[value]))
        return train.Feature(bytes_list=train.BytesList(value=[value]))

    def work() -> None:
        with tf.io.TFRecordWriter(out) as writer:
            for batch in batches:
                for row in batch.to_pylist():
                    features = {
                        field.name: feature(field.dtype, row[field.name])
                        for field in schema
                        if row[field.name] is not None
                    }
                    writer.write(train.Example(features=train.Features(feature=features)).SerializeToString())

    return work


def one_example(schema: Schema, batches: list[pa.RecordBatch], out: str) -> Callable[[], None]:
    """One Example for all rows, its values set in place."""
    import tensorflow as tf

    lists = {"int64": "int64_list", "float32": "float_list"}

    def work() -> None:
        example = tf.train.Example()
        features = [example.features.feature[field.name] for field in schema]
        kinds = [lists.get(field.dtype, "bytes_list") for field in schema]
        places: list[Any] = [None] * len(features)
        with tf.io.TFRecordWriter(out) as writer:
            for batch in batches:
                for row in zip(*(batch.column(field.name).to_pylist() for field in schema), strict=True):
                    for number, value in enumerate(row):
                        place = places[number]
                        if value is None:
                            features[number].Clear()
                            places[number] = None
                        elif place is None:
                            places[number] = getattr(features[number], kinds[number]).value
                            places[number].append(value)
                        else:
                            place[0] = value
                    writer.write(example.SerializeToString())

    return work


@contextmanager
def tfx(python: str, rows: str, out: str) -> Iterator[Callable[[], float]]:
    """tfx-bsl in a process of its own; a call answers with its CPU seconds."""
    command = [python, str(PEER), rows, out]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        reader, sender = process.stdout, process.stdin

        def work() -> float:
            sender.write("go\n")
            sender.flush()
            return float(reader.readline())

        yield work
        sender.close()


def checked(schema: Schema, batches: list[pa.RecordBatch], work: Callable[[], object], out: str) -> None:
    """Run a writer once and compare the first batch that it wrote with what it was given."""
    work()
    data = np.fromfile(out, dtype=np.uint8)
    found = decode_foreign_frames(schema, data, record_offsets(data, file=out)[:501])
    assert found.equals(batches[0].slice(0, len(found))), "what was written is not what was given"


def compare(name: str, schema: Schema, rows: pa.RecordBatch, repeats: int, tfx_python: str | None, folder: str) -> None:
    """Time all writers of one shape in turn and print them."""
    batches = [rows.slice(start, BATCH_ROWS) for start in range(0, rows.num_rows, BATCH_ROWS)]
    makers = {
        "row by row": row_by_row,
        "one Example reused": one_example,
        "kernel": by_kernel,
        "kernel, SHA-256 and CRC-32C of the file too": with_digests,
    }
    plain = {label: make(schema, batches, f"{folder}/out") for label, make in makers.items()}
    for work in plain.values():
        checked(schema, batches, work, f"{folder}/out")
    works = {label: functools.partial(cpu_seconds, work) for label, work in plain.items()}
    title = f"{name}, {os.path.getsize(f'{folder}/out') / rows.num_rows:.0f} bytes a record"
    if tfx_python is None:
        print_rates(title, rows.num_rows, interleaved(works, repeats), "row by row")
        return
    with pa.OSFile(f"{folder}/rows.arrow", "wb") as sink, pa.ipc.new_file(sink, rows.schema) as writer:
        writer.write_batch(rows)
    with tfx(tfx_python, f"{folder}/rows.arrow", f"{folder}/tfx") as run:
        checked(schema, batches, run, f"{folder}/tfx")
        spent = interleaved({**works, "tfx-bsl and framing": run}, repeats)
    print_rates(title, rows.num_rows, spent, "row by row")
    print_rates(title, rows.num_rows, spent, "tfx-bsl and framing")


def main(argv: list[str]) -> int:
    """Print a table a shape; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=60_000, help="rows of each shape")
    parser.add_argument("--repeats", type=int, default=5, help="counted rounds, after a dropped one")
    parser.add_argument("--tfx-python", help="a Python with tfx-bsl")
    args = parser.parse_args(argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(machine("tensorflow", "protobuf", "pyarrow", "numba", "numpy"), flush=True)
    shm = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=shm) as folder:
        rows = tab_rows(args.rows, NULL_SHARE)
        compare("40 columns, 5 % nulls", tab_schema(True), rows, args.repeats, args.tfx_python, folder)
        compare("images", image_schema(), image_rows(args.rows), args.repeats, args.tfx_python, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
