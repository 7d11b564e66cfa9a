"""The log formats: one record a format, with all that the log job asks of it, and how their lines become a table.

A new format is its parser, in a file of its own, one entry of LOG_FORMATS, and its name in lockstep.etl.choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lockstep.etl.input.files import Range
from lockstep.etl.input.lines import CHUNK_BYTES, FileDigest, Lines, LongLine, read_lines
from lockstep.etl.logs import alb, fields, json_lines, server_log, w3c
from lockstep.etl.logs.server_log import Requests
from lockstep.etl.logs.values import Column, Reasons, as_text
from lockstep.etl.reasons import (
    BAD_QUOTES,
    EMPTY_LINE,
    NOT_COMBINED_LOG,
    NOT_COMMON_LOG,
    NOT_JSON,
    NOT_UTF8,
    OPEN_QUOTE,
    TOO_FEW_FIELDS,
    TOO_MANY_FIELDS,
)


class ReadColumns(Protocol):
    """The reader of lines whose fields have names."""

    def __call__(
        self,
        text: pa.Array,
        names: Sequence[str],
        columns: Sequence[Column],
        null_texts: Sequence[str],
        reasons: Reasons,
    ) -> tuple[dict[str, pa.Array], NDArray[np.int64]]:
        """Read columns of lines (n,) of strings, whose fields have `names` in this order.

        Returns the values by column, each (g,), and the place of each line among them, (n,), -1 for none. Adds to
        `reasons` for lines that are refused.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFormat:
    """One format of a log's lines. It either says itself what each field of a line means, and has `parse`; or the
    fields have names, and it has `read`, with `names_of` or `object_of`.
    """

    name: str
    parse: Callable[[pa.Array], Requests] | None = None
    """Parses the requests of lines (n,) binary."""
    referrers: bool = False
    """Whether `parse` finds referrer and user agent."""
    read: ReadColumns | None = None
    """Reads columns by their names."""
    names_of: Callable[[Sequence[bytes], str], tuple[str, ...]] | None = None
    """The names of the fields, by the first lines of a file and its URL; raises DataError if they name none."""
    object_of: Callable[[bytes], dict[str, Any] | None] | None = None
    """The fields of a line that names them itself, as an object of JSON; None for a line that is none."""
    looks_like: Callable[[Sequence[bytes]], bool] | None = None
    """Whether lines, refused by another format, are of this one; None if `parse` knows."""
    misfits: Mapping[str, Callable[[str], str]] = field(default_factory=dict)
    """Where a line stops to fit, for each reason with which it does not have the format at all. An error says this, and
    which other formats read such lines."""
    delimiter: str | None = None
    """The delimiter, where a file's first line is a header; lines of any format may have it."""
    quotes: bool = False
    """Whether a field may be in quotes, with newlines inside."""
    sections: Callable[[pa.Array, tuple[str, ...]], Iterator[tuple[tuple[str, ...], NDArray[np.int64]]]] | None = None
    """Cuts lines where the names of their fields change, as lockstep.etl.logs.w3c.sections does. One task then reads a
    whole file: the names are those since its start."""
    directive: str | None = None
    """The mark with which lines about the fields begin."""
    absent: str | None = None
    """The text of a field that is absent; a method, a path and a status may be."""
    dated: bool = False
    """Whether the date and the time of day are two fields."""

    @property
    def has_columns(self) -> bool:
        """Whether the fields of a line have names, so that roles are columns."""
        return self.read is not None

    @property
    def keyed(self) -> bool:
        """Whether each line names its fields, whose values have types, and blanks around a line mean nothing."""
        return self.object_of is not None

    @property
    def is_table(self) -> bool:
        """Whether a declared schema may describe its lines."""
        return self.delimiter is not None or self.keyed

    def reads(self, lines: Sequence[bytes]) -> bool:
        """Whether all of these lines seem to be of this format."""
        if self.looks_like is not None:
            return self.looks_like(lines)
        assert self.parse is not None
        return bool(self.parse(pa.array(lines, pa.binary())).reasons.good.all())


@cache  # tasks ask for it for each batch of lines
def _delimited(name: str, delimiter: str, *, quotes: bool) -> LogFormat:
    after = partial(fields.after_fields, delimiter=delimiter, quotes=quotes)
    wrong = partial(fields.at_wrong_quote, delimiter=delimiter)
    return LogFormat(
        name=name,
        read=partial(fields.read_fields, delimiter=delimiter, quotes=quotes),
        names_of=partial(fields.names_of_header, delimiter=delimiter, quotes=quotes),
        delimiter=delimiter,
        quotes=quotes,
        looks_like=partial(fields.looks_delimited, delimiter=delimiter),
        misfits={
            TOO_FEW_FIELDS: after,
            TOO_MANY_FIELDS: after,
            **({OPEN_QUOTE: wrong, BAD_QUOTES: wrong} if quotes else {}),
        },
    )


