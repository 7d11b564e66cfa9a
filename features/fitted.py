"""Statistics learnt on stated splits: kept as small JSON files beside the shards, applied when read."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from storage.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """The tokens of one field in the order of their columns: count descending, then UTF-8 bytes.

    `counts` are those of the splits `fitted_on`. Raises DataError where the parts do not fit together.
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
    def from_json(cls, document: object) -> Vocabulary:
        """Rebuild a vocabulary; raises DataError for anything but what to_json gives."""
        if not isinstance(document, dict) or set(document) != {"kind", "name", "tokens", "counts", "fitted_on"}:
            raise _bad("?", repr(document)[:80], "an object of kind, name, tokens, counts, fitted_on")
        if document["kind"] != "vocabulary" or not isinstance(document["name"], str):
            raise _bad(str(document["name"]), f"kind {document['kind']!r}", "vocabulary")
        for key, kind in (("tokens", str), ("counts", int), ("fitted_on", str)):
            values = document[key]
            if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
                raise _bad(document["name"], f"{key} {values!r}"[:80], f"a list of {kind.__name__}")
        return cls(
            name=document["name"],
            tokens=tuple(document["tokens"]),
            counts=tuple(document["counts"]),
            fitted_on=tuple(document["fitted_on"]),
        )


def _bad(name: str, got: str, allowed: str) -> DataError:
    return DataError(
        f"the fitted vocabulary `{name}` is not one",
        got=got,
        allowed=allowed,
        next_step="Build the dataset anew with its ETL job.",
    )
