"""The log job: web requests, or records of a declared schema, become a dataset.

Decision record: docs/decisions/063-log-sources.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.etl import columns as c
from lockstep.etl.choices import LABEL_WINDOW_S
from lockstep.etl.columns import ddl_of
from lockstep.etl.input.files import DEFAULT_SPLIT_BYTES, Source, digest_sources
from lockstep.etl.logs import records, web
from lockstep.etl.logs.config import DEFAULT_LABEL, LogsConfig
from lockstep.etl.logs.pages import most_frequent
from lockstep.etl.logs.parse import (
    BAD,
    DIGEST,
    NO_TIME,
    ROW,
    SUFFIX,
    SUMMARY,
    SUMMARY_COLUMNS,
    LineParser,
    ParseLog,
    Work,
    output_schema,
)
from lockstep.etl.logs.past import hold_of_label, looks_round, text_of
from lockstep.etl.logs.plan import Plan, plan_of, sources_of
from lockstep.etl.logs.records import RecordLines
from lockstep.etl.logs.rejected import look
from lockstep.etl.spark.session import job_description
from lockstep.etl.spark.tasks import over_slices
from lockstep.etl.write.checks import check_label, check_output
from lockstep.etl.write.increment import ReadBefore
from lockstep.etl.write.job import Counts, Input, Labelled
from lockstep.etl.write.job import run as run_job
from lockstep.etl.write.refusal import Look
from lockstep.etl.write.sources import check_contents
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

# columns of lockstep.etl.input.files.DIGEST, and those of a row of lockstep.etl.logs.parse that hold them
_DIGEST_COLUMNS = {
    "number": "_source",
    "bytes": "_length",
    "sha256": "_sha256",
    "content_bytes": "_content_bytes",
    "content_crc32c": "_content_crc32c",
}


SUFFIXES = "suffixes_of_pages"  # in created_by.config
LISTED_SUFFIXES = 10
NO_SUFFIX = "(none)"


@dataclass(frozen=True, kw_only=True)
class LogCounts(Counts):
    """The counts of the first pass over all ranges, the time of the last request (0 if there is none) and of the first
    request for a page (None if there is none, and for records).
    """

    log_end: int
    first_page: int | None
    digests: list[dict[str, Any]]
    """Rows of lockstep.etl.input.files.DIGEST of the files that were read whole."""
    records: dict[int, int]
    """How many records each of these has, by the number of the file."""
    suffixes: Mapping[str, int]
    """How many requests for pages have each suffix; "" for none."""


def check(config: LogsConfig) -> Plan:
    """Check before Spark starts that the output is free, that the inputs exist and have the columns asked for, and that
    these go with split, sample, weights and the dataset that is continued.
    """
    return plan_of(config, check_output(config))


def check_increment(config: LogsConfig) -> Plan | None:
    """What `check` returns, for the files that no dataset of the chain has read; None if there is no such file.

    Raises also DataError for a file that has grown or changed since it was read.
    """
    parent = check_output(config)
    sources = sources_of(config, None if parent is None else ReadBefore(parent))
    return plan_of(config, parent, sources) if sources else None


def run(spark: SparkSession, config: LogsConfig, plan: Plan | None = None) -> DatasetManifest:
    """Parse, label, split and publish; `plan` is what `check` returned, if it was called.

    Raises the errors of check, and DataError for input that is not such a log.
    """
    return run_job(spark, LogInput(config, plan or check(config)))


@dataclass(frozen=True)
class LogInput(Input[LogCounts]):
    """A log of web requests, or records of a declared schema."""

    what, label, is_rejected = "log", "logs", f"_kind = {BAD}"
    first_step = "read and parse the log"
    config: LogsConfig
    plan: Plan

    @property
    def sources(self) -> Sequence[Source]:
        """The log's files."""
        return self.plan.sources

    def parsed(self, spark: SparkSession) -> DataFrame:
        """The rows of lockstep.etl.logs.parse. Raises ConfigError for a --label that is not one."""
        self._check_label(spark)
        return parsed(spark, self.plan.work, self.plan.parser, self.config.split_bytes)

    def counted(self, parsed: DataFrame) -> LogCounts:
        """The sums over the summaries of all ranges: one of what was read, one for each reason of a drop."""
        with job_description(parsed.sparkSession, self.first_step):
            found = parsed.where(f"_kind IN ({SUMMARY}, {DIGEST}, {SUFFIX})").select(*SUMMARY_COLUMNS).collect()
        dropped, suffixes = Counter[str](), Counter[str]()
        for row in found:
            if row["_kind"] == SUFFIX:
                suffixes[row["_reason"]] += row["_lines"]
            if row["_kind"] == SUMMARY and row["_reason"] is not None:
                dropped[row["_reason"]] += row["_dropped_lines"]
        wholes = [row for row in found if row["_kind"] == SUMMARY and row["_reason"] is None]
        last = max(row["_last_time"] for row in wholes)
        read, bad = sum(row["_lines"] for row in wholes), sum(row["_bad"] for row in wholes)
        digests = [row for row in found if row["_kind"] == DIGEST]
        return LogCounts(
            read=read,
            bad=bad,
            lines=read + sum(row["_newlines"] for row in wholes),
            bad_lines=bad + sum(row["_bad_newlines"] for row in wholes),
            raw_bytes=sum(row["_raw_bytes"] for row in wholes),
            dropped=dict(dropped),
            log_end=0 if last == NO_TIME else last,
            first_page=min((row["_first_time"] for row in wholes if row["_first_time"] is not None), default=None),
            suffixes=suffixes,
            digests=[{name: row[column] for name, column in _DIGEST_COLUMNS.items()} for row in digests],
            records={row["_source"]: row["_lines"] for row in digests},
        )

    def look(self, rejected: Sequence[Row]) -> Look:
        """The first rejected line, where it stops to fit the format, and the formats that would read such lines."""
        found = [(bytes(row[c.RAW]), str(row[c.REASON])) for row in rejected]
        return look(found, self.plan.parser.form, records=isinstance(self.plan.parser, RecordLines))

    def labelled(self, parsed: DataFrame, counts: LogCounts) -> Labelled:
        """Raises DataError if the log is shorter than the default label's window, if a file is there twice, or if it
        comes too late for an append.
        """
        config, plan, spark = self.config, self.plan, parsed.sparkSession
        sources = digest_sources(spark, plan.sources, counts.digests, paths=plan.by_place)
        check_contents(sources, counts.records, plan.target.parent)
        if config.label is None and plan.target.parent is None and not config.unlabelled:
            _check_covered(counts)
        rows, carry = parsed.where(f"_kind = {ROW}"), None
        if isinstance(plan.parser, RecordLines):
            rows = records.rows_of(rows, plan.target.rows, plan.parser, config.label)
        else:
            past, texts = plan.past, web.texts_of(plan.combined)
            past.check_order(rows, counts.first_page, [source.url for source in plan.sources], config.label)
            continues = config.split_spec.continues and not config.unlabelled
            hold_s = hold_of_label(spark, config.label) if continues else None
            rows = web.rows_of(
                rows,
                "false" if config.unlabelled else config.label or DEFAULT_LABEL,
                past.log_end(counts.log_end),
                plan.combined,
                past=past.rows(spark, texts),
                part=past.part,
                hold_s=hold_s,
            )
            carry = None if hold_s is None else past.carry(texts, counts.log_end, hold_s)
        return Labelled(
            rows=rows,
            target=plan.target,
            id_columns=plan.id_columns,
            sources=sources,
            created_config={**config.to_json(), **plan.created, **_suffixes(counts)},
            carry=carry,
        )

    def _check_label(self, spark: SparkSession) -> None:
        label, plan = self.config.label, self.plan
        if label is None:
            return
        if not isinstance(plan.parser, RecordLines):
            check_label(spark, label, web.label_schema(plan.combined), web.LABEL_TYPES, web.LABEL_ALLOWED)
            plan.past.check_label(hold_of_label(spark, label), label)
        else:
            kinds, columns = records.label_kinds(plan.target.rows), plan.parser.schema
            allowed = f"a SQL expression of type {kinds[0]} over {ddl_of(columns)}"[:500]
            check_label(spark, label, columns, kinds, allowed)
            if plan.target.parent is not None and looks_round(text_of(spark, label)):
                raise ConfigError(
                    "--append-to does not go with a --label that looks at other records",
                    got=label[:500],
                    allowed="an expression over the columns of one record: an append does not read those before it",
                    next_step="Make one dataset of all files, the earlier and the new, without --append-to.",
                )


