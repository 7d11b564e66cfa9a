"""How records are split: independent of other records, or by counts over all records (stratified, time, balanced).

Decision record: docs/decisions/061-splits-and-leakage.md.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lockstep.etl import columns as c
from lockstep.etl.choices import SPLITS
from lockstep.features.sample_id import group_hashes, text_of, unit_hashes
from lockstep.storage.errors import ConfigError, DataError

TRAIN, VALIDATION, TEST = "train", "validation", "test"
TIME_COLUMN = "time"
MAX_FOLDS = 100
MAX_SHOWN = 200
NO_SPLIT = "none"  # what --split is called where all records are in one
_PART = re.compile(r"[0-9]{1,6}([.][0-9]{1,6})?")
_FOLDS = re.compile(r"[1-9][0-9]{0,2}")
_FOLD = re.compile(r"fold-\d+")
_BALANCED = ":balanced"
_TIMES, _CLASSES = "whole numbers, dates or timestamps", "whole numbers, text or booleans"
_COLLATED = " collate "  # in the name of a type of Spark's


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitSpec:
    """How records are split.

    `kind` random: by the sample id; group: by the value of `column`; kfold: either of them, into equal folds;
    stratified: each value of `column` in the ratio `weights`; time: by `column`, the earliest records first; subset:
    rows whose `column` is one of `values` are test, all others train; given: the input names the split. `names` are the
    splits in the order of `weights`; empty for given. `balanced` deals the groups of kfold by their sizes, so that
    folds are as equal as whole groups allow.
    """

    kind: str = "random"
    names: tuple[str, ...] = ()
    weights: tuple[int, ...] = ()
    column: str | None = None
    balanced: bool = False
    values: tuple[str, ...] = ()

    @property
    def given(self) -> bool:
        """Whether each record names its split."""
        return self.kind == "given"

    @property
    def counted(self) -> bool:
        """Whether splits are known only after all records were counted (lockstep.etl.split.counted)."""
        return self.kind in ("stratified", "time", "subset") or self.balanced

    @property
    def grouped(self) -> bool:
        """Whether all rows of one value of `column` are in one split."""
        return self.kind in ("group", "kfold", "subset") and self.column is not None

    @property
    def continues(self) -> bool:
        """Whether a dataset with this split can be continued by appends."""
        return self.kind != "time" and not self.balanced

    @property
    def trained(self) -> tuple[str, ...]:
        """The splits that are used for training: `train`, or all folds."""
        return self.names if self.kind == "kfold" else (TRAIN,)

    @property
    def text(self) -> str:
        """The form that `parse` reads; NO_SPLIT for all records in one."""
        if len(self.names) == 1:
            return NO_SPLIT
        shares = "/".join(map(str, self.weights))
        if self.kind == "kfold":
            column = "" if self.column is None else f":{self.column}"
            return f"kfold:{len(self.names)}{column}{_BALANCED if self.balanced else ''}"
        if self.kind == "subset":
            return f"subset:{self.column}={','.join(self.values)}"
        return {"given": "given", "random": shares}.get(self.kind, f"{self.kind}:{self.column}:{shares}")

    def check_append(self, url: str) -> None:
        """Raise ConfigError if no dataset with this split, as the one at `url` has it, can be continued."""
        moved = "borders in time" if self.kind == "time" else "groups between the folds"
        if not self.continues:
            raise ConfigError(
                f"--append-to does not go with a split by {'time' if self.kind == 'time' else 'balanced folds'}",
                got=f"--split {self.text[:MAX_SHOWN]} of {url}",
                allowed=f"a split that more records do not change; they would move {moved}",
                next_step="Make one dataset from all inputs, the earlier and the new, without --append-to.",
            )

    @classmethod
    def parse(cls, text: str) -> SplitSpec:
        """Read `--split`. Raises ConfigError for anything but the forms of SPLITS."""
        if text == "given":
            return cls(kind="given")
        head, _, rest = text.partition(":")
        if head == "kfold":
            count, separator, column = rest.partition(":")
            balanced = column.endswith(_BALANCED)
            column = column.removesuffix(_BALANCED)
            if not _FOLDS.fullmatch(count) or not 2 <= int(count) <= MAX_FOLDS or (separator and not column):
                raise _unreadable(text)
            names = tuple(f"fold-{number}" for number in range(int(count)))
            return cls(kind="kfold", names=names, weights=(1,) * len(names), column=column or None, balanced=balanced)
        if head == "subset":
            column, _, listed = rest.partition("=")
            values = tuple(listed.split(","))
            if not column or not all(values) or len(set(values)) < len(values):
                raise _unreadable(text)
            return cls(kind="subset", names=(TRAIN, TEST), column=column, values=values)
        if head not in ("group", "stratified", "time"):
            return cls(names=_names(text, text), weights=_weights(text, text))
        column, _, shares = rest.rpartition(":")
        if head == "time" and not column and ":" not in rest:
            column = TIME_COLUMN
        if not column:
            raise _unreadable(text)
        return cls(kind=head, names=_names(shares, text), weights=_weights(shares, text), column=column)

    def check(self, kind: str) -> None:
        """Raise ConfigError if a column of type `kind` (in Spark's notation) cannot decide the split."""
        assert self.column is not None
        if self.kind == "time" and kind not in (*c.WHOLE, "date", "timestamp"):
            raise ConfigError(**_unfit(self.column, kind, _TIMES))
        if self.kind in ("stratified", "subset") and kind not in (*c.WHOLE, "boolean", "string"):
            raise ConfigError(**_unfit(self.column, kind, _CLASSES))
        if kind.partition("<")[0] in c.NESTED:
            raise ConfigError(**_unfit(self.column, kind, "a number, text, bytes, boolean, date or time"))
        if _COLLATED in kind:
            # Groups are compared by their bytes: values that are equal by a collation would be in several splits.
            plain = f"text without a collation, such as lower(CAST({self.column} AS STRING COLLATE UTF8_BINARY))"
            raise ConfigError(**_unfit(self.column, kind, plain))

    def assign(self, batch: pa.RecordBatch, ids: NDArray[np.int64], seed: int) -> pa.StringArray:
        """The split of each row: (n,) strings, none null.

        `ids` are the rows' sample ids, (n,) int64. For `counted` splits the result is not the split, but the value from
        which lockstep.etl.split.counted decides it, as text: the class, the time as a whole number, the hash of the
        group, or the number of the value in `values` (the empty text for others). Raises DataError for a null in
        `column`.
        """
        if self.kind == "given":
            return _no_nulls(c.SPLIT, batch.column(c.SPLIT))
        if self.column is None:
            return self._named(unit_hashes(ids, seed))
        column = _no_nulls(self.column, batch.column(self.column))
        if self.kind == "time":
            return times_of(self.column, column).cast(pa.string())
        if self.kind == "stratified":
            return texts_of(self.column, column)
        if self.kind == "subset":
            numbers = pc.index_in(texts_of(self.column, column), value_set=pa.array(self.values, pa.string()))
            return pc.fill_null(numbers.cast(pa.string()), "")
        hashes = group_hashes(text_of(column), seed)
        return pa.array(hashes.view(np.int64)).cast(pa.string()) if self.balanced else self._named(hashes)

    def _named(self, hashes: NDArray[np.uint64]) -> pa.StringArray:
        return pa.array(self.names, pa.string()).take(pa.array(shares_of(hashes, self.weights)))


ONE_SPLIT = SplitSpec(names=(TEST,), weights=(1,))
"""All records are `test`, the split that predictions are of unless another one is named."""


def are_folds(names: Collection[str]) -> bool:
    """Whether splits of these names are folds: two or more, all called fold-NUMBER."""
    return len(names) > 1 and all(map(_FOLD.fullmatch, names))


def shares_of(hashes: NDArray[np.uint64], weights: Sequence[int]) -> NDArray[np.intp]:
    """The index of the share in `weights`, in order, that each hash falls into: (n,) uint64 -> (n,)."""
    total = sum(weights)
    firsts = [-(-(below << 64) // total) for below in accumulate(weights[:-1])]  # of each share but the first
    return np.searchsorted(np.array(firsts, dtype=np.uint64), hashes, side="right")


def texts_of(name: str, column: pa.Array) -> pa.StringArray:
    """The values of a class column as text: true, false, digits, or themselves. Raises DataError for other types."""
    kind = column.type
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_string(kind):
        return column.cast(pa.string())
    raise DataError(**_unfit(name, str(kind), _CLASSES))


def times_of(name: str, column: pa.Array) -> pa.Int64Array:
    """The values of a time column as whole numbers in the same order: unchanged, days, or microseconds."""
    kind = column.type
    if pa.types.is_integer(kind):
        return column.cast(pa.int64())
    if pa.types.is_date32(kind):
        return column.cast(pa.int32()).cast(pa.int64())
    if pa.types.is_timestamp(kind):
        return pc.cast(column, pa.timestamp("us", kind.tz)).cast(pa.int64())
    raise DataError(**_unfit(name, str(kind), _TIMES))


def span_of(kind: str, span: int) -> int:
    """A span of seconds in the unit of times_of for a column of `kind` (Spark's notation), days rounded up; for a
    column of whole numbers the span itself.
    """
    return {"date": -(-span // 86_400), "timestamp": span * 1_000_000}.get(kind, span)


def _no_nulls(name: str, column: pa.Array) -> pa.Array:
    if column.null_count:
        raise DataError(
            f"column `{name}` decides the split and is null",
            got=f"null in {column.null_count} of {len(column)} rows",
            allowed="a value in each row",
            next_step="Fill or drop those rows, or split by another column.",
        )
    return column


def _unfit(name: str, got: str, allowed: str) -> dict[str, str]:
    way = "Cast the column" + ("; --time-columns reads ISO 8601 in logs" if allowed == _TIMES else "")
    what = f"column `{name}` cannot decide the split"
    return {"what": what, "got": got, "allowed": allowed, "next_step": f"{way}. Or split by another one."}


def _parts(shares: str, text: str) -> list[str]:
    parts = shares.split("/")
    if not 2 <= len(parts) <= 3 or not all(_PART.fullmatch(part) and float(part) > 0 for part in parts):
        raise _unreadable(text)
    return parts


def _names(shares: str, text: str) -> tuple[str, ...]:
    return (TRAIN, TEST) if len(_parts(shares, text)) == 2 else (TRAIN, VALIDATION, TEST)


def _weights(shares: str, text: str) -> tuple[int, ...]:
    parts = _parts(shares, text)
    digits = max(len(part.partition(".")[2]) for part in parts)
    return tuple(int(whole + part.ljust(digits, "0")) for whole, _, part in (p.partition(".") for p in parts))


def _example(text: str) -> str:
    """A valid split close to `text`: its kind and column with valid shares."""
    head, *rest = text.split(":")
    named = [part for part in rest if re.search("[A-Za-z_]", part)]
    column = named[0] if len(named) == 1 and len(text) <= MAX_SHOWN else None
    if head == "kfold":
        return "kfold:5" if column is None else f"kfold:5:{column}"
    if head == "time":
        return "time:80/20" if column is None else f"time:{column}:80/20"
    if head in ("group", "stratified"):
        return f"{head}:{column or 'COLUMN'}:80/20"
    if head == "subset":
        return f"subset:{(column or 'COLUMN').partition('=')[0]}=VALUE"
    return "80/20"


def _unreadable(text: str) -> ConfigError:
    return ConfigError(
        "--split cannot be read",
        got=text[:MAX_SHOWN] or "nothing",
        allowed=SPLITS,
        next_step=f"Write for example --split {_example(text)}.",
    )
