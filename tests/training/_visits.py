"""A small dataset with an encoding of each kind that TensorFlow can compute: nulls, unknown words, a tensor."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

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
        pa.array(["10.0.0.1"] * rows),
        pa.array(rng.random(rows) < 0.4),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA.arrow_schema())


def write_visits(root: object, records: dict[str, int]) -> pa.RecordBatch:
    """Write the dataset; returns its rows in order, splits after one another."""
    tokens = Vocabulary(name="page", tokens=("a", "bb", "é"), counts=(9, 8, 7), fitted_on=("train",))
    moments = Moments(name="bytes", count=80, mean=5.1, variance=8.7, fitted_on=("train",))
    rows = visits(sum(records.values()))
    write_rows(str(root), SCHEMA, rows, records, "tfrecord", 2, 16, 0, (tokens, moments))
    return rows