def parsed(
    spark: SparkSession, work: Sequence[Work], parser: LineParser, slice_bytes: int = DEFAULT_SPLIT_BYTES
) -> DataFrame:
    """The rows of lockstep.etl.logs.parse over all ranges, about `slice_bytes` a task."""
    sizes = [one.part.length for one in work]
    items = [one.to_json() for one in work]
    return over_slices(spark, items, sizes, slice_bytes, ParseLog(parser), output_schema(parser))


def _suffixes(counts: LogCounts) -> dict[str, Any]:
    """For the manifest: the most frequent suffixes of pages."""
    found = {suffix or NO_SUFFIX: count for suffix, count in counts.suffixes.items()}
    return {SUFFIXES: most_frequent(found, LISTED_SUFFIXES)} if found else {}


def _check_covered(totals: LogCounts) -> None:
    """Raise DataError if the log ends before the default label of any page request is known."""
    if totals.first_page is None or totals.first_page + LABEL_WINDOW_S <= totals.log_end:
        return
    raise DataError(
        f"the log is shorter than the default label's window of {LABEL_WINDOW_S} s",
        got=f"{totals.log_end - totals.first_page} s from the first page request to the log's last request",
        allowed=f"{LABEL_WINDOW_S} s or more: the label is whether the visitor asks for another page in that time",
        next_step="Add the log's next hours to --input: a first dataset, to which later logs are appended, must hold "
        "records whose label is known. Or give a --label with a shorter window (docs/formats.md).",
    )
