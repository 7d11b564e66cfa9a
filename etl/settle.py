"""Splits that need to see all records: each class in one ratio, and the earlier before the later.

Both rest on counts over ranges of keys or times, narrowed in a few passes, so the driver holds some thousand numbers
however many records there are, and no task sorts a whole class.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from etl import columns as c
from etl.splits import SplitSpec
from storage.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

BUCKET_BITS = 12  # 4096 ranges a pass: what one pass leaves open is a 4096th of the records
KEY_BITS = 64
MAX_CLASSES = 1000
_LEAST = -(1 << 63)

# (bucket, shift) of the values to look at, or None for all; shift of the buckets to count -> records by bucket. A value
# v lies in bucket v >> shift.
Histogram = Callable[[tuple[int, int] | None, int], Mapping[int, int]]


def settle(rows: DataFrame, split: SplitSpec) -> DataFrame:
    """Rows of etl.assign with the name of each row's split in SPLIT; nothing changes where it stands there already.

    Raises DataError for more than MAX_CLASSES classes.
    """
    if split.kind == "stratified":
        return _stratified(rows, split)
    if split.kind == "time":
        return _by_time(rows, split)
    return rows


def cuts_of(total: int, weights: Sequence[int]) -> list[int]:
    """How many of `total` records lie before each border between the shares `weights`, rounded to the nearest."""
    whole = sum(weights)
    return [(2 * total * below + whole) // (2 * whole) for below in accumulate(weights[:-1])]


def at_rank(rank: int, low: int, high: int, histogram: Histogram) -> tuple[int, int, int]:
    """The value that stands at 0-based `rank` among all in order, how many are less and how many equal to it.

    All values lie in low..high; rank is below their number.
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


def last_before(cut: int, low: int, high: int, histogram: Histogram) -> int:
    """The last value before a border that should lie behind `cut` values, where equal ones stay together.

    Of the borders beside the equal values at `cut`, the nearer one; the earlier if both are as near.
    """
    value, less, equal = at_rank(cut, low, high, histogram)
    return max(value - 1, _LEAST) if cut - less <= less + equal - cut else value


def _by_time(rows: DataFrame, split: SplitSpec) -> DataFrame:
    from pyspark.sql import functions as f

    time = f.col(c.SPLIT).cast("bigint")
    times = rows.where(f.col(c.DROPPED).isNull()).select(time.alias("t"))
    span = times.agg(f.min("t").alias("low"), f.max("t").alias("high"), f.count("t").alias("n")).collect()[0]
    if not span["n"]:
        return rows

    def histogram(where: tuple[int, int] | None, shift: int) -> dict[int, int]:
        here = times if where is None else times.where(f.shiftright("t", where[1]) == where[0])
        return {row["b"]: row["count"] for row in here.groupBy(f.shiftright("t", shift).alias("b")).count().collect()}

    ends = [last_before(cut, span["low"], span["high"], histogram) for cut in _inner(span["n"], split.weights)]
    named = f.lit(split.names[-1])
    for name, end in reversed(list(zip(split.names, ends, strict=False))):
        named = f.when(time <= end, name).otherwise(named)
    return _renamed(rows, named)


def _inner(total: int, weights: Sequence[int]) -> list[int]:
    return [min(cut, total - 1) for cut in cuts_of(total, weights)]


def _stratified(rows: DataFrame, split: SplitSpec) -> DataFrame:
    from pyspark.sql import functions as f

    kept = rows.where(f.col(c.DROPPED).isNull())
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
    # The keys of distinct ids are distinct, so the first key behind a border is the border.
    firsts = {
        name: [keys[name, place[0]][place[1]] if place else None for place in places] for name, places in wanted.items()
    }
    return _cut_by_class(rows, split, firsts)


def _place(cut: int, counts: Mapping[int, int]) -> tuple[int, int] | None:
    """The bucket that holds the record at 0-based rank `cut`, and its rank there; None behind the last record."""
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
    return _renamed(joined, named).select(*map(c.quoted, rows.columns))


def _renamed(rows: DataFrame, named: Column) -> DataFrame:
    from pyspark.sql import functions as f

    return rows.withColumn(c.SPLIT, f.when(f.col(c.DROPPED).isNull(), named))


def _small(rows: DataFrame, table: Mapping[str, Iterable[object]], *numbers: str) -> DataFrame:
    """A table of a few thousand rows beside `rows`: text, and whole numbers where named."""
    ddl = ", ".join(f"{name} {'bigint' if name in numbers else 'string'}" for name in table)
    return rows.sparkSession.createDataFrame(list(zip(*table.values(), strict=True)), ddl)
