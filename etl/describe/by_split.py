"""Columns split by split: the same facts next to each other, and histograms over bins that all splits share.

Bins are chosen by all values together. Equal bins show most columns as they are; a skewed column would be one tall bar
and nothing else, so it gets bins by size (each a factor wider than the one before), or else bins of equal count, and a
single value that most rows have is left out of the bars and named above them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lockstep.etl.describe.statistics import BINS, ID, TOP, ColumnStats, NumberStats

MOST_SHARE = 0.5  # of the values in one bar; above that, the others are too small to be seen
MOST_SPLITS = 4  # next to each other; more, as of folds, are shown as one
ALL = "all splits"
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SharedHistogram:
    """Bars by label; of each split the share of its values in each bar. `note` names what the bars leave out."""

    title: str
    labels: tuple[str, ...]
    shares: Mapping[str, tuple[float, ...]]
    note: str = ""


@dataclass(frozen=True)
class ComparedColumn:
    """A column by split: (fact, a value of each split) and histograms. Texts may come from data and must be escaped."""

    name: str
    type: str
    kind: str
    splits: tuple[str, ...]
    facts: tuple[tuple[str, tuple[str, ...]], ...]
    histograms: tuple[SharedHistogram, ...]


def in_order(splits: Mapping[str, object]) -> list[str]:
    """The names of splits, the one to train on first."""
    return sorted(splits, key=lambda name: (name != "train", name))


def compared(total: ColumnStats, by_split: Mapping[str, ColumnStats]) -> ComparedColumn:
    """A column's statistics of each split; of more than MOST_SPLITS only those of all together, `total`."""
    parts = dict(by_split) if len(by_split) <= MOST_SPLITS else {ALL: total}
    names = in_order(parts)
    summaries = {name: parts[name].summary() for name in names}
    facts: dict[str, list[str]] = {"rows": [str(summaries[name].rows) for name in names]}
    if any(one.nulls for one in summaries.values()):
        facts["null"] = [_share_text(summaries[name].nulls, summaries[name].rows) for name in names]
    for number, name in enumerate(names):
        for fact, value in summaries[name].facts:
            span, mark, mean = value.partition(", mean ")
            parts_of = {fact: span}
            if mark and fact == "values":  # an end a row: three splits fit next to each other
                parts_of = dict(zip(("least", "greatest"), span.split(" to "), strict=True))
            if mark:
                parts_of["mean" if fact == "values" else f"mean of {fact}"] = mean
            for what, text in parts_of.items():
                facts.setdefault(what, [""] * len(names))[number] = text
    histograms = []
    if total.kind != ID:  # which says nothing but that ids differ
        for what, pick in ((total.length_name, _lengths), ("values", _numbers)):
            found = _of_numbers(what, {name: pick(parts[name]) for name in names})
            histograms += [] if found is None else [found]
        for found in (_of_bytes({name: parts[name] for name in names}), _of_texts(parts, names)):
            histograms += [] if found is None else [found]
    whole = summaries[names[0]]
    rows = tuple((fact, tuple(values)) for fact, values in facts.items())
    return ComparedColumn(total.name, whole.type, total.kind, tuple(names), rows, tuple(histograms))


def _share_text(count: int, rows: int) -> str:
    return f"{count} ({100 * count / rows:.1f} %)" if count else "0"


def _lengths(stats: ColumnStats) -> NumberStats:
    return stats.lengths


def _numbers(stats: ColumnStats) -> NumberStats:
    return stats.numbers


def _of_numbers(what: str, parts: Mapping[str, NumberStats]) -> SharedHistogram | None:
    values = {name: stats.picked if stats.count else np.zeros(0) for name, stats in parts.items()}
    together = np.concatenate(list(values.values()))
    if not len(together) or (what != "values" and together.min() == together.max()):
        return None
    return shared_histogram(what, values)


def shared_histogram(what: str, values: Mapping[str, npt.NDArray[np.generic]]) -> SharedHistogram:
    """The histogram of the finite numbers (n,) of each split, of which there must be one."""
    whole = all(one.dtype.kind in "iu" or not len(one) for one in values.values())
    floats = {name: one.astype(np.float64) for name, one in values.items()}
    together = np.concatenate(list(floats.values()))
    distinct, counts = np.unique(together, return_counts=True)
    note = ""
    if len(distinct) > BINS and counts.max() > MOST_SHARE * len(together):
        usual = distinct[counts.argmax()]
        shares = [f"{name} {100 * float((one == usual).mean()):.1f} %" for name, one in floats.items() if len(one)]
        note = f"without {usual:.6g}, the value of {', '.join(shares)}"
        together, distinct = together[together != usual], distinct[distinct != usual]
        floats = {name: one[one != usual] for name, one in floats.items()}
    title, lefts, labels = _bins(what, together, distinct, whole=whole)
    counted = {name: np.bincount(_bar(lefts, one), minlength=len(lefts)) for name, one in floats.items()}
    found = {name: tuple((bars / max(1, bars.sum())).tolist()) for name, bars in counted.items()}
    return SharedHistogram(title, labels, found, note)


