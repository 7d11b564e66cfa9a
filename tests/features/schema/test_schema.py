"""The declared schema: its JSON form, and declarations that cannot be."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.features.schema.declare import load_schema
from lockstep.features.schema.encodings import KINDS
from lockstep.features.schema.fields import ARROW_TYPES, Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.features.schema.signature import Signature, TensorSpec
from lockstep.storage.errors import ConfigError

VOCABULARY = {"kind": "vocabulary", "file": "page.json", "max_size": 9, "min_count": 1, "oov_buckets": 1}
NORMALISE = {"kind": "normalise", "mean": [0.5], "deviation": [1]}
IMAGE = {"kind": "image", "height": 8, "width": 8, "channels": 3}
HASH = {"kind": "hash", "buckets": 9, "seed": 42}


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
        ({"shape": (2, None)}, "half a list, half a tensor"),
        ({"dtype": "uint8"}, "uint8 only in tensors"),
        ({"dtype": "uint8", "shape": (1 << 31,)}, "more bytes than Arrow's offsets reach"),
        ({"dtype": "float64", "shape": (1 << 14, 1 << 14)}, "2^31 bytes"),
        ({"dtype": "int64", "shape": (10**4000,) * 3}, "more digits than Python writes"),
        ({"dtype": "string", "shape": (2,)}, "strings have no fixed size"),
        ({"shape": (None,), "nullable": True}, "an empty list says nothing"),
        ({"kind": "label", "nullable": True}, "a label is there"),
        ({"num_classes": 3}, "classes belong to labels"),
        ({"dtype": "float32", "encoding": VOCABULARY}, "vocabulary of fractions"),
        ({"dtype": "string", "encoding": {**VOCABULARY, "file": "../x.json"}}, "a path"),
        ({"dtype": "string", "encoding": {"kind": "vocabulary"}}, "missing keys"),
        ({"encoding": {"kind": "bucketise", "boundaries": [2, 1]}}, "falling boundaries"),
        ({"encoding": {"kind": "hash"}}, "missing keys"),
        ({"encoding": {"kind": "magic"}}, "unknown encoding"),
        ({"encoding": {"kind": ["hash"]}}, "no name at all"),
        ({"dtype": "uint32"}, "int64 holds these"),
        ({"dtype": "decimal"}, "nor this"),
        ({"kind": "weight"}, "a weight is float32"),
        ({"dtype": "string", "encoding": {**VOCABULARY, "output": "multi_hot"}}, "one value is one_hot"),
        ({"dtype": "string", "shape": (None,), "encoding": {**HASH, "output": "index"}}, "ids of a list: a sequence"),
        ({"dtype": "string", "encoding": {**VOCABULARY, "max_size": 1 << 17}}, "too wide for one_hot"),
        ({"dtype": "string", "encoding": {**VOCABULARY, "file": "a.fold-1.json"}}, "a fold's own file"),
        ({"dtype": "float32", "encoding": HASH}, "a hash of fractions"),
        ({"encoding": {**HASH, "buckets": 0}}, "no bucket"),
        ({"encoding": {**HASH, "seed": True}}, "true is no number"),
        ({"encoding": {"kind": "bucketise", "boundaries": [1, float("nan")]}}, "NaN is no boundary"),
        ({"nullable": True, "encoding": {"kind": "number"}}, "what stands for null is not said"),
        ({"dtype": "float32", "encoding": {"kind": "number", "dtype": "int64"}}, "fractions would be cut"),
        ({"encoding": {"kind": "number", "null_value": 10**400}}, "beyond any float"),
        ({"dtype": "bytes", "encoding": {**IMAGE, "channels": 2}}, "grey or colours"),
        ({"dtype": "bytes", "encoding": {**IMAGE, "fit": "tile"}}, "no such way"),
        ({"dtype": "string", "encoding": IMAGE}, "text is no image"),
        ({"dtype": "bytes", "encoding": {**IMAGE, "mean": [0.5]}}, "no deviation"),
        ({"dtype": "bytes", "encoding": {**IMAGE, "mean": [0.5, 1], "deviation": [1]}}, "two means, three channels"),
        ({"dtype": "uint8", "shape": (2, 3), "encoding": {**NORMALISE, "deviation": [0]}}, "a division by zero"),
        ({"dtype": "uint8", "shape": (2, 3), "encoding": {**NORMALISE, "mean": ["a"]}}, "no number"),
        ({"dtype": "uint8", "shape": (2, 3), "encoding": HASH}, "a hash of tensors"),
        ({"dtype": "float32", "encoding": NORMALISE}, "standardise does scalars"),
        ({"shape": (None,), "encoding": {"kind": "number"}}, "a list is no number"),
        ({"shape": (None,), "encoding": {"kind": "sequence", "length": 0}}, "a sequence of nothing"),
        ({"encoding": {"kind": "sequence", "length": 3}}, "a scalar is no sequence"),
        ({"dtype": "string", "shape": (None,), "encoding": {"kind": "sequence", "length": 3}}, "texts are no numbers"),
        ({"shape": (None,), "encoding": {"kind": "sequence", "length": 3, "of": {"kind": "ignore"}}}, "ids are needed"),
    ],
)
def test_impossible_fields_are_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Field(**{"name": "a", "dtype": "int64", **wrong})
    assert caught.value.got and caught.value.allowed and caught.value.next_step, why


def test_lists_of_lists_are_refused_with_another_way() -> None:
    with pytest.raises(ConfigError, match="one list of all values, and a second one of the lengths"):
        Field(name="a", dtype="int64", shape=(None, None))


def test_only_wrong_keys_of_an_encoding_are_named() -> None:
    """A hash's seed has been filled in for somebody who never wrote it."""
    with pytest.raises(ConfigError) as caught:
        Field(name="a", dtype="int64", encoding={"kind": "hash", "bucket": 9, "seed": 42})
    assert caught.value.got == "encoding hash with no key buckets and unknown key bucket"
    assert "buckets" in caught.value.allowed


