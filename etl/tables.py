"""A dataset from a table of Spark's catalog, a query, or files that Spark reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lockstep.etl import frames
from lockstep.etl.choices import LAKES
from lockstep.etl.columns import listed
from lockstep.etl.input.snapshots import Snapshot, open_snapshot
from lockstep.etl.spark.errors import translating_errors
from lockstep.etl.spark.session import watched
from lockstep.etl.table_files import FORMATS, of_query, read_files, read_snapshot
from lockstep.etl.write.append import Parent
from lockstep.etl.write.checks import check_output, check_schema, refuse_existing
from lockstep.etl.write.config import WriteConfig
from lockstep.etl.write.dataset import write_frame
from lockstep.etl.write.frame import infer_schema
from lockstep.etl.write.quarantine import Origin
from lockstep.etl.write.shards import RECORDS_STEP, SHARDS_STEP
from lockstep.features.schema.declare import load_schema
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import ConfigError, NotFoundError, require
from lockstep.storage.urls import several

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LATEST = "latest"
_NO_FILE_SYSTEM = re.compile(r"No FileSystem for scheme|S3AFileSystem not found")
_NO_FORMAT = "DATA_SOURCE_NOT_FOUND"
_STEP = "Correct --table, --query or --input; catalogs are set by spark-submit --conf spark.sql.catalog..."
_ILLEGAL_STEP = (
    "Give the files by --input, which reads times in nanoseconds, and columns of any type with --exclude; or in a query"
    " read nanoseconds as whole numbers: spark-submit --conf spark.sql.legacy.parquet.nanosAsLong=true."
)
# Conditions of Spark: what is allowed instead, and what to do.
_PARTITIONS = (
    "the same partitions, folders NAME=VALUE, on the same levels below all inputs",
    "Give --input one folder whose partitions are alike, and join several by a --query: SELECT ... FROM parquet.`A` "
    "UNION ALL SELECT ... FROM parquet.`B`.",
)
_LAYOUTS = {
    "CONFLICTING_DIRECTORY_STRUCTURES": _PARTITIONS,
    "CONFLICTING_PARTITION_COLUMN_NAMES": _PARTITIONS,
    "UNABLE_TO_INFER_SCHEMA": (
        "a file of this format or more, whose name begins with neither `_` nor `.`",
        "Correct the path, or --input-format.",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TableConfig(WriteConfig):
    """Exactly one of `table`, `query` and `inputs`. Raises ConfigError for values that are invalid."""

    table: str | None = None
    """A table or view of the session's catalog."""
    query: str | None = None
    """A SQL query."""
    inputs: tuple[str, ...] = ()
    """URLs that Spark loads as `input_format`."""
    input_format: str = "parquet"
    """Any format that Spark's session knows."""
    table_version: str | None = None
    """The version of a Delta table, or the id of an Iceberg snapshot, to read without the format's jars
    (lockstep.etl.input.snapshots); LATEST is the newest; None leaves the format to Spark.
    """
    id_columns: tuple[str, ...]
    """The columns that identify a row; unique together."""
    label: str | None = None
    """The column to predict."""
    exclude: tuple[str, ...] = ()
    """Columns that are not stored, though they may be ids or decide the split."""
    schema: str | None = None
    """File of a declared schema (lockstep.features.schema.declare); None takes the columns' own types
    (lockstep.etl.write.frame).
    """
    columns: tuple[str, ...] = ()
    """The columns of CSV files without a header, in order, for a proposed schema."""
    proposes: bool = False
    """Whether `output` is to be a proposed schema, which needs no ids, in place of a dataset."""

    def __post_init__(self) -> None:
        super(TableConfig, self).__post_init__()
        for name in ("inputs", "id_columns", "exclude", "columns"):
            object.__setattr__(self, name, several(getattr(self, name)))
        given = [flag for flag, value in self._sources().items() if value]
        require(len(given) == 1, "the input", " and ".join(given) or "none", "one of --table, --query, --input")
        files = bool(self.inputs) or self.input_format == "parquet"
        require(files, "--input-format", f"{self.input_format} without --input", "with --input, whose format it is")
        version, lake = self.table_version, self.input_format.lower() in LAKES and len(self.inputs) == 1
        number = version is None or version == LATEST or re.fullmatch(r"[0-9]{1,19}", version) is not None
        require(number, "--table-version", str(version), f"a number, or {LATEST}")
        allowed = f"with one --input and --input-format {' or '.join(LAKES)}"
        require(version is None or lake, "--table-version", str(version), allowed)
        # Spark takes the first line for a row, and all values for texts.
        step = "Use `lockstep etl_logs --log-format csv --schema FILE`; --propose-schema makes FILE."
        typed = self.proposes or self.input_format.lower() != "csv"
        require(typed, "--input-format", "csv", "formats whose columns have names and types", step)
        proposed = self.proposes and bool(self.inputs) and self.input_format.lower() == "csv"
        named = "with --propose-schema --input-format csv; lockstep etl_logs reads such files with --columns"
        require(not self.columns or proposed, "--columns", ",".join(self.columns), named)
        ids = self.id_columns
        require(
            (self.proposes or len(ids) > 0) and all(ids), "--id-columns", ",".join(ids) or "none", "one column or more"
        )
        require(len(set(ids)) == len(ids), "--id-columns", ",".join(ids), "each column once")
        require(not (self.label and self.unlabelled), "--label", "with --unlabelled", "without it: there are no labels")
        one = self.schema is None or not (self.exclude or self.label)
        require(one, "--schema", "together with --exclude or --label", "without them: the file declares both")

    def to_json(self) -> dict[str, Any]:
        """The settings that decide the content of the dataset, in addition to input and seed."""
        own = {"job": "etl_table", "table": self.table, "query": self.query, "inputs": list(self.inputs)}
        own |= {"input_format": self.input_format if self.inputs else None, "id_columns": list(self.id_columns)}
        return {**super(TableConfig, self).to_json(), **own}

    def _sources(self) -> dict[str, object]:
        return {"--table": self.table, "--query": self.query, "--input": self.inputs}


