"""Warnings about splits whose sizes or classes are far from what their shares promise, a line each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fractions import Fraction

from lockstep.etl.split.splits import TRAIN, SplitSpec
from lockstep.features.schema.schema import Schema

# A share of 20 % is odd below 15 % and above 26.7 %. Groups of a few hundred records among thousands stay within that.
FAR = Fraction(4, 3)
MIN_Z, MIN_APART = 5, Fraction(1, 10)


def far_from_shares(split: SplitSpec, records: Mapping[str, int]) -> str | None:
    """A line about the split of whole groups whose share is furthest from the one asked for, if it is FAR from it.

    `records` is the number of each split's records. Splits without any, which only an append has, say nothing.
    """
    if not split.grouped or not split.weights or not all(records.values()):
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


def fed_group_line(split: SplitSpec, schema: Schema) -> str | None:
    """A line about a column that keeps whole groups in one split, if a model is fed its categories: those of one split
    are not in another. None for any other column.
    """
    kinds = {field.name: (field.encoding or {}).get("kind") for field in schema.features}
    if not split.grouped or kinds.get(str(split.column)) not in ("hash", "vocabulary"):
        return None
    return (
        f"note: `{split.column}` decides the split and is an input of a model, which sees none of the test's values in"
        ' training; give the field encoding = { kind = "ignore" } in the schema, unless that is meant'
    )


def label_lines(label: str, classes: Mapping[str, Mapping[str, int]], *, sampled: bool) -> list[str]:
    """One line if all records have one class of `label`. Else a line for each split whose records have one class and,
    unless training was `sampled`, for each split whose share of a class is far from that in `train`, or in all other
    splits if none is called `train`.

    `classes` are the records of each class in each split. Shares are far apart if they differ by more than MIN_APART of
    the smaller one and by more than MIN_Z standard deviations (two proportions, pooled): neither are 50.0 and 50.4 % of
    a million records, nor 50 and 60 % of a hundred.
    """
    values = {value for counts in classes.values() for value in counts}
    if len(values) == 1 and len(classes) > 1 and all(classes.values()):
        return [
            f"label: all records have `{label}` = {values.pop()}, so there is nothing to learn; correct the label, or"
            " give input that has other classes"
        ]
    lines = [
        f"label: all {count} records of {name} have `{label}` = {value}, so no metric there says how well a model"
        f" separates classes; give more input, or --split stratified:{label}:..."
        for name, counts in classes.items()
        if len(counts) == 1
        for value, count in counts.items()
    ]
    base = [TRAIN] if TRAIN in classes else list(classes)
    for name in [] if sampled else classes:
        others = [other for other in base if other != name]
        far = _farthest(Counter(classes[name]), sum((Counter(classes[other]) for other in others), Counter[str]()))
        if far is not None:
            value, here, there = far
            where = others[0] if len(others) == 1 else "all other splits"
            lines.append(
                f"label: {percent(here)} of {name} have `{label}` = {value}, of {where} {percent(there)}, which is more"
                f" than chance; find out what differs between them, or give --split stratified:{label}:..."
            )
    return lines


def _farthest(here: Counter[str], there: Counter[str]) -> tuple[str, Fraction, Fraction] | None:
    """The class whose shares are furthest apart in standard deviations, with both shares; None if none are far."""
    one, two = here.total(), there.total()
    if not one or not two:
        return None
    worst = None
    for value in sorted({*here, *there}):
        first, second = Fraction(here[value], one), Fraction(there[value], two)
        both = Fraction(here[value] + there[value], one + two)
        apart = abs(first - second)
        if both == 1 or apart <= MIN_APART * min(first, second):
            continue
        z_squared = apart**2 / (both * (1 - both) * (Fraction(1, one) + Fraction(1, two)))
        if z_squared > MIN_Z**2 and (worst is None or z_squared > worst[0]):
            worst = z_squared, value, first, second
    return None if worst is None else worst[1:]


def percent(share: Fraction) -> str:
    """A share in percent, to one decimal."""
    return f"{float(100 * share):.1f} %"
