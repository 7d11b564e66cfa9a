"""Vocabularies, counted on the training split alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etl import columns as c
from features.fitted import Vocabulary
from features.schema import Field, Schema

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

FITTED_ON = ("train",)


def fit_vocabularies(rows: DataFrame, schema: Schema) -> dict[str, Vocabulary]:
    """The vocabulary of each field that declares one, by field name, from rows that etl.assign wrote.

    Counts are exact; the order is count descending, then UTF-8 bytes. The driver holds max_size tokens a field.
    """
    fields = c.vocabulary_fields(schema)
    if not fields:
        return {}
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    trained = rows.where(f.col(c.SPLIT).isin(*FITTED_ON))
    pairs = f.concat(*(_pairs(number, field) for number, field in enumerate(fields)))
    tokens = (
        trained.select(f.explode(pairs).alias("pair")).select("pair.field", "pair.token").where("token IS NOT NULL")
    )
    counted = tokens.groupBy("field", "token").agg(f.count(f.lit(1)).alias("n"))
    least = f.element_at(f.array(*(f.lit(_setting(field, "min_count")) for field in fields)), f.col("field") + 1)
    most = f.element_at(f.array(*(f.lit(_setting(field, "max_size")) for field in fields)), f.col("field") + 1)
    order = Window.partitionBy("field").orderBy(f.col("n").desc(), "token")
    ranked = (
        counted.where(f.col("n") >= least).withColumn("rank", f.row_number().over(order)).where(f.col("rank") <= most)
    )
    found = sorted((row["field"], row["rank"], row["token"], row["n"]) for row in ranked.collect())
    return {
        field.name: Vocabulary(
            name=field.name,
            tokens=tuple(token for which, _, token, _ in found if which == number),
            counts=tuple(n for which, _, _, n in found if which == number),
            fitted_on=FITTED_ON,
        )
        for number, field in enumerate(fields)
    }


def _pairs(number: int, field: Field) -> Column:
    from pyspark.sql import functions as f

    values = f.col(field.name) if field.is_list else f.array(field.name)
    return f.transform(values, lambda token: f.struct(f.lit(number).alias("field"), token.alias("token")))


def _setting(field: Field, key: str) -> int:
    assert field.encoding is not None
    return int(field.encoding[key])
