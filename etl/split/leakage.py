"""Leakage between splits: the same id, group or content in two of them, or times that overlap."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from typing import TYPE_CHECKING, Any

from lockstep.etl import columns as c
from lockstep.etl.spark.errors import SameIdError
from lockstep.etl.spark.session import job_description
from lockstep.etl.split.splits import SplitSpec
from lockstep.features.schema.fields import SAMPLE_ID, Field
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

log = logging.getLogger(__name__)

ID, CONTENT, GROUP, TIME = "sample_id", "content", "group", "time"


@dataclass(frozen=True, slots=True)
class Values:
    """The values of one check: how many records have a value that occurs in more than one split, how many values occur
    in n records each, and one of the most frequent values.
    """

    shared: int
    counts: Mapping[int, int]
    largest: int

    @property
    def records(self) -> int:
        """The number of records."""
        return sum(n * values for n, values in self.counts.items())


@dataclass(frozen=True, slots=True)
class Leakage:
    """How many records share their value with a record of another split, by check; see
    docs/decisions/061-splits-and-leakage.md.

    `values` has the Values of each check except TIME, `by_chance` the result of by_chance for CONTENT.
    """

    kind: str
    found: dict[str, int]
    values: Mapping[str, Values]
    by_chance: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The manifest's `leakage`."""
        entry: dict[str, Any] = {"kind": self.kind, "checked": sorted(self.found), "found": self.found}
        if self.by_chance is not None:
            distinct = sum(self.values[CONTENT].counts.values())
            entry |= {"by_chance": {CONTENT: self.by_chance}, "distinct": {CONTENT: distinct}}
        return entry


def checks_of(split: SplitSpec, schema: Schema) -> tuple[str, ...]:
    """The checks for a kind of split: what it promises, and what no other check would notice.

    A split by the sample id puts equal ids into one split by construction, and each shard is searched for equal ids.
    """
    ids = () if split.kind in ("random", "kfold") and split.column is None else (ID,)
    if split.kind == "time":
        return (*ids, TIME)
    if split.grouped:
        return (*ids, GROUP)
    return (*ids, CONTENT) if fed(schema) else ids


def fed(schema: Schema) -> tuple[Field, ...]:
    """The features that a model is fed with, without those that are only stored, such as ids."""
    return tuple(field for field in schema.features if (field.encoding or {}).get("kind") != "ignore")


def leak_key(df: DataFrame, split: SplitSpec, schema: Schema, *, late: bool = False) -> Column:
    """The column LEAK of `df` (bigint): the time as a number, or a 64-bit hash of the group or of all features that a
    model is fed with; null if it is computed `late`, together with the features.

    A column that decides the split has a type that SplitSpec.check accepts; timestamps are numbers already
    (lockstep.etl.write.frame.prepared).
    """
    from pyspark.sql import functions as f

    if late:
        return f.lit(None).cast("bigint")
    if split.kind == "time":
        assert split.column is not None
        column = f.col(c.quoted(split.column))
        return f.unix_date(column).cast("bigint") if dict(df.dtypes)[split.column] == "date" else column.cast("bigint")
    if split.grouped:
        assert split.column is not None
        return f.xxhash64(c.quoted(split.column))
    features = fed(schema)
    if not features:
        return f.lit(None).cast("bigint")
    parts: list[str] = []
    for field in features:
        name = c.quoted(field.name)
        parts.append(name)
        # Nulls and ends of lists do not change the hash: (null, 1) would equal (1, null), and [1], [2] equal [1, 2],
        # [].
        parts += [f"{name} IS NULL"] if field.nullable else []
        parts += [f"size({name})"] if field.is_list else []
    return f.expr(f"xxhash64({', '.join(parts)})")


def check_leakage(rows: DataFrame, split: SplitSpec, schema: Schema, records: Mapping[str, int]) -> Leakage:
    """Check the rows of lockstep.etl.split.assign (with final splits, without dropped rows); `records` is the number of
    each split's records, in order of time.

    Equal content in two splits is counted and logged. Raises DataError for an id or a group in two splits and for times
    that overlap, which break the promise of the split.
    """
    checks = checks_of(split, schema)
    columns = {check: SAMPLE_ID if check == ID else c.LEAK for check in checks if check != TIME}
    with job_description(rows.sparkSession, "check for leakage between splits"):
        values = _on_two_sides(rows, columns, tuple(records))
    found = {check: of.shared for check, of in values.items()}
    for check, count in found.items():
        if count and check != CONTENT:
            raise _broken(rows, columns[check], check, count, split)
    if TIME in checks:
        found[TIME] = _overlap(rows, split, tuple(records))
    return logged(split, found, values, records)


def logged(
    split: SplitSpec, found: dict[str, int], values: Mapping[str, Values], records: Mapping[str, int]
) -> Leakage:
    """The result of the checks; equal content is logged. `records` is the number of each split's records."""
    chance = by_chance(values[CONTENT].counts, tuple(records.values())) if CONTENT in values else None
    leakage = Leakage(split.kind, found, values, chance)
    line = content_line(leakage.to_json())
    if line is not None:
        log.warning("%s; --split group:COLUMN:... keeps what belongs together on one side", line)
    return leakage


