"""Every encoding against itself written out for one value, over any columns and slices of them."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.features.encode.encoder import Encoder
from lockstep.features.schema.encodings import Encoding
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.fitted import Moments, Vocabulary
from lockstep.features.schema.schema import Schema
from tests.features.encode.test_hashing import reference

TOKENS = ("a", "é", "", "ab", "7", "-1")
KNOWN = Vocabulary(name="x", tokens=TOKENS, counts=(6, 5, 4, 3, 2, 1), fitted_on=("train",))
SPREAD = Moments(name="x", count=9, mean=2.5, variance=4.0, fitted_on=("train",))
HASH = {"kind": "hash", "buckets": 5, "seed": 7}
WORDS = {"kind": "vocabulary", "file": "x.json", "max_size": 9, "min_count": 1, "oov_buckets": 2}
BOUNDS = [-1.5, 0.0, 3.0]
VALUES = {
    "string": st.sampled_from(TOKENS) | st.text(max_size=3),
    "int64": st.sampled_from([7, -1]) | st.integers(-(2**63), 2**63 - 1),
    "bytes": st.binary(max_size=40),
    "float64": st.floats(-1e6, 1e6),
}


def signed(data: bytes, seed: int) -> int:
    value = reference(data, seed)
    return value - (1 << 64) if value >> 63 else value


def id_of(encoding: Encoding, value: Any) -> int:
    """0 for nothing, else 1 and the column."""
    if value is None:
        return 0
    if encoding["kind"] == "bucketise":
        return 1 + bisect_right(encoding["boundaries"], value)
    if encoding["kind"] == "hash":
        number = value.to_bytes(8, "little", signed=True) if isinstance(value, int) else value
        return (
            1 + signed(number.encode() if isinstance(number, str) else number, encoding["seed"]) % encoding["buckets"]
        )
    text = str(value)
    if text in TOKENS:
        return 1 + TOKENS.index(text)
    return 1 + len(TOKENS) + signed(text.encode(), 0) % encoding["oov_buckets"]


def encoded(field: Field, values: list[Any], skip: int) -> dict[str, Any]:
    """What the Encoder makes of values[skip:], as a slice of a column that holds all of them."""
    schema = Schema((sample_id_field(), field))
    rows = pa.RecordBatch.from_pydict({"sample_id": range(len(values)), "x": values}, schema=schema.arrow_schema())
    return Encoder(schema, {"x": SPREAD if field.dtype == "float64" else KNOWN}).encode(rows.slice(skip)).x


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(["string", "int64", "bytes"]), st.booleans(), st.integers(0, 3))
def test_categories_as_ids_columns_and_sequences(data: st.DataObject, dtype: str, hashed: bool, skip: int) -> None:
    encoding = HASH if hashed or dtype == "bytes" else WORDS
    size = 5 if encoding is HASH else len(TOKENS) + 2
    scalars = data.draw(st.lists(st.none() | VALUES[dtype], max_size=12))
    ids = [id_of(encoding, value) for value in scalars[skip:]]
    index = Field(name="x", dtype=dtype, nullable=True, encoding={**encoding, "output": "index"})
    assert encoded(index, scalars, skip)["x"].ravel().tolist() == ids
    hot = Field(name="x", dtype=dtype, nullable=True, encoding=encoding)
    np.testing.assert_array_equal(encoded(hot, scalars, skip)["x"], np.eye(size + 1)[ids, 1:])

    lists = data.draw(st.lists(st.lists(VALUES[dtype], max_size=5), max_size=8))
    of = [[id_of(encoding, value) for value in row] for row in lists[skip:]]
    many = encoded(Field(name="x", dtype=dtype, shape=(None,), encoding=encoding), lists, skip)["x"]
    assert [(np.flatnonzero(row) + 1).tolist() for row in many] == [sorted(set(row)) for row in of]
    for keep in ("first", "last"):
        more = {"kind": "sequence", "length": 3, "keep": keep, "of": encoding}
        found = encoded(Field(name="x", dtype=dtype, shape=(None,), encoding=more), lists, skip)
        cut = [row[:3] if keep == "first" else row[-3:] for row in of]
        assert found["x"].tolist() == [row + [0] * (3 - len(row)) for row in cut]
        assert found["x_mask"].sum(axis=1).tolist() == [len(row) for row in cut]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.none() | VALUES["float64"], max_size=12), st.integers(0, 3))
def test_numbers(values: list[float | None], skip: int) -> None:
    def made(encoding: Encoding) -> list[float]:
        field = Field(name="x", dtype="float64", nullable=True, encoding=encoding)
        return encoded(field, values, skip)["x"].ravel().tolist()

    kept = values[skip:]
    bounds = {"kind": "bucketise", "boundaries": BOUNDS, "output": "index"}
    assert made(bounds) == [id_of(bounds, value) for value in kept]
    assert made({"kind": "number", "null_value": 4}) == [4 if v is None else np.float32(v) for v in kept]
    expected = [0.0 if value is None else np.float32((value - 2.5) / 2) for value in kept]
    assert made({"kind": "standardise", "file": "x.json"}) == expected
