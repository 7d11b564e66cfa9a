"""Vocabularies, means and variances of the training split: exact, and the same for any parallelism.

Decision record: docs/decisions/062-features.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lockstep.etl import columns as c
from lockstep.etl.fit.exact_sums import FLOAT_UNIT, ExactSums
from lockstep.etl.spark.session import at_once, job_description
from lockstep.etl.spark.tasks import mapped
from lockstep.etl.split.assign import Assign
from lockstep.etl.split.counted import MAX_CLASSES, assign_by_counts
from lockstep.etl.split.splits import TRAIN, are_folds
from lockstep.features.encode.transforms import plain_values
from lockstep.features.schema.encodings import Encoding, fitted_part
from lockstep.features.schema.fields import Field
from lockstep.features.schema.fitted import Moments, Vocabulary, held_out_file
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_ROW = pa.schema(
    [
        ("field", pa.int32()),
        ("split", pa.string()),
        ("count", pa.int64()),
        ("total", pa.string()),
        ("squares", pa.string()),
    ]
)


class Fit(Protocol):
    """The splits that are counted, and the fold that is held out."""

    @property
    def splits(self) -> tuple[str, ...]: ...
    @property
    def held_out(self) -> str | None: ...


def fit_moments(rows: DataFrame, fields: Sequence[Field], plan: Sequence[Fit]) -> dict[tuple[str, str | None], Moments]:
    """The moments of each field and held-out fold, in one pass over the rows.

    Null and NaN are ignored. Raises DataError for an infinite value and for a field without any value.
    """
    if not fields:
        return {}
    from pyspark.sql import functions as f

    used = {name for fit in plan for name in fit.splits}
    # By number: mapInArrow does not accept a dot in a column's name.
    columns = [f.col(c.quoted(field.name)).alias(str(number)) for number, field in enumerate(fields)]
    counted = rows.where(f.col(c.SPLIT).isin(*used)).select(c.SPLIT, *columns)
    parts = mapped(counted, Sums(tuple(fields)), _ROW)
    sums = {(field.name, name): ExactSums(_unit(field)) for field in fields for name in used}
    with job_description(rows.sparkSession, "add up means and variances"):
        collected = parts.collect()
    for row in collected:
        field = fields[row["field"]]
        part = ExactSums(_unit(field), row["count"], int(row["total"], 16), int(row["squares"], 16))
        sums[field.name, row["split"]].merge(part)
    found = {}
    for field in fields:
        for fit in plan:
            whole = ExactSums(_unit(field))
            for name in fit.splits:
                whole.merge(sums[field.name, name])
            found[field.name, fit.held_out] = whole.moments(field.name, fit.splits)
    return found


@dataclass(frozen=True)
class Sums:
    """The function for mapInArrow: `_split` and the fields as columns `0`, `1`... in; a row of _ROW for each split and
    field out.
    """

    fields: tuple[Field, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Sum up the rows of the task."""
        sums: dict[tuple[int, str], ExactSums] = {}
        for batch in batches:
            for name in pc.unique(batch.column(c.SPLIT)).to_pylist():
                part = batch.filter(pc.equal(batch.column(c.SPLIT), name))
                for number, field in enumerate(self.fields):
                    add(sums.setdefault((number, name), ExactSums(_unit(field))), field, part.column(str(number)))
        rows = [
            {"field": number, "split": name, "count": s.count, "total": f"{s.total:x}", "squares": f"{s.squares:x}"}
            for (number, name), s in sums.items()
        ]
        yield pa.RecordBatch.from_pylist(rows, schema=_ROW)


def add(sums: ExactSums, field: Field, column: pa.Array) -> None:
    """Add the values of a column except null and NaN. Raises DataError for an infinite one."""
    values = plain_values(column.drop_null())
    if sums.unit:
        values = values.astype(np.float64)[~np.isnan(values)]
        if np.isinf(values).any():
            raise DataError(
                f"field `{field.name}` holds a value that is infinite",
                got=str(values[np.isinf(values)][0]),
                allowed="finite numbers, NaN and null (which count as missing), where a mean is fitted",
                next_step="Drop or cap such values before the dataset is written.",
            )
    sums.add(values)


