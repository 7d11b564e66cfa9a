"""A schema proposed for a table, from its first rows: a TOML text to read, correct and use.

Each field follows a comment with what was seen of it. Jobs read the same table by the text as it is: so a column that
no field can hold is only a comment. etl/logs/propose.py reads lines, etl/frames.py data frames.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lockstep.etl.columns import named
from lockstep.features.schema.declare import declared_field
from lockstep.features.schema.fields import SAMPLE_ID
from lockstep.storage.errors import ConfigError, DataError, nearest, require

ROWS = 10_000
LABELS = ("label", "target", "click", "clicked")
MAX_CLASSES = 100
MAX_VOCABULARY, HASH_BUCKETS = 1000, 1000  # more distinct texts are hashed
EMBEDDED_BUCKETS = 100_000  # ids need no column each
SKEWED = 3.0  # the skewness (of an exponential distribution it is 2) from which a number is cut into tenths
PERHAPS_IDS = 0.9  # the share of different values from which categories may be ids
LEAST_IDS = 10  # in fewer rows, any column may have a different value in each
_EXAMPLES, _EXAMPLE_CHARACTERS = 3, 30
# No and yes, in any case; of two other texts the second by alphabet is yes.
_PAIRS = (
    ("no", "yes"), ("nein", "ja"), ("non", "oui"), ("no", "sí"), ("no", "si"), ("false", "true"), ("n", "y"), ("0", "1")
)  # fmt: skip
_PAIR_NOTE = "A text of two values can be the label, by its name: label (--label)"
_NUMBER = r"[+-]?(?:\d+|\d{1,3}(?:\.\d{3})+)(?:,\d+)?"
_DATES = {
    r"\d\d\.\d\d\.\d{4}": "dd.MM.yyyy", r"\d\d?\.\d\d?\.\d{4}": "d.M.yyyy", r"\d\d/\d\d/\d{4}": "dd/MM/yyyy",
    r"\d\d?/\d\d?/\d{4}": "d/M/yyyy", r"\d{4}/\d\d/\d\d": "yyyy/MM/dd",
}  # fmt: skip
_TIMES = {"": "", r" \d\d:\d\d": " HH:mm", r" \d\d:\d\d:\d\d": " HH:mm:ss"}
_CONVERTED = "in a query makes it one (docs/formats.md, CSV of another form)"
_IDS = re.compile(r"(^|[_ ])(id|code|zip|key)s?$", re.IGNORECASE)
_DTYPES = {pa.bool_(): "bool", pa.int64(): "int64", pa.uint64(): "uint64", pa.float64(): "float64"}
_DTYPES |= {pa.string(): "string", pa.timestamp("us"): "string", pa.float32(): "float32"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Columns by position, each an Arrow array (rows,), or None if no field holds its values; names may be any."""

    names: Sequence[str]
    columns: Sequence[pa.Array | None]
    notes: Sequence[str]
    nullable: Sequence[bool]
    """Whether a row may have no value there, one that was not read too."""
    rows: int
    unread: str = ""
    """Rows that cannot be read, in words."""
    faults: Mapping[str, str] = field(default_factory=dict)
    """Why no field can hold a column, by the column's name."""
    label_values: pa.Array | None = None
    """All distinct values of the label that was asked for, null among them, of all rows; at most MAX_CLASSES + 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What a proposal is for, and what the job that reads the table can do."""

    where: str
    """The table, in errors."""
    next_step: str
    """What the error advises if the table has nothing to propose from."""
    label: str | None = None
    """The column to predict; None looks for one of LABELS."""
    embeddings: bool = False
    """Whether categories are ids for embeddings, in place of a column each."""
    time_columns: Sequence[str] = ()
    """Columns that are stored as whole numbers of microseconds."""
    id_columns: Sequence[str] = ()
    """Columns that identify a row: stored, and no input of a model."""
    numbers_as_bool: bool = True
    """Whether 0 and 1 can be stored as no and yes."""
    fractions_as_bool: bool = True
    """Whether 0.0 and 1.0 can be too, as pandas has them where a null was once."""
    header_note: str = ""
    """A comment for the head of the text."""
    ids_note: str = "Different in each row, so perhaps --id-columns"


@dataclass(frozen=True, slots=True)
class Proposal:
    """The text of a schema, the numbers of its fields and of the rows that were read, the label, and the columns that
    are left out, as TOML writes their names.
    """

    text: str
    fields: int
    rows: int
    label: str | None
    left_out: tuple[str, ...]
    doubt: str = ""
    """What the label is taken for, where it may be meant otherwise."""

    def __str__(self) -> str:
        label = "no label" if self.label is None else f"label {self.label}"
        label += f" ({self.doubt})" if self.doubt else ""
        return f"{self.fields} fields from {self.rows} rows, {label}"


