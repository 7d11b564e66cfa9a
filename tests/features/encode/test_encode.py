"""From columns to arrays: every encoding on small columns whose result can be seen."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lockstep.etl.fit.exact_sums import FLOAT_UNIT, ExactSums
from lockstep.features.encode.encoder import Encoder
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.fitted import Fitted, Moments, Vocabulary, read_fitted
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError, DataError
from tests.features.encode.test_hashing import reference


def vocabulary(name: str, *tokens: str) -> Vocabulary:
    counts = tuple(range(len(tokens), 0, -1))
    return Vocabulary(name=name, tokens=tokens, counts=counts, fitted_on=("train",))


def words(name: str, oov_buckets: int, *, shape: tuple[None] | tuple[()] = (), nullable: bool = False) -> Field:
    encoding = {"kind": "vocabulary", "file": f"{name}.json", "max_size": 3, "min_count": 1, "oov_buckets": oov_buckets}
    return Field(name=name, dtype="string", shape=shape, nullable=nullable, encoding=encoding)


def encode(fields: tuple[Field, ...], fitted: Mapping[str, Fitted], **columns: Any) -> Any:
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


def test_buckets_of_whole_numbers_are_exact() -> None:
    """2^53 and 2^53 + 1 are one float64; a boundary between two whole numbers is the upper one."""
    bounds = [-1e30, -0.5, 2**53 + 1, 1e30]
    field = Field(name="n", dtype="int64", encoding={"kind": "bucketise", "boundaries": bounds, "output": "index"})
    encoded = encode((field,), {}, n=[-(2**63), -1, 0, 2**53, 2**53 + 1, 2**63 - 1])
    assert encoded.x["n"].ravel().tolist() == [2, 2, 3, 3, 4, 4]


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


HASH = {"kind": "hash", "buckets": 10, "seed": 42}
LONG = "x" * 77  # longer than the hash's block of 32 bytes


def bucket(data: bytes) -> int:
    value = reference(data, 42)
    return (value - (1 << 64) if value >> 63 else value) % 10


def test_hashed_text_bytes_and_numbers() -> None:
    fields = (
        Field(name="s", dtype="string", nullable=True, encoding={**HASH, "output": "index"}),
        Field(name="n", dtype="int64", encoding={**HASH, "output": "index"}),
        Field(name="b", dtype="bytes", encoding=HASH),
        Field(name="l", dtype="string", shape=(None,), encoding=HASH),
    )
    values = ["", "a", None, LONG]
    encoded = encode(
        fields,
        {},
        s=values,
        n=[0, 1, -1, 2**63 - 1],
        b=[b"", b"a", b"\xff", LONG.encode()],
        l=[["", "a"], [], ["a"], []],
    )
    assert encoded.x["s"].tolist() == [[1 + bucket(b"")], [1 + bucket(b"a")], [0], [1 + bucket(LONG.encode())]]
    assert encoded.x["n"].tolist() == [
        [1 + bucket(n.to_bytes(8, "little", signed=True))] for n in (0, 1, -1, 2**63 - 1)
    ]
    assert encoded.x["b"].argmax(axis=1).tolist() == [bucket(v) for v in (b"", b"a", b"\xff", LONG.encode())]
    assert [np.flatnonzero(row).tolist() for row in encoded.x["l"]] == [
        sorted({bucket(b""), bucket(b"a")}), [], [bucket(b"a")], [],
    ]  # fmt: skip


def test_ids_keep_0_for_nothing() -> None:
    known = {**dict(words("v", 2).encoding or {}), "output": "index"}
    buckets = {"kind": "bucketise", "boundaries": [0], "output": "index"}
    fields = (
        Field(name="v", dtype="string", nullable=True, encoding=known),
        Field(name="n", dtype="float64", nullable=True, encoding=buckets),
    )
    encoded = encode(fields, {"v": vocabulary("v", "a", "b")}, v=["b", None, "z", "a"], n=[-1.0, None, np.nan, 0.0])
    ids = encoded.x["v"].ravel().tolist()
    assert ids[:2] == [2, 0] and ids[2] in (3, 4) and ids[3] == 1
    assert encoded.x["n"].ravel().tolist() == [1, 0, 0, 2]


def test_a_vocabulary_of_numbers_holds_their_digits() -> None:
    encoding = {"kind": "vocabulary", "file": "n.json", "max_size": 3, "min_count": 1, "oov_buckets": 0}
    field = Field(name="n", dtype="int64", encoding=encoding)
    encoded = encode((field,), {"n": vocabulary("n", "-5", "9223372036854775807")}, n=[2**63 - 1, -5, 5])
    assert encoded.x["n"].tolist() == [[0, 1], [1, 0], [0, 0]]


def test_text_is_bytes_of_utf_8_and_nothing_is_folded() -> None:
    """Composed and decomposed letters, cases and blanks are different tokens; so is the empty text from null."""
    encoded = encode(
        (words("w", 0, nullable=True),),
        {"w": vocabulary("w", "é", "É", "")},
        w=["e\u0301", "é", "É", "", None, " é", "\U0001f600"],
    )
    assert encoded.x["w"].argmax(axis=1).tolist() == [0, 0, 1, 2, 0, 0, 0]
    assert encoded.x["w"].sum(axis=1).tolist() == [0, 1, 1, 1, 0, 0, 0]


def moments(mean: float, variance: float) -> Moments:
    return Moments(name="n", count=3, mean=mean, variance=variance, fitted_on=("train",))


def test_standardised_numbers() -> None:
    field = Field(name="n", dtype="float64", nullable=True, encoding={"kind": "standardise", "file": "n.json"})
    encoded = encode((field,), {"n": moments(10.0, 4.0)}, n=[10.0, 14.0, None, np.nan, 9.0])
    assert encoded.x["n"].ravel().tolist() == [0, 2, 0, 0, -0.5]
    assert encode((field,), {"n": moments(1.0, 0.0)}, n=[1.0, 3.0]).x["n"].ravel().tolist() == [0, 2]
    with pytest.raises(DataError, match="another number"):
        encode((field,), {"n": moments(0.0, 1.0)}, n=[1e300])
    others: list[dict[str, Fitted]] = [{}, {"n": vocabulary("n", "a")}]
    for wrong in others:
        with pytest.raises(DataError, match="missing"):
            Encoder(Schema((sample_id_field(), field)), wrong)


@pytest.mark.parametrize(
    ("dtype", "values", "constant"),
    [
        ("float64", [0.3, 0.1 + 0.2, 0.3, 0.3, 0.3], True),  # the last bit, 0.3 and 0.30000000000000004
        ("float64", [1e17 + 16, 1e17, 1e17], True),
        ("float64", [0.3, 0.3 + 1e-12], False),
        ("float64", [1e-150, 2e-150, 3e-150], False),  # small, and no noise
        ("float32", [np.float32(0.3), np.nextafter(np.float32(0.3), np.float32(1)), np.float32(0.3)], True),
        ("float32", [1.0, 1.0 + 2**-20], False),
        ("float64", [1.0, 1.0 + 2**-51], True),
        ("int64", [10**18, 10**18 + 1, 10**18 + 2], True),  # as floats they are one number
        ("int64", [10**15, 10**15 + 1], False),
    ],
)
def test_the_last_bit_of_a_constant_column_is_nothing(dtype: str, values: list[Any], constant: bool) -> None:
    field = Field(name="n", dtype=dtype, encoding={"kind": "standardise", "file": "n.json"})
    sums = ExactSums(0 if dtype == "int64" else FLOAT_UNIT)
    sums.add(np.array(values, dtype=np.int64 if dtype == "int64" else np.float64))
    found = encode((field,), {"n": sums.moments("n", ("train",))}, n=values).x["n"].ravel()
    if constant:
        assert found.tolist() == [0.0] * len(values)
    else:
        assert abs(found.mean()) < 0.1 and abs(found.std() - 1) < 0.1


def test_numbers_are_narrowed_only_when_asked() -> None:
    """A whole number that float32 cannot hold is no feature, unless the schema asks for rounding or int64."""
    plain = Field(name="n", dtype="int64")
    assert encode((plain,), {}, n=[2**24, -(2**24)]).x["n"].dtype == np.float32
    with pytest.raises(DataError, match="another number as float32") as caught:
        encode((plain,), {}, n=[2**24 + 1])
    assert caught.value.got == "16777217" and "hash" in caught.value.next_step
    rounded = Field(name="n", dtype="int64", encoding={"kind": "number"})
    assert encode((rounded,), {}, n=[2**24 + 1]).x["n"].tolist() == [[2**24]]
    whole = Field(name="n", dtype="int64", encoding={"kind": "number", "dtype": "int64"})
    assert encode((whole,), {}, n=[2**63 - 1]).x["n"].tolist() == [[2**63 - 1]]
    fraction = Field(name="n", dtype="float64")
    assert encode((fraction,), {}, n=[0.1]).x["n"].tolist() == [[np.float32(0.1)]]
    with pytest.raises(DataError, match="another number"):
        encode((fraction,), {}, n=[1e39])
    double = Field(name="n", dtype="float64", encoding={"kind": "number", "dtype": "float64"})
    assert encode((double,), {}, n=[1e39, 0.1]).x["n"].tolist() == [[1e39], [0.1]]
    infinite = encode((fraction,), {}, n=[np.inf, -np.inf]).x["n"]
    assert np.isinf(infinite).all(), "what is infinite stays so"


@pytest.mark.parametrize(("dtype", "null"), [("float32", -1.5), ("int64", -1), ("bool", 0.5)])
def test_null_numbers_take_the_declared_value(dtype: str, null: float) -> None:
    target = "int64" if dtype == "int64" else "float32"
    field = Field(
        name="n", dtype=dtype, nullable=True, encoding={"kind": "number", "null_value": null, "dtype": target}
    )
    assert encode((field,), {}, n=[None, dtype == "bool" or 1, None]).x["n"].ravel().tolist() == [null, 1, null]


def test_sequences() -> None:
    more = {"kind": "sequence", "length": 3}
    fields = (
        Field(name="a", dtype="float64", shape=(None,), encoding={**more, "pad_value": -1}),
        Field(name="b", dtype="int64", shape=(None,), encoding={**more, "keep": "last", "with": "length"}),
        Field(name="c", dtype="string", shape=(None,), encoding={**more, "of": words("c", 1).encoding}),
        Field(name="d", dtype="string", shape=(None,), encoding={**more, "of": HASH, "with": "nothing"}),
    )
    rows: dict[str, Any] = {
        "a": [[1.5], [], [1, 2, 3, 4]],
        "b": [[1], [], [1, 2, 3, 4]],
        "c": [["b", "z"], [], ["a"] * 4],
        "d": [["x"], [], ["x", "y"]],
    }
    encoded = encode(fields, {"c": vocabulary("c", "a", "b")}, **rows)
    x = {name: value.tolist() for name, value in encoded.x.items()}
    assert x["a"] == [[1.5, -1, -1], [-1, -1, -1], [1, 2, 3]] and encoded.x["a"].dtype == np.float32
    assert x["a_mask"] == [[1, 0, 0], [0, 0, 0], [1, 1, 1]]
    assert x["b"] == [[1, 0, 0], [0, 0, 0], [2, 3, 4]] and x["b_length"] == [[1], [0], [3]]
    assert x["c"] == [[2, 3, 0], [0, 0, 0], [1, 1, 1]] and x["c_mask"][0] == [1, 1, 0]
    assert x["d"] == [[1 + bucket(b"x"), 0, 0], [0, 0, 0], [1 + bucket(b"x"), 1 + bucket(b"y"), 0]]
    assert list(encoded.x) == ["a", "a_mask", "b", "b_length", "c", "c_mask", "d"], "d has nothing beside it"


def test_encoded_images_are_decoded_when_read() -> None:
    from PIL import Image

    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    more = {"kind": "image", "height": 2, "width": 4, "channels": 3}
    field = Field(name="i", dtype="bytes", encoding=more)
    assert encode((field,), {}, i=[file.getvalue()] * 2).x["i"].tolist() == [pixels.tolist()] * 2
    small = Field(name="i", dtype="bytes", encoding={**more, "height": 1, "width": 2, "channels": 1, "fit": "pad"})
    assert encode((small,), {}, i=[file.getvalue()]).x["i"].shape == (1, 1, 2, 1)
    with pytest.raises(DataError, match="cannot be decoded"):
        encode((field,), {}, i=[b"GIF89a"])


def test_tensors_and_images_are_normalised_by_channel() -> None:
    from PIL import Image

    more = {"kind": "normalise", "mean": [0.5, 0.0], "deviation": [0.25], "divide_by": 255}
    pixels = Field(name="t", dtype="uint8", shape=(1, 2, 2), encoding=more)
    encoded = encode((pixels,), {}, t=[bytes([255, 255, 0, 51])])
    np.testing.assert_allclose(encoded.x["t"], np.array([[[[2, 4], [-2, 0.8]]]]), rtol=1e-6)
    wide = Field(name="t", dtype="int64", shape=(2,), encoding={"kind": "normalise", "mean": [2**60], "deviation": [1]})
    assert encode((wide,), {}, t=[np.array([2**60 + 2**9, 2**60]).tobytes()]).x["t"].tolist() == [[512, 0]]
    file = io.BytesIO()
    Image.new("RGB", (2, 1), (255, 0, 51)).save(file, "PNG")
    sizes = {"kind": "image", "height": 1, "width": 2, "channels": 3}
    image = Field(name="i", dtype="bytes", encoding={**more, **sizes, "mean": [0.0]})
    np.testing.assert_allclose(encode((image,), {}, i=[file.getvalue()]).x["i"][0, 0, 0], [4, 0, 0.8], rtol=1e-6)


def test_what_is_ignored_is_not_fed() -> None:
    field = Field(name="when", dtype="string", nullable=True, encoding={"kind": "ignore"})
    assert list(encode((field, Field(name="f", dtype="float32")), {}, when=["x", None], f=[1, 2]).x) == ["f"]


def test_weights_are_beside_the_features() -> None:
    label, weight = Field(name="y", dtype="bool", kind="label"), Field(name="w", dtype="float32", kind="weight")
    fields = (Field(name="f", dtype="float32"), weight, label)
    encoded = encode(fields, {}, f=[1, 2], w=[0.5, 0], y=[True, False])
    assert list(encoded.x) == ["f"] and encoded.weight.tolist() == [0.5, 0] and encoded.weight.dtype == np.float32
    for wrong in (-1, np.nan, np.inf):
        with pytest.raises(DataError, match="weight"):
            encode(fields, {}, f=[1], w=[wrong], y=[True])
    with pytest.raises(ConfigError, match="cannot be fed"):  # nothing that it could weigh
        Encoder(Schema((sample_id_field(), *fields[:2])), {})


def test_two_inputs_of_one_name_are_refused() -> None:
    fields = (
        Field(name="a", dtype="float32", shape=(None,), encoding={"kind": "sequence", "length": 3}),
        Field(name="a_mask", dtype="float32"),
    )
    with pytest.raises(ConfigError, match="a_mask"):
        Encoder(Schema((sample_id_field(), *fields)), {})


@pytest.mark.parametrize("wrong", [{"count": 0}, {"mean": "1"}, {"mean": float("nan")}, {"variance": -1.0}, {"x": 1}])
def test_moments_json_form_and_back(wrong: dict[str, Any]) -> None:
    value = moments(0.1, 2.5)
    assert read_fitted(value.to_json()) == value
    with pytest.raises(DataError):
        read_fitted({**value.to_json(), **wrong})
