"""Slices of a split: the rows of each value, quartile, day or hour of a stored column, and their metrics. NumPy only.

Numbers travel to rank 0 with the rows. Texts travel as numbers: all ranks count theirs first, and agree on the most
frequent ones. So slices are exact, and the same at any number of ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError, DataError
from lockstep.training.comm.base import Communicator
from lockstep.training.scoring.estimates import Floats
from lockstep.training.scoring.scores import (
    LABEL,
    OutputForm,
    RowMetric,
    class_counts,
    with_row_metrics,
)

MOST_SLICES = 20  # of one column; the rows of all other values are one more
MOST_VALUES = 10_000  # distinct texts of one column: they are counted in memory
NUMBERS = ("int64", "uint64", "float32", "float64", "bool")
OTHER, MISSING = "(other)", "(missing)"
DAY_S, HOUR_S = 86_400, 3_600
HOURS = 24
UNITS = ((1e11, 1.0), (1e14, 1e3), (1e17, 1e6))  # times up to a limit: units a second; above: nanoseconds


@dataclass(frozen=True, slots=True)
class SliceBy:
    """A stored column, whether it has texts, and for times `day` or `hour` of the day (UTC)."""

    name: str
    """The name as given: COLUMN, COLUMN:day or COLUMN:hour."""
    column: str
    is_text: bool
    time: str | None = None


def slices_of(names: Sequence[str], schema: Schema) -> tuple[SliceBy, ...]:
    """The slices called `names`. Raises ConfigError for what is not a stored column of single values."""
    fields = {field.name: field for field in schema if field.shape == () and field.dtype in (*NUMBERS, "string")}
    found = []
    for name in names:
        column, _, time = (name, "", "") if name in fields else name.rpartition(":")
        field = fields.get(column)
        if field is None or (time and (time not in ("day", "hour") or field.dtype != "int64")):
            raise ConfigError(
                f"the dataset has no slices by {name}",
                got=name,
                allowed=f"{', '.join(fields)}; for times in an int64 column also COLUMN:day and COLUMN:hour",
                next_step="Correct --slice.",
            )
        found.append(SliceBy(name, column, field.dtype == "string", time or None))
    return tuple(found)


class SliceColumn:
    """Collects one column of this rank's rows."""

    def __init__(self, by: SliceBy) -> None:
        self.by = by
        self._parts: list[Floats] = []
        self._ids: dict[str | None, int] = {}  # of texts, in the order of their first row

    def take(self, rows: pa.RecordBatch) -> None:
        """Add a batch of raw rows. Raises DataError for a column of too many texts."""
        column: Any = rows.column(self.by.column)
        if not self.by.is_text:
            self._parts.append(column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))
            return
        found = column.dictionary_encode(null_encoding="encode")
        ids = [self._ids.setdefault(value, len(self._ids)) for value in found.dictionary.to_pylist()]
        self._check(len(self._ids))
        self._parts.append(np.array(ids, np.float64)[found.indices.to_numpy(zero_copy_only=False)])

    def agreed(self, communicator: Communicator) -> tuple[Floats, list[str]]:
        """Return (This rank's rows as numbers (n,), the names of the most frequent texts). A collective.

        A text is the number of its name, the number of names stands for all others; a null number is NaN. Raises
        DataError as `take` does.
        """
        values = np.concatenate([np.empty(0), *self._parts])
        if not self.by.is_text:
            return values, []
        counts = np.bincount(values.astype(np.int64), minlength=len(self._ids)).tolist()
        mine = [[text, count] for text, count in zip(self._ids, counts, strict=True)]
        totals: dict[str | None, int] = {}
        for part in communicator.all_gather_bytes(json.dumps(mine).encode()):
            for text, count in json.loads(part):
                totals[text] = totals.get(text, 0) + count
        self._check(len(totals))
        largest = sorted(totals, key=lambda text: (-totals[text], text is None, text or ""))[:MOST_SLICES]
        numbers = {text: number for number, text in enumerate(largest)}
        of_ids = np.array([numbers.get(text, len(largest)) for text in self._ids], np.float64)
        named = [MISSING if text is None else text for text in largest]
        return (of_ids[values.astype(np.int64)] if len(values) else values), named

    def _check(self, values: int) -> None:
        if values > MOST_VALUES:
            raise DataError(
                f"the column `{self.by.column}` has too many values for slices",
                got=f"more than {MOST_VALUES} texts",
                allowed=f"up to {MOST_VALUES} texts; numbers without a limit",
                next_step="Leave it out of --slice, or store a coarser column.",
            )