def proposal(table: Table, asked: Asked) -> Proposal:
    """Propose a schema. Raises DataError for a table without rows or without a column that a field can hold,
    ConfigError for a label that cannot be one.
    """
    if asked.label is not None and asked.label not in table.names:
        raise bad_label(asked.label, f"no such column{nearest(asked.label, table.names)}")
    lost = [name for name in asked.id_columns if name not in table.names]
    known = ", ".join(map(str, table.names))[:500]
    require(
        not lost, "--id-columns", ", ".join(name + nearest(name, table.names) for name in lost), f"columns: {known}"
    )
    if not table.rows:
        raise _nothing(asked, table.unread or "no rows")
    blocks, ids, left_out, fields, label, doubt = list[str](), list[str](), list[str](), 0, None, ""
    times, cases = Counter(table.names), Counter(name.lower() for name in table.names)
    for position, (name, values) in enumerate(zip(table.names, table.columns, strict=True), 1):
        faults = {
            "it has no name, or one that begins with `_`": not name or name.startswith("_"),
            "its name is not Unicode": name != _unicode(name),
            "the dataset has a column of this name": name in ("split", SAMPLE_ID),
            "the name occurs twice": times[name] > 1,
            table.faults.get(name, ""): name in table.faults,
            "the name differs from another only in case": cases[name.lower()] > times[name],
            "its values have several types": values is None,
            "it has no value in these rows": values is not None and values.null_count == len(values),
        }
        fault = next((words for words, wrong in faults.items() if wrong), None)
        entry: dict[str, Any] | None = None
        if fault is None and values is not None:
            if name == asked.label:
                entry = _asked_label(name, values, table.label_values, asked)
            elif asked.label is None and label is None and name.lower() in LABELS:
                entry = _label(values, asked)
            if name in asked.time_columns:
                entry = {"dtype": "int64", "encoding": {"kind": "ignore"}}
            if name in asked.id_columns and name != asked.label:
                entry = _stored(values)
            entry = entry or _feature(name, values, embeddings=asked.embeddings)
            fault = None if entry is not None else f"no field holds {values.type}"
            if entry is not None and entry.get("kind") != "label" and not entry.get("list"):
                entry |= {"nullable": True} if table.nullable[position - 1] else {}
        if entry is not None:
            try:
                declared_field({"name": name, **entry})
            except ConfigError as error:
                fault = f"{error.what}: {error.got}"
        if fault is not None and name == asked.label:
            raise bad_label(name, fault)
        if fault is not None or entry is None or values is None:
            blocks.append(f"# {quoted(name)}, column {position}, is left out: {fault}\n")
            left_out.append(quoted(name) if name else f"column {position}")
            continue
        fields += 1
        ids += [name] if _unique(values) else []
        note = table.notes[position - 1] or ("always the same, so not an input" if _constant(values) else "")
        if entry.get("kind") == "label":
            known = values if table.label_values is None or name != asked.label else table.label_values
            label, doubt = name, _doubt(entry, values, known)
            note = "; ".join(filter(None, [note, doubt]))
        else:
            note = note or _perhaps_id(entry, values)
        seen = [_seen(values) + (f"; {note}" if note else ""), *filter(None, [_other_form(name, values)])]
        blocks.append(_block({"name": name, **entry}, seen))
    if not fields:
        raise _nothing(asked, "; ".join(block.strip("# \n") for block in blocks)[:500])
    head = [f"Proposed from {table.rows} rows. Read and correct it: docs/schema.md explains each key."]
    head += [f"Lines that cannot be read: {table.unread}."] if table.unread else []
    head += [asked.header_note] if asked.header_note else []
    head += [] if label else [f'No column is called {", ".join(LABELS)}: give the field to predict kind = "label".']
    if label is None and (pair := _last_pair(table)) is not None:
        head.append(f"{_PAIR_NOTE} {quoted(pair)}.")
    head += [f"{asked.ids_note}: {', '.join(map(quoted, ids[:5]))}."] if ids else []
    text = "\n".join(["".join(f"# {line}\n" for line in head), *blocks])
    return Proposal(text, fields, table.rows, label, tuple(left_out), doubt)


def bad_label(name: str, got: str) -> ConfigError:
    """The error for a column that cannot be the label."""
    return ConfigError(
        f"column `{name}` cannot be the label",
        got=got,
        allowed=f"a column of numbers, of yes or no, or of 2 to {MAX_CLASSES} texts, without null",
        next_step="Name another column, drop the rows without a label, or make a number of it in a query.",
    )


