"""What a manifest may say of a baked field: only what baking a field that can be declared would say."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.features.encode.bake import Baker
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError

HASH = {"kind": "hash", "buckets": 5, "seed": 0}
BINS = {"kind": "bucketise", "boundaries": [1.0, 2.0]}
SEQUENCE = {"kind": "sequence", "length": 3, "of": HASH}


@pytest.mark.parametrize(
    ("raw", "ids", "told"),
    [
        ({"dtype": "string", "shape": [None], "nullable": True, "encoding": HASH}, 6, "a nullable list"),
        ({"dtype": "uint8", "shape": [], "nullable": False, "encoding": None}, None, "uint8 outside a tensor"),
        ({"dtype": "string", "shape": [], "nullable": True, "encoding": HASH}, 3, "ids 3"),
        ({"dtype": "string", "shape": [], "nullable": True, "encoding": HASH}, 5, "ids 5"),
        ({"dtype": "string", "shape": [None], "nullable": False, "encoding": SEQUENCE}, 7, "ids 7"),
        ({"dtype": "float32", "shape": [], "nullable": True, "encoding": BINS}, 3, "ids 3"),
    ],
)
def test_what_was_never_declared_is_not_baked(raw: dict[str, Any], ids: int | None, told: str) -> None:
    encoding = {"kind": "baked", "raw": raw} | ({} if ids is None else {"ids": ids})
    dtype, shape = ("float32", ()) if ids is None else ("int64", tuple(raw["shape"]))
    with pytest.raises(ConfigError) as caught:
        Field(name="w", dtype=dtype, shape=shape, encoding=encoding)
    assert told in str(caught.value.got)


@pytest.mark.parametrize(
    ("dtype", "shape", "encoding", "ids"),
    [("string", (), HASH, 6), ("string", (None,), SEQUENCE, 6), ("float32", (), BINS, 4)],
)
def test_ids_follow_from_what_was_declared(
    dtype: str, shape: tuple[None, ...], encoding: dict[str, Any], ids: int
) -> None:
    field = Field(name="w", dtype=dtype, shape=shape, nullable=not shape, encoding=encoding)
    made = Baker(Schema((sample_id_field(), field)), {}).schema["w"]
    assert made.encoding is not None and made.encoding["ids"] == ids


def test_nobody_is_told_to_declare_what_is_baked() -> None:
    with pytest.raises(ConfigError) as caught:
        Field(name="w", dtype="string", encoding={"kind": "bake"})
    assert "hash" in caught.value.allowed and "baked" not in caught.value.allowed
