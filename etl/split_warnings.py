"""What is said, in a line each, of splits that are not what their shares let one expect."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from etl.splits import SplitSpec

# Of a share of 20 %: below 15 % and above 26.7 %. Groups of a few hundred records among thousands stay within that.
FAR = Fraction(4, 3)


def far_from_shares(split: SplitSpec, records: Mapping[str, int]) -> str | None:
    """Says which split of whole groups has the share that is furthest from what was asked for, if one is FAR from it.

    `records` are the records of each split.
    """
    if split.column is None or split.kind not in ("group", "kfold"):
        return None
    total, parts = sum(records.values()), sum(split.weights)
    asked = {name: Fraction(weight, parts) for name, weight in zip(split.names, split.weights, strict=True)}
    times = {name: Fraction(records[name], total) / share for name, share in asked.items()}
    worst = max(times, key=lambda name: max(times[name], 1 / times[name]))
    if max(times[worst], 1 / times[worst]) <= FAR:
        return None
    return (
        f"{worst} has {percent(Fraction(records[worst], total))} of the records where --split {split.text} asks for"
        f" {percent(asked[worst])}"
    )


def percent(share: Fraction) -> str:
    """A share of a whole to a tenth of a percent."""
    return f"{float(100 * share):.1f} %"
