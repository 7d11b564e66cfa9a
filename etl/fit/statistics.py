"""Vocabularies, means and variances: learnt on the training split alone, exactly, whatever the parallelism."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from etl import columns as c
from etl.fit.fit_moments import fit_moments
from etl.spark.session import described
from lockstep.features.schema.encodings import Encoding, fitted_part
from lockstep.features.schema.fields import Field
from lockstep.features.schema.fitted import Vocabulary, held_out_file
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

TRAIN = "train"
_FOLD = re.compile(r"fold-\d+")


@dataclass(frozen=True, slots=True)
class FittedOn:
    """The splits that are counted, and the fold that is not, if the dataset has folds."""

    splits: tuple[str, ...]
    held_out: str | None = None


def fit_all(rows: DataFrame, schema: Schema, splits: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What is fitted for a dataset of these splits: the file's name below `_fitted/` -> its content as JSON.

    `rows` are those of etl.split.assign: `_split` (null where a row is dropped) and the schema's `fitted_fields`. The
    split `train` is counted; among folds (`fold-0`, `fold-1`, ...) all but one, once for each, into NAME.fold-0.json
    and so on. Counts are exact; a vocabulary's order is count descending, then UTF-8 bytes; mean and variance are
    worked out as fractions and rounded once. The driver holds max_size tokens a field and fold. Raises ConfigError for
    splits without a training one, DataError for a column that has no mean.
    """
    fields = schema.fitted_fields
    if not fields:
        return {}
    plan = fitted_on(splits)
    found: dict[str, dict[str, Any]] = {}
    of_kind: dict[str, list[Field]] = {"vocabulary": [], "standardise": []}
    for field in fields:
        of_kind[_part(field)["kind"]].append(field)
    for fits in (_vocabularies(rows, of_kind["vocabulary"], plan), fit_moments(rows, of_kind["standardise"], plan)):
        for (name, held_out), fitted in fits.items():
            file = schema[name].fitted_file
            assert file is not None
            found[held_out_file(file, held_out)] = fitted.to_json()
    return dict(sorted(found.items()))


def fitted_on(splits: Sequence[str]) -> tuple[FittedOn, ...]:
    """On which splits statistics are fitted: `train`, or each choice of all folds but one."""
    if TRAIN in splits:
        return (FittedOn((TRAIN,)),)
    if len(splits) < 2 or not all(_FOLD.fullmatch(name) for name in splits):
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
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    pairs = f.concat(*(_pairs(number, field) for number, field in enumerate(fields)))
    tokens = rows.where(f.col(c.SPLIT).isin(*{name for fit in plan for name in fit.splits})).select(
        c.SPLIT, f.explode(pairs).alias("pair")
    )
    counts = [
        f.struct(f.lit(number).alias("fit"), f.count(f.when(f.col(c.SPLIT).isin(*fit.splits), f.lit(1))).alias("n"))
        for number, fit in enumerate(plan)
    ]
    counted = (
        tokens.select(c.SPLIT, "pair.field", "pair.token")
        .where("token IS NOT NULL")
        .groupBy("field", "token")
        .agg(f.array(*counts).alias("counts"))
        .select("field", "token", f.inline("counts"))
    )
    least = f.element_at(f.array(*(f.lit(_part(field)["min_count"]) for field in fields)), f.col("field") + 1)
    most = f.element_at(f.array(*(f.lit(_part(field)["max_size"]) for field in fields)), f.col("field") + 1)
    order = Window.partitionBy("field", "fit").orderBy(f.col("n").desc(), "token")
    ranked = (
        counted.where(f.col("n") >= least).withColumn("rank", f.row_number().over(order)).where(f.col("rank") <= most)
    )
    tops: dict[tuple[int, int], list[tuple[int, str, int]]] = {}
    with described(rows.sparkSession, "count vocabularies"):
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


def _pairs(number: int, field: Field) -> Column:
    from pyspark.sql import functions as f

    values = f.col(c.quoted(field.name)) if field.is_list else f.array(c.quoted(field.name))
    # int64 as decimal digits: a cast of text to text costs nothing
    return f.transform(
        values, lambda token: f.struct(f.lit(number).alias("field"), token.cast("string").alias("token"))
    )


def _part(field: Field) -> Encoding:
    part = fitted_part(field.encoding)
    assert part is not None
    return part
