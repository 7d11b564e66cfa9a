"""Fewer records of common classes, and weights for rare ones (docs/decisions/061-splits-and-leakage.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lockstep.etl import columns as c
from lockstep.etl.split.splits import SplitSpec, texts_of
from lockstep.features.sample_id import shard_keys, splitmix64
from lockstep.features.schema.fields import Field
from lockstep.features.schema.sampled import Sampled
from lockstep.storage.errors import ConfigError, require

_SHARE = re.compile(r"(?P<number>[0-9]{1,20}([.][0-9]{0,20}|/[0-9]{1,20})?|[.][0-9]{1,20})(?P<percent>%?)")
WEIGHT = "weight"
UNCOUNTED = 1.0  # the weight of a class that only validation or test has: the mean weight in training
_OWN_SEED = 0x73616D706C65  # "sample": which records are kept must not depend on their order in shards or on the split
_BOOLEAN, _WHOLE = re.compile("true|false|[01]"), re.compile("0|-?[1-9][0-9]{0,18}")
_AS_BOOLEAN = {"0": "false", "1": "true"}


def parse_share(text: str, flag: str = "--max-bad") -> Fraction:
    """Read "1%" or "0.01" exactly. Raises ConfigError, naming `flag`, outside 0 to 1."""
    # Fraction accepts more forms than these; it would compute 1e99999999 digit by digit.
    found = _SHARE.fullmatch(text)
    try:
        share = Fraction(found["number"]) / (100 if found["percent"] else 1) if found else Fraction(-1)
    except ZeroDivisionError:
        share = Fraction(-1)
    require(0 <= share <= 1, flag, text, "0% to 100%, or 0 to 1")
    return share


@dataclass(frozen=True, slots=True)
class Sampling:
    """The share of the records of some classes that training keeps: `shares` by values of `column`; other classes are
    kept whole.
    """

    column: str
    shares: tuple[tuple[str, Fraction], ...]

    @classmethod
    def parse(cls, text: str) -> Sampling:
        """Read `--sample COLUMN=VALUE:SHARE[,COLUMN=VALUE:SHARE...]`. Raises ConfigError for another form."""
        found: dict[str, Fraction] = {}
        columns = set()
        for part in text.split(","):
            column, equals, rest = part.partition("=")
            value, colon, share = rest.rpartition(":")
            if not (column and equals and value and colon) or value in found:
                raise _unreadable(text)
            columns.add(column)
            found[value] = parse_share(share, "--sample")
        if len(columns) != 1:
            raise _unreadable(text)
        return cls(columns.pop(), tuple(found.items()))

    def check(self, kind: str, num_classes: int | None = None) -> None:
        """Raise ConfigError if a column of `kind` (in Spark's notation) has no classes or cannot have one that is
        named; `num_classes` is given if it is a label with so many.
        """
        whole = kind in c.WHOLE
        if not whole and kind not in ("boolean", "string"):
            raise _no_class(self.column, kind, "whole numbers, text or booleans")
        form = _BOOLEAN if kind == "boolean" else _WHOLE
        named = [_AS_BOOLEAN.get(value, value) for value, _ in self.shares]
        if kind == "boolean" and len(set(named)) < len(named):
            got = ", ".join(value for value, _ in self.shares)
            raise ConfigError(
                f"--sample names a class of column `{self.column}` twice",
                got=got,
                allowed="true or 1, false or 0, each once",
                next_step="Correct --sample.",
            )
        for value, _ in self.shares:
            if kind != "string" and not form.fullmatch(value):
                raise _no_class(self.column, value, "true, false, 1, 0" if kind == "boolean" else "such as 7, not 07")
            if whole and num_classes is not None and not 0 <= int(value) < num_classes:
                raise _no_class(self.column, value, f"0 to {num_classes - 1}")

    def sampled(self, kind: str, split: SplitSpec) -> Sampled:
        """The manifest's entry; the column has `kind` (in Spark's notation)."""
        shares = {_AS_BOOLEAN.get(value, value) if kind == "boolean" else value: share for value, share in self.shares}
        return Sampled(self.column, shares, split.trained)

    def keeps(self, batch: pa.RecordBatch, ids: NDArray[np.int64], seed: int) -> NDArray[np.bool_]:
        """Which rows are kept, (n,) bool: those whose hash is in the share of their class. `ids` is (n,) int64."""
        column = batch.column(self.column)
        texts = texts_of(self.column, column)
        hashes = shard_keys(ids, splitmix64(seed ^ _OWN_SEED))
        kept = np.ones(len(ids), dtype=bool)
        for value, share in self.shares:
            named = _AS_BOOLEAN.get(value, value) if pa.types.is_boolean(column.type) else value
            here = np.asarray(pc.fill_null(pc.equal(texts, named), False), dtype=bool)
            edge = (share.numerator << 64) // share.denominator
            if edge < 1 << 64:
                kept &= ~here | (hashes < np.uint64(edge))
        return kept


@dataclass(frozen=True, slots=True)
class ClassWeights:
    """The weight of each class of `column`, by the text of its value; UNCOUNTED for a class that was not counted."""

    column: str
    weights: Mapping[str, float]

    def of(self, batch: pa.RecordBatch) -> pa.FloatArray:
        """The weight of each row, (n,) float32."""
        codes = texts_of(self.column, batch.column(self.column)).dictionary_encode()
        classes = codes.dictionary.to_pylist()
        weights = [self.weights.get(name, UNCOUNTED) for name in classes]
        return pa.array(weights, pa.float32()).take(codes.indices)


def balanced(column: str, counts: Mapping[str, int]) -> ClassWeights:
    """Weights that give all classes equal total weight and a mean of 1: records / (classes * records of the class)."""
    total = sum(counts.values())
    return ClassWeights(column, {name: total / (len(counts) * n) for name, n in sorted(counts.items())})


def weight_field() -> Field:
    """The field that holds a record's weight, float32."""
    return Field(name=WEIGHT, dtype="float32", kind="weight")


def _no_class(column: str, got: str, allowed: str) -> ConfigError:
    return ConfigError(
        f"--sample names a class that column `{column}` cannot have",
        got=got,
        allowed=allowed,
        next_step="Correct --sample.",
    )


def _unreadable(text: str) -> ConfigError:
    return ConfigError(
        "--sample cannot be read",
        got=text[:200] or "nothing",
        allowed="COLUMN=VALUE:SHARE, several with `,` between them, each value of one column once",
        next_step="Write for example --sample click=0:10%.",
    )
