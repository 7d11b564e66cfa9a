"""The log formats: one record a format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class LogFormat:
    """One format: its name, where a file names the fields of its lines (None if the format fixes them), the delimiter
    of lines that a header names, and whether a declared schema may describe its lines.
    """

    name: str
    fields_from: Literal["header", "keys", "directive"] | None = None
    delimiter: str | None = None
    may_be_records: bool = False

    @property
    def has_columns(self) -> bool:
        """Whether the fields of a line have names, so that roles are columns."""
        return self.fields_from is not None


LOG_FORMATS: Mapping[str, LogFormat] = {
    form.name: form
    for form in (
        LogFormat("common"),
        LogFormat("combined"),
        LogFormat("tsv", "header", "\t", may_be_records=True),
        LogFormat("csv", "header", ",", may_be_records=True),
        LogFormat("json", "keys", may_be_records=True),
        LogFormat("w3c", "directive"),
        LogFormat("alb"),
    )
}

TABLE_FORMATS = tuple(name for name, form in LOG_FORMATS.items() if form.may_be_records)
DELIMITERS = {name: form.delimiter for name, form in LOG_FORMATS.items() if form.delimiter is not None}