def content_line(leakage: Mapping[str, Any]) -> str | None:
    """A line about equal content in two splits from a manifest's `leakage`, None if there is none."""
    count = leakage["found"].get(CONTENT, 0)
    if not count:
        return None
    chance, distinct = leakage["by_chance"][CONTENT], leakage["distinct"][CONTENT]
    return (
        f"leakage: {count} records have the same features as one of another split (a random split has {chance}; "
        f"{distinct} different contents in all)"
    )


def by_chance(counts: Mapping[int, int], records: Sequence[int]) -> float:
    """How many records are expected to share their content with a record of another split if each record is assigned
    independently, in the shares of `records`; rounded to a tenth.

    `counts` is how many contents occur in n records each. All of n records are in one split with probability sum(p^n)
    over the shares p, so the expectation is sum(counts[n] n (1 - sum(p^n))). Decimals give the same digits on any
    machine.
    """
    with localcontext(Context(prec=28)):
        shares = [Decimal(count) / sum(records) for count in records]
        found = Decimal(0)
        for n, of in sorted(counts.items()):
            found += n * of * (1 - sum((share**n for share in shares), Decimal(0)))
        return float(round(found, 1))


def _on_two_sides(rows: DataFrame, columns: Mapping[str, str], names: Sequence[str]) -> dict[str, Values]:
    """Count, for each check, the values of its column and the rows whose value is on both sides; all in one pass."""
    from pyspark.sql import functions as f

    if not columns:
        return {}
    places = " ".join(f"WHEN {name!r} THEN {place}" for place, name in enumerate(names))
    side = f"CASE {c.SPLIT} {places} ELSE 0 END AS side"  # numbers instead of names: Spark aggregates them in place
    looked_at = ", ".join(f"struct({n} AS of, {name} AS value)" for n, name in enumerate(columns.values()))
    values = rows.selectExpr(side, f"inline(array({looked_at}))")
    sides = values.groupBy("of", "value").agg(
        f.min("side").alias("low"), f.max("side").alias("high"), f.count(f.lit(1)).alias("n")
    )
    # N records have fewer than sqrt(2 N) different counts.
    shared = f.count_if(f.col("low") < f.col("high")).alias("shared")
    counted = sides.groupBy("of", "n").agg(f.count(f.lit(1)).alias("values"), shared, f.max("value").alias("one"))
    by_number: dict[int, dict[int, Row]] = {number: {} for number in range(len(columns))}
    for row in counted.collect():
        by_number[row["of"]][row["n"]] = row
    return {check: _values(by_number[number]) for number, check in enumerate(columns)}


def _values(by_count: Mapping[int, Row]) -> Values:
    shared = sum(n * row["shared"] for n, row in by_count.items())
    largest = by_count[max(by_count)]["one"] if by_count else 0
    return Values(shared, {n: by_count[n]["values"] for n in sorted(by_count)}, largest)


def _overlap(rows: DataFrame, split: SplitSpec, names: Sequence[str]) -> int:
    """Return 0 if each split ends before the next begins; else raise DataError."""
    from pyspark.sql import functions as f

    spans = {
        row[c.SPLIT]: (row["low"], row["high"])
        for row in rows.groupBy(c.SPLIT).agg(f.min(c.LEAK).alias("low"), f.max(c.LEAK).alias("high")).collect()
    }
    there = [name for name in names if name in spans]
    for before, after in itertools.pairwise(there):
        if spans[before][1] >= spans[after][0]:
            raise DataError(
                f"the times of {before} and {after} overlap",
                got=f"{before} ends at {spans[before][1]}, {after} begins at {spans[after][0]}",
                allowed=f"{before} before {after}",
                next_step=f"Check that `{split.column}` gives the same values each time the input is read.",
            )
    return 0


def _broken(rows: DataFrame, column: str, check: str, found: int, split: SplitSpec) -> DataError:
    from pyspark.sql import functions as f

    worst = rows.groupBy(column).agg(f.count_distinct(c.SPLIT).alias("sides")).where("sides > 1").orderBy(column)
    value = worst.limit(1).collect()[0][column]
    two = (
        rows.where(f.col(column) == value).select(c.SPLIT, c.SOURCE, c.POSITION, SAMPLE_ID).orderBy(c.SPLIT, SAMPLE_ID)
    )
    places = [
        f"{row[SAMPLE_ID] & (1 << 64) - 1:016x} in {row[c.SPLIT]} (source {row[c.SOURCE]} at {row[c.POSITION]})"
        for row in two.limit(2).collect()
    ]
    what = "one sample id" if check == ID else f"one value of `{split.column}`"
    kind = SameIdError if check == ID else DataError
    return kind(
        f"{found} records of different splits share {what}",
        got=", ".join(places),
        allowed="a sample id and a group on one side of the split",
        next_step="Name more id columns, or check that the input is the same each time it is read.",
    )