def test_impossible_schemas_are_refused() -> None:
    one = Field(name="a", dtype="int64")
    hidden = Field(name="_a", dtype="int64")  # such names are the writer's own
    for fields in (
        (one,),
        (sample_id_field(), one, one),
        (sample_id_field(), sample_id_field()),
        (sample_id_field(), hidden),
    ):
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
    assert set(signature.to_json()) == {"features", "label", "num_classes"}, "no new key where nothing is new"
    number = TensorSpec(shape=(), dtype="float32")
    more = Signature(
        features={"a": TensorSpec(shape=(1,), dtype="int64", ids=7)}, label=number, num_classes=None, weight=number
    )
    assert Signature.from_json(more.to_json()) == more
    rating = replace(more, label_is_number=True)
    assert Signature.from_json(rating.to_json()) == rating and rating.to_json()["label_is_number"] is True
    assert list(signature.to_json()["features"]) == ["a", "b"]
    with pytest.raises(ConfigError):
        Signature.from_json({"features": {}})


def test_a_plain_schema_keeps_columns_as_they_are() -> None:
    schema = Schema.plain({"a": "int64", "tags": "string", "y": "bool"}, label="y", lists="tags")
    assert [field.name for field in schema] == ["sample_id", "a", "tags", "y"]
    assert schema["a"].nullable and not schema["y"].nullable and schema["tags"].is_list and schema.label is not None


TOML = """
[[fields]]
name = "click"
dtype = "bool"
kind = "label"

[[fields]]
names = ["u0", "u1"]
dtype = "string"
nullable = true
encoding = {kind = "hash", buckets = 1000}

[[fields]]
name = "item tags"
dtype = "string"
list = true
encoding = {kind = "sequence", length = 8, of = {kind = "vocabulary", max_size = 500}}

[[fields]]
name = "price"
dtype = "float64"
encoding = {kind = "standardise"}
"""


