"""The configuration of the log job, checked before anything is read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from lockstep.etl.choices import LABEL_WINDOW_S
from lockstep.etl.logs.fields import TAB
from lockstep.etl.logs.formats import LOG_FORMATS, Form, LogFormat, format_of, formats_that
from lockstep.etl.split.splits import TIME_COLUMN
from lockstep.etl.write.config import OutputConfig
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import require
from lockstep.storage.urls import several

_SUFFIX = re.compile(r"[a-z0-9]{1,16}")
"""Seconds after a request in which the default label looks for another one."""
DEFAULT_LABEL = (
    f"CASE WHEN time + {LABEL_WINDOW_S} > log_end THEN NULL ELSE count(*) OVER"
    f" (PARTITION BY visitor ORDER BY time RANGE BETWEEN 1 FOLLOWING AND {LABEL_WINDOW_S} FOLLOWING) > 0 END"
)
"""NULL for each request whose window the log does not cover. That a visit continues can be seen at once, that it ended
only after the whole window: without the NULLs, nearly all labels of the last window would be true.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogsConfig(OutputConfig):
    """The configuration of `lockstep etl_logs`."""

    log_format: str = "common"
    """common or combined (Apache, Nginx), tsv, csv, json (an object a line), w3c (IIS, CloudFront) or alb (AWS)."""
    label: str | None = None
    """A SQL expression; NULL leaves the record out. For web requests over visitor, page, query, time and log_end
    (seconds since 1970, UTC), None for DEFAULT_LABEL; with a schema over the columns, None for its label column."""
    schema: str | Schema | None = None
    """A declared schema, or its text or URL (lockstep.features.schema.declare): the input is such records, not web
    requests.
    """
    id_columns: tuple[str, ...] = ()
    """With a schema: the columns that identify a record; none: the file's path and the byte position."""
    columns: tuple[str, ...] = ()
    """TSV and CSV: the names of a line's fields; none: each file's first line names them."""
    time_columns: tuple[str, ...] = ()
    """With a schema: columns in ISO 8601, which become int64 microseconds since 1970 UTC."""
    null_texts: tuple[str, ...] = ()
    """TSV and CSV: texts that mean null, besides an empty field."""
    delimiter: str | None = None
    """CSV: the character between fields, such as `;`; None for a comma."""
    quoted_newlines: bool = False
    """CSV: a newline inside quotes is part of a record. Then one task reads the whole file."""
    visitor_column: str | None = None
    """Web requests with named fields: the column of the visitor; None for one with a known name."""
    time_column: str | None = None
    """The column of the time, as for the visitor."""
    status_column: str | None = None
    """The column of the status, as for the visitor."""
    method_column: str | None = None
    """The column of the method, as for the visitor."""
    target_column: str | None = None
    """The column of the target, as for the visitor."""
    query_column: str | None = None
    """The column of the query of targets that have none, as for the visitor."""
    request_column: str | None = None
    """The column of the whole request line, as for the visitor."""
    page_suffixes: tuple[str, ...] = ()
    """Web requests: suffixes of pages that otherwise are none."""
    asset_suffixes: tuple[str, ...] = ()
    """Web requests: suffixes of what is no page."""

    def __post_init__(self) -> None:
        super(LogsConfig, self).__post_init__()
        for name in ("id_columns", "columns", "time_columns", "null_texts"):
            object.__setattr__(self, name, several(getattr(self, name)))
        require(self.log_format in LOG_FORMATS, "--log-format", self.log_format, ", ".join(LOG_FORMATS))
        self._check_delimiter()
        for flag, given, fits in (
            ("--schema", self.schema is not None, _is_table),
            *((f"--{role}-column", True, _has_columns) for role in self.role_columns),
            ("--columns", bool(self.columns), _is_delimited),
            ("--null-text", bool(self.null_texts), _is_delimited),
            ("--quoted-newlines", self.quoted_newlines, _has_quotes),
        ):
            allowed = f"with --log-format {formats_that(fits)}"
            require(not given or fits(self.format), flag, f"--log-format {self.log_format}", allowed)
        named = self.schema is None or bool(self.id_columns)
        require(
            self.input_root is None or not named,
            "--input-root",
            str(self.input_root),
            "with --schema and without --id-columns: no other ids name the file",
        )
        for flag, names in (("--id-columns", self.id_columns), ("--time-columns", self.time_columns)):
            require(len(set(names)) == len(names) and all(names), flag, " ".join(names), "each name once")
        require(len(set(self.columns)) == len(self.columns), "--columns", " ".join(self.columns), "each name once")
        self._check_web()
        require(not (self.label and self.unlabelled), "--label", "with --unlabelled", "without it: there are no labels")
        require(
            not self.split_spec.given,
            "--split",
            self.split,
            "80/20 or group:COLUMN:80/20: a log does not name splits",
        )

    def _check_delimiter(self) -> None:
        """Raise ConfigError for a delimiter of another format, and for a character that cannot be one."""
        mark = TAB if self.delimiter == r"\t" else self.delimiter
        if mark is None:
            return
        fits = _has_quotes(LOG_FORMATS[self.log_format])
        allowed = f"with --log-format {formats_that(_has_quotes)}"
        require(fits, "--delimiter", f"--log-format {self.log_format}", allowed)
        good = len(mark) == 1 and (mark == TAB or (mark.isascii() and mark.isprintable() and not mark.isalnum()))
        require(good and mark != '"', "--delimiter", repr(mark), r"one character such as ; or |, or \t for a tab")
        object.__setattr__(self, "delimiter", None if mark == "," else mark)

    def _check_web(self) -> None:
        """Raise ConfigError for columns of roles and suffixes that contradict each other or the schema."""
        for name in ("page_suffixes", "asset_suffixes"):
            suffixes = tuple(suffix.lower().removeprefix(".") for suffix in several(getattr(self, name)))
            object.__setattr__(self, name, suffixes)
            good = all(_SUFFIX.fullmatch(suffix) for suffix in suffixes)
            require(good, _flag(name), " ".join(suffixes), "letters and digits, 16 at most, such as pdf,docx")
        both = set(self.page_suffixes) & set(self.asset_suffixes)
        require(not both, "--page-suffixes", " ".join(sorted(both)), "suffixes that --asset-suffixes does not name")
        columns = self.role_columns
        flags = [f"--{role}-column" for role in columns]
        flags += [_flag(name) for name in ("page_suffixes", "asset_suffixes") if getattr(self, name)]
        require(self.schema is None or not flags, ", ".join(flags), "--schema", "without --schema: for web requests")
        apart = len(set(columns.values())) == len(columns)
        require(apart, ", ".join(flags), " ".join(columns.values()), "another column for each role")
        whole = "request" in columns and bool({"target", "query"} & set(columns))
        require(not whole, "--request-column", ", ".join(flags), "the whole request line, or its target")

    @property
    def format(self) -> LogFormat:
        """What is known of `log_format`, with its delimiter."""
        return format_of(self.log_format, self.delimiter)

    @property
    def form(self) -> Form:
        """How lines are to be read."""
        nulls = self.null_texts if self.format.absent is None else (self.format.absent,)
        return Form(self.log_format, nulls, self.has_header, self.quoted_newlines, self.delimiter)

    @property
    def role_columns(self) -> dict[str, str]:
        """The columns that are given, by their roles."""
        roles = ("visitor", "time", "status", "method", "target", "query", "request")
        given = ((role, getattr(self, f"{role}_column")) for role in roles)
        return {role: name for role, name in given if name is not None}

    @property
    def has_header(self) -> bool:
        """Whether the first line of each file names its fields."""
        return self.format.delimiter is not None and not self.columns

    @property
    def window(self) -> int | None:
        """`label_window`, by default that of the default label where web requests are split by their time."""
        spec = self.split_spec
        web = self.schema is None and self.label is None and (spec.kind, spec.column) == ("time", TIME_COLUMN)
        return LABEL_WINDOW_S if self.label_window is None and web else self.label_window

    @property
    def stored_window(self) -> int | None:
        """`window` for the column that decides the split as it is stored: a column of `time_columns` is in ISO 8601 in
        the input and in microseconds in the dataset.
        """
        if self.window is None:
            return None
        return self.window * (1_000_000 if self.split_spec.column in self.time_columns else 1)

    def to_json(self) -> dict[str, Any]:
        """The settings that decide the content of the dataset, in addition to input, seed and schema."""
        web = {
            "label": None if self.unlabelled else self.label or DEFAULT_LABEL,
            "role_columns": self.role_columns,
            "page_suffixes": list(self.page_suffixes),
            "asset_suffixes": list(self.asset_suffixes),
        }
        table = {
            "label": self.label,
            "id_columns": list(self.id_columns),
            "time_columns": list(self.time_columns),
        }
        return {
            **super(LogsConfig, self).to_json(),
            "job": "etl_logs",
            "log_format": self.log_format,
            "columns": list(self.columns),
            "null_texts": list(self.null_texts),
            "delimiter": self.delimiter,
            "quoted_newlines": self.quoted_newlines,
            **(web if self.schema is None else table),
        }


def _is_table(form: LogFormat) -> bool:
    return form.is_table


def _has_columns(form: LogFormat) -> bool:
    return form.has_columns


def _is_delimited(form: LogFormat) -> bool:
    return form.delimiter is not None


def _has_quotes(form: LogFormat) -> bool:
    return form.quotes


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
