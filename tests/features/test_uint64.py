"""uint64: a decimal in Arrow, Spark and Parquet, 8 little-endian bytes in a record, and never another number."""

from __future__ import annotations

from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.etl.fit.exact_sums import ExactSums
from lockstep.features.encode.encoder import Encoder
from lockstep.features.examples import decode_batch
from lockstep.features.examples.codec import RecordDecoder, RecordEncoder
from lockstep.features.examples.sequence_example import encode_sequence_batch
from lockstep.features.schema.fields import ARROW_TYPES, Field, sample_id_field
from lockstep.features.schema.fitted import Fitted, Moments, Vocabulary
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError, DataError
from tests.builders.records import encode_batch

MOST = 2**64 - 1
TYPE = ARROW_TYPES["uint64"]
ONE = Schema((sample_id_field(), Field(name="u", dtype="uint64", nullable=True)))
MANY = Schema((sample_id_field(), Field(name="u", dtype="uint64", shape=(None,))))


def rows(column: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"sample_id": pa.array(range(len(column)), pa.int64()), "u": column})


@settings(deadline=None)
@given(st.lists(st.none() | st.integers(0, MOST), max_size=5))
def test_a_record_holds_eight_little_endian_bytes(values: list[int | None]) -> None:
    batch = rows(pa.array(values, TYPE))
    records = encode_batch(ONE, batch)
    for value, record in zip(values, records, strict=True):
        stored = b"" if value is None else b"\x01u\x12\x0c\x0a\x0a\x0a\x08" + value.to_bytes(8, "little")
        assert record.endswith(stored)
    data = RecordEncoder(ONE).encode(batch)[0].tobytes()
    for found in (decode_batch(ONE, records), RecordDecoder(ONE).decode(data, file="f")):
        assert found.schema.equals(ONE.arrow_schema())
        assert found.column("u").to_pylist() == [None if value is None else Decimal(value) for value in values]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([0, -1], TYPE),
        ([0, MOST + 1], TYPE),  # a decimal of 20 digits goes up to 10^20 - 1
        ([5, -1], pa.int64()),
        ([Decimal("0.0"), Decimal("1.5")], pa.decimal128(20, 1)),
        ([Decimal(10) ** 30], pa.decimal128(38, 0)),
        ([1.0], pa.float64()),  # a float is no whole number, whatever its value
        (["1"], pa.string()),
    ],
)
def test_what_is_no_uint64_is_refused(values: list[Any], kind: pa.DataType) -> None:
    for schema, column in ((ONE, pa.array(values, kind)), (MANY, pa.array([values] * len(values), pa.list_(kind)))):
        for encode in (RecordEncoder(schema).encode, partial(encode_batch, schema)):
            with pytest.raises(DataError, match="`u`"):
                encode(rows(column))
    sequences = Schema(MANY.fields, record="sequence_example")
    with pytest.raises(DataError, match="`u`"):
        encode_sequence_batch(sequences, rows(pa.array([values], pa.list_(kind))))
    if kind == TYPE:
        for schema, column in ((ONE, pa.array(values, kind)), (MANY, pa.array([values] * 2, pa.list_(kind)))):
            with pytest.raises(DataError, match=r"not a uint64\n.*got"):
                encode_batch(schema, rows(column))
        with pytest.raises(DataError, match="not a uint64"):
            encode_sequence_batch(sequences, rows(column))


@pytest.mark.parametrize("kind", [pa.uint64(), pa.int32(), pa.decimal128(3, 0), pa.decimal128(22, 2)])
def test_a_column_that_holds_the_same_numbers_is_taken(kind: pa.DataType) -> None:
    expected = RecordEncoder(ONE).encode(rows(pa.array([7, None, 0], TYPE)))[0].tobytes()
    assert RecordEncoder(ONE).encode(rows(pa.array([7, None, 0], kind)))[0].tobytes() == expected


def fed(encoding: dict[str, Any] | None, values: list[int], fitted: Fitted | None = None) -> Any:
    field = Field(name="u", dtype="uint64", encoding=encoding)
    encoder = Encoder(Schema((sample_id_field(), field)), {} if fitted is None else {"u": fitted})
    return encoder.encode(rows(pa.array(values, TYPE))).x["u"]


@pytest.mark.parametrize(
    ("encoding", "values", "expected"),
    [
        (None, [0, 2**24], [[0.0], [2.0**24]]),
        ({"kind": "number"}, [MOST], [[np.float32(MOST)]]),  # asked for, so rounded
        ({"kind": "number", "dtype": "float64"}, [2**53, MOST], [[2.0**53], [2.0**64]]),
        ({"kind": "number", "dtype": "int64"}, [2**63 - 1], [[2**63 - 1]]),
        (
            {"kind": "bucketise", "boundaries": [-1, 2**63, 2**65]},
            [0, 2**63 - 1, 2**63],
            [[0, 1, 0, 0]] * 2 + [[0, 0, 1, 0]],
        ),
        ({"kind": "hash", "buckets": 10**6, "seed": 42, "output": "index"}, [1, 2**63], None),
    ],
)
def test_what_a_model_is_fed(encoding: dict[str, Any] | None, values: list[int], expected: Any) -> None:
    found = fed(encoding, values)
    if expected is None:  # the same bytes as those of the int64 with the same bits
        signed = Field(name="u", dtype="int64", encoding=encoding)
        column = pa.array(np.array(values, dtype=np.uint64).view(np.int64))
        expected = Encoder(Schema((sample_id_field(), signed)), {}).encode(rows(column)).x["u"]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("encoding", "value"),
    [
        (None, 2**24 + 1),  # float32 would change it
        ({"kind": "number", "dtype": "int64"}, 2**63),  # another number as int64, which rounding is not
    ],
)
def test_nothing_is_narrowed_unasked(encoding: dict[str, Any] | None, value: int) -> None:
    with pytest.raises(DataError, match="another number"):
        fed(encoding, [1, value])


def test_statistics_are_those_of_the_numbers() -> None:
    sums = ExactSums(0)
    sums.add(np.array([0, 2**63, MOST], dtype=np.uint64))
    moments = sums.moments("u", ("train",))
    assert (sums.total, sums.squares) == (2**63 + MOST, 2**126 + MOST**2)
    standardise = {"kind": "standardise", "file": "u.json"}
    mean, variance = moments.mean, moments.variance
    found = fed(
        standardise, [0, 2**63, MOST], Moments(name="u", count=3, mean=mean, variance=variance, fitted_on=("t",))
    )
    np.testing.assert_allclose(found.mean(), 0, atol=1e-6)
    words = {"kind": "vocabulary", "file": "u.json", "max_size": 9, "min_count": 1, "oov_buckets": 0, "output": "index"}
    known = Vocabulary(name="u", tokens=(str(MOST), "5"), counts=(2, 1), fitted_on=("t",))
    assert fed(words, [5, MOST, 6], known).tolist() == [[2], [1], [0]]


def test_there_are_no_tensors_of_it() -> None:
    with pytest.raises(ConfigError, match="a tensor of uint64"):
        Field(name="u", dtype="uint64", shape=(2,))
