"""Statistics of a column, batch by batch: counts, ranges, distinct values and a histogram."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lockstep.features.arrow import flat
from lockstep.features.sample_id import splitmix64_array

KEPT = 1 << 17  # values kept for median, histogram and distinct values; of more values, half to all of that
PIECE = 1 << 20  # values per step
MAX_PIECES = 1000  # arrays in _picked
BINS = 24
TOP = 10
MAX_DISTINCT = 100_000  # different strings that are counted; beyond that the text says "more than"
MAX_TEXT = 200  # characters by which strings are compared
ID = "id"  # the kind of a column that only identifies its row
_NUMBERS = ("int64", "float32", "float64", "uint64", "bool")


@dataclass
class NumberStats:
    """Collects numbers of one type, 1-dimensional arrays of it.

    Counts, minimum, maximum, mean and deviation are of all finite values. `picked` holds them all, in order, up to KEPT
    values; then those whose position has a hash below a bound, which are spread evenly for values of any period.
    Memory: 16 bytes a kept value.
    """

    nans: int = 0
    infinite: int = 0
    zeros: int = 0
    count: int = 0
    least: Any = None
    most: Any = None
    mean: float = 0.0
    _squares: float = 0.0  # the sum of squared distances from the mean
    _bits: int = 0  # a value is picked if so many first bits of its position's hash are 0
    _picked: list[npt.NDArray[Any]] = field(default_factory=list)
    _hashes: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    _held: int = 0  # values in all of _picked

    def add(self, values: npt.NDArray[Any]) -> None:
        """Take in (n,) more numbers."""
        for start in range(0, len(values), PIECE):
            self._add(values[start : start + PIECE])

    @property
    def whole(self) -> bool:
        """Whether `picked` are all finite values."""
        return self._bits == 0

    @property
    def picked(self) -> npt.NDArray[Any]:
        """(m,) finite values, m <= KEPT; there must have been one."""
        return np.concatenate(self._picked)

    @property
    def deviation(self) -> float:
        """The standard deviation of the finite values; 0 of equal ones, whose mean may be rounded."""
        return 0.0 if self.least == self.most else math.sqrt(self._squares / max(self.count, 1))

    def _add(self, values: npt.NDArray[Any]) -> None:
        if values.dtype.kind == "f":
            nans, infinite = np.isnan(values), np.isinf(values)
            self.nans += int(nans.sum())
            self.infinite += int(infinite.sum())
            values = values[~(nans | infinite)]
        if not len(values):
            return
        self._pick(values)
        self.zeros += int((values == 0).sum())
        least, most = values.min(), values.max()
        self.least = least if self.least is None else min(self.least, least)
        self.most = most if self.most is None else max(self.most, most)
        wide = values.astype(np.float64)
        total = self.count + len(wide)
        mean = float(np.mean(wide / len(wide)) * len(wide))  # divided first: a sum of large ones would be infinite
        with np.errstate(over="ignore"):
            squares = float(np.square(wide - mean).sum())
            apart = (mean / 2 - self.mean / 2) * 2
            self._squares += squares + apart * (apart * (self.count * len(wide) / total))
        self.mean = self.mean * (self.count / total) + mean * (len(wide) / total)
        self.count = total

    def _pick(self, values: npt.NDArray[Any]) -> None:
        places = np.arange(self.count, self.count + len(values), dtype=np.uint64)
        hashes = splitmix64_array(places)
        here = self._chosen(hashes)
        picked, hashes = values[here], hashes[here]
        if not len(picked):
            return
        self._picked.append(picked)
        self._hashes.append(hashes)
        self._held += len(picked)
        # Pieces of a few values each would be more objects than values.
        if self._held > KEPT or len(self._picked) > MAX_PIECES:
            self._join()

    def _join(self) -> None:
        picked, hashes = np.concatenate(self._picked), np.concatenate(self._hashes)
        while len(hashes) > KEPT:
            self._bits += 1
            here = self._chosen(hashes)
            picked, hashes = picked[here], hashes[here]
        self._picked, self._hashes, self._held = [picked], [hashes], len(picked)

    def _chosen(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        return hashes < np.uint64(1 << (64 - self._bits)) if self._bits else np.ones(len(hashes), dtype=np.bool_)


@dataclass(frozen=True)
class Histogram:
    """The label and the count of each bar, in order."""

    title: str
    bars: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class ColumnSummary:
    """The statistics of a column: rows that were read, nulls among them, facts by name, and histograms."""

    name: str
    type: str
    kind: str
    rows: int
    nulls: int
    facts: tuple[tuple[str, str], ...]
    histograms: tuple[Histogram, ...]


@dataclass
class ColumnStats:
    """Collects one column. `dtype` and `shape` as in lockstep.features.schema.schema.Field: shape () scalar, (None,)
    list, else tensor.

    Memory: two NumberStats, MAX_DISTINCT strings, 256 counts for the bytes of a uint8 tensor, however much is added.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] = ()
    kind: str = "feature"
    rows: int = 0
    nulls: int = 0
    numbers: NumberStats = field(default_factory=NumberStats)
    lengths: NumberStats = field(default_factory=NumberStats)
    texts: Counter[str] = field(default_factory=Counter)
    _more_texts: bool = False
    _cut_texts: bool = False
    byte_counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(256, np.int64))

    def add(self, column: pa.Array) -> None:
        """Take in one more batch of the column."""
        self.rows += len(column)
        self.nulls += column.null_count
        values = column.drop_null()
        if self.shape == (None,):
            self.lengths.add(pc.list_value_length(values).cast(pa.int64()).to_numpy())
            values = values.flatten().drop_null()
        elif self.shape:
            self._tensors(values)
            return
        if self.dtype in _NUMBERS:
            plain = {"bool": pa.int8(), "uint64": pa.uint64()}.get(self.dtype, values.type)
            self.numbers.add(values.cast(plain).to_numpy())
            return
        if self.shape == ():
            self.lengths.add(pc.binary_length(values).cast(pa.int64()).to_numpy())
        if self.dtype == "string":
            self._strings(values)

    @property
    def length_name(self) -> str:
        """What `lengths` are of a value: of a list, or else of a text or bytes."""
        return "values in a row" if self.shape else "length in bytes"

    def summary(self) -> ColumnSummary:
        """The statistics of all batches so far."""
        shape = "" if not self.shape else " list" if self.shape == (None,) else f" {'x'.join(map(str, self.shape))}"
        facts: list[tuple[str, str]] = []
        histograms: list[Histogram] = []
        if self.lengths.count:
            what = self.length_name
            facts.append((what, _range(self.lengths)))
            if self.lengths.least < self.lengths.most:
                histograms.append(histogram(self.lengths.picked, _title(what, self.lengths)))
        _tell_numbers(self.numbers, facts, histograms)
        if self.byte_counts.any():
            self._tell_bytes(facts, histograms)
        if self.texts:
            self._tell_texts(facts, histograms)
        if self.kind == ID:  # a mean of ids says nothing
            facts, histograms = [fact for fact in facts if fact[0] == "distinct"], []
        return ColumnSummary(
            self.name, self.dtype + shape, self.kind, self.rows, self.nulls, tuple(facts), tuple(histograms)
        )

    def _tensors(self, values: pa.Array) -> None:
        data = flat(values)[1]
        if self.dtype != "uint8":
            self.numbers.add(data.view(np.dtype(self.dtype).newbyteorder("<")))
            return
        for start in range(0, len(data), PIECE):  # which bincount takes as 8 bytes each
            self.byte_counts += np.bincount(data[start : start + PIECE], minlength=256)

    def _strings(self, values: pa.Array) -> None:
        short = pc.utf8_slice_codeunits(values, 0, MAX_TEXT)
        self._cut_texts |= not short.equals(values)
        for item in pc.value_counts(short).to_pylist():
            if item["values"] in self.texts or len(self.texts) < MAX_DISTINCT:
                self.texts[item["values"]] += item["counts"]
            else:
                self._more_texts = True

    def _tell_bytes(self, facts: list[tuple[str, str]], histograms: list[Histogram]) -> None:
        present = np.flatnonzero(self.byte_counts)
        total = int(self.byte_counts.sum())
        mean = float((self.byte_counts * np.arange(256)).sum()) / total
        square = float((self.byte_counts * np.arange(256) ** 2).sum()) / total
        facts.append(("values", f"{present[0]} to {present[-1]}, mean {mean:.4g}"))
        facts.append(("standard deviation", f"{math.sqrt(max(0.0, square - mean * mean)):.4g}"))
        groups = self.byte_counts.reshape(16, 16).sum(axis=1)
        bars = tuple((f"{16 * i} to {16 * i + 15}", int(count)) for i, count in enumerate(groups))
        histograms.append(Histogram("values", bars))

    def _tell_texts(self, facts: list[tuple[str, str]], histograms: list[Histogram]) -> None:
        more = "more than " if self._more_texts else ""
        cut = f", by their first {MAX_TEXT} characters" if self._cut_texts else ""
        facts.append(("distinct", f"{more}{len(self.texts)}{cut}"))
        # By count, descending, then by text: the same page for the same data.
        top = sorted(self.texts.items(), key=lambda item: (-item[1], item[0]))[:TOP]
        if top[0][1] > 1:
            histograms.append(Histogram(f"the most frequent of {more}{len(self.texts)}", tuple(top)))


