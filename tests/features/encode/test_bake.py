"""Baked columns: their form, and that a model is fed from them what it is fed from the declared ones, bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.features.encode.bake import Baker, check_bakeable, check_declared, raw_schema
from lockstep.features.encode.encoder import Encoder
from lockstep.features.schema.declare import load_schema
from lockstep.features.schema.fitted import Fitted, Moments, Vocabulary
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError, DataError

WORDS = Vocabulary(name="w", tokens=("b", "a", "ü"), counts=(5, 3, 2), fitted_on=("train",))
DIGITS = Vocabulary(name="n", tokens=("7", "-1"), counts=(5, 3), fitted_on=("train",))
SCHEMA = load_schema("""
fields = [
    {name = "y", dtype = "bool", kind = "label"},
    {name = "how_much", dtype = "float32", kind = "weight"},
    {name = "plain", dtype = "float32"},
    {name = "whole", dtype = "int64"},
    {name = "wide", dtype = "float64"},
    {name = "yes", dtype = "bool", nullable = true, encoding = {kind = "number", dtype = "int64", null_value = 7}},
    {name = "w", dtype = "string", nullable = true, encoding = {kind = "vocabulary", max_size = 4, oov_buckets = 2}},
    {name = "w0", dtype = "string", encoding = {kind = "vocabulary", max_size = 4, oov_buckets = 0, output = "index"}},
    {name = "h", dtype = "bytes", nullable = true, encoding = {kind = "hash", buckets = 9, output = "index"}},
    {name = "b", dtype = "float64", nullable = true, encoding = {kind = "bucketise", boundaries = [0, 1.5]}},
    {name = "s", dtype = "int64", nullable = true, encoding = {kind = "standardise"}},
    {name = "many", dtype = "int64", list = true, encoding = {kind = "vocabulary", max_size = 4, oov_buckets = 0}},
    {name = "hot.hashed", dtype = "string", list = true, encoding = {kind = "hash", buckets = 3}},
    {name = "last", dtype = "float64", list = true, encoding = {kind = "sequence", length = 2, keep = "last", pad_value = -1}},
    {name = "ids", dtype = "string", list = true, encoding = {kind = "sequence", length = 3, with = "length", of = {kind = "vocabulary", max_size = 4, oov_buckets = 0}}},
    {name = "big", dtype = "uint64"},
    {name = "large", dtype = "uint64", list = true, encoding = {kind = "hash", buckets = 5}},
    {name = "t", dtype = "uint8", shape = [1, 2], encoding = {kind = "normalise", mean = [3, 4], deviation = [2]}},
    {name = "kept", dtype = "int64", shape = [2]},
    {name = "only", dtype = "string", nullable = true, encoding = {kind = "ignore"}},
]
""")  # noqa: E501 - a line a field
FITTED: dict[str, Fitted] = {
    "w": WORDS,
    "w0": WORDS,
    "ids": WORDS,
    "many": DIGITS,
    "s": Moments(name="s", count=4, mean=0.3, variance=1.7, fitted_on=("train",)),
}
TEXTS = ["a", "b", "ü", "", "zz"]


def rows_of(count: int, seed: int) -> pa.RecordBatch:
    """Rows with nulls, NaN, unknown tokens, empty and long lists."""
    rng = np.random.default_rng(seed)

    def some(values: list[Any], most: int) -> list[Any]:
        return [values[n] for n in rng.integers(0, len(values), rng.integers(0, most + 1))]

    def one(values: list[Any]) -> list[Any]:
        return [values[n] for n in rng.integers(0, len(values), count)]

    columns = {
        "sample_id": rng.integers(-(2**63), 2**63 - 1, count).tolist(),
        "y": one([True, False]),
        "how_much": one([0.5, 2.0]),
        "plain": one([0.1, float("nan"), -0.0]),
        "whole": one([-(2**24), 0, 5]),
        "wide": one([0.1, 1e300 * 0, float("inf"), 2.0**60]),
        "yes": one([True, None, False]),
        "w": one([*TEXTS, None]),
        "w0": one(TEXTS),
        "h": one([b"", b"\xff", None]),
        "b": one([-1.0, 0.0, 1.5, float("nan"), None]),
        "s": one([None, 0, 2**63 - 1]),
        "many": [some([7, -1, 8], 5) for _ in range(count)],
        "hot.hashed": [some(TEXTS, 4) for _ in range(count)],
        "last": [some([0.1, 2.0, -5.5], 5) for _ in range(count)],
        "ids": [some(TEXTS, 5) for _ in range(count)],
        "big": one([Decimal(0), Decimal(2**24)]),
        "large": [some([Decimal(2**64 - 1), Decimal(2**63)], 3) for _ in range(count)],
        "t": one([b"\x00\xff", b"\x03\x04"]),
        "kept": one([b"\x01" * 16]),
        "only": one([None, "x"]),
    }
    return pa.RecordBatch.from_pydict(columns, schema=SCHEMA.arrow_schema())


def baked_of(baker: Baker, rows: pa.RecordBatch) -> pa.RecordBatch:
    none = pa.RecordBatch.from_pylist([], schema=baker.schema.arrow_schema())
    return pa.concat_batches([none, *baker.batches(rows)])


@settings(max_examples=20, deadline=None)
@given(count=st.integers(0, 9), seed=st.integers(0, 2**32), cut=st.integers(0, 9))
def test_a_model_is_fed_the_same_bits(count: int, seed: int, cut: int) -> None:
    rows = rows_of(count, seed)
    baker = Baker(SCHEMA, FITTED)
    stored = [baked_of(baker, rows.slice(0, cut)), baked_of(baker, rows.slice(min(cut, count)))]  # as two tasks would
    from_raw, from_baked = Encoder(SCHEMA, FITTED), Encoder(Schema.from_json(baker.schema.to_json()), {})
    assert from_baked.signature == from_raw.signature
    want, got = from_raw.encode(rows), from_baked.encode(pa.concat_batches(stored))
    assert list(got.x) == list(want.x)
    for name, array in want.x.items():
        assert got.x[name].dtype == array.dtype and got.x[name].tobytes() == array.tobytes(), name
    for mine, theirs in ((got.y, want.y), (got.weight, want.weight), (got.sample_id, want.sample_id)):
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()


def test_what_is_stored() -> None:
    """Plain columns that anybody reads: ids, numbers, lists; what a model is not fed stays as it is."""
    rows = rows_of(2, 0)
    given = {
        "w": [None, "ü"], "w0": ["?", "b"], "b": [None, 1.5], "yes": [None, True], "s": [None, 1],
        "many": [[8, 7, 7, -1], []], "last": [[1.0, 2.0, 3.0], [4.0]], "ids": [["?", "a", "b", "ü"], []],
        "t": [bytes([3, 4]), bytes([5, 6])], "whole": [3, 4], "only": ["x", None],
    }  # fmt: skip
    for name, values in given.items():
        place = rows.schema.get_field_index(name)
        rows = rows.set_column(place, rows.schema.field(name), pa.array(values, SCHEMA[name].arrow_type))
    baker = Baker(SCHEMA, FITTED)
    stored = baked_of(baker, rows).to_pydict()
    assert {name: stored[name] for name in ("w", "w0", "b", "yes", "whole", "only")} == {
        "w": [0, 3],  # null is nothing; the third token
        "w0": [0, 1],  # unknown without a bucket is nothing
        "b": [0, 3],
        "yes": [7, 1],
        "whole": [3.0, 4.0],
        "only": ["x", None],
    }
    assert stored["many"] == [[1, 2], []], "ids rise, each once, and the unknown is left out"
    assert stored["last"] == [[2.0, 3.0], [4.0]], "cut, and not padded"
    assert stored["ids"] == [[0, 2, 1], []], "in their order, the unknown in its place"
    assert stored["s"] == [0.0, float(np.float32((1 - 0.3) / np.sqrt(1.7)))]
    assert np.frombuffer(stored["t"][1], "<f4").tolist() == [1.0, 1.0]
    unchanged = ("sample_id", "y", "how_much", "plain", "kept", "only")
    assert all((field.name in unchanged) != field.is_baked for field in baker.schema)
    assert not any(field.nullable for field in baker.schema if field.name != "only")


def test_the_schema_tells_what_was_done() -> None:
    schema = Baker(SCHEMA, FITTED).schema
    assert schema["w"].encoding == {
        "kind": "baked",
        "raw": {"dtype": "string", "shape": [], "nullable": True, "encoding": SCHEMA["w"].encoding},
        "ids": 6,  # nothing, three tokens, two buckets
        "fitted": {"file": "w.json", "splits": ["train"]},
    }
    assert schema["s"].encoding is not None and schema["s"].encoding["fitted"]["file"] == "s.json"
    assert {name: (schema[name].encoding or {}).get("ids") for name in ("h", "b", "many", "hot.hashed", "ids")} == {
        "h": 10, "b": 4, "many": 3, "hot.hashed": 4, "ids": 4,
    }  # fmt: skip
    assert schema.fitted_fields == (), "nothing is fitted or looked up again"
    assert raw_schema(schema) == SCHEMA == raw_schema(SCHEMA)


def test_ids_that_there_are_not_are_told() -> None:
    baker = Baker(SCHEMA, FITTED)
    rows = baked_of(baker, rows_of(2, 1))
    place = rows.schema.get_field_index("w")
    for wrong in ([0, 6], [-1, 0]):
        odd = rows.set_column(place, rows.schema.field("w"), pa.array(wrong, pa.int64()))
        with pytest.raises(DataError, match="field `w` has an id out of range"):
            Encoder(baker.schema, {}).encode(odd)


def test_large_tensors_are_baked_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.features.encode.bake.BATCH_BYTES", 40)  # t takes 8 bytes a row
    parts = list(Baker(SCHEMA, FITTED).batches(rows_of(12, 2)))
    assert [len(part) for part in parts] == [5, 5, 2]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"ids": 0}, "ids 0"),
        ({"ids": (1 << 16) + 2}, "ids 65538"),  # of a one-hot: too many columns
        ({"ids": None}, "ids None"),
        ({"fitted": {"file": "w.json"}}, "fitted"),
        ({"fitted": {"file": "other.json", "splits": ["train"]}}, "fitted"),
        ({"raw": {"dtype": "string", "shape": [], "nullable": True, "encoding": {"kind": "baked"}}}, "baked twice"),
        ({"raw": {"dtype": "string", "shape": [], "nullable": True, "encoding": None}}, "int64, shape ()"),
        ({"raw": {"dtype": "string", "shape": []}}, "raw "),
        ({"raw": {"dtype": "string", "shape": [1, None], "nullable": True, "encoding": None}}, "raw "),
        ({"raw": {"dtype": "string", "shape": ["x"], "nullable": True, "encoding": None}}, "raw "),
    ],
)
def test_a_forged_schema_is_refused(change: dict[str, Any], told: str) -> None:
    document = json.loads(json.dumps(Baker(SCHEMA, FITTED).schema.to_json()))
    (field,) = [field for field in document["fields"] if field["name"] == "w"]
    field["encoding"] = {key: value for key, value in {**field["encoding"], **change}.items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        Schema.from_json(document)
    assert told in str(caught.value.got)


def test_what_cannot_be_baked() -> None:
    baked = Baker(SCHEMA, FITTED).schema
    for wrong in (
        baked,  # twice
        load_schema('{"fields": [{"name": "a", "dtype": "float32"}]}'),  # nothing to do
        load_schema('{"fields": [{"name": "a", "dtype": "string"}]}'),  # no model can be fed with it
    ):
        with pytest.raises(ConfigError):
            check_bakeable(wrong)
    check_bakeable(SCHEMA)
    with pytest.raises(ConfigError, match="is baked: its values are a model's inputs"):
        check_declared(baked)
    check_declared(SCHEMA)
    with pytest.raises(ConfigError) as caught:
        load_schema(json.dumps(baked.to_json()))
    assert "--bake" in str(caught.value.allowed)
    with pytest.raises(DataError, match="would become another number"):
        rows = rows_of(1, 0)
        place = rows.schema.get_field_index("whole")
        list(Baker(SCHEMA, FITTED).batches(rows.set_column(place, rows.schema.field("whole"), pa.array([2**24 + 1]))))


def test_an_image_is_baked_as_its_pixels() -> None:
    from io import BytesIO

    from PIL import Image

    size = {"kind": "image", "height": 2, "width": 3, "channels": 3}
    for extra, dtype in (({}, "uint8"), ({"mean": [0.5], "deviation": [0.25], "divide_by": 255}, "float32")):
        schema = load_schema(json.dumps({"fields": [{"name": "i", "dtype": "bytes", "encoding": {**size, **extra}}]}))
        data = BytesIO()
        Image.new("RGB", (6, 4), (10, 20, 30)).save(data, "PNG")
        rows = pa.RecordBatch.from_pydict({"sample_id": [1], "i": [data.getvalue()]}, schema=schema.arrow_schema())
        baker = Baker(schema, {})
        assert (baker.schema["i"].dtype, baker.schema["i"].shape) == (dtype, (2, 3, 3))
        want, got = (
            Encoder(schema, {}).encode(rows).x["i"],
            Encoder(baker.schema, {}).encode(baked_of(baker, rows)).x["i"],
        )
        assert want.dtype == got.dtype == dtype and want.tobytes() == got.tobytes()


def test_a_vocabulary_without_tokens_and_buckets_is_refused() -> None:
    empty = replace(WORDS, tokens=(), counts=())
    schema = load_schema("""
fields = [{name = "w", dtype = "string", encoding = {kind = "vocabulary", max_size = 4, oov_buckets = 0}}]
""")
    with pytest.raises(ConfigError, match="cannot be fed to a model"):
        Baker(schema, {"w": empty})
