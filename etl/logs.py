"""From a log to a dataset: parse, quarantine, label, split, publish; web requests, or records of a declared schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from etl import records, weblog
from etl.config import DEFAULT_LABEL, LABEL_WINDOW_S, LogsConfig
from etl.digest import digest_sources
from etl.label import check_label
from etl.log_plan import Plan, plan_of
from etl.output import check_output
from etl.parse import BAD, NO_TIME, ROW, SUMMARY, WORK_DDL, LineParser, ParseLog, Work, ddl_of, output_ddl
from etl.quality import check_bad
from etl.records import RecordLines
from etl.session import tuned
from etl.spark_errors import translated
from etl.tasks import planned
from etl.watch import watched
from etl.write import Origin, write_dataset
from storage.errors import DataError
from storage.manifest import DatasetManifest
from storage.settings import hadoop_settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_BAD_ROWS = tuple(f"_{name} AS {name}" for name in ("source", "position", "reason", "raw", "length", "sha256"))


@dataclass(frozen=True, slots=True)
class _Totals:
    """What the first pass counted over all ranges, the time of the last request (0 without), and that of the first for
    a page (None without one, and of records).
    """

    read: int
    bad: int
    dropped: dict[str, int]
    log_end: int
    first_page: int | None


def check(config: LogsConfig) -> Plan:
    """What can be checked before Spark starts: the output is free, the inputs are there and have the columns wanted,
    which go with split, sample, weights and the dataset that is continued.
    """
    check_output(config)
    return plan_of(config)


def run(spark: SparkSession, config: LogsConfig, plan: Plan | None = None) -> DatasetManifest:
    """Parse, label, split and publish; `plan` is what `check` gave, where it was asked already.

    Raises the errors of check, and DataError where the log is not one.
    """
    plan = plan or check(config)
    urls = [source.url for source in plan.sources]
    with translated(spark, "reading the log"), tuned(spark, plan.sources), watched(spark, "etl logs"):
        _check_label(spark, config, plan)
        rows = parsed(spark, plan.work, plan.parser).persist()
        try:
            totals = _totals(rows, web=not isinstance(plan.parser, RecordLines))
            bad_rows = rows.where(f"_kind = {BAD}").selectExpr(*_BAD_ROWS)
            check_bad(bad_rows, urls, totals.bad, totals.read, config.max_bad_share, config.max_bad)
            if config.label is None:
                _check_covered(totals)
            origin = Origin(
                sources=digest_sources(spark, plan.sources),
                read=totals.read,
                dropped=totals.dropped,
                quarantined=totals.bad,
                quarantined_raw_bytes=_raw_bytes(bad_rows) if totals.bad else 0,
                quarantine=bad_rows,
                created_config=config.to_json(),
            )
            return write_dataset(
                _labelled(rows.where(f"_kind = {ROW}"), config, plan, totals.log_end),
                config.output,
                schema=plan.schema,
                id_columns=plan.id_columns,
                origin=origin,
                **config.write_options(),
            )
        finally:
            rows.unpersist()


def parsed(spark: SparkSession, work: Sequence[Work], parser: LineParser) -> DataFrame:
    """The rows of etl.parse over all ranges, a task each."""
    plan = planned(spark, [one.row() for one in work], WORK_DDL)
    return plan.mapInArrow(ParseLog(hadoop_settings(), parser), output_ddl(parser))


def _check_label(spark: SparkSession, config: LogsConfig, plan: Plan) -> None:
    if not isinstance(plan.parser, RecordLines):
        columns, label = weblog.label_columns(plan.told), config.label or DEFAULT_LABEL
        check_label(spark, label, columns, weblog.LABEL_TYPES, weblog.LABEL_ALLOWED)
    elif config.label is not None:
        kinds = records.label_kinds(plan.schema)
        columns = ddl_of(plan.parser.schema)
        check_label(spark, config.label, columns, kinds, f"a SQL expression of type {kinds[0]} over {columns}"[:500])


def _labelled(rows: DataFrame, config: LogsConfig, plan: Plan, log_end: int) -> DataFrame:
    if isinstance(plan.parser, RecordLines):
        by_place = plan.id_columns == records.PLACE_COLUMNS
        return records.rows_of(rows, plan.schema, plan.parser, config.label, by_place)
    return weblog.rows_of(rows, config.label or DEFAULT_LABEL, log_end, plan.told)


def _totals(rows: DataFrame, *, web: bool) -> _Totals:
    """The sums over all ranges' summaries: one for what was read, one for each reason of a drop."""
    from pyspark.sql import functions as f

    sums = [f.sum(name).alias(name) for name in ("_lines", "_bad", "_dropped_lines")]
    ends = [f.max("_last_time").alias("last"), f.min("time" if web else f.lit(None)).alias("first")]
    found = rows.where(f"_kind <> {BAD}").groupBy("_kind", "_reason").agg(*sums, *ends).collect()
    summaries = [row for row in found if row["_kind"] == SUMMARY]
    (whole,) = [row for row in summaries if row["_reason"] is None]
    dropped = {row["_reason"]: int(row["_dropped_lines"]) for row in summaries if row["_reason"] is not None}
    last, first_page = int(whole["last"]), next((row["first"] for row in found if row["_kind"] == ROW), None)
    return _Totals(int(whole["_lines"]), int(whole["_bad"]), dropped, 0 if last == NO_TIME else last, first_page)


def _check_covered(totals: _Totals) -> None:
    """Raise DataError where the log ends before the default label of any page request is known."""
    if totals.first_page is None or totals.first_page + LABEL_WINDOW_S <= totals.log_end:
        return
    raise DataError(
        f"the log is shorter than the default label's window of {LABEL_WINDOW_S} s",
        got=f"{totals.log_end - totals.first_page} s from the first page request to the log's last request",
        allowed=f"{LABEL_WINDOW_S} s or more: the label is whether the visitor asks for another page in that time",
        next_step="Add the log's next hours to --input, or give a --label with a shorter window (docs/logs.md).",
    )


def _raw_bytes(bad_rows: DataFrame) -> int:
    return int(bad_rows.selectExpr("sum(length(raw)) AS n").collect()[0]["n"])
