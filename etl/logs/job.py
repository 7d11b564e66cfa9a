"""From a log to a dataset: parse, quarantine, label, split, publish; web requests, or records of a declared schema."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from etl.columns import ddl_of
from etl.input.files import DEFAULT_SPLIT_BYTES, digest_sources
from etl.logs import records, web
from etl.logs.parse import (
    BAD,
    DIGEST,
    NO_TIME,
    ROW,
    SUMMARY,
    SUMMARY_COLUMNS,
    LineParser,
    ParseLog,
    Work,
    output_schema,
)
from etl.logs.plan import Plan, plan_of
from etl.logs.records import RecordLines
from etl.spark.errors import translated
from etl.spark.session import described, tuned, watched
from etl.spark.tasks import over_slices
from etl.write.checks import check_label, check_output
from etl.write.config import DEFAULT_LABEL, LABEL_WINDOW_S, LogsConfig
from etl.write.dataset import write_dataset
from etl.write.quarantine import Origin, check_bad
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import DataError

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
    raw_bytes: int
    dropped: dict[str, int]
    log_end: int
    first_page: int | None
    digests: list[dict[str, Any]]
    """Rows of etl.input.files of the files that were read whole."""


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
        rows = parsed(spark, plan.work, plan.parser, config.split_bytes).persist()
        try:
            totals = _totals(spark, rows)
            bad_rows = rows.where(f"_kind = {BAD}").selectExpr(*_BAD_ROWS)
            check_bad(config, bad_rows, urls, totals.bad, totals.read)
            if config.label is None:
                _check_covered(totals)
            origin = Origin(
                sources=digest_sources(spark, plan.sources, totals.digests),
                read=totals.read,
                dropped=totals.dropped,
                quarantined=totals.bad,
                quarantined_raw_bytes=totals.raw_bytes,
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


def parsed(
    spark: SparkSession, work: Sequence[Work], parser: LineParser, slice_bytes: int = DEFAULT_SPLIT_BYTES
) -> DataFrame:
    """The rows of etl.logs.parse over all ranges, some `slice_bytes` a task."""
    sizes = [one.part.length for one in work]
    items = [one.to_json() for one in work]
    return over_slices(spark, items, sizes, slice_bytes, ParseLog(parser), output_schema(parser))


def _check_label(spark: SparkSession, config: LogsConfig, plan: Plan) -> None:
    if config.label is None:
        return
    if not isinstance(plan.parser, RecordLines):
        check_label(spark, config.label, web.label_schema(plan.told), web.LABEL_TYPES, web.LABEL_ALLOWED)
    else:
        kinds = records.label_kinds(plan.schema)
        columns = plan.parser.schema
        allowed = f"a SQL expression of type {kinds[0]} over {ddl_of(columns)}"[:500]
        check_label(spark, config.label, columns, kinds, allowed)


def _labelled(rows: DataFrame, config: LogsConfig, plan: Plan, log_end: int) -> DataFrame:
    if isinstance(plan.parser, RecordLines):
        by_place = plan.id_columns == records.PLACE_COLUMNS
        return records.rows_of(rows, plan.schema, plan.parser, config.label, by_place)
    return web.rows_of(rows, config.label or DEFAULT_LABEL, log_end, plan.told)


def _totals(spark: SparkSession, rows: DataFrame) -> _Totals:
    """The sums over all ranges' summaries: one for what was read, one for each reason of a drop."""
    with described(spark, "read and parse the log"):
        found = rows.where(f"_kind IN ({SUMMARY}, {DIGEST})").select(*SUMMARY_COLUMNS).collect()
    dropped: Counter[str] = Counter()
    for row in found:
        if row["_kind"] == SUMMARY and row["_reason"] is not None:
            dropped[row["_reason"]] += row["_dropped_lines"]
    wholes = [row for row in found if row["_kind"] == SUMMARY and row["_reason"] is None]
    last = max(row["_last_time"] for row in wholes)
    digests = [row for row in found if row["_kind"] == DIGEST]
    return _Totals(
        read=sum(row["_lines"] for row in wholes),
        bad=sum(row["_bad"] for row in wholes),
        raw_bytes=sum(row["_raw_bytes"] for row in wholes),
        dropped=dict(dropped),
        log_end=0 if last == NO_TIME else last,
        first_page=min((row["_first_time"] for row in wholes if row["_first_time"] is not None), default=None),
        digests=[{"number": row["_source"], "bytes": row["_length"], "sha256": row["_sha256"]} for row in digests],
    )


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
