"""A schema proposed for a table of unknown columns, from its first rows: a TOML file to read, correct and use.

Each field follows a comment with what was seen of it. jobs.etl_logs runs with the file on the same table as it is: so a
column that no field can hold, or that a file lacks, is only a comment, and if there are more rows than were read every
feature may be null.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.input.files import Source, find_lines, plan_ranges
from etl.input.lines import Lines, LongLine, read_lines
from etl.input.log_formats import TABLE_FORMATS
from etl.logs.fields import Column, Form, read_table
from etl.logs.parse import LINE_TOO_LONG
from etl.logs.plan import listed, names_in
from etl.logs.values import Reasons, as_values, without_bom
from etl.write.config import LogsConfig
from lockstep.features.schema.declare import declared_field, load_schema
from lockstep.features.schema.fields import SAMPLE_ID
from lockstep.storage.errors import ConfigError, DataError, require
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import occupied, write_file

ROWS = 10_000
LABELS = ("label", "target", "click", "clicked")
MAX_CLASSES = 100
MAX_VOCABULARY, HASH_BUCKETS = 1000, 1000  # more distinct texts are hashed
SKEWED = 3.0  # the skewness (of an exponential distribution it is 2) from which a number is cut into tenths
LEAST_IDS = 10  # in fewer rows, any column may have a different value in each
_EXAMPLES, _EXAMPLE_CHARACTERS = 3, 30
_IDS = re.compile(r"(^|[_ ])(id|code|zip|key)s?$", re.IGNORECASE)
_NULLS = ("", "na", "n/a", "nan", "null", "none", "nil", "?", "-", "\\n")
_DTYPES = {pa.bool_(): "bool", pa.int64(): "int64", pa.uint64(): "uint64", pa.float64(): "float64"}
_DTYPES |= {pa.string(): "string", pa.timestamp("us"): "string"}


def propose(config: LogsConfig) -> str:
    """Write a schema for the table `config.inputs` to `config.output`; returns what was proposed, in two lines.

    Raises ConfigError for a format that is no table, ExistsError if the output exists, DataError for a table without
    rows or without a column that a field can hold.
    """
    allowed = "with --log-format tsv, csv or json, and without --schema"
    good = config.log_format in TABLE_FORMATS and config.schema is None
    require(good, "--propose-schema", "--schema" if config.schema else f"--log-format {config.log_format}", allowed)
    fs = filesystem(config.output)
    if fs.exists(config.output):
        raise occupied(config.output)
    sources = find_lines(config.inputs, header=config.has_header)
    table = _json_table(sources) if config.log_format == "json" else _text_table(sources, config)
    text, found = _proposal(table, config)
    load_schema(text)
    write_file(fs, config.output, text.encode())
    return (
        f"{config.output}: {found}\nnext: read and correct it, then run jobs.etl_logs with the same flags, "
        f"--schema {config.output} and an --output for the dataset"
    )


@dataclass(frozen=True, slots=True)
class _Table:
    """Columns by position, each an Arrow array (rows,), or None if its values have several types; names may be any."""

    names: Sequence[str]
    columns: Sequence[pa.Array | None]
    notes: Sequence[str]
    rows: int
    unread: str
    whole: bool
    """Whether these are all rows."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """By the names of columns that not every file has once: the first file that has not."""


def _lines(sources: Iterable[Source], unread: Counter[str], *, quoted_newlines: bool, header: bool) -> Iterator[bytes]:
    """The lines of files in order, without their headers; lines that are too long are counted in `unread`."""
    for source in sources:
        for found in read_lines(plan_ranges([source], 1, whole=True)[0], quoted_newlines=quoted_newlines):
            if isinstance(found, Lines):
                first = int(found.positions[0]) == 0
                values = without_bom(found.values) if first else found.values
                yield from values.slice(int(first and header)).to_pylist()
            elif isinstance(found, LongLine):
                unread[LINE_TOO_LONG] += 1


def _text_table(sources: Sequence[Source], config: LogsConfig) -> _Table:
    header = not config.columns

    def named(source: Source) -> tuple[str, ...]:
        return config.columns or names_in(source, config.log_format, config.quoted_newlines)

    headers = {source.url: named(source) for source in sources}
    names = headers[sources[0].url]
    absent = {name: url for url in reversed(headers) for name in names if headers[url].count(name) != 1}
    alike = list(takewhile(lambda source: headers[source.url] == names, sources))
    lost = Counter[str]()
    lines = list(islice(_lines(alike, lost, quoted_newlines=config.quoted_newlines, header=header), ROWS + 1))
    whole = len(lines) <= ROWS and len(alike) == len(sources)
    del lines[ROWS:]
    reasons, drops = Reasons(len(lines)), Reasons(len(lines))
    places = [str(place) for place in range(len(names))]  # names may occur twice
    columns = [Column(place, pa.string(), nullable=True) for place in places]
    form = Form(config.log_format, config.null_texts, header, config.quoted_newlines)
    read = read_table(pa.array(lines, pa.binary()), form, places, columns, reasons, drops)
    good = reasons.good & drops.good
    typed = [_typed(read[place].filter(pa.array(good))) for place in places]
    unread = ", ".join(f"{count} {reason}" for reason, count in (lost + Counter(reasons.counts())).items())
    columns_read, notes = [values for values, _ in typed], [note for _, note in typed]
    return _Table(names, columns_read, notes, int(good.sum()), unread, whole, absent)


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
        return texts, f"numbers with --null-text {' '.join(map(_quoted, others))}"
    named = [text for text in others if text]
    return texts, f"with --null-text {' '.join(map(_quoted, named))} null too" if named else ""


def _are(values: pa.Array, kind: pa.DataType) -> bool:
    """Whether texts are read as values of a type; a few first, since each text that is not takes several casts."""
    parts = (values[:: max(1, len(values) // most)] for most in (1, 100, len(values) or 1))
    return len(values) > 0 and not any(as_values(part, kind)[1].any() for part in parts)


def _json_table(sources: Sequence[Source]) -> _Table:
    documents, unread = list[dict[str, Any]](), Counter[str]()
    lines = list(islice(_lines(sources, unread, quoted_newlines=False, header=False), ROWS + 1))
    for line in lines[:ROWS]:
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):
            document = None
        documents += [document] if isinstance(document, dict) else []
        unread["not_json_object"] += bool(line.strip()) and not isinstance(document, dict)
    names = list(dict.fromkeys(name for document in documents for name in document))
    columns = [_array([document.get(name) for document in documents]) for name in names]
    lost = ", ".join(f"{count} {reason}" for reason, count in unread.items() if count)
    return _Table(names, columns, [""] * len(names), len(documents), lost, len(lines) <= ROWS)


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


def _proposal(table: _Table, config: LogsConfig) -> tuple[str, str]:
    """The text of the file, and what it holds in a few words."""
    if not table.rows:
        raise _nothing(config, table.unread or "no line after the header")
    blocks, ids, left_out, fields, label = list[str](), list[str](), list[str](), 0, None
    times, cases = Counter(table.names), Counter(name.lower() for name in table.names)
    for position, (name, values) in enumerate(zip(table.names, table.columns, strict=True), 1):
        faults = {
            "it has no name, or one that begins with `_`": not name or name.startswith("_"),
            "its name is not Unicode": name != _unicode(name),
            "the dataset has a column of this name": name in ("split", SAMPLE_ID),
            "the name occurs twice": times[name] > 1,
            f"{table.absent.get(name)} does not have it once": name in table.absent,
            "the name differs from another only in case": cases[name.lower()] > times[name],
            "its values have several types": values is None,
            "it has no value in these rows": values is not None and values.null_count == len(values),
        }
        fault = next((words for words, wrong in faults.items() if wrong), None)
        entry: dict[str, Any] | None = None
        if fault is None and values is not None:
            wanted = label is None and name.lower() in LABELS
            entry = _label(values, config.log_format == "json") if wanted else None
            if name in config.time_columns:
                entry = {"dtype": "int64", "encoding": {"kind": "ignore"}}
            entry = entry or _feature(name, values)
            fault = None if entry is not None else f"no field holds {values.type}"
            if entry is not None and entry.get("kind") != "label" and not entry.get("list"):
                entry |= {"nullable": True} if values.null_count or not table.whole else {}
        if entry is not None:
            try:
                declared_field({"name": name, **entry})
            except ConfigError as error:
                fault = f"{error.what}: {error.got}"
        if fault is not None or entry is None or values is None:
            blocks.append(f"# {_quoted(name)}, column {position}, is left out: {fault}\n")
            left_out.append(_quoted(name) if name else f"column {position}")
            continue
        fields += 1
        label = name if entry.get("kind") == "label" else label
        ids += [name] if _unique(values) else []
        note = table.notes[position - 1]
        note = note or ("always the same, so not an input" if _constant(values) else "")
        blocks.append(_block({"name": name, **entry}, _seen(values) + (f"; {note}" if note else "")))
    if not fields:
        raise _nothing(config, "; ".join(block.strip("# \n") for block in blocks)[:500])
    head = [f"Proposed from {table.rows} rows. Read and correct it: docs/schema.md explains each key."]
    head += [f"Lines that cannot be read: {table.unread}."] if table.unread else []
    if config.log_format != "json" and not config.columns and any(map(_is_number, table.names)):
        head.append("A name in the first line is a number. If that line is a row, name the fields by --columns.")
    head += [] if label else [f'No column is called {", ".join(LABELS)}: give the field to predict kind = "label".']
    if label is None and (pair := _last_pair(table)):
        head.append(
            f'For a text of two values: dtype = "bool", kind = "label", neither encoding nor nullable, and --label '
            f"{_quoted(pair)}."
        )
    head += [f"Different in each row, so perhaps --id-columns: {', '.join(map(_quoted, ids[:5]))}."] if ids else []
    found = f"{fields} fields from {table.rows} rows, {'no label' if label is None else f'label {label}'}"
    found += f"\nleft out (the file says why): {listed(left_out)}" if left_out else ""
    return "\n".join(["".join(f"# {line}\n" for line in head), *blocks]), found


def _nothing(config: LogsConfig, got: str) -> DataError:
    return DataError(
        f"{', '.join(config.inputs)} has nothing to propose a schema from",
        got=got,
        allowed="a row or more, and a named column of numbers, texts, booleans or lists of one of them",
        next_step="Check --input and --log-format; name the fields by --columns if the file has no header.",
    )


def _unique(values: pa.Array) -> bool:
    """Whether the values may name the rows."""
    named = any(map(values.type.equals, (pa.int64(), pa.uint64(), pa.string())))
    return named and LEAST_IDS <= len(values) == pc.count_distinct(values).as_py() and not values.null_count


def _last_pair(table: _Table) -> str | None:
    """An expression of SQL for yes or no, from the last text column of two values that it can name."""
    for name, values in reversed([*zip(table.names, table.columns, strict=True)]):
        if values is not None and values.type == pa.string() and not values.null_count:
            texts = Counter(values.to_pylist()).most_common(3)
            if len(texts) == 2 and name.isidentifier() and not {"'", "\\"} & {*texts[1][0]}:
                return f"{name} = '{texts[1][0]}'"
    return None


def _constant(values: pa.Array) -> bool:
    scalars = not pa.types.is_nested(values.type) and not values.null_count
    return scalars and len(values) >= LEAST_IDS and pc.count_distinct(values).as_py() == 1


def _label(values: pa.Array, typed: bool) -> dict[str, Any] | None:
    """The column as the field to predict; None if it has nulls, or is no number and not yes or no."""
    kind, span = _DTYPES.get(values.type), pc.min_max(values)
    if values.null_count or kind not in ("bool", "int64", "float64"):
        return None
    least, most = span["min"].as_py(), span["max"].as_py()
    if kind == "bool" or (kind == "int64" and not typed and least >= 0 and most <= 1):
        return {"dtype": "bool", "kind": "label"}
    classes = {"num_classes": max(most + 1, 2)} if kind == "int64" and least == 0 and most < MAX_CLASSES else {}
    return {"dtype": kind, "kind": "label", **classes}


def _feature(name: str, values: pa.Array) -> dict[str, Any] | None:
    """The column as a feature with an encoding; None if no field holds such values."""
    if pa.types.is_list(values.type):
        items = values.flatten()
        if items.null_count or items.type not in (pa.string(), pa.int64(), pa.float64()):
            return None
        length = min(pc.max(pc.list_value_length(values)).as_py(), MAX_VOCABULARY)
        encoding = _categories(items) if items.type == pa.string() else {"kind": "sequence", "length": length}
        return {"dtype": _DTYPES[items.type], "list": True, "encoding": encoding}
    dtype = _DTYPES.get(values.type)
    if dtype is None:
        return None
    if _unique(values) or _constant(values) or values.type == pa.timestamp("us"):
        encoding = {"kind": "ignore"}
    elif dtype == "bool":
        encoding = {"kind": "number", "null_value": 0}
    elif dtype == "string" or (dtype != "float64" and _IDS.search(name)):
        encoding = _categories(values)
    else:
        encoding = _of_numbers(np.asarray(values.drop_null().cast(pa.float64(), safe=False)))
    return {"dtype": dtype, "encoding": encoding}


def _categories(values: pa.Array) -> dict[str, Any]:
    few = pc.count_distinct(values).as_py() <= MAX_VOCABULARY
    return {"kind": "vocabulary"} if few else {"kind": "hash", "buckets": HASH_BUCKETS}


def _of_numbers(numbers: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, Any]:
    """Standardise; tenths for skewed or infinite numbers, whose mean says little or does not exist."""
    finite = numbers[np.isfinite(numbers)]
    if not len(finite):
        return {"kind": "ignore"}
    infinite = bool(np.isinf(numbers).any())
    with np.errstate(all="ignore"):  # the skewness of a constant is NaN, which is not above the bar
        skewness = abs(float((((finite - finite.mean()) / finite.std()) ** 3).mean()))
    bounds = _tenths(finite[finite > finite.min()]) if np.median(finite) == finite.min() else _tenths(finite)[1:]
    if bounds and (infinite or skewness > SKEWED):
        return {"kind": "bucketise", "boundaries": bounds}
    return {"kind": "ignore"} if infinite else {"kind": "standardise"}


def _tenths(numbers: np.ndarray[Any, np.dtype[np.float64]]) -> list[float]:
    """The least number of each tenth, rising, each once."""
    return sorted({*np.quantile(numbers, np.arange(10) / 10, method="lower").tolist()}) if len(numbers) else []


def _seen(values: pa.Array) -> str:
    """The share of nulls, the number of values, their range, and the most frequent ones."""
    texts = values.cast(pa.string()) if not pa.types.is_nested(values.type) else pa.array(map(str, values.to_pylist()))
    counts = Counter(texts.drop_null().to_pylist())
    parts = [f"{values.null_count / len(values):.1%} null", f"{len(counts)} distinct"]
    if not pa.types.is_nested(values.type) and values.type not in (pa.string(), pa.bool_()):
        span = pc.min_max(values.filter(pc.is_finite(values)) if pa.types.is_floating(values.type) else values)
        parts += [f"{span['min']} to {span['max']}"] if span["min"].is_valid else []
    most = _EXAMPLE_CHARACTERS
    examples = (value for value, _ in counts.most_common(_EXAMPLES))
    shown = (_quoted(value[:most] + ("…" if len(value) > most else "")) for value in examples)
    time = (
        'a time: dtype = "int64" with --time-columns stores microseconds' if values.type == pa.timestamp("us") else ""
    )
    return ", ".join([*parts, f"such as {' '.join(shown)}", *filter(None, [time])])


def _block(entry: dict[str, Any], comment: str) -> str:
    lines = [f"# {comment}", "[[fields]]"]
    for key, value in entry.items():
        parts = [f"{inner} = {_toml(item)}" for inner, item in value.items()] if isinstance(value, dict) else []
        lines.append(f"{key} = {{ {', '.join(parts)} }}" if parts else f"{key} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def _quoted(text: str) -> str:
    """A text as TOML writes it, on one line."""
    return json.dumps(_unicode(text), ensure_ascii=False).replace("\x7f", "\\u007f")


def _unicode(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _is_number(text: str) -> bool:
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False