def _nothing(asked: Asked, got: str) -> DataError:
    return DataError(
        f"{asked.where} has nothing to propose a schema from",
        got=got,
        allowed="a row or more, and a named column of numbers, texts, booleans or lists of one of them",
        next_step=asked.next_step,
    )


def _unique(values: pa.Array) -> bool:
    """Whether the values may name the rows."""
    named = any(map(values.type.equals, (pa.int64(), pa.uint64(), pa.string())))
    return named and LEAST_IDS <= len(values) == pc.count_distinct(values).as_py() and not values.null_count


def _last_pair(table: Table) -> str | None:
    """The last text column of two values."""
    for name, values in reversed([*zip(table.names, table.columns, strict=True)]):
        texts = values is not None and values.type == pa.string() and not values.null_count
        if texts and pc.count_distinct(values).as_py() == 2:
            return name
    return None


def _stored(values: pa.Array) -> dict[str, Any] | None:
    """A column that is stored and that no model is fed; None if no field holds it."""
    dtype = _DTYPES.get(values.type)
    return None if dtype is None else {"dtype": dtype, "encoding": {"kind": "ignore"}}


def _other_form(name: str, values: pa.Array) -> str:
    """A note on texts that all look like numbers with a decimal comma, or like dates in another form than ISO 8601."""
    if values.type != pa.string() or not (texts := values.drop_null().unique().to_pylist()):
        return ""
    if all(re.fullmatch(_NUMBER, text.strip()) for text in texts) and any("," in text for text in texts):
        plain = f"replace({named(name)}, '.', '')" if any("." in text for text in texts) else named(name)
        return f"Looks like numbers with a decimal comma: CAST(replace({plain}, ',', '.') AS DOUBLE) {_CONVERTED}"
    forms = {date + time: day + of_day for date, day in _DATES.items() for time, of_day in _TIMES.items()}
    form = next((form for each, form in forms.items() if all(re.fullmatch(each, text) for text in texts)), None)
    if form is None:
        return ""
    if form.startswith("d") and "/" in form and any(int(text.split("/")[1]) > 12 for text in texts):
        form = form.replace("dd/MM", "MM/dd").replace("d/M/", "M/d/")
    return f"Looks like dates: to_timestamp({named(name)}, '{form}') {_CONVERTED}"


def _constant(values: pa.Array) -> bool:
    scalars = not pa.types.is_nested(values.type) and not values.null_count
    return scalars and len(values) >= LEAST_IDS and pc.count_distinct(values).as_py() == 1


def _label(values: pa.Array, asked: Asked) -> dict[str, Any] | None:
    """The column as the field to predict; None if it has nulls, or is no number and not yes or no."""
    kind, span = _DTYPES.get(values.type), pc.min_max(values)
    if values.null_count or kind not in ("bool", "int64", "float32", "float64"):
        return None
    least, most = span["min"].as_py(), span["max"].as_py()
    if kind in ("float32", "float64"):
        as_bool = asked.fractions_as_bool and {*values.unique().to_pylist()} <= {0.0, 1.0}
    else:
        as_bool = kind == "bool" or (asked.numbers_as_bool and least >= 0 and most <= 1)
    if as_bool:
        return {"dtype": "bool", "kind": "label"}
    classes = {"num_classes": max(most + 1, 2)} if kind == "int64" and least == 0 and most < MAX_CLASSES else {}
    return {"dtype": kind, "kind": "label", **classes}


def _doubt(entry: Mapping[str, Any], values: pa.Array, known: pa.Array) -> str:
    """What a label is taken for, where another meaning is likely, and what to change for that. `values` are those of
    the first rows, `known` the least and greatest of all.
    """
    names = entry.get("class_names", ())
    if entry["dtype"] == "bool" and tuple(map(str.casefold, names)) in _PAIRS:
        return ""
    if entry["dtype"] == "bool" and names:
        return f"{quoted(names[1])} is yes, the second by alphabet; for {quoted(names[0])} turn class_names round"
    if entry["dtype"] == "bool" or "num_classes" in entry or names:
        return ""
    least, most = (pc.min_max(known)[end].as_py() for end in ("min", "max"))
    taken, distinct = "taken for a number to predict", values.unique().to_pylist()
    if sorted(distinct) == [least, most]:
        return f"{taken}; for yes or no make a boolean of it in a query: whether it is {most:g}"
    if all(float(value).is_integer() for value in distinct) and most - least < MAX_CLASSES:
        return f"{taken}; for {most - least + 1:g} classes make whole numbers from 0 of it in a query: less {least:g}"
    return ""


