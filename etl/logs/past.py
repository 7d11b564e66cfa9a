"""The past of a web log: which labels wait for later requests, and what requests need to know of earlier ones.

N appends have the rows of one job over all files. So each dataset carries its open requests whole (those whose label
needs later requests), and of each visitor the last request that is settled, with the sums up to it.
Decision record: docs/decisions/012-web-log.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pyarrow as pa

from lockstep.etl import columns as c
from lockstep.etl.choices import LABEL_WINDOW_S
from lockstep.etl.logs.config import DEFAULT_LABEL
from lockstep.etl.spark.session import job_description
from lockstep.etl.write.append import Parent
from lockstep.etl.write.carried import OPEN, Carried, Carry, check_carried, read_carried
from lockstep.storage.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ORDER = ("part", "source", "position")
_OTHERS = pa.schema(
    [
        ("part", pa.int32()),  # how many datasets the one continues in which the request was read
        ("source", pa.int32()),
        ("position", pa.int64()),
        ("requests", pa.int64()),  # how many requests of the visitor the row stands for: 1, or all up to this one
        ("since", pa.int64()),  # the time of the first of them
        ("stays", pa.bool_()),  # the label, if it is known
        (OPEN, pa.bool_()),
    ]
)
# `CASE WHEN time + N > log_end THEN NULL ELSE ... END` as Spark's parser prints it, and windows that begin at the
# request or later.
_WAITS = re.compile(
    r"CASE WHEN \(\('time \+ (\d{1,9})\) > 'log_end\) THEN (?:null|cast\(null as boolean\)) ELSE (.*) END",
    re.IGNORECASE | re.DOTALL,
)
_EDGE = r"(?:currentrow\$\(\)|(\d{1,9}))"
_WINDOW = re.compile(
    r"windowspecdefinition\('visitor, 'time ASC NULLS FIRST,"
    rf" specifiedwindowframe\(RangeFrame, {_EDGE}, {_EDGE}\)\)",
    re.IGNORECASE,
)
_LOOKS_ROUND = re.compile("windowspec|windowexpression", re.IGNORECASE)
_LOG_END = re.compile("log_end", re.IGNORECASE)


def hold_of(parsed: str) -> int | None:
    """How many seconds a label waits for later requests, so that appends give what one job gives; None if they cannot.

    `parsed` is the label as Spark's parser prints it. A label of a request's own columns waits for nothing: 0. One with
    windows or log_end must be NULL, as its first case, where time + N > log_end, and its windows must be a visitor's,
    in the order of time, over a range from the request on that is no longer than N: N.
    """
    found = _WAITS.fullmatch(parsed.strip())
    hold, rest = (0, parsed) if found is None else (int(found[1]), found[2])
    windows = list(_WINDOW.finditer(rest))
    known = len(windows) == len(_LOOKS_ROUND.findall(rest)) and not _LOG_END.search(rest)
    return hold if known and all(int(window[2] or 0) <= hold for window in windows) else None


def text_of(spark: SparkSession, expression: str) -> str:
    """A SQL expression as Spark's parser prints it: one form for all spellings."""
    return str(spark._jsparkSession.sessionState().sqlParser().parseExpression(expression).toString())


def looks_round(parsed: str) -> bool:
    """Whether an expression that `text_of` returned looks at other rows."""
    return _LOOKS_ROUND.search(parsed) is not None


def hold_of_label(spark: SparkSession, label: str | None) -> int | None:
    """`hold_of` for --label, None for the default."""
    return LABEL_WINDOW_S if label in (None, DEFAULT_LABEL) else hold_of(text_of(spark, label))


def carried_schema(texts: Sequence[str]) -> pa.Schema:
    """The columns of a carried request; `texts` are those of the log: visitor, page, query ..."""
    return pa.schema([*((name, pa.string()) for name in texts), ("time", pa.int64()), *_OTHERS])