@dataclass(frozen=True, slots=True)
class Plan:
    """The declared schema, if there is one, and the dataset that the output continues."""

    schema: Schema | None
    parent: Parent | None


def check(config: TableConfig) -> Plan:
    """Check before Spark starts that the output is free, and that a declared schema goes with --bake, --weights,
    --petastorm and the dataset that is continued.
    """
    parent = check_output(config)
    schema = None if config.schema is None else config.stored(load_schema(config.schema))
    if schema is not None:
        check_schema(config, schema, parent)
    return Plan(schema, parent)


def run(spark: SparkSession, config: TableConfig, plan: Plan | None = None) -> DatasetManifest:
    """Read, split and publish; `plan` is what `check` returned, if it was called.

    Raises the errors of check and write_dataset, NotFoundError for a missing table or path, and ConfigError for a query
    that is not valid.
    """
    plan = plan or check(config)
    with translating_errors(spark, "reading the table"), watched(spark, "etl table", (RECORDS_STEP, SHARDS_STEP)):
        fields = None if plan.schema is None else [field.name for field in plan.schema]
        snapshot = _snapshot(config)
        df, left_out = frame(spark, config, fields, snapshot)
        exclude = [name for name in config.exclude if name not in left_out]
        return write_frame(
            df,
            config,
            plan.parent,
            id_columns=config.id_columns,
            schema=plan.schema or infer_schema(df, config.label, exclude, config.id_columns),
            origin=Origin(
                created_config=config.to_json() | ({} if snapshot is None else {"table_version": snapshot.to_json()})
            ),
        )


def propose(spark: SparkSession, config: TableConfig, *, embeddings: bool = False) -> str:
    """Write a schema for the table to `config.output`, from its first rows; returns what was proposed, in a few lines.

    Raises ConfigError for a declared schema and for a label that cannot be one; ExistsError if the output exists; the
    errors of `run`.
    """
    require(config.schema is None, "--propose-schema", "with --schema", "without it")
    refuse_existing(config.output)
    with translating_errors(spark, "reading the table"):
        df, left_out = frame(spark, config, snapshot=_snapshot(config))
        df = df.drop(*(name for name in config.exclude if name not in left_out))
        found = frames.propose(df, config.label, embeddings=embeddings, id_columns=config.id_columns)
    frames.write_proposal(found, config.output)
    more = f"\nleft out (the file says why): {listed(found.left_out)}" if found.left_out else ""
    return (
        f"{config.output}: {found}{more}\nnext: read and correct it, then run lockstep etl_table with the same flags "
        "but --propose-schema, --for, --label and --exclude, with "
        f"--schema {config.output}, --id-columns and an --output for the dataset"
    )