class ClusterColumn:
    """Collects which of this rank's rows belong together: those of one value of a stored column."""

    def __init__(self, column: str) -> None:
        self.column = column
        self._parts: list[Floats] = []
        self._numbers: dict[str, float] = {}

    def take(self, rows: pa.RecordBatch) -> None:
        """Add a batch of raw rows."""
        texts: Any = rows.column(self.column).cast(pa.string())
        found = texts.dictionary_encode(null_encoding="encode")
        numbers = [self._number(value) for value in found.dictionary.to_pylist()]
        self._parts.append(np.array(numbers, np.float64)[found.indices.to_numpy(zero_copy_only=False)])

    def values(self) -> Floats:
        """The cluster of each row (n,), a number that is the same on all ranks: 52 bits of a hash of the value."""
        return np.concatenate([np.empty(0), *self._parts])

    def _number(self, value: str | None) -> float:
        text = "\0null" if value is None else value
        if text not in self._numbers:
            self._numbers[text] = float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7]) >> 4)
        return self._numbers[text]


def rows_of_slices(by: SliceBy, values: Floats, names: Sequence[str]) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Yield (Name, rows (n,)) of each slice of a column's `values` (n,) and `names` from `SliceColumn.agreed`, none
    empty.

    Up to MOST_SLICES distinct numbers are a slice each, more are cut into quartiles; days are the ones of most rows.
    """
    missing = np.isnan(values)
    known = values[~missing]
    if by.is_text:
        found = [*((name, values == number) for number, name in enumerate(names)), (OTHER, values == len(names))]
    elif not len(known):
        found = []
    elif by.time is not None:
        found = list(_times(values, known, by.time))
    elif len(distinct := np.unique(known)) <= MOST_SLICES:
        found = [(_text(value), values == value) for value in distinct.tolist()]
    else:
        edges = np.unique(np.quantile(known, [0.25, 0.5, 0.75, 1.0], method="inverted_cdf"))
        quartiles = np.searchsorted(edges, values)  # of NaN, which sorts last, their number
        masks = [quartiles == number for number in range(len(edges))]
        found = [(f"{_text(values[mask].min())} to {_text(values[mask].max())}", mask) for mask in masks]
    yield from ((name, mask) for name, mask in [*found, (MISSING, missing)] if mask.any())


def _text(number: float) -> str:
    return f"{number:.0f}" if float(number).is_integer() else f"{number:.7g}"


def _times(values: Floats, known: Floats, unit: str) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    latest = np.abs(known).max()
    seconds = values / next((scale for limit, scale in UNITS if latest < limit), 1e9)
    if unit == "hour":
        hours = np.floor(seconds / HOUR_S) % HOURS
        yield from ((f"{hour:02d}:00", hours == hour) for hour in range(HOURS))
        return
    days = np.floor(seconds / DAY_S)
    distinct, counts = np.unique(days[~np.isnan(days)], return_counts=True)
    largest = np.sort(distinct[np.argsort(-counts, kind="stable")[:MOST_SLICES]])
    yield from ((str(np.datetime64(int(day), "D")), days == day) for day in largest)
    yield OTHER, ~np.isnan(days) & ~np.isin(days, largest)


def metrics_of_slices(
    by: SliceBy,
    values: Floats,
    names: Sequence[str],
    rows: Floats,
    asked: Sequence[RowMetric],
    form: OutputForm,
    classes: int | None,
    baseline: str | None,
    clusters: NDArray[Any] | None = None,
) -> list[dict[str, Any]]:
    """Compute {value, samples, metrics, intervals, class_counts, baseline, difference} of each slice.

    `rows` are the columns of `scores.measure`, and `clusters` theirs.
    """
    if classes is None and class_counts(rows[:, LABEL], None) is None:
        form = replace(form, numbers=True)
    found = []
    for name, mask in rows_of_slices(by, values, names):
        part = rows[mask]
        of_baseline = None if baseline is None else {"name": baseline, "metrics": {}}
        empty: dict[str, Any] = {"metrics": {}, "intervals": {}, "baseline": of_baseline}
        scored = with_row_metrics(empty, part, asked, form, classes, None if clusters is None else clusters[mask])
        scored.pop("compared_by", None)
        found.append({"value": name, "samples": len(part), **scored})
    return found
