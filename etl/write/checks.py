"""Checks before a job reads its input: the label's expression, the output, and columns and schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from lockstep.etl.columns import ddl_of
from lockstep.etl.fit.bake import check_bake
from lockstep.etl.petastorm.metadata import check_petastorm
from lockstep.etl.split.sampling import weight_field
from lockstep.etl.write.append import Parent, open_parent
from lockstep.etl.write.chance import chance_in, patterns
from lockstep.etl.write.config import NOT_KEPT, WriteConfig
from lockstep.etl.write.staging import is_unfinished
from lockstep.features.encode.bake import check_declared
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError, ExistsError
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import refuse_occupied
from lockstep.storage.urls import absolute, parent

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def check_label(spark: SparkSession, label: str, columns: pa.Schema, kinds: tuple[str, ...], allowed: str) -> None:
    """Raise ConfigError, with `allowed`, for a label over `columns` that is not valid SQL, names unknown columns, has
    none of the types `kinds`, does not give one value for each row, or depends on chance or the clock.
    """
    from pyspark.errors import AnalysisException, ParseException

    def bad(got: str) -> ConfigError:
        return ConfigError(
            f"--label is not a label: {label}",
            got=got,
            allowed=allowed,
            next_step="Correct --label; leave it out for the default.",
        )

    try:
        labelled = spark.createDataFrame([], ddl_of(columns)).selectExpr("*", f"({label}) AS _label")
        kind = dict(labelled.dtypes)["_label"]
        plan = labelled._jdf.queryExecution().analyzed()
    except (AnalysisException, ParseException) as error:
        raise bad(str(error).strip().splitlines()[0]) from None
    if kind not in kinds:
        raise bad(f"type {kind}")
    chance, there = chance_in(labelled), patterns(spark)
    if chance is not None:
        raise bad(chance)
    if plan.containsPattern(there.GENERATE()) or plan.containsPattern(there.PLAN_EXPRESSION()):
        raise bad("an expression that makes rows or reads another table")


def refuse_existing(url: str) -> None:
    """Raise ExistsError if the output exists already, or if a file is in the place of a directory above it.

    Called before Spark starts, so that a job that cannot publish fails at once.
    """
    fs, above = filesystem(url), parent(absolute(url))
    refuse_occupied(fs, url)
    while not fs.exists(above) and parent(above) != above:
        above = parent(above)
    if fs.exists(above) and not fs.stat(above).is_dir:
        raise ExistsError(
            f"{url} cannot be made: {above} is a file",
            got="a file",
            allowed="directories above the output",
            next_step="Correct --output.",
        )


@dataclass(frozen=True, slots=True)
class Target:
    """A dataset that can be made as `config` asks: the schema of its rows, the schema as written, with the field that
    --weights adds, and the dataset that it continues.
    """

    config: WriteConfig
    rows: Schema
    schema: Schema
    parent: Parent | None


def check_output(config: WriteConfig) -> Parent | None:
    """Check before Spark starts that the output and the place of rejected input are free, or that --clean will free
    them; returns the dataset that the output continues. Raises ExistsError, and what open_parent raises.
    """
    refuse_existing(config.output)
    if config.quarantine not in (None, NOT_KEPT):
        place = str(config.quarantine)
        if not (config.clean and is_unfinished(filesystem(place), place, config.output)):
            refuse_existing(place)
    return None if config.append_to is None else open_parent(config.append_to, config)


def check_target(config: WriteConfig, schema: Schema, kinds: Mapping[str, str], parent: Parent | None) -> Target:
    """The dataset of rows with this schema. `kinds` are the types of the rows' columns, in Spark's notation.

    Raises ConfigError if --split or --sample name a column that the rows do not have or that does not fit, or if the
    schema does not go with --bake, --weights, --petastorm or the parent.
    """
    check_columns(config, schema, kinds)
    return Target(config, schema, check_schema(config, schema, parent), parent)


def check_schema(config: WriteConfig, schema: Schema, parent: Parent | None = None) -> Schema:
    """The schema as it will be written, with the field that --weights adds.

    Raises ConfigError for a schema that does not go with --bake, --weights, --petastorm or the parent.
    """
    check_declared(schema)
    if config.bake:
        check_bake(schema, config.split_spec)
    if config.weights == "balanced":
        schema = replace(schema, fields=(*schema.fields, _weight(schema)))
    if config.petastorm:
        check_petastorm(schema, config.fmt)
    if parent is not None:
        parent.check_schema(schema)
    return schema


def check_columns(config: WriteConfig, schema: Schema, kinds: Mapping[str, str]) -> None:
    """Raise ConfigError if --split or --sample name a column that the rows do not have, or whose type or classes do not
    fit. `kinds` are the types of the columns, in Spark's notation.
    """
    split, sample = config.split_spec, config.sampling
    for flag, name in (("--split", split.column), ("--sample", None if sample is None else sample.column)):
        if name is not None and name not in kinds:
            raise ConfigError(
                f"{flag} names the column `{name}`",
                got="no such column",
                allowed=", ".join(kinds)[:500],
                next_step=f"Correct {flag}.",
            )
    if split.column is not None:
        split.check(kinds[split.column])
    if sample is not None:
        label = schema.label
        is_label = label is not None and label.name == sample.column
        sample.check(kinds[sample.column], label.num_classes if is_label and label is not None else None)


def _weight(schema: Schema) -> Field:
    label = schema.label
    if schema.weight is not None:
        raise ConfigError(
            "--weights balanced adds weights, but the schema already has some",
            got=f"the field `{schema.weight.name}`",
            allowed="one weight for each record",
            next_step="Remove --weights or that field.",
        )
    if label is None or label.shape or label.dtype not in ("bool", "int64", "string"):
        raise ConfigError(
            "--weights needs classes to weigh",
            got="no label" if label is None else f"a label of {label.dtype}, shape {label.shape}",
            allowed="a label that is a boolean, a whole number or text",
            next_step="Name the label, or remove --weights.",
        )
    return weight_field()