def test_a_declared_schema_has_stated_defaults(tmp_path: Path) -> None:
    schema = load_schema(TOML)
    assert [field.name for field in schema] == ["sample_id", "click", "u0", "u1", "item tags", "price"]
    assert schema["u1"].encoding == {"kind": "hash", "buckets": 1000, "seed": 42} and schema["u1"].nullable
    of = {"kind": "vocabulary", "file": "item-20-tags.json", "max_size": 500, "min_count": 1, "oov_buckets": 1}
    assert schema["item tags"].encoding == {"kind": "sequence", "length": 8, "of": of}
    assert [field.fitted_file for field in schema.fitted_fields] == ["item-20-tags.json", "price.json"]
    (tmp_path / "s.toml").write_text(TOML, encoding="utf-8")
    (tmp_path / "s.json").write_text(json.dumps(schema.to_json()), encoding="utf-8")  # the manifest's own form too
    assert load_schema(str(tmp_path / "s.toml")) == load_schema(str(tmp_path / "s.json")) == schema


def test_the_schema_in_the_documentation_is_one() -> None:
    text = (Path(__file__).parents[3] / "docs" / "schema.md").read_text(encoding="utf-8")
    schema = load_schema(text.partition("```toml\n")[2].partition("```")[0])
    assert [field.name for field in schema] == ["sample_id", "click", "user_feature_0", "user_feature_1", "tags"]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]\n",
        "a = 1\n",
        '{"fields": [], "more": 1}',
        '{"fields": [{"name": "a"}]}',  # no dtype
        '{"fields": [{"name": "a", "names": ["b"], "dtype": "int64"}]}',
        '{"fields": [{"name": "a", "dtype": "int64", "colour": 1}]}',
        '{"fields": [{"name": "a", "dtype": "int64", "list": 1}]}',
        '{"fields": [{"name": "a", "dtype": "int64", "encoding": "hash"}]}',
        '{"fields": [{"name": "sample_id", "dtype": "int64"}]}',  # the id's name for another kind
        '{"fields": [{"name": "a", "dtype": "string", "encoding": {"kind": "sequence", "of": 1}}]}',
        '{"fields": [{"names": [], "dtype": "int64", "list": 1}]}',
        '[[fields]]\nname = "a"\ndtype = "float32"\nshape = [0x'
        + "f" * 6000
        + "]\n",  # too long to be written in decimals
        '{"fields": [{"name": "a", "dtype": "int64", "encoding": ' + '{"of": ' * 990 + "1" + "}" * 990 + "}]}",
    ],
    ids=lambda text: text[:60],
)
def test_a_wrong_declaration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_schema(text)
    assert caught.value.exit_code == 2 and caught.value.next_step


def with_entry(*lines: str) -> str:
    """TOML, and an entry for `x` that begins in its line 24."""
    return "\n".join([TOML, "[[fields]]", 'name = "x"', *lines])


PLAIN = [{"name": "a", "dtype": "int64"}, {"names": ["b", "c"], "dtype": "string"}]
WRONG_X = json.dumps({"fields": [*PLAIN, {"name": "x", "dtype": "int6"}]}, indent=1)
HASH_X = ('dtype = "string"', 'encoding = {kind = "hash"}')


@pytest.mark.parametrize(
    ("name", "text", "what", "got"),
    [
        ("s.toml", with_entry('dtype = "int32"'), ", line 26, fields[4]: field `x` cannot", "dtype 'int32'"),
        ("s.toml", with_entry('dtpe = "bool"'), ", line 26, fields[4]: ", "dtpe, an unknown key (perhaps `dtype`)"),
        ("s.toml", with_entry(*HASH_X), ", line 27, fields[4]: field `x` cannot", "encoding hash with no key buckets"),
        ("s.toml", with_entry("# no dtype"), ", line 24, fields[4]: ", "dtype = None"),
        ("s.toml", TOML.replace("name", "nam"), ", line 3, fields[0]: ", "nam, an unknown key (perhaps `name`)"),
        ("s.toml", 'fields = [\n{name = "x"}]', ", fields[0]: ", "dtype = None"),  # no line can be told
        ("s.toml", TOML.replace("price", "u0"), ": the schema cannot", "'u0', 'u1', 'item tags', 'u0'"),
        ("s.toml", with_entry('dtype = "bool', ""), " does not declare", "at line 26"),
        ("s.json", WRONG_X, ", line 16, fields[2]: field `x` cannot", "dtype 'int6'"),
        ("s.json", json.dumps({"fields": [{"name": "_x"}]}), ", line 1, fields[0]: field `_x` cannot", "'_x'"),
        ("s.json", json.dumps({"fields": [{"name": "x"}, *PLAIN]}), ", line 1, fields[0]: ", "dtype = None"),
    ],
)
def test_an_error_names_file_line_and_entry(tmp_path: Path, name: str, text: str, what: str, got: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_schema(str(path))
    assert caught.value.what.startswith(f"{path}{what}") and got in caught.value.got


WORDS = st.sampled_from(
    [
        *(
            *KINDS,
            *ARROW_TYPES,
            "feature",
            "label",
            "weight",
            "index",
            "a",
            "a.json",
            "name",
            "names",
            "dtype",
            "shape",
        ),
        *("fields", "record", "list", "kind", "nullable", "encoding", "num_classes", "of", "buckets", "seed", "length"),
        *("file", "max_size", "min_count", "oov_buckets", "boundaries", "output", "with"),
    ]
)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=8,
)
ENCODING = VALUE | st.fixed_dictionaries(
    {"kind": WORDS}, optional=dict.fromkeys(("buckets", "seed", "length", "of", "boundaries", "output"), VALUE)
)
FIELD = VALUE | st.fixed_dictionaries(
    {"name": st.sampled_from("abc"), "dtype": WORDS},
    optional={"encoding": ENCODING, "kind": VALUE, "shape": VALUE, "list": VALUE, "nullable": VALUE},
)


