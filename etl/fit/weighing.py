"""Records of each class, which weights follow from: counted before rows are encoded, in a first, narrow pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from etl import columns as c
from etl.spark.tasks import mapped
from etl.split.assign import Assign
from etl.split.splits import TRAIN
from etl.split.time_and_strata import MAX_CLASSES, settle
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def class_counts(df: DataFrame, schema: Schema, assign: Assign, window: int | None = None) -> dict[str, int]:
    """How many records of each class of the label `assign` will write of `df`, by the text of the class.

    `window` is that of settle. Counted on the training split, after sampling; over all splits where no record is in
    one called train (folds).
    Raises DataError for too many classes.
    """
    from pyspark.sql import functions as f

    label = schema.label
    assert label is not None, "etl.write.output.check_schema refuses a schema without"
    narrow = replace(assign, schema=Schema((schema.id_field, label)), fmt="parquet")
    rows = mapped(df, narrow, narrow.ddl()).persist()
    try:
        kept = settle(rows, assign.split, window).where(f.col(c.DROPPED).isNull())
        trains = (f.col(c.SPLIT) == TRAIN).alias("trains")
        found = kept.groupBy(trains, f.col(c.quoted(label.name)).cast("string").alias("class")).count()
        first = found.orderBy(f.desc("trains")).limit(MAX_CLASSES + 1).collect()
        counts = counts_of([(row["trains"], row["class"], row["count"]) for row in first])
    finally:
        rows.unpersist()
    if len(counts) > MAX_CLASSES:
        raise DataError(
            f"label `{label.name}` has too many values to weigh",
            got=f"more than {MAX_CLASSES}",
            allowed=f"{MAX_CLASSES} classes or fewer",
            next_step="Leave --weights out.",
        )
    return dict(sorted(counts.items()))


def counts_of(found: Iterable[tuple[bool, str, int]]) -> dict[str, int]:
    """Records by class, from (whether in the training split, class, records): of that split alone if it has any."""
    rows = list(found)
    trained = any(trains for trains, _, _ in rows)
    return {name: count for trains, name, count in rows if trains or not trained}
