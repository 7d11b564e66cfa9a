"""From a web log to a dataset: will this visitor ask for another page within half an hour?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from etl import weblog
from etl.config import LogsConfig
from etl.digest import digest_sources
from etl.parse import BAD, NO_TIME, OUTPUT_DDL, PAGE, RANGE_DDL, SUMMARY, ParseLog
from etl.quality import check_bad
from etl.ranges import Range, Source, find_sources, plan_ranges
from etl.session import tuned
from etl.spark_errors import translated
from etl.watch import watched
from etl.write import Origin, refuse_existing, write_dataset
from storage.errors import ConfigError
from storage.manifest import DatasetManifest
from storage.settings import hadoop_settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MAX_RANGES_A_JOB = 10_000


def check(config: LogsConfig) -> list[Source]:
    """What can be checked before Spark starts: the output is free, the inputs are there. Returns the input files."""
    refuse_existing(config.output)
    column = config.split_spec.column
    if column is not None and column not in weblog.ID_COLUMNS:
        raise ConfigError(
            f"--split names the column `{column}`",
            got=config.split,
            allowed=", ".join(weblog.ID_COLUMNS),
            next_step="Correct --split.",
        )
    return find_sources(config.inputs)


def run(spark: SparkSession, config: LogsConfig) -> DatasetManifest:
    """Parse, label, split and publish. Raises the errors of check, and DataError where the log is not one."""
    sources = check(config)
    ranges = plan_ranges(sources, config.split_bytes)
    with translated(spark, "reading the log"), tuned(spark, sources), watched(spark, "etl logs"):
        check_label(spark, config.label)
        rows = parsed(spark, ranges).persist()
        try:
            read, bad, not_pages, log_end = _totals(rows)
            check_bad(
                rows.where(f"kind = {BAD}"), [s.url for s in sources], bad, read, config.max_bad_share, config.max_bad
            )
            origin = Origin(
                sources=digest_sources(spark, sources),
                read=read,
                dropped={weblog.NOT_A_PAGE: not_pages},
                quarantined=bad,
                quarantined_raw_bytes=_raw_bytes(rows) if bad else 0,
                quarantine=rows.where(f"kind = {BAD}"),
                created_config=config.to_json(),
            )
            return write_dataset(
                rows_of(rows.where(f"kind = {PAGE}"), config.label, log_end),
                config.output,
                schema=weblog.schema(),
                id_columns=weblog.ID_COLUMNS,
                fmt=config.fmt,
                split=config.split_spec,
                shard_bytes=config.shard_bytes,
                seed=config.seed,
                origin=origin,
            )
        finally:
            rows.unpersist()


def rows_of(pages: DataFrame, label: str, log_end: int) -> DataFrame:
    """Page requests (visitor, page, query, time, source, position) with label, features and the writer's columns."""
    seen = pages.select("visitor", "page", "query", "time", "source", "position").selectExpr(
        "*", f"{log_end}L AS log_end"
    )
    labelled = seen.selectExpr("*", f"({label}) AS {weblog.LABEL}")
    return labelled.selectExpr(*weblog.WINDOWS).selectExpr(*weblog.COLUMNS)


def check_label(spark: SparkSession, label: str) -> None:
    """Raise ConfigError for what is no SQL, names unknown columns, is not boolean, does not give one value for each
    row, or depends on chance or the clock.
    """
    from pyspark.errors import AnalysisException, ParseException

    empty = spark.createDataFrame([], weblog.LABEL_COLUMNS).selectExpr(
        "visitor", "page", "query", "time", "0L AS log_end"
    )
    try:
        labelled = empty.selectExpr("*", f"({label}) AS {weblog.LABEL}")
        kind = dict(labelled.dtypes)[weblog.LABEL]
        plan = labelled._jdf.queryExecution().analyzed()
    except (AnalysisException, ParseException) as error:
        raise _bad_label(label, str(error).strip().splitlines()[0]) from None
    if kind != "boolean":
        raise _bad_label(label, f"type {kind}")
    jvm = spark.sparkContext._jvm  # pyspark tells nothing of a plan's expressions
    assert jvm is not None
    patterns = jvm.org.apache.spark.sql.catalyst.trees.TreePattern
    if not plan.deterministic():
        raise _bad_label(label, "an expression that depends on chance")
    if plan.containsPattern(patterns.CURRENT_LIKE()):
        raise _bad_label(label, "an expression that depends on the clock")
    if plan.containsPattern(patterns.GENERATE()) or plan.containsPattern(patterns.PLAN_EXPRESSION()):
        raise _bad_label(label, "an expression that makes rows or asks another table")


def parsed(spark: SparkSession, ranges: Sequence[Range]) -> DataFrame:
    """The rows of etl.parse over all ranges, a task each."""
    rows = [(part.source_index, part.url, part.start, part.length, part.codec) for part in ranges]
    partitions = min(len(rows), MAX_RANGES_A_JOB)
    planned = spark.createDataFrame(spark.sparkContext.parallelize(rows, partitions), RANGE_DDL)
    return planned.mapInArrow(ParseLog(hadoop_settings()), OUTPUT_DDL)


def _totals(parsed: DataFrame) -> tuple[int, int, int, int]:
    """(lines, bad lines, requests that are no page, last time) over all ranges, from their summaries."""
    found = (
        parsed.where(f"kind = {SUMMARY}")
        .agg({"lines": "sum", "bad": "sum", "dropped": "sum", "last_time": "max"})
        .collect()[0]
    )
    lines, last = int(found["sum(lines)"]), int(found["max(last_time)"])
    return lines, int(found["sum(bad)"]), int(found["sum(dropped)"]), 0 if last == NO_TIME else last


def _raw_bytes(parsed: DataFrame) -> int:
    return int(parsed.where(f"kind = {BAD}").selectExpr("sum(length(raw)) AS n").collect()[0]["n"])


def _bad_label(label: str, got: str) -> ConfigError:
    return ConfigError(
        f"--label is not a label: {label}",
        got=got,
        allowed="a boolean SQL expression over visitor, page, query, time and log_end; NULL means censored",
        next_step="Correct --label; leave it out for the default.",
    )