def _perhaps_id(entry: Mapping[str, Any], values: pa.Array) -> str:
    """A note on a feature of categories of which nearly each row has its own."""
    if (entry.get("encoding") or {}).get("kind") not in ("vocabulary", "hash") or pa.types.is_nested(values.type):
        return ""
    known = len(values) - values.null_count
    different = pc.count_distinct(values).as_py()
    if different < PERHAPS_IDS * known or different < 2:
        return ""
    return f'looks like an id: {different} of {known} values differ; encoding = {{ kind = "ignore" }} if it is one'


def _asked_label(name: str, values: pa.Array, distinct: pa.Array | None, asked: Asked) -> dict[str, Any]:
    """The column that was asked for as the label: of texts, the sorted ones are its classes; of two, the
    second is yes, unless it is a known word for no. `distinct` are its values in all rows.
    """
    known = values if distinct is None else distinct
    if known.null_count:
        raise bad_label(name, "null in some rows")
    if known.type != pa.string():
        found = _label(known, asked)
        if found is None:
            raise bad_label(name, f"values of type {known.type}")
        return found
    classes = sorted(set(known.to_pylist()))
    if not 2 <= len(classes) <= MAX_CLASSES or not all(classes):
        raise bad_label(name, f"{min(len(classes), MAX_CLASSES + 1)} different texts or more, such as {classes[:3]}")
    if len(classes) == 2:
        yes_first = (classes[1].casefold(), classes[0].casefold()) in _PAIRS
        classes = classes[::-1] if yes_first else classes
        return {"dtype": "bool", "kind": "label", "class_names": classes}
    return {"dtype": "int64", "kind": "label", "class_names": classes}


def _feature(name: str, values: pa.Array, *, embeddings: bool) -> dict[str, Any] | None:
    """The column as a feature with an encoding; None if no field holds such values."""
    if pa.types.is_list(values.type):
        items = values.flatten()
        if items.null_count or items.type not in (pa.string(), pa.int64(), pa.float32(), pa.float64()):
            return None
        encoding: dict[str, Any] = {"kind": "sequence", "length": min(_longest(values), MAX_VOCABULARY)}
        if items.type == pa.string() and embeddings:  # a sequence feeds ids of itself
            of = _categories(items, embeddings=True)
            encoding["of"] = {key: value for key, value in of.items() if key != "output"}
        elif items.type == pa.string():
            encoding = _categories(items, embeddings=False)
        return {"dtype": _DTYPES[items.type], "list": True, "encoding": encoding}
    dtype = _DTYPES.get(values.type)
    if dtype is None:
        return None
    if _unique(values) or _constant(values) or values.type == pa.timestamp("us"):
        encoding = {"kind": "ignore"}
    elif dtype == "bool":
        encoding = {"kind": "number", "null_value": 0}
    elif dtype == "string" or (dtype not in ("float32", "float64") and _IDS.search(name)):
        encoding = _categories(values, embeddings=embeddings)
    else:
        encoding = _of_numbers(np.asarray(values.drop_null().cast(pa.float64(), safe=False)))
        encoding |= {"output": "index"} if embeddings and encoding["kind"] == "bucketise" else {}
    return {"dtype": dtype, "encoding": encoding}


def _longest(values: pa.Array) -> int:
    return max(1, pc.max(pc.list_value_length(values)).as_py() or 0)


def _categories(values: pa.Array, *, embeddings: bool) -> dict[str, Any]:
    """A vocabulary, or a hash of many values: a column each, or ids."""
    if pc.count_distinct(values).as_py() <= MAX_VOCABULARY:
        return {"kind": "vocabulary"} | ({"output": "index"} if embeddings else {})
    if embeddings:
        return {"kind": "hash", "buckets": EMBEDDED_BUCKETS, "output": "index"}
    return {"kind": "hash", "buckets": HASH_BUCKETS}


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
    shown = (quoted(value[:most] + ("…" if len(value) > most else "")) for value in examples)
    time = (
        'a time: dtype = "int64" with --time-columns stores microseconds' if values.type == pa.timestamp("us") else ""
    )
    return ", ".join([*parts, f"such as {' '.join(shown)}", *filter(None, [time])])


def _block(entry: dict[str, Any], comments: Sequence[str]) -> str:
    lines = [*(f"# {comment}" for comment in comments), "[[fields]]"]
    for key, value in entry.items():
        lines.append(f"{key} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_toml(item)}' for key, item in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return quoted(value) if isinstance(value, str) else json.dumps(value)


def quoted(text: str) -> str:
    """A text as TOML writes it, on one line."""
    return json.dumps(_unicode(text), ensure_ascii=False).replace("\x7f", "\\u007f")


def _unicode(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
