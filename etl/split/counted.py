"""Splits that depend on all records: stratified by class, by time, by folds of equal size, and by named values.

Classes and times use counts over ranges of keys or times, which a few passes narrow down, so the driver holds some
thousand numbers for any number of records, and no task sorts a whole class. Balanced folds need the size of each group:
the driver holds 16 bytes for each of MAX_GROUPS at most.

Decision record: docs/decisions/061-splits-and-leakage.md.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import pyarrow as pa

from lockstep.etl import columns as c
from lockstep.etl.reasons import CENSORED_AT_BORDER, SAMPLED_OUT
from lockstep.etl.split.splits import SplitSpec
from lockstep.storage.errors import DataError, nearest

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

BUCKET_BITS = 12  # 4096 ranges a pass: each pass narrows the search to about a 4096th of the records
KEY_BITS = 64
MAX_CLASSES = 1000
MAX_GROUPS = 1_000_000
MAX_NAMED = 20  # values that an error lists
_LEAST = -(1 << 63)

# (bucket, shift) of the values to count, or None for all; shift of the buckets -> records by bucket. A value v is in
# bucket v >> shift.
Histogram = Callable[[tuple[int, int] | None, int], Mapping[int, int]]


def assign_by_counts(rows: DataFrame, split: SplitSpec, window: int | None = None) -> DataFrame:
    """Rows of lockstep.etl.split.assign with the name of each row's split in SPLIT; for other kinds of splits they are
    unchanged. Rows that are marked SAMPLED_OUT are counted for the splits, and dropped only in splits that are trained
    on.

    In a split by time, a label that looks `window` ahead (in the column's unit) may look into the next split: such rows
    are dropped as CENSORED_AT_BORDER. Raises DataError for more than MAX_CLASSES classes or MAX_GROUPS groups.
    """
    from pyspark.sql import functions as f

    if split.balanced:
        return _balanced(rows, split)
    if split.kind == "subset":
        return _renamed(rows, f.when(f.col(c.SPLIT) == "", split.names[0]).otherwise(split.names[1]), split)
    if split.kind == "stratified":
        return _stratified(rows, split)
    if split.kind == "time":
        return _by_time(rows, split, window)
    return rows


def cuts_of(total: int, weights: Sequence[int]) -> list[int]:
    """How many of `total` records are before each border between the shares `weights`, rounded to the nearest."""
    whole = sum(weights)
    return [(2 * total * below + whole) // (2 * whole) for below in accumulate(weights[:-1])]


def at_rank(rank: int, low: int, high: int, histogram: Histogram) -> tuple[int, int, int]:
    """The value at 0-based `rank` in sorted order, the number of smaller values and of equal ones.

    All values are in low..high; `rank` is less than their number.
    """
    shift = max(0, (high - low).bit_length() - BUCKET_BITS)
    where, below = None, 0
    while True:
        counts = histogram(where, shift)
        for bucket in sorted(counts):
            if below + counts[bucket] > rank:
                break
            below += counts[bucket]
        else:
            raise AssertionError(f"rank {rank} is not below {below}")
        if shift == 0:
            return bucket, below, counts[bucket]
        where, shift = (bucket, shift), max(0, shift - BUCKET_BITS)


def ends_of(cuts: Sequence[int], total: int, low: int, high: int, histogram: Histogram) -> list[int]:
    """The last value before each border, for `total` values in low..high; equal values stay together.

    A border should come after its number of values in `cuts`, which rise and are less than `total`. It moves to the
    nearer end of the run of equal values there, to the earlier end if both are equally near. If that left nothing
    between two borders, before the first or after the last, it moves on to the next value, if there is one.
    """
    found: list[tuple[int, int]] = []  # the last value before the border, and how many there are
    for cut in cuts:
        value, less, equal = at_rank(cut, low, high, histogram)
        found.append((max(value - 1, _LEAST), less) if cut - less <= less + equal - cut else (value, less + equal))
    below = 0
    for number, (_, before) in enumerate(found):
        if before <= below < total:
            value, less, equal = at_rank(below, low, high, histogram)
            found[number] = value, less + equal
        below = found[number][1]
    above = total
    for number, (_, before) in reversed(list(enumerate(found))):
        if before >= above > 0:
            value, less, _ = at_rank(above - 1, low, high, histogram)
            found[number] = max(value - 1, _LEAST), less
        above = found[number][1]
    return [last for last, _ in found]


def check_values(rows: DataFrame, df: DataFrame, split: SplitSpec) -> None:
    """Raise DataError if no row has one of the values that a subset names. `rows` are those of
    lockstep.etl.split.assign, before `assign_by_counts`, and `df` those they were made of, which are read again only
    for the error.
    """
    there = {row[c.SPLIT] for row in rows.select(c.SPLIT).distinct().collect()}
    missing = [value for number, value in enumerate(split.values) if str(number) not in there]
    if not missing:
        return
    assert split.column is not None
    column = df.select(df[c.quoted(split.column)].cast("string").alias("value")).distinct().orderBy("value")
    values = [row["value"] for row in column.limit(MAX_CLASSES).collect()]
    some = ", ".join(values[:MAX_NAMED])[:500]
    raise DataError(
        f"--split {split.text[:200]} names a value that no row has",
        got=", ".join(value + nearest(value, values) for value in missing)[:500],
        allowed=f"values of `{split.column}`: {some}{', ...' if len(values) > MAX_NAMED else ''}",
        next_step="Correct the value, or name another column.",
    )


def deal(sizes: Sequence[int], folds: int) -> list[int]:
    """The fold of each group, for groups of `sizes` records in falling order: the fold that has fewest records so far,
    the first of equal ones. scikit-learn's GroupKFold gives folds the same sizes.
    """
    smallest = [(0, fold) for fold in range(folds)]  # a heap
    found = []
    for size in sizes:
        records, fold = smallest[0]
        heapq.heapreplace(smallest, (records + size, fold))
        found.append(fold)
    return found


def _balanced(rows: DataFrame, split: SplitSpec) -> DataFrame:
    from pyspark.sql import functions as f

    group = f.col(c.SPLIT).cast("bigint")
    # Only rows that will be written: what sampling leaves out makes no fold larger.
    sizes = (
        rows.where(f.col(c.DROPPED).isNull()).groupBy(group.alias("_group")).agg(f.count(f.lit(1)).alias("_records"))
    )
    table = sizes.limit(MAX_GROUPS + 1).toPandas()
    if len(table) > MAX_GROUPS:
        raise DataError(
            f"column `{split.column}` has too many groups to balance folds by their sizes",
            got=f"more than {MAX_GROUPS}",
            allowed=f"{MAX_GROUPS} groups or fewer",
            next_step=f"Write --split kfold:{len(split.names)}:{split.column}: chance makes even folds of so many.",
        )
    if table.empty:
        return rows
    table = table.sort_values(["_records", "_group"], ascending=[False, True])  # by the hash: the same in each run
    table["_fold"] = [split.names[fold] for fold in deal(table.pop("_records").tolist(), len(split.names))]
    dealt = rows.sparkSession.createDataFrame(table, "_group bigint, _fold string")
    joined = rows.join(f.broadcast(dealt), group == f.col("_group"), "left")
    return _renamed(joined, f.col("_fold"), split).select(*map(c.quoted, rows.columns))


def _by_time(rows: DataFrame, split: SplitSpec, window: int | None) -> DataFrame:
    from pyspark.sql import functions as f

    time = f.col(c.SPLIT).cast("bigint")
    times = rows.where(f.col(c.SPLIT).isNotNull()).select(time.alias("t"))
    span = times.agg(f.min("t").alias("low"), f.max("t").alias("high"), f.count("t").alias("n")).collect()[0]
    if not span["n"]:
        return rows

    def histogram(where: tuple[int, int] | None, shift: int) -> dict[int, int]:
        here = times if where is None else times.where(f.shiftright("t", where[1]) == where[0])
        return {row["b"]: row["count"] for row in here.groupBy(f.shiftright("t", shift).alias("b")).count().collect()}

    ends = ends_of(_inner(span["n"], split.weights), span["n"], span["low"], span["high"], histogram)
    if window is not None:
        nexts = times.agg(*(f.min(f.when(f.col("t") > end, f.col("t"))) for end in ends)).collect()[0]
        seen = f.lit(False)  # whether the label looks into the next split
        for end, first in reversed(list(zip(ends, nexts, strict=True))):
            since = span["high"] + 1 if first is None else first - window
            seen = f.when(time <= end, time >= f.lit(max(since, _LEAST))).otherwise(seen)
        lost = f.when(f.col(c.SPLIT).isNotNull() & seen, CENSORED_AT_BORDER).otherwise(f.col(c.DROPPED))
        rows = rows.withColumn(c.DROPPED, lost)
    named = f.lit(split.names[-1])
    for name, end in reversed(list(zip(split.names, ends, strict=False))):
        named = f.when(time <= end, name).otherwise(named)
    return _renamed(rows, named, split)


def _inner(total: int, weights: Sequence[int]) -> list[int]:
    return [min(cut, total - 1) for cut in cuts_of(total, weights)]


def _stratified(rows: DataFrame, split: SplitSpec) -> DataFrame:
    from pyspark.sql import functions as f

    kept = rows.where(f.col(c.SPLIT).isNotNull())
    totals = {row[c.SPLIT]: row["count"] for row in kept.groupBy(c.SPLIT).count().limit(MAX_CLASSES + 1).collect()}
    if len(totals) > MAX_CLASSES:
        raise DataError(
            f"column `{split.column}` has too many values to stratify by",
            got=f"more than {MAX_CLASSES}",
            allowed=f"{MAX_CLASSES} classes or fewer",
            next_step="Stratify by the label, or split by --split group:COLUMN:...",
        )
    if not totals:
        return rows
    bucket = f.shiftright(c.KEY, KEY_BITS - BUCKET_BITS).alias("bucket")
    counts: dict[str, dict[int, int]] = defaultdict(dict)
    for row in kept.groupBy(c.SPLIT, bucket).count().collect():
        counts[row[c.SPLIT]][row["bucket"]] = row["count"]
    wanted = {name: [_place(cut, counts[name]) for cut in cuts_of(n, split.weights)] for name, n in totals.items()}
    open_buckets = sorted({(name, place[0]) for name, places in wanted.items() for place in places if place})
    asked = _small(rows, {"class": [p[0] for p in open_buckets], "bucket": [p[1] for p in open_buckets]}, "bucket")
    held = kept.select(f.col(c.SPLIT).alias("class"), bucket, c.KEY).join(f.broadcast(asked), ["class", "bucket"])
    keys: dict[tuple[str, int], list[int]] = defaultdict(list)
    for row in held.collect():
        keys[row["class"], row["bucket"]].append(row[c.KEY])
    for found in keys.values():
        found.sort()
    # Distinct ids have distinct keys, so the first key after a border is the border.
    firsts = {
        name: [keys[name, place[0]][place[1]] if place else None for place in places] for name, places in wanted.items()
    }
    return _cut_by_class(rows, split, firsts)


def _place(cut: int, counts: Mapping[int, int]) -> tuple[int, int] | None:
    """The bucket of the record at 0-based rank `cut`, and its rank in the bucket; None after the last record."""
    for bucket in sorted(counts):
        if cut < counts[bucket]:
            return bucket, cut
        cut -= counts[bucket]
    return None


def _cut_by_class(rows: DataFrame, split: SplitSpec, firsts: Mapping[str, Sequence[int | None]]) -> DataFrame:
    from pyspark.sql import functions as f

    names = [f"_first_{number}" for number in range(len(split.names) - 1)]
    table: dict[str, Iterable[object]] = {"_class": list(firsts)}
    table |= {name: [firsts[value][number] for value in firsts] for number, name in enumerate(names)}
    joined = rows.join(f.broadcast(_small(rows, table, *names)), f.col(c.SPLIT) == f.col("_class"), "left")
    named = f.lit(split.names[0])
    for name, first in zip(split.names[1:], names, strict=True):
        named = f.when(f.col(c.KEY) >= f.col(first), name).otherwise(named)
    return _renamed(joined, named, split).select(*map(c.quoted, rows.columns))


def _renamed(rows: DataFrame, named: Column, split: SplitSpec) -> DataFrame:
    from pyspark.sql import functions as f

    back = (f.col(c.DROPPED) == SAMPLED_OUT) & f.col(c.SPLIT).isNotNull() & ~named.isin(*split.trained)
    rows = rows.withColumn(c.DROPPED, f.when(back, None).otherwise(f.col(c.DROPPED)))
    return rows.withColumn(c.SPLIT, f.when(f.col(c.DROPPED).isNull(), named))


def _small(rows: DataFrame, table: Mapping[str, Iterable[object]], *numbers: str) -> DataFrame:
    """A table of a few thousand rows in the session of `rows`: columns of text, those in `numbers` of whole numbers."""
    schema = pa.schema([(name, pa.int64() if name in numbers else pa.string()) for name in table])
    return rows.sparkSession.createDataFrame(list(zip(*table.values(), strict=True)), c.ddl_of(schema))