@dataclass(frozen=True)
class Past:
    """What the requests of a log have behind them: the parent, and what it carries. The first log has neither."""

    parent: Parent | None = None
    carried: Carried | None = None

    @classmethod
    def of(cls, parent: Parent | None) -> Past:
        """The past that the parent carries. Raises what check_carried raises."""
        return cls() if parent is None else cls(parent, check_carried(parent))

    @property
    def part(self) -> int:
        """How many datasets this one continues."""
        return 0 if self.parent is None else len(self.parent.chain)

    def log_end(self, last_time: int) -> int:
        """The latest time of the whole log, whose last part ends with `last_time`."""
        return last_time if self.carried is None else max(last_time, self.carried.log_end)

    def carry(self, texts: Sequence[str], last_time: int, hold_s: int) -> Carry:
        """How this dataset carries its requests."""
        reopened = 0 if self.carried is None else self.carried.open
        order = ("visitor", "time", *_ORDER)
        return Carry(
            schema=carried_schema(texts),
            key="visitor",
            order=order,
            log_end=self.log_end(last_time),
            hold_s=hold_s,
            reopened=reopened,
        )

    def rows(self, spark: SparkSession, texts: Sequence[str]) -> DataFrame | None:
        """The requests that the parent carries, with the columns of carried_schema; None for the first log."""
        return None if self.parent is None else read_carried(spark, self.parent, carried_schema(texts))

    def check_label(self, hold_s: int | None, label: str | None) -> None:
        """Raise ConfigError for a label that an append cannot continue."""
        if self.parent is None or hold_s is not None:
            return
        raise ConfigError(
            "--append-to does not go with this --label: its rows would not be those of one job over all files",
            got=str(label)[:500],
            allowed="a label of a request's own columns, or CASE WHEN time + N > log_end THEN NULL ELSE ... END with"
            " windows (PARTITION BY visitor ORDER BY time RANGE BETWEEN ... AND at most N FOLLOWING)",
            next_step="Write the label so, or make one dataset of all files without --append-to.",
        )

    def check_order(self, pages: DataFrame, first_time: int | None, urls: Sequence[str], label: str | None) -> None:
        """Raise DataError if requests of this part change a record that is written already: those that come before a
        settled request of their visitor, and those in the window of its label, unless that is decided.

        `pages` have visitor, time, _source and _position; `first_time` is the least time among them.
        """
        if self.parent is None or self.carried is None or first_time is None or first_time > self.carried.log_end:
            return
        from pyspark.sql import functions as f

        end = self.carried.log_end
        old = read_carried(pages.sparkSession, self.parent, carried_schema(("visitor",)))
        late = too_late(pages, old, end, self.carried.hold_s, label)
        sums = (f.count(f.lit(1)).alias("n"), f.min(f.struct(c.SOURCE, c.POSITION, "time")).alias("first"))
        with job_description(pages.sparkSession, "look for requests that come too late"):
            (found,) = late.agg(*sums).collect()
        if not found["n"]:
            return
        source, position, time = found["first"]
        raise DataError(
            f"{found['n']} requests come too late: they would change records of {self.parent.url}, or of those before",
            got=f"{urls[source]} at byte {position}, of {_moment(time)}, is the first",
            allowed=f"requests in the order of time: the log was read up to {_moment(end)}",
            next_step="Append logs in the order of time, each once. For one that came late, make one dataset of all"
            " files, or make the last one again of its files and this one.",
        )


def too_late(pages: DataFrame, old: DataFrame, log_end: int, hold_s: int, label: str | None) -> DataFrame:
    """The requests of `pages` (visitor, time, _source, _position) that change a record of which `old`, the carried rows
    of a log up to log_end, know that it is written.

    A request after all settled ones of its visitor changes no feature. Whether it changes a label follows from the last
    settled request alone: the window of an earlier one ends before that, or holds it.
    """
    from pyspark.sql import functions as f

    new = pages.where(f"time <= {log_end}L").select("visitor", "time", c.SOURCE, c.POSITION).alias("new")
    # The default label asks for one request in the window: more of them change nothing.
    decided = "coalesce(old.stays, false)" if label in (None, DEFAULT_LABEL) else "false"
    changes = (
        f"old.visitor = new.visitor AND (old.time > new.time OR (old.time = new.time AND old.time < {log_end}L)"
        f" OR (old.time < new.time AND old.time + {hold_s}L >= new.time AND NOT {decided}))"
    )
    return new.join(old.where(f"NOT {OPEN}").alias("old"), f.expr(changes), "left_semi")


def _moment(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()  # a time in a log is of the years 1 to 9999
