"""A small dataset with an encoding of each kind that TensorFlow can compute: nulls, unknown words, lists, images."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pyarrow as pa
from PIL import Image

from lockstep.features.sample_id import sample_id
from lockstep.features.schema.fields import Field
from lockstep.features.schema.fitted import Moments, Vocabulary
from lockstep.features.schema.schema import Schema
from tests.training._tiny import write_rows

WORDS = ("", "a", "bb", "a word of more than thirty-two bytes, hashed in stripes", "é", "rare")
SCHEMA = Schema(
    (
        Field(name="sample_id", dtype="int64", kind="id"),
        Field(name="agent", dtype="string", encoding={"kind": "hash", "buckets": 7, "seed": 42}),
        Field(
            name="page", dtype="string", nullable=True,
            encoding={"kind": "vocabulary", "file": "page.json", "max_size": 4, "min_count": 1, "oov_buckets": 3},
        ),
        Field(
            name="user", dtype="int64", nullable=True,
            encoding={"kind": "hash", "buckets": 50, "seed": 0, "output": "index"},
        ),
        Field(name="bytes", dtype="float64", nullable=True, encoding={"kind": "standardise", "file": "bytes.json"}),
        Field(name="age", dtype="int64", encoding={"kind": "bucketise", "boundaries": [3, 5.5, 9]}),
        Field(name="speed", dtype="float32", nullable=True, encoding={"kind": "number", "null_value": -1}),
        Field(name="robot", dtype="bool", encoding={"kind": "number"}),
        Field(name="count", dtype="int64"),
        Field(
            name="pixels", dtype="uint8", shape=(2, 2),
            encoding={"kind": "normalise", "mean": [0.5], "deviation": [0.25], "divide_by": 255},
        ),
        Field(
            name="tags", dtype="string", shape=(None,),
            encoding={"kind": "vocabulary", "file": "tags.json", "max_size": 4, "min_count": 1, "oov_buckets": 2},
        ),
        Field(
            name="path", dtype="int64", shape=(None,),
            encoding={
                "kind": "sequence", "length": 3, "keep": "last", "with": "length",
                "of": {"kind": "hash", "buckets": 9, "seed": 1},
            },
        ),
        Field(
            name="seconds", dtype="float64", shape=(None,),
            encoding={"kind": "sequence", "length": 2, "pad_value": -1.5},
        ),
        Field(
            name="picture", dtype="bytes",
            encoding={
                "kind": "image", "height": 4, "width": 6, "channels": 3, "fit": "crop",
                "mean": [0.5, 0.25, 0.125], "deviation": [0.25], "divide_by": 255,
            },
        ),
        Field(name="ip", dtype="string", encoding={"kind": "ignore"}),
        Field(name="label", dtype="bool", kind="label"),
    )
)  # fmt: skip


def visits(rows: int, seed: int = 0) -> pa.RecordBatch:
    """Rows with all columns of SCHEMA."""
    rng = np.random.default_rng(seed)

    def with_nulls(values: list[object]) -> list[object]:
        return [None if null else value for null, value in zip(rng.random(rows) < 0.2, values, strict=True)]

    columns = [
        pa.array([sample_id([str(row).encode()], 0) for row in range(rows)]),
        pa.array(rng.choice(WORDS, rows).tolist()),
        pa.array(with_nulls(rng.choice(WORDS, rows).tolist()), pa.string()),
        pa.array(with_nulls(rng.integers(-(2**62), 2**62, rows).tolist()), pa.int64()),
        pa.array(with_nulls(rng.normal(5, 3, rows).tolist()), pa.float64()),
        pa.array(rng.integers(0, 12, rows)),
        pa.array(with_nulls(rng.normal(0, 1, rows).astype(np.float32).tolist()), pa.float32()),
        pa.array(rng.random(rows) < 0.5),
        pa.array(rng.integers(0, 5, rows)),
        pa.array([row.tobytes() for row in rng.integers(0, 256, (rows, 4), dtype=np.uint8)]),
        pa.array([rng.choice(WORDS, size).tolist() for size in rng.integers(0, 5, rows)], pa.list_(pa.string())),
        pa.array([rng.integers(0, 9, size).tolist() for size in rng.integers(0, 6, rows)], pa.list_(pa.int64())),
        pa.array([rng.normal(0, 1, size).tolist() for size in rng.integers(0, 4, rows)], pa.list_(pa.float64())),
        pa.array([_picture(rng, row) for row in range(rows)]),
        pa.array(["10.0.0.1"] * rows),
        pa.array(rng.random(rows) < 0.4),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA.arrow_schema())


def _picture(rng: np.random.Generator, row: int) -> bytes:
    """A PNG with transparent parts or a JPEG, lying on its side by its EXIF orientation in every fourth row."""
    height, width = rng.integers(3, 20, 2)
    image = Image.fromarray(rng.integers(0, 256, (height, width, 4), dtype=np.uint8))
    file, exif = io.BytesIO(), Image.Exif()
    if row % 2:
        image.save(file, "PNG")
    else:
        exif[0x0112] = 6 if row % 4 else 1
        image.convert("RGB").save(file, "JPEG", exif=exif)
    return file.getvalue()


def write_visits(root: object, records: dict[str, int], *, labelled: bool = True) -> pa.RecordBatch:
    """Write the dataset, without the label if it is not `labelled`; returns its rows in order, splits after one
    another.
    """
    tokens = Vocabulary(name="page", tokens=("a", "bb", "é"), counts=(9, 8, 7), fitted_on=("train",))
    moments = Moments(name="bytes", count=80, mean=5.1, variance=8.7, fitted_on=("train",))
    tags = replace(tokens, name="tags")
    rows = visits(sum(records.values()))
    schema = SCHEMA if labelled else Schema(tuple(field for field in SCHEMA if field.kind != "label"))
    rows = rows if labelled else rows.drop_columns(["label"])
    write_rows(str(root), schema, rows, records, "tfrecord", 2, 16, 0, (tokens, tags, moments))
    return rows