def _unit(field: Field) -> int:
    return 0 if field.dtype in ("int64", "uint64") else FLOAT_UNIT


@dataclass(frozen=True, slots=True)
class FittedOn:
    """The splits that are counted, and the fold that is held out, if the dataset has folds."""

    splits: tuple[str, ...]
    held_out: str | None = None


def fit_all(rows: DataFrame, schema: Schema, splits: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The fitted files of a dataset with these splits: file name below `_fitted/` -> content as JSON.

    `rows` are those of lockstep.etl.split.assign: `_split` (null if a row is dropped) and the schema's `fitted_fields`.
    The split `train` is counted; with folds (`fold-0`, `fold-1`, ...) all but one, for each fold held out, into
    NAME.fold-0.json and so on. Declared `tokens`, or `mean` and `deviation`, are not counted. Counts are exact; a
    vocabulary is sorted by count, descending, then by UTF-8 bytes; mean and variance are computed as fractions and
    rounded once. The driver holds max_size tokens a field and fold. Raises ConfigError if there is no training
    split, DataError for a column that has no mean.
    """
    fields = schema.fitted_fields
    if not fields:
        return {}
    found: dict[str, dict[str, Any]] = {}
    of_kind: dict[str, list[Field]] = {"vocabulary": [], "standardise": []}
    for field in fields:
        part = _part(field)
        if "tokens" in part:
            found[part["file"]] = Vocabulary.declared(field.name, part["tokens"]).to_json()
        elif "mean" in part:
            found[part["file"]] = Moments.declared(field.name, part["mean"], part["deviation"]).to_json()
        else:
            of_kind[part["kind"]].append(field)
    if not any(of_kind.values()):
        return dict(sorted(found.items()))
    plan = fitted_on(splits)
    texts, numbers = of_kind["vocabulary"], of_kind["standardise"]
    for fits in at_once(lambda: _vocabularies(rows, texts, plan), lambda: fit_moments(rows, numbers, plan)):
        for (name, held_out), fitted in fits.items():
            file = schema[name].fitted_file
            assert file is not None
            found[held_out_file(file, held_out)] = fitted.to_json()
    return dict(sorted(found.items()))


def fitted_on(splits: Sequence[str]) -> tuple[FittedOn, ...]:
    """The splits that statistics are fitted on: `train`, or for each fold all others."""
    if TRAIN in splits:
        return (FittedOn((TRAIN,)),)
    if not are_folds(splits):
        raise ConfigError(
            "there is no split to fit statistics on",
            got=f"splits {', '.join(splits)}",
            allowed="a split `train`, or folds named fold-0, fold-1, ...",
            next_step="Use another --split, or encodings that need nothing fitted: hash, bucketise, number.",
        )
    return tuple(FittedOn(tuple(other for other in splits if other != name), name) for name in splits)


def _vocabularies(
    rows: DataFrame, fields: Sequence[Field], plan: Sequence[FittedOn]
) -> dict[tuple[str, str | None], Vocabulary]:
    """The vocabulary of each field and held-out fold, counted in one pass over the rows."""
    if not fields:
        return {}
    from pyspark.sql import functions as f

    pairs = ", ".join(_pairs(number, field) for number, field in enumerate(fields))
    tokens = rows.where(f.col(c.SPLIT).isin(*{name for fit in plan for name in fit.splits}))
    counts = ", ".join(
        f"struct({number} AS fit, count_if({c.SPLIT} IN ({', '.join(map(repr, fit.splits))})) AS n)"
        for number, fit in enumerate(plan)
    )
    counted = (
        tokens.selectExpr(c.SPLIT, f"inline(concat({pairs})) AS (field, token)")
        .where("token IS NOT NULL")
        .groupBy("field", "token")
        .agg(f.expr(f"array({counts}) AS counts"))
        .selectExpr("field", "token", "inline(counts)")
    )
    least, most = (
        f"element_at(array({', '.join(str(_part(field)[limit]) for field in fields)}), field + 1)"
        for limit in ("min_count", "max_size")
    )
    # In SQL: a call of Java for each of these columns and conditions would take longer than a small table's job.
    ranked = (
        counted.where(f"n >= {least}")
        .selectExpr("*", "row_number() OVER (PARTITION BY field, fit ORDER BY n DESC, token) AS rank")
        .where(f"rank <= {most}")
    )
    tops: dict[tuple[int, int], list[tuple[int, str, int]]] = {}
    with job_description(rows.sparkSession, "count vocabularies"):
        found = ranked.collect()
    for row in found:
        tops.setdefault((row["field"], row["fit"]), []).append((row["rank"], row["token"], row["n"]))
    return {
        (field.name, fit.held_out): _vocabulary(field.name, sorted(tops.get((number, place), [])), fit.splits)
        for number, field in enumerate(fields)
        for place, fit in enumerate(plan)
    }


def _vocabulary(name: str, found: Sequence[tuple[int, str, int]], splits: tuple[str, ...]) -> Vocabulary:
    tokens, counts = tuple(token for _, token, _ in found), tuple(n for _, _, n in found)
    return Vocabulary(name=name, tokens=tokens, counts=counts, fitted_on=splits)


def _pairs(number: int, field: Field) -> str:
    """A list of structs in SQL, one for each value of a field."""
    # int64 as decimal digits; casting text to text is free
    name = c.quoted(field.name)
    if field.is_list:
        return f"transform({name}, token -> struct({number} AS field, CAST(token AS STRING) AS token))"
    return f"array(struct({number} AS field, CAST({name} AS STRING) AS token))"


def _part(field: Field) -> Encoding:
    part = fitted_part(field.encoding)
    assert part is not None
    return part


def class_counts(df: DataFrame, schema: Schema, assign: Assign, window: int | None = None) -> dict[str, int]:
    """The number of records of each class of the label that `assign` will write of `df`, by the text of the class.

    Counted on the training split, after sampling; over all splits if none is called train (folds). `window` is that of
    assign_by_counts. Raises DataError for too many classes.
    """
    label = schema.label
    assert label is not None, "lockstep.etl.write.checks.check_schema refuses a schema without"
    narrow = replace(assign, schema=Schema((schema.id_field, label)), fmt="parquet")
    rows = mapped(df, narrow, narrow.output).persist()
    try:
        return classes_of(assign_by_counts(rows, assign.split, window), label)
    finally:
        rows.unpersist()


def classes_of(rows: DataFrame, label: Field) -> dict[str, int]:
    """Count the records of each class, as class_counts does, from rows whose splits are settled."""
    from pyspark.sql import functions as f

    kept = rows.where(f.col(c.DROPPED).isNull())
    trains = (f.col(c.SPLIT) == TRAIN).alias("trains")
    found = kept.groupBy(trains, f.col(c.quoted(label.name)).cast("string").alias("class")).count()
    first = found.orderBy(f.desc("trains")).limit(MAX_CLASSES + 1).collect()
    counts = counts_of([(row["trains"], row["class"], row["count"]) for row in first])
    if len(counts) > MAX_CLASSES:
        raise DataError(
            f"label `{label.name}` has too many values to weigh",
            got=f"more than {MAX_CLASSES}",
            allowed=f"{MAX_CLASSES} classes or fewer",
            next_step="Leave --weights out.",
        )
    return dict(sorted(counts.items()))


def counts_of(found: Iterable[tuple[bool, str, int]]) -> dict[str, int]:
    """Records by class, from (is in the training split, class, records): only of that split if it has any."""
    rows = list(found)
    trained = any(trains for trains, _, _ in rows)
    return {name: count for trains, name, count in rows if trains or not trained}