def _bar(lefts: Floats, values: Floats) -> npt.NDArray[np.intp]:
    """The bar of each value: the last one whose left end is not above it."""
    return np.searchsorted(lefts, values, side="right").astype(np.intp) - 1


def _bins(what: str, values: Floats, distinct: Floats, *, whole: bool) -> tuple[str, Floats, tuple[str, ...]]:
    """Return (title, the left end of each bar, its label)."""
    if len(distinct) <= BINS:
        return what, distinct, tuple(f"{value:.6g}" for value in distinct)
    half, steps = values / 2, np.arange(BINS) / BINS  # halved: the difference of the ends may exceed float64
    lefts = (half.min() + (half.max() - half.min()) * steps) * 2
    if whole:  # bars that are as many values wide
        width = (values.max() - values.min()) // BINS + 1
        lefts = np.arange(values.min(), values.max() + 1, width)
    title = what
    if _tallest(_ends(lefts, whole=whole), values) > MOST_SHARE:
        title, lefts = _uneven(what, values)
    lefts = _ends(lefts, whole=whole)
    rights = [*lefts[1:], values.max()]
    last = len(lefts) - 1
    if whole:
        pairs = [(left, right - (place < last)) for place, (left, right) in enumerate(zip(lefts, rights, strict=True))]
        return title, lefts, tuple(f"{a:.0f}" if a >= b else f"{a:.0f} to {b:.0f}" for a, b in pairs)
    return title, lefts, tuple(f"{a:.4g} to {b:.4g}" for a, b in zip(lefts, rights, strict=True))


def _uneven(what: str, values: Floats) -> tuple[str, Floats]:
    """Bins by size where no value is negative, unless one of them holds most values too; else of equal count."""
    positive = values[values > 0]
    if len(positive) and values.min() >= 0:
        lefts = np.geomspace(positive.min(), values.max(), BINS + 1)[:-1]
        lefts = np.concatenate([[0.0], lefts]) if values.min() == 0 else lefts
        lefts[-BINS] = positive.min()  # rounding may put it above its own value
        if _tallest(lefts, values) <= MOST_SHARE:
            return f"{what}, in bins by size", lefts
    return f"{what}, in bins of equal count", np.quantile(values, np.arange(BINS) / BINS, method="lower")


def _ends(lefts: Floats, *, whole: bool) -> Floats:
    """Left ends in order, each once; of whole numbers the next whole one."""
    return np.unique(np.ceil(lefts) if whole else lefts)


def _tallest(lefts: Floats, values: Floats) -> float:
    return float(np.bincount(_bar(lefts, values)).max() / len(values))


def _of_bytes(parts: Mapping[str, ColumnStats]) -> SharedHistogram | None:
    """The bytes of a uint8 tensor in 16 bars; without the most frequent one if most are it, as black in pictures."""
    total = np.sum([stats.byte_counts for stats in parts.values()], axis=0)  # (256,)
    if not total.any():
        return None
    usual, note = int(np.argmax(total)), ""
    counts = {name: stats.byte_counts.astype(np.float64) for name, stats in parts.items()}
    if total[usual] > MOST_SHARE * total.sum() and np.count_nonzero(total) > 1:
        shares = [f"{name} {100 * one[usual] / max(1, one.sum()):.1f} %" for name, one in counts.items()]
        note = f"without {usual}, the value of {', '.join(shares)}"
        for one in counts.values():
            one[usual] = 0
    bars = {name: one.reshape(16, 16).sum(axis=1) for name, one in counts.items()}  # (256,) -> (16, 16)
    labels = tuple(f"{16 * place} to {16 * place + 15}" for place in range(16))
    return SharedHistogram(
        "values", labels, {name: tuple((one / max(1, one.sum())).tolist()) for name, one in bars.items()}, note
    )


def _of_texts(parts: Mapping[str, ColumnStats], names: list[str]) -> SharedHistogram | None:
    """The most frequent texts of all splits together."""
    together: Counter[str] = Counter()
    for name in names:
        together.update(parts[name].texts)
    top = sorted(together.items(), key=lambda item: (-item[1], item[0]))[:TOP]
    if not top or top[0][1] <= 1:
        return None
    shares = {
        name: tuple(parts[name].texts[text] / max(1, parts[name].texts.total()) for text, _ in top) for name in names
    }
    return SharedHistogram(f"the most frequent of {len(together)}", tuple(text for text, _ in top), shares)
