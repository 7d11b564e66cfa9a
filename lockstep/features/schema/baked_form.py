"""How a feature is stored where its encoding is baked in: as what a model is fed, without what costs bytes only.

    declared                                    stored, never null
    a number or bool, no encoding; standardise  float32
    number                                      its dtype
    hash, vocabulary, bucketise                 int64: the id, 0 for nothing, whatever the output
    hash, vocabulary of a list                  int64 list: the ids of its values, rising, each once, without 0
    sequence                                    list, cut to its length, of float32, or of int64 ids with `of`
    normalise, image                            tensor
    float32 or a tensor without encoding        as declared: that is what a model is fed
    ignore                                      as declared

One-hot columns, padding and masks are made of these when they are read: that takes no statistics and no hash, and in
shards they would be most of the bytes (docs/decisions/062-features.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BAKED = "baked"
RAW_KEYS = ("dtype", "shape", "nullable", "encoding")
Form = tuple[str, tuple[int | None, ...]]

_CATEGORICAL = ("hash", "vocabulary", "bucketise")
_PLAIN = ("int64", "uint64", "float32", "float64", "bool")


def stored_form(dtype: str, shape: tuple[int | None, ...], encoding: Mapping[str, Any] | None) -> Form | None:
    """The dtype and shape that a declared feature is stored in once its encoding is baked in.

    None where it is stored as it is declared, and where no model can be fed with it.
    """
    kind = None if encoding is None else encoding["kind"]
    if encoding is None:
        return ("float32", ()) if not shape and dtype in _PLAIN and dtype != "float32" else None
    if kind == "standardise":
        return "float32", ()
    if kind == "number":
        return encoding.get("dtype", "float32"), ()
    if kind in _CATEGORICAL:
        return "int64", shape
    if kind == "sequence":
        return "int64" if "of" in encoding else "float32", shape
    if kind == "normalise":
        return "float32", shape
    if kind == "image":
        size = (encoding["height"], encoding["width"], encoding["channels"])
        return "float32" if "mean" in encoding else "uint8", size
    return None


def has_ids(encoding: Mapping[str, Any] | None) -> bool:
    """Whether what is stored of a declared feature are ids, 0 for nothing."""
    return encoding is not None and (encoding["kind"] in _CATEGORICAL or "of" in encoding)
