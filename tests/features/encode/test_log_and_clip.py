"""The encodings log and clip, against NumPy and scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.preprocessing import FunctionTransformer

from lockstep.features.encode.bake import Baker
from lockstep.features.encode.encoder import Encoder
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError

NUMBERS = st.lists(st.none() | st.floats(-1e30, 1e30) | st.just(float("nan")), max_size=20)


def fed(dtype: str, encoding: dict[str, Any], values: list[Any], *, baked: bool = False) -> np.ndarray[Any, Any]:
    """What a model is fed of a nullable column; with `baked` through a baked dataset."""
    field = Field(name="x", dtype=dtype, nullable=True, encoding=encoding)
    schema = Schema((sample_id_field(), field))
    rows = pa.RecordBatch.from_arrays(
        [pa.array(range(len(values)), pa.int64()), pa.array(values, field.record_type).cast(field.arrow_type)],
        schema=schema.arrow_schema(),
    )
    if not baked:
        return Encoder(schema, {}).encode(rows).x["x"]
    baker = Baker(schema, {})
    parts = [Encoder(baker.schema, {}).encode(part).x["x"] for part in baker.batches(rows)]
    return np.concatenate([np.empty((0, 1), np.float32), *parts])


@given(NUMBERS, st.booleans())
def test_log_is_log1p_of_each_side(values: list[float | None], baked: bool) -> None:
    plain = np.array([0.0 if v is None or np.isnan(v) else v for v in values], np.float64)
    wanted = FunctionTransformer(lambda x: np.sign(x) * np.log1p(np.abs(x))).transform(plain.reshape(-1, 1))
    np.testing.assert_array_equal(fed("float64", {"kind": "log"}, values, baked=baked), wanted.astype(np.float32))


@given(NUMBERS, st.booleans())
def test_clip_is_that_of_numpy(values: list[float | None], baked: bool) -> None:
    known = np.array([np.nan if v is None else v for v in values], np.float64)
    wanted = np.where(np.isnan(known), -1.0, np.clip(known, 2.0, 50.0)).astype(np.float32)
    encoding = {"kind": "clip", "least": 2, "most": 50.0, "null_value": -1}
    np.testing.assert_array_equal(fed("float64", encoding, values, baked=baked).ravel(), wanted)


def test_whole_numbers_beyond_float32_have_logs_too() -> None:
    big = [2**63 + 5, 2**40 + 1, 0, None]
    wanted = np.log1p(np.array([2.0**63, 2.0**40 + 1, 0, 0])).astype(np.float32)
    np.testing.assert_array_equal(fed("uint64", {"kind": "log"}, big).ravel(), wanted)


@pytest.mark.parametrize(
    "encoding",
    [
        {"kind": "clip", "least": 2, "most": 2}, {"kind": "clip", "least": 0}, {"kind": "log", "base": 2},
        {"kind": "log", "null_value": float("inf")}, {"kind": "clip", "least": 0, "most": float("nan")},
    ],
)  # fmt: skip
def test_wrong_declarations_name_the_field(encoding: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="field `x`"):
        Field(name="x", dtype="float64", encoding=encoding)
    with pytest.raises(ConfigError, match="field `x`"):
        Field(name="x", dtype="string", encoding={"kind": "log"})
