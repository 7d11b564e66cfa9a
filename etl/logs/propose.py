"""A schema proposed for lines of unknown columns (tsv, csv, json), from the first ones: see etl/propose.py.

lockstep etl_logs runs with the file on the same table as it is: so a column that a file lacks is only a comment, and if
there are more rows than were read every feature may be null.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lockstep.etl.columns import listed
from lockstep.etl.input.files import Source, find_lines, plan_ranges
from lockstep.etl.input.lines import Lines, LongLine
from lockstep.etl.logs.config import LogsConfig
from lockstep.etl.logs.formats import Form, formats_that, header_hint, other_delimiters, read_table
from lockstep.etl.logs.plan import names_in
from lockstep.etl.logs.values import Column, Reasons, as_values, without_bom
from lockstep.etl.propose import ROWS, Asked, Table, proposal, quoted
from lockstep.etl.reasons import LINE_TOO_LONG, NOT_JSON
from lockstep.features.schema.declare import load_schema
from lockstep.storage.errors import DataError, require
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import occupied, write_file

_NULLS = ("", "na", "n/a", "nan", "null", "none", "nil", "?", "-", "\\n")


def propose(
    config: LogsConfig,
    *,
    embeddings: bool = False,
    flags: str = "the same flags but --propose-schema, --for and --label",
) -> str:
    """Write a schema for the table `config.inputs` to `config.output`; returns what was proposed, in two lines, and the
    `flags` with which lockstep etl_logs reads that table.

    `config.label` is the name of the column to predict. Raises ConfigError for a format that is no table, for columns
    of web requests and for a label that cannot be one, ExistsError if the output exists, DataError for a table without
    rows or without a column that a field can hold.
    """
    allowed = f"with --log-format {formats_that(lambda form: form.is_table)}, and without --schema"
    good = config.format.is_table and config.schema is None
    web = [f"--{role}-column" for role in config.role_columns]
    web += [
        flag
        for flag, given in (("--page-suffixes", config.page_suffixes), ("--asset-suffixes", config.asset_suffixes))
        if given
    ]
    require(not web, ", ".join(web), "--propose-schema", "without --propose-schema: for web requests")
    require(good, "--propose-schema", "--schema" if config.schema else f"--log-format {config.log_format}", allowed)
    fs = filesystem(config.output)
    if fs.exists(config.output):
        raise occupied(config.output)
    sources = find_lines(config.inputs, config.has_header)
    table = _keyed_table(sources, config.form) if config.format.keyed else _text_table(sources, config)
    asked = Asked(
        where=", ".join(config.inputs),
        next_step="Check --input and --log-format; name the fields by --columns if the file has no header.",
        embeddings=embeddings,
        label=config.label,
        time_columns=config.time_columns,
        id_columns=config.id_columns,
        numbers_as_bool=not config.format.keyed,
        fractions_as_bool=False,
        header_note=_header_note(table, config),
    )
    found = proposal(table, asked)
    load_schema(found.text)
    write_file(fs, config.output, found.text.encode())
    left_out = f"\nleft out (the file says why): {listed(found.left_out)}" if found.left_out else ""
    return (
        f"{config.output}: {found}{left_out}\nnext: read and correct it, then run lockstep etl_logs with {flags}, "
        f"--schema {config.output} and an --output for the dataset"
    )


def _header_note(table: Table, config: LogsConfig) -> str:
    if config.format.keyed or config.columns or not any(map(_is_number, table.names)):
        return ""
    return "A name in the first line is a number. If that line is a row, name the fields by --columns."


def _lines(sources: Iterable[Source], unread: Counter[str], form: Form) -> Iterator[bytes]:
    """The lines of files in order, without their headers; lines that are too long are counted in `unread`."""
    for source in sources:
        for found in form.lines_of(plan_ranges([source], 1, whole=True)[0]):
            if isinstance(found, Lines):
                first = int(found.positions[0]) == 0
                values = without_bom(found.values) if first else found.values
                yield from values.slice(int(first and form.has_header)).to_pylist()
            elif isinstance(found, LongLine):
                unread[LINE_TOO_LONG] += 1


def _text_table(sources: Sequence[Source], config: LogsConfig) -> Table:
    form = config.form

    def named(source: Source) -> tuple[str, ...]:
        return config.columns or names_in(source, form)

    headers = {source.url: named(source) for source in sources}
    names = headers[sources[0].url]
    _refuse_header(sources[0].url, names, config)
    absent = {
        name: f"{url} does not have it once"
        for url in reversed(headers) for name in names if headers[url].count(name) != 1
    }  # fmt: skip
    alike = list(takewhile(lambda source: headers[source.url] == names, sources))
    lost = Counter[str]()
    lines = list(islice(_lines(alike, lost, form), ROWS + 1))
    whole = len(lines) <= ROWS and len(alike) == len(sources)
    del lines[ROWS:]
    reasons, drops = Reasons(len(lines)), Reasons(len(lines))
    places = [str(place) for place in range(len(names))]  # names may occur twice
    columns = [Column(place, pa.string(), nullable=True) for place in places]
    read = read_table(pa.array(lines, pa.binary()), form, places, columns, reasons, drops)
    good = reasons.good & drops.good
    if not good.any() and lines:
        ways = [f"--log-format {way}" for way in other_delimiters(lines[:100], form)]
        hint = f"Read the file by lockstep etl_logs {' or '.join(ways)}." if ways else ""
        _refuse_delimiter(sources[0].url, f"{len(lines)} lines, none of {len(names)} fields", hint)
    typed = [_typed(read[place].filter(pa.array(good))) for place in places]
    unread = ", ".join(f"{count} {reason}" for reason, count in (lost + Counter(reasons.counts())).items())
    columns_read, notes = [values for values, _ in typed], [note for _, note in typed]
    return Table(
        names=names, columns=columns_read, notes=notes, nullable=_nullable(columns_read, whole=whole),
        rows=int(good.sum()), unread=unread, faults=absent,
    )  # fmt: skip


def _refuse_header(url: str, names: Sequence[str], config: LogsConfig) -> None:
    """Raise DataError for a header of one name that is several with another delimiter: one column teaches nothing."""
    if not config.columns:
        _refuse_delimiter(url, f"one column, {quoted(names[0][:80])}", header_hint(names, config.log_format))


def _refuse_delimiter(url: str, got: str, hint: str) -> None:
    if hint:
        allowed = "columns, with the delimiter between them"
        raise DataError(f"{url} has another delimiter", got=got, allowed=allowed, next_step=hint)


def _typed(texts: pa.Array) -> tuple[pa.Array, str]:
    """Texts as the narrowest type that all of them have, and a note."""
    values = texts.drop_null()
    if pc.all(pc.is_in(pc.utf8_lower(values), pa.array(["true", "false", "t", "f", "yes", "no"]))).as_py():
        return as_values(texts, pa.bool_())[0], ""
    zeros = pc.any(pc.match_substring_regex(values, r"^\s*[+-]?0[0-9]")).as_py()
    for kind in (pa.int64(), pa.uint64(), pa.float64()):
        if _are(values, kind):
            return (texts, "digits after a first 0 stay a text") if zeros else (as_values(texts, kind)[0], "")
    if _are(values, pa.timestamp("us")):
        return as_values(texts, pa.timestamp("us"))[0], ""
    nulls = pc.is_in(pc.ascii_lower(pc.utf8_trim_whitespace(values)), pa.array(_NULLS))
    numbers = values.filter(pc.invert(nulls))
    others = sorted({*values.filter(nulls).to_pylist()})
    if len(numbers) and not zeros and _are(numbers, pa.float64()):
        return texts, f"numbers with --null-text {' '.join(map(quoted, others))}"
    named = [text for text in others if text]
    return texts, f"with --null-text {' '.join(map(quoted, named))} null too" if named else ""


def _are(values: pa.Array, kind: pa.DataType) -> bool:
    """Whether texts are read as values of a type; a few first, since each text that is not takes several casts."""
    parts = (values[:: max(1, len(values) // most)] for most in (1, 100, len(values) or 1))
    return len(values) > 0 and not any(as_values(part, kind)[1].any() for part in parts)


def _keyed_table(sources: Sequence[Source], form: Form) -> Table:
    object_of = form.format.object_of
    assert object_of is not None
    documents, unread = list[dict[str, Any]](), Counter[str]()
    lines = list(islice(_lines(sources, unread, form), ROWS + 1))
    for line in lines[:ROWS]:
        document = object_of(line)
        documents += [] if document is None else [document]
        unread[NOT_JSON] += bool(line.strip()) and document is None
    names = list(dict.fromkeys(name for document in documents for name in document))
    columns = [_array([document.get(name) for document in documents]) for name in names]
    lost = ", ".join(f"{count} {reason}" for reason, count in unread.items() if count)
    return Table(
        names=names, columns=columns, notes=[""] * len(names), nullable=_nullable(columns, whole=len(lines) <= ROWS),
        rows=len(documents), unread=lost,
    )  # fmt: skip


def _nullable(columns: Sequence[pa.Array | None], *, whole: bool) -> list[bool]:
    """Whether columns may have nulls: those that had some or, if these are not the `whole` table, all."""
    return [not whole or (values is not None and values.null_count > 0) for values in columns]


def _array(values: list[Any]) -> pa.Array | None:
    """Values of JSON as an array, texts in ISO 8601 as times; None if they have several types."""
    for kind in (None, pa.uint64()):  # without a type, whole numbers are int64
        try:
            found = pa.array(values, kind)
        except (pa.ArrowException, OverflowError, UnicodeEncodeError):
            continue
        timed = pa.types.is_string(found.type) and _are(found.drop_null(), pa.timestamp("us"))
        return as_values(found, pa.timestamp("us"))[0] if timed else found
    return None


def _is_number(text: str) -> bool:
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False
