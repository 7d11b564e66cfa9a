"""From columns to arrays: every encoding on small columns whose result can be seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from features.encode import Encoder
from features.fitted import Vocabulary
from features.schema import Field, Schema, sample_id_field
from storage.errors import ConfigError, DataError


def vocabulary(name: str, *tokens: str) -> Vocabulary:
    counts = tuple(range(len(tokens), 0, -1))
    return Vocabulary(name=name, tokens=tokens, counts=counts, fitted_on=("train",))


def words(name: str, oov_buckets: int, *, shape: tuple[None] | tuple[()] = (), nullable: bool = False) -> Field:
    encoding = {"kind": "vocabulary", "file": f"{name}.json", "max_size": 3, "min_count": 1, "oov_buckets": oov_buckets}
    return Field(name=name, dtype="string", shape=shape, nullable=nullable, encoding=encoding)


def encode(fields: tuple[Field, ...], fitted: dict[str, Vocabulary], **columns: Any) -> Any:
    schema = Schema((sample_id_field(), *fields))
    count = len(next(iter(columns.values())))
    rows = pa.RecordBatch.from_pydict({"sample_id": list(range(count)), **columns}, schema=schema.arrow_schema())
    encoder = Encoder(schema, fitted)
    encoded = encoder.encode(pa.concat_batches([rows, rows]).slice(count))  # a slice has offsets of its own
    for name, spec in encoder.signature.features.items():
        assert encoded.x[name].shape == (count, *spec.shape) and encoded.x[name].dtype == spec.dtype
        np.testing.assert_array_equal(encoded.x[name], encoder.encode(rows).x[name])
    return encoded


def test_vocabulary_with_null_and_unknown() -> None:
    encoded = encode((words("w", 1, nullable=True),), {"w": vocabulary("w", "a", "b")}, w=["b", None, "z", "a"])
    assert encoded.x["w"].tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]]


def test_without_an_oov_bucket_the_unknown_is_nothing() -> None:
    encoded = encode((words("w", 0),), {"w": vocabulary("w", "a")}, w=["z", "a"])
    assert encoded.x["w"].tolist() == [[0], [1]]


def test_lists_become_multi_hot() -> None:
    field = words("w", 1, shape=(None,))
    encoded = encode((field,), {"w": vocabulary("w", "a", "b")}, w=[["a", "b", "a"], [], ["y", "z"]])
    assert encoded.x["w"].tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]


def test_several_oov_buckets_take_the_same_token_always() -> None:
    one, two = (encode((words("w", 8),), {"w": vocabulary("w", "a")}, w=w) for w in (["x", "y"], ["y", "x"]))
    assert one.x["w"][0].tolist() == two.x["w"][1].tolist()


def test_buckets_hold_their_lower_boundary() -> None:
    field = Field(name="n", dtype="int64", nullable=True, encoding={"kind": "bucketise", "boundaries": [1, 5]})
    encoded = encode((field,), {}, n=[0, 1, 4, 5, None, -(2**63)])
    assert encoded.x["n"].argmax(axis=1).tolist() == [0, 1, 1, 2, 0, 0]
    assert encoded.x["n"].sum(axis=1).tolist() == [1, 1, 1, 1, 0, 1]


def test_plain_numbers_and_tensors() -> None:
    fields = (
        Field(name="b", dtype="bool"),
        Field(name="f", dtype="float32"),
        Field(name="t", dtype="uint8", shape=(1, 2, 1)),
    )
    encoded = encode(fields, {}, b=[True, False], f=[0.5, 2.0], t=[b"\x01\x02", b"\xff\x00"])
    assert encoded.x["b"].tolist() == [[1], [0]] and encoded.x["f"].tolist() == [[0.5], [2]]
    assert encoded.x["t"].tolist() == [[[[1], [2]]], [[[255], [0]]]]
    assert encoded.sample_id.dtype == np.int64 and len(encoded) == 2


def test_labels() -> None:
    yes = encode(
        (Field(name="y", dtype="bool", kind="label"), Field(name="f", dtype="float32")), {}, y=[True, False], f=[0, 0]
    )
    assert yes.y.dtype == np.float32 and yes.y.tolist() == [1, 0]
    field = Field(name="y", dtype="int64", kind="label", num_classes=3)
    assert encode((field,), {}, y=[2, 0]).y.dtype == np.int64
    with pytest.raises(DataError, match="outside its classes"):
        encode((field,), {}, y=[3])


def test_an_empty_batch() -> None:
    encoded = encode(
        (words("w", 1), Field(name="t", dtype="uint8", shape=(2,))), {"w": vocabulary("w", "a")}, w=[], t=[]
    )
    assert encoded.x["w"].shape == (0, 2) and encoded.x["t"].shape == (0, 2)


@pytest.mark.parametrize(
    "field",
    [
        Field(name="a", dtype="string"),
        Field(name="a", dtype="int64", shape=(None,)),
        Field(name="a", dtype="int64", nullable=True),
        Field(name="a", dtype="float32", kind="weight"),
    ],
)
def test_what_no_model_can_be_fed_is_refused(field: Field) -> None:
    with pytest.raises(ConfigError):
        Encoder(Schema((sample_id_field(), field)), {})


def test_a_missing_or_too_large_vocabulary_is_refused() -> None:
    schema = Schema((sample_id_field(), words("w", 1)))
    for fitted in ({}, {"w": vocabulary("w", *"abcd")}):
        with pytest.raises(DataError):
            Encoder(schema, fitted)


def test_vocabulary_json_form_and_back() -> None:
    value = vocabulary("w", "b", "é")
    assert Vocabulary.from_json(value.to_json()) == value
    for wrong in (None, {}, {**value.to_json(), "counts": [1]}, {**value.to_json(), "tokens": ["a", "a"]}):
        with pytest.raises(DataError):
            Vocabulary.from_json(wrong)