@settings(max_examples=150, deadline=None)
@given(VALUE | st.fixed_dictionaries({"fields": VALUE | st.lists(FIELD, max_size=3)}, optional={"record": VALUE}))
def test_any_document_is_a_schema_or_one_error(document: object) -> None:
    for read in (lambda: load_schema("\n" + json.dumps({"x": document})), lambda: Schema.from_json(document)):
        with contextlib.suppress(ConfigError):
            read()
    if isinstance(document, dict):
        with contextlib.suppress(ConfigError):
            schema = load_schema(json.dumps(document))
            assert Schema.from_json(schema.to_json()) == schema


@pytest.mark.parametrize("asked", [3, {"fields": []}, None, b"{}"])
def test_what_is_no_schema_is_refused_by_name(asked: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a declared schema") as caught:
        load_schema(asked)
    assert repr(asked) in caught.value.got
    path = tmp_path / "s.json"
    path.write_text('{"fields": [{"name": "hour", "dtype": "int64"}]}')
    assert load_schema(path) == load_schema(str(path))


@pytest.mark.parametrize(
    ("dtype", "default", "good"),
    [
        ("string", "", True), ("string", 3, False), ("int64", -3, True), ("int64", 2**63, False), ("int64", 1.0, False),
        ("int64", True, False), ("uint64", 2**64 - 1, True), ("uint64", -1, False), ("float32", 7, True),
        ("float32", 0.1, True), ("float32", 1e39, False), ("float64", float("nan"), False), ("float64", False, False),
        ("float64", 10**400, False), ("bool", False, True), ("bool", 0, False), ("bytes", "a", False),
        ("string", [], False), ("string", None, False),
    ],
)  # fmt: skip
def test_a_default_is_a_value_that_a_record_may_hold(dtype: str, default: object, good: bool) -> None:
    document = Field(name="f", dtype=dtype, nullable=True).to_json() | {"default": default}
    if good:
        field = Field.from_json(document)
        assert field.to_json() == document and field.default == default
    else:
        with pytest.raises(ConfigError):
            Field.from_json(document)


@pytest.mark.parametrize(
    "more", [{"nullable": False}, {"kind": "label", "nullable": False}, {"shape": [None], "nullable": False}]
)
def test_only_nullable_features_have_a_default(more: dict[str, object]) -> None:
    document = Field(name="f", dtype="int64", nullable=True).to_json() | {"default": 1}
    with pytest.raises(ConfigError, match="cannot be declared"):
        Field.from_json(document | more)


def test_a_default_is_declared_and_kept() -> None:
    text = '[[fields]]\nname = "device"\ndtype = "string"\nnullable = true\ndefault = "desktop"\n'
    schema = load_schema(text)
    assert schema["device"].default == "desktop" and Schema.from_json(schema.to_json()) == schema
