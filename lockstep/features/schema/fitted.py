"""Fitted statistics: learned on named splits, stored as small JSON files next to the shards, applied when read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lockstep.storage.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """The tokens of one field in the order of their columns: count descending, then UTF-8 bytes.

    `counts` are those in the splits `fitted_on`, 0 in a vocabulary that was declared and not fitted; the tokens of
    an int64 field are its decimal digits. Raises DataError if tokens and counts are inconsistent.
    """

    name: str
    tokens: tuple[str, ...]
    counts: tuple[int, ...]
    fitted_on: tuple[str, ...]

    def __post_init__(self) -> None:
        order = [(-count, token.encode()) for token, count in zip(self.tokens, self.counts, strict=False)]
        good = len(self.tokens) == len(self.counts) and all(a < b for a, b in pairwise(order))
        if not good or len(set(self.tokens)) != len(self.tokens):
            raise _bad(
                self.name,
                f"{len(self.tokens)} tokens, {len(self.counts)} counts",
                "distinct tokens by falling count, then bytes",
            )

    def to_json(self) -> dict[str, Any]:
        """The vocabulary as _fitted/NAME.json holds it."""
        return {
            "kind": "vocabulary",
            "name": self.name,
            "tokens": list(self.tokens),
            "counts": list(self.counts),
            "fitted_on": list(self.fitted_on),
        }

    @classmethod
    def declared(cls, name: str, tokens: Sequence[str]) -> Vocabulary:
        """A vocabulary that no data was looked at for."""
        return cls(name=name, tokens=tuple(sorted(tokens, key=str.encode)), counts=(0,) * len(tokens), fitted_on=())

    @classmethod
    def from_json(cls, document: object) -> Vocabulary:
        """Rebuild a vocabulary; raises DataError for anything but what to_json gives."""
        values = _object(document, "vocabulary", ("tokens", "counts"))
        for key, kind in (("tokens", str), ("counts", int)):
            if not isinstance(values[key], list) or not all(isinstance(value, kind) for value in values[key]):
                raise _bad(values["name"], f"{key} {values[key]!r}"[:80], f"a list of {kind.__name__}")
        return cls(
            name=values["name"],
            tokens=tuple(values["tokens"]),
            counts=tuple(values["counts"]),
            fitted_on=values["fitted_on"],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """Mean and population variance (divided by `count`) of the values of one field that are neither null nor NaN.

    Both are exact over the splits `fitted_on` and rounded once; of no split, and of 0 values, if they were declared.
    Raises DataError for impossible values.
    """

    name: str
    count: int
    mean: float
    variance: float
    fitted_on: tuple[str, ...]

    def __post_init__(self) -> None:
        numbers = math.isfinite(self.mean) and math.isfinite(self.variance) and self.variance >= 0
        if self.count < bool(self.fitted_on) or not numbers:
            got = f"count {self.count}, mean {self.mean}, variance {self.variance}"
            raise _bad(self.name, got, "at least one value, a finite mean and a variance from 0 up")

    @classmethod
    def declared(cls, name: str, mean: float, deviation: float) -> Moments:
        """Moments that a schema declares."""
        return cls(name=name, count=0, mean=float(mean), variance=float(deviation) ** 2, fitted_on=())

    def to_json(self) -> dict[str, Any]:
        """The moments as _fitted/NAME.json holds them."""
        return {
            "kind": "moments",
            "name": self.name,
            "count": self.count,
            "mean": self.mean,
            "variance": self.variance,
            "fitted_on": list(self.fitted_on),
        }

    @classmethod
    def from_json(cls, document: object) -> Moments:
        """Rebuild moments; raises DataError for anything but what to_json gives."""
        values = _object(document, "moments", ("count", "mean", "variance"))
        if type(values["count"]) is not int or not all(type(values[key]) is float for key in ("mean", "variance")):
            raise _bad(values["name"], repr(values)[:200], "a whole count, mean and variance with a fraction")
        return cls(**values)


Fitted = Vocabulary | Moments


def read_fitted(document: object) -> Fitted:
    """Read a fitted file's document; raises DataError for anything but what to_json of Vocabulary or Moments gives."""
    kind = document.get("kind") if isinstance(document, dict) else None
    return Moments.from_json(document) if kind == "moments" else Vocabulary.from_json(document)


def held_out_file(file: str, held_out: str | None) -> str:
    """The name of a fitted file: NAME.json, or NAME.fold-0.json if it was fitted on all folds but fold-0."""
    return file if held_out is None else f"{file.removesuffix('.json')}.{held_out}.json"


def _object(document: object, kind: str, keys: Sequence[str]) -> dict[str, Any]:
    wanted = {"kind", "name", "fitted_on", *keys}
    if not isinstance(document, dict) or set(document) != wanted:
        raise _bad("?", repr(document)[:80], f"an object of {', '.join(sorted(wanted))}")
    splits = document["fitted_on"]
    if document["kind"] != kind or not isinstance(document["name"], str):
        raise _bad(str(document["name"]), f"kind {document['kind']!r}", kind)
    if not isinstance(splits, list) or not all(isinstance(split, str) for split in splits):
        raise _bad(document["name"], f"fitted_on {splits!r}"[:80], "a list of splits")
    return {key: document[key] for key in ("name", *keys)} | {"fitted_on": tuple(splits)}


def _bad(name: str, got: str, allowed: str) -> DataError:
    return DataError(
        f"the fitted statistics of `{name}` are invalid",
        got=got,
        allowed=allowed,
        next_step="Build the dataset again with its ETL job.",
    )