def histogram(values: npt.NDArray[Any], title: str) -> Histogram:
    """Count values in at most BINS equal bins from the least to the greatest value; whole numbers have bins of whole
    numbers.

    values: (n,) finite numbers, n >= 1.
    """
    if values.dtype.kind in "iu":
        low, high = int(values.min()), int(values.max())
        width = (high - low) // BINS + 1
        # In unsigned arithmetic, which holds the difference between the least and the greatest int64.
        steps = (values.astype(np.int64).view(np.uint64) - np.uint64(low % (1 << 64))) // np.uint64(width)
        counts = np.bincount(steps.astype(np.int64))
        starts = [low + i * width for i in range(len(counts))]
        labels = [str(start) if width == 1 else f"{start} to {min(high, start + width - 1)}" for start in starts]
        return Histogram(title, tuple(zip(labels, map(int, counts), strict=True)))
    distinct, repeats = np.unique(values, return_counts=True)
    if len(distinct) <= BINS:  # also if they are too close for bins between them
        return Histogram(title, tuple((f"{value:.6g}", int(n)) for value, n in zip(distinct, repeats, strict=True)))
    # Halved: the difference between the ends of float64 exceeds float64.
    counts, edges = np.histogram(values.astype(np.float64) / 2, bins=BINS)
    bars = zip(edges[:-1] * 2, edges[1:] * 2, counts, strict=True)
    return Histogram(title, tuple((f"{start:.4g} to {end:.4g}", int(count)) for start, end, count in bars))


def _tell_numbers(stats: NumberStats, facts: list[tuple[str, str]], histograms: list[Histogram]) -> None:
    for name, count in (("NaN", stats.nans), ("infinite", stats.infinite)):
        if count:
            facts.append((name, str(count)))
    if not stats.count:
        return
    picked = stats.picked
    distinct = len(np.unique(picked))
    facts.append(("values", _range(stats)))
    facts.append(("standard deviation", f"{stats.deviation:.4g}"))
    facts.append(("median", f"{'' if stats.whole else 'about '}{float(np.median(picked)):.6g}"))
    facts.append(("zeros", str(stats.zeros)))
    facts.append(("distinct", str(distinct) if stats.whole else f"{distinct} or more"))
    histograms.append(histogram(picked, _title("values", stats)))


def _title(what: str, stats: NumberStats) -> str:
    return what if stats.whole else f"{what}, {len(stats.picked)} of {stats.count}"


def _range(stats: NumberStats) -> str:
    return f"{_number(stats.least)} to {_number(stats.most)}, mean {stats.mean:.6g}"


def _number(value: Any) -> str:
    return str(int(value)) if np.issubdtype(type(value), np.integer) else f"{float(value):.6g}"