# A format that reads the lines of another one comes behind it.
LOG_FORMATS: dict[str, LogFormat] = {
    form.name: form
    for form in (
        LogFormat(name="common", parse=server_log.parse_common, misfits={NOT_COMMON_LOG: server_log.at_not_common}),
        LogFormat(
            name="combined",
            parse=server_log.parse_combined,
            referrers=True,
            misfits={NOT_COMBINED_LOG: server_log.at_not_combined},
        ),
        _delimited("tsv", "\t", quotes=False),
        _delimited("csv", ",", quotes=True),
        LogFormat(
            name="json",
            read=json_lines.read_keyed,
            object_of=json_lines.object_of,
            looks_like=json_lines.looks_like_json,
            misfits={NOT_JSON: json_lines.at_no_object},
        ),
        LogFormat(
            name="w3c",
            read=w3c.read_w3c,
            names_of=w3c.names_in,
            sections=w3c.sections,
            directive="#",
            absent="-",
            dated=True,
            looks_like=w3c.looks_like_w3c,
            misfits=dict.fromkeys(
                (TOO_FEW_FIELDS, TOO_MANY_FIELDS), partial(fields.after_fields, delimiter=",", quotes=True)
            ),
        ),
        LogFormat(name="alb", parse=alb.parse_alb),
    )
}


def formats_that(fit: Callable[[LogFormat], bool]) -> str:
    """The names of the formats that fit, in words."""
    names = [form.name for form in LOG_FORMATS.values() if fit(form)]
    return " or ".join([*([", ".join(names[:-1])] if names[:-1] else []), *names[-1:]])


def format_of(log_format: str, delimiter: str | None) -> LogFormat:
    """The record of a format; of CSV, with this delimiter if there is one."""
    return LOG_FORMATS[log_format] if delimiter is None else _delimited(log_format, delimiter, quotes=True)


def header_hint(there: Sequence[str], log_format: str = "") -> str:
    """What to do about a header that has one name in `log_format`, if it has several in another format or with another
    delimiter; "" if not.
    """
    if len(there) != 1:
        return ""
    marks = ((form.name, form.delimiter) for form in LOG_FORMATS.values() if form.delimiter is not None)
    other = next((name for name, mark in marks if name != log_format and mark in there[0]), None)
    if other is None:
        return fields.hint_of(there[0])
    return f"The file looks like {other}: correct --log-format{f', which is {log_format}' if log_format else ''}."


@dataclass(frozen=True, slots=True)
class Form:
    """The format of a log's lines as a job reads it. `null_texts` and `has_header` are for delimited fields;
    `quoted_newlines` (newlines inside quotes are part of a record) and `delimiter` are for CSV, which has commas for
    None.
    """

    log_format: str
    null_texts: tuple[str, ...] = ()
    has_header: bool = False
    quoted_newlines: bool = False
    delimiter: str | None = None

    @property
    def format(self) -> LogFormat:
        """The format's record."""
        return format_of(self.log_format, self.delimiter)

    def lines_of(
        self, part: Range, chunk_bytes: int = CHUNK_BYTES, *, most_bytes: int | None = None, digest: bool = False
    ) -> Iterator[Lines | LongLine | FileDigest]:
        """The lines of a range, as lockstep.etl.input.lines.read_lines yields them for this format."""
        delimiter = self.delimiter or ","
        quoted = self.quoted_newlines
        return read_lines(
            part, chunk_bytes, quoted_newlines=quoted, delimiter=delimiter, most_bytes=most_bytes, digest=digest
        )


def other_delimiters(lines: Sequence[bytes], read_as: Form) -> list[str]:
    """The values of --log-format, with flags, by which CSV of other delimiters reads all of these lines, which were
    read as delimited fields.
    """
    own = read_as.format.delimiter
    marks = () if own is None else fields.DELIMITERS
    return [fields.flags_of(mark) for mark in marks if mark != own and format_of("csv", mark).reads(lines)]


def read_table(
    lines: pa.Array,
    form: Form,
    names: Sequence[str],
    columns: Sequence[Column],
    reasons: Reasons,
    drops: Reasons,
) -> dict[str, pa.Array]:
    """The columns of lines (n,) binary by name, each (n,), null in lines that `reasons` refuses or `drops` names.

    `names` are the fields of a line in order, where lines do not name them.
    """
    read = form.format.read
    assert read is not None, "the fields of this format have no names"
    text, broken = as_text(lines)
    reasons.add(broken, NOT_UTF8)
    text = pc.fill_null(text, "")
    content = pc.ascii_trim_whitespace(text) if form.format.keyed else text
    drops.add(np.asarray(pc.equal(pc.binary_length(content), 0)) & ~broken, EMPTY_LINE)
    kept = np.flatnonzero(drops.good & reasons.good)
    inner = Reasons(len(kept))
    some = text if len(kept) == len(text) else text.take(pa.array(kept))
    found, place = read(some, names, columns, form.null_texts, inner)
    reasons.take_from(inner, kept)
    if len(kept) == len(lines) and (place >= 0).all():
        return found
    back = np.full(len(lines), -1)
    back[kept] = place
    places = pa.array(np.maximum(back, 0), mask=back < 0)
    return {name: values.take(places) for name, values in found.items()}
