"""The declared schema: its JSON form, and declarations that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from features.schema import Field, Schema, sample_id_field
from features.signature import Signature, TensorSpec
from storage.errors import ConfigError

VOCABULARY = {"kind": "vocabulary", "file": "page.json", "max_size": 9, "min_count": 1, "oov_buckets": 1}


def test_json_form_and_back() -> None:
    schema = Schema(
        (
            sample_id_field(),
            Field(name="page", dtype="string", nullable=True, encoding=VOCABULARY),
            Field(name="image", dtype="uint8", shape=(28, 28, 1)),
            Field(name="label", dtype="int64", kind="label", num_classes=10),
        )
    )
    assert Schema.from_json(schema.to_json()) == schema
    assert schema.label is not None and schema.label.num_classes == 10
    assert [field.name for field in schema.in_byte_order] == ["image", "label", "page", "sample_id"]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"dtype": "int32"}, "unknown dtype"),
        ({"name": "_a"}, "hidden names are the writer's own"),
        ({"shape": (2, None)}, "half a list, half a tensor"),
        ({"dtype": "uint8"}, "uint8 only in tensors"),
        ({"dtype": "string", "shape": (2,)}, "strings have no fixed size"),
        ({"shape": (None,), "nullable": True}, "an empty list says nothing"),
        ({"kind": "label", "nullable": True}, "a label is there"),
        ({"num_classes": 3}, "classes belong to labels"),
        ({"encoding": VOCABULARY}, "vocabulary of numbers"),
        ({"dtype": "string", "encoding": {**VOCABULARY, "file": "../x.json"}}, "a path"),
        ({"dtype": "string", "encoding": {"kind": "vocabulary"}}, "missing keys"),
        ({"encoding": {"kind": "bucketise", "boundaries": [2, 1]}}, "falling boundaries"),
        ({"encoding": {"kind": "hash"}}, "unknown encoding"),
    ],
)
def test_impossible_fields_are_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Field(**{"name": "a", "dtype": "int64", **wrong})
    assert caught.value.got and caught.value.allowed and caught.value.next_step, why


def test_impossible_schemas_are_refused() -> None:
    one = Field(name="a", dtype="int64")
    for fields in ((one,), (sample_id_field(), one, one), (sample_id_field(), sample_id_field())):
        with pytest.raises(ConfigError):
            Schema(fields)


@pytest.mark.parametrize("document", [None, [], {}, {"fields": [{}]}, {"fields": [], "x": 1}])
def test_other_json_is_refused(document: object) -> None:
    with pytest.raises(ConfigError):
        Schema.from_json(document)


def test_signature_json_form_and_back() -> None:
    signature = Signature(
        features={"b": TensorSpec(shape=(3,), dtype="float32"), "a": TensorSpec(shape=(2, 2), dtype="uint8")},
        label=TensorSpec(shape=(), dtype="int64"),
        num_classes=4,
    )
    assert Signature.from_json(signature.to_json()) == signature
    assert list(signature.to_json()["features"]) == ["a", "b"]
    with pytest.raises(ConfigError):
        Signature.from_json({"features": {}})