def frame(
    spark: SparkSession, config: TableConfig, fields: Sequence[str] | None = None, snapshot: Snapshot | None = None
) -> tuple[DataFrame, frozenset[str]]:
    """The rows of the table, query or files, and the columns of files that are left out, as read_files has them.
    `fields` are those of a declared schema; `snapshot` is the version of the table to read, if there is one.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import AnalysisException, ParseException, PySparkException

    try:
        if config.table is not None:
            return spark.table(config.table), frozenset()
        elif config.query is not None:
            # Only a query is valid in parentheses: a statement that changes something is an error.
            query = f"SELECT * FROM (\n{config.query.strip().rstrip(';')}\n) AS query"
            return of_query(spark, query), frozenset()
        if snapshot is not None:
            return read_snapshot(spark, snapshot, partial(_is_used, config, fields))
        if config.input_format.lower() in FORMATS:
            return read_files(spark, config.inputs, config.input_format.lower(), partial(_is_used, config, fields))
        return spark.read.format(config.input_format).load(list(config.inputs)), frozenset()
    except PySparkException as error:
        if not isinstance(error, AnalysisException | ParseException) and not any(map(_said(error).count, _LAYOUTS)):
            raise
        raise _unreadable(config, error) from None
    except Py4JJavaError as error:  # pyspark has no class for these
        if _NO_FILE_SYSTEM.search(str(error)):
            raise ConfigError(
                "Spark cannot read these files: it has no file system for their URLs",
                got=", ".join(config.inputs),
                allowed="tables where Spark itself can read: s3a:// with its jar",
                next_step="Write s3a:// and add `--packages org.apache.hadoop:hadoop-aws:VERSION` to spark-submit"
                " (docs/object-stores.md).",
            ) from None
        if f"[{_NO_FORMAT}]" not in str(error):
            raise
        raise ConfigError(
            f"Spark does not know the format {config.input_format}",
            got=_NO_FORMAT,
            allowed="parquet, orc, csv, json, or one whose jar the session has",
            next_step=f"Correct --input-format, or name its jar by spark-submit --packages; {' and '.join(LAKES)} need"
            f" none with --table-version {LATEST}.",
        ) from None


def _snapshot(config: TableConfig) -> Snapshot | None:
    """The version of a table that `--table-version` names; None without it."""
    if config.table_version is None:
        return None
    number = None if config.table_version == LATEST else int(config.table_version)
    return open_snapshot(config.input_format.lower(), config.inputs[0], number)


def _is_used(config: TableConfig, fields: Sequence[str] | None, name: str) -> bool:
    """Whether the job looks at a column of its input."""
    sampling, column = config.sampling, config.split_spec.column
    if name in (*config.id_columns, column, None if sampling is None else sampling.column):
        return True
    return name not in config.exclude if fields is None else name in fields


def _said(error: BaseException | None) -> str:
    """What an error of Spark says, and what it says of its causes: of a query on files only these name the layout."""
    texts = []
    while error is not None:
        texts.append(str(error).partition("JVM stacktrace")[0])
        error = getattr(error, "_cause", None) or error.__cause__
    return "\n".join(texts)


def _unreadable(config: TableConfig, error: Exception) -> ConfigError:
    first = str(error).strip().splitlines()[0][:500]
    missing = "NOT_FOUND" in first.upper() or "PATH_DOES_NOT_EXIST" in first.upper()
    name = config.table or config.query or ", ".join(config.inputs)
    kind = NotFoundError if missing else ConfigError
    said = _said(error)
    for condition, (allowed, step) in _LAYOUTS.items():
        if condition in said:
            folders = re.findall(r"\b(?:\w+:)?/[^\s,`]+", said)
            got = f"{condition}: {', '.join(folders)}" if folders else condition
            return kind(f"the input cannot be read: {name[:200]}", got=got[:500], allowed=allowed, next_step=step)
    return kind(
        f"the input cannot be read: {name[:200]}",
        got=first,
        allowed="a table of the session's catalog, a query (SELECT ...), or URLs that Spark can load",
        next_step=_ILLEGAL_STEP if "PARQUET_TYPE_ILLEGAL" in first else _STEP,
    )
