"""What must not lie on two sides of a split: the same id, group or content, or times that overlap."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from typing import TYPE_CHECKING, Any

from etl import columns as c
from etl.spark.errors import SameIdError
from etl.spark.session import described
from etl.split.splits import SplitSpec
from lockstep.features.schema.fields import SAMPLE_ID, Field
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

log = logging.getLogger(__name__)

ID, CONTENT, GROUP, TIME = "sample_id", "content", "group", "time"


@dataclass(frozen=True, slots=True)
class Values:
    """The values of one check: how many records have one that occurs in more than one split, how many values occur in n
    records each, and one of those that most records have.
    """

    shared: int
    counts: Mapping[int, int]
    largest: int

    @property
    def records(self) -> int:
        """Records in all."""
        return sum(n * values for n, values in self.counts.items())


@dataclass(frozen=True, slots=True)
class Leakage:
    """What was looked for and how many records were found on two sides, by check; see docs/decisions/061.

    `values` are those of each check but TIME, `by_chance` is what by_chance gives for CONTENT.
    """

    kind: str
    found: dict[str, int]
    values: Mapping[str, Values]
    by_chance: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The manifest's `leakage`."""
        told: dict[str, Any] = {"kind": self.kind, "checked": sorted(self.found), "found": self.found}
        if self.by_chance is not None:
            distinct = sum(self.values[CONTENT].counts.values())
            told |= {"by_chance": {CONTENT: self.by_chance}, "distinct": {CONTENT: distinct}}
        return told


def checks_of(split: SplitSpec, schema: Schema) -> tuple[str, ...]:
    """The checks that fit a kind of split: what it promises, and what nobody else would notice.

    A split by the sample id sends equal ids to one side by itself, and each shard is searched for equal ids.
    """
    ids = () if split.kind in ("random", "kfold") and split.column is None else (ID,)
    if split.kind == "time":
        return (*ids, TIME)
    if split.kind in ("group", "kfold") and split.column is not None:
        return (*ids, GROUP)
    return (*ids, CONTENT) if fed(schema) else ids


def fed(schema: Schema) -> tuple[Field, ...]:
    """The features that a model is fed with: none that are only stored, such as ids."""
    return tuple(field for field in schema.features if (field.encoding or {}).get("kind") != "ignore")


def leak_key(df: DataFrame, split: SplitSpec, schema: Schema, *, late: bool = False) -> Column:
    """The column LEAK of `df` (bigint): the time as a number, or a 64-bit hash of the group or of all features that a
    model is fed with; null where it is made `late`, with the features.

    A column that decides the split is of a type that SplitSpec.check takes; moments are numbers
    (etl.write.frame.prepared).
    """
    from pyspark.sql import functions as f

    if late:
        return f.lit(None).cast("bigint")
    if split.kind == "time":
        assert split.column is not None
        column = f.col(c.quoted(split.column))
        return f.unix_date(column).cast("bigint") if dict(df.dtypes)[split.column] == "date" else column.cast("bigint")
    if split.column is not None and split.kind in ("group", "kfold"):
        return f.xxhash64(c.quoted(split.column))
    features = fed(schema)
    if not features:
        return f.lit(None).cast("bigint")
    parts: list[Column] = []
    for field in features:
        column = f.col(c.quoted(field.name))
        parts.append(column)
        # A null and a list's end leave the hash as it is: (null, 1) would be (1, null), and [1], [2] be [1, 2], [].
        parts += [column.isNull()] if field.nullable else []
        parts += [f.size(column)] if field.is_list else []
    return f.xxhash64(*parts)


def check_leakage(rows: DataFrame, split: SplitSpec, schema: Schema, records: Mapping[str, int]) -> Leakage:
    """Look through the rows that etl.split.assign wrote (splits settled, dropped rows left out); `records` are those
    of each split, in order of time.

    Equal content on two sides is counted and told. Raises DataError for an id or a group on two sides and for times
    that overlap: the split's own promise is broken then.
    """
    checks = checks_of(split, schema)
    columns = {check: SAMPLE_ID if check == ID else c.LEAK for check in checks if check != TIME}
    with described(rows.sparkSession, "look for what is on two sides of the split"):
        values = _on_two_sides(rows, columns, tuple(records))
    found = {check: of.shared for check, of in values.items()}
    for check, count in found.items():
        if count and check != CONTENT:
            raise _broken(rows, columns[check], check, count, split)
    if TIME in checks:
        found[TIME] = _overlap(rows, split, tuple(records))
    return told(split, found, values, records)


def told(split: SplitSpec, found: dict[str, int], values: Mapping[str, Values], records: Mapping[str, int]) -> Leakage:
    """What was found, by check; equal content is logged. `records` are those of each split."""
    chance = by_chance(values[CONTENT].counts, tuple(records.values())) if CONTENT in values else None
    leakage = Leakage(split.kind, found, values, chance)
    line = content_line(leakage.to_json())
    if line is not None:
        log.warning("%s; --split group:COLUMN:... keeps what belongs together on one side", line)
    return leakage


def content_line(leakage: Mapping[str, Any]) -> str | None:
    """What a manifest's `leakage` says of equal content on two sides, None where there is none."""
    count = leakage["found"].get(CONTENT, 0)
    if not count:
        return None
    line = f"leakage: {count} records have the same features as one of another split"
    if "by_chance" not in leakage:  # of a dataset that an earlier version has made
        return line
    chance, distinct = leakage["by_chance"][CONTENT], leakage["distinct"][CONTENT]
    return f"{line} (a random split has {chance}; {distinct} different contents in all)"


def by_chance(counts: Mapping[int, int], records: Sequence[int]) -> float:
    """How many records are expected to share their content with one of another split if each record falls into a split
    by itself, in the shares of `records`; rounded to a tenth.

    `counts` says how many contents occur in n records each. Of n records all are in one split with probability sum(p^n)
    over the shares p, so that sum(counts[n] n (1 - sum(p^n))) is the expectation. Decimals give it the same digits on
    any machine.
    """
    with localcontext(Context(prec=28)):
        shares = [Decimal(count) / sum(records) for count in records]
        found = Decimal(0)
        for n, of in sorted(counts.items()):
            found += n * of * (1 - sum((share**n for share in shares), Decimal(0)))
        return float(round(found, 1))


def _on_two_sides(rows: DataFrame, columns: Mapping[str, str], names: Sequence[str]) -> dict[str, Values]:
    """For each check, the values of its column; all in one pass."""
    from pyspark.sql import functions as f

    if not columns:
        return {}
    side = f.lit(0)  # numbers in place of names: Spark aggregates those in place
    for place, name in enumerate(names):
        side = f.when(f.col(c.SPLIT) == name, place).otherwise(side)
    looked_at = [f.struct(f.lit(n).alias("of"), f.col(name).alias("value")) for n, name in enumerate(columns.values())]
    values = rows.select(side.alias("side"), f.explode(f.array(*looked_at)).alias("_")).select(
        "side", "_.of", "_.value"
    )
    sides = values.groupBy("of", "value").agg(
        f.min("side").alias("low"), f.max("side").alias("high"), f.count(f.lit(1)).alias("n")
    )
    # Of N records there are fewer than sqrt(2 N) different counts.
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
    """0 where each split ends before the next begins; else DataError."""
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
