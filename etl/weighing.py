"""Weights of classes, counted before the rows are encoded: a first, narrow pass over the same rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from etl import columns as c
from etl.assign import Assign
from etl.sampling import ClassWeights, balanced
from etl.settle import MAX_CLASSES, settle
from etl.splits import TRAIN
from features.schema import Schema
from storage.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def class_weights(df: DataFrame, schema: Schema, assign: Assign) -> ClassWeights:
    """Balanced weights of the classes of the label among the records that `assign` will write of `df`.

    Counted on the training split, after sampling; over all splits where no record is in one called train (folds).
    Raises ConfigError where the label has no classes, DataError for too many of them.
    """
    from pyspark.sql import functions as f

    label = schema.label
    if label is None or label.shape or label.dtype not in ("bool", "int64", "string"):
        raise ConfigError(
            "--weights needs classes to weigh",
            got="no label" if label is None else f"a label of {label.dtype}, shape {label.shape}",
            allowed="a label that is a boolean, a whole number or text",
            next_step="Name the label, or leave --weights out.",
        )
    narrow = replace(assign, schema=Schema((schema.id_field, label)), fmt="parquet")
    rows = df.mapInArrow(narrow, narrow.ddl()).persist()
    try:
        kept = settle(rows, assign.split).where(f.col(c.DROPPED).isNull())
        trains = (f.col(c.SPLIT) == TRAIN).alias("trains")
        found = kept.groupBy(trains, f.col(f"`{label.name}`").cast("string").alias("class")).count()
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
    return balanced(label.name, counts)


def counts_of(found: Iterable[tuple[bool, str, int]]) -> dict[str, int]:
    """Records by class, from (whether in the training split, class, records): of that split alone if it has any."""
    rows = list(found)
    trained = any(trains for trains, _, _ in rows)
    return {name: count for trains, name, count in rows if trains or not trained}
