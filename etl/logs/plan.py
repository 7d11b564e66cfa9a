"""The plan of a log job: the files, their format, and the fields that their first lines name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from lockstep.etl import columns as c
from lockstep.etl.columns import listed
from lockstep.etl.input.files import Range, Source, find_lines, plan_ranges
from lockstep.etl.input.lines import MAX_LINE_BYTES, Lines
from lockstep.etl.logs import web
from lockstep.etl.logs.config import LogsConfig
from lockstep.etl.logs.formats import Form, LogFormat, header_hint
from lockstep.etl.logs.pages import assets
from lockstep.etl.logs.parse import LineParser, Work
from lockstep.etl.logs.past import Past
from lockstep.etl.logs.records import PLACE_COLUMNS, PLACE_SCHEMA, RecordLines, columns_for
from lockstep.etl.logs.roles import check_alike, columns_of
from lockstep.etl.logs.values import without_bom
from lockstep.etl.logs.web import WebLines
from lockstep.etl.write.append import Parent, other_parent
from lockstep.etl.write.checks import Target, check_target
from lockstep.etl.write.config import TO_PREDICT
from lockstep.etl.write.increment import ReadBefore
from lockstep.etl.write.sources import check_paths
from lockstep.features.schema.declare import load_schema
from lockstep.features.schema.fields import SAMPLE_ID
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError, require

HEAD_BYTES = 64 << 10
HEAD_LINES = 100
ROLES = "roles"  # in created_by.config: the column of each role
_SCALAR = (bool, int, float, str)
# Tokens of Spark's SQL: strings and comments, a name in backquotes, or a bare name. A name before a bracket is a
# function.
_TOKEN = re.compile(
    r"""\br(?:'[^']*'|"[^"]*")|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|--[^\n]*|/\*.*?\*/"""
    r"""|`(?P<quoted>(?:[^`]|``)+)`|(?P<bare>\w+)(?!\w|\s*\()""",
    re.DOTALL | re.IGNORECASE,
)


def names_in(source: Source, form: Form) -> tuple[str, ...]:
    """The names that the format takes from a file's first lines, or the keys of its first objects, () if it starts with
    none.

    Raises DataError naming the file for an invalid header.
    """
    kind, head = form.format, _head(source, form)
    if kind.names_of is None:
        return tuple(dict.fromkeys(key for document in _objects(head, kind) for key in document))
    return kind.names_of(head, source.url)


def keys_in(source: Source, form: LogFormat) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The keys of a file's first objects that are no objects or lists, and the paths of values inside objects."""
    objects = _objects(_head(source, Form(form.name)), form)
    keys = dict.fromkeys(key for document in objects for key in document)
    inner = {key for document in objects for key, value in document.items() if isinstance(value, dict | list)}
    plain = {key for document in objects for key, value in document.items() if isinstance(value, _SCALAR)}
    paths = dict.fromkeys(path for document in objects for path in _paths(document, ""))
    return tuple(key for key in keys if key in plain or key not in inner), tuple(paths)


def _paths(document: dict[str, Any], inside: str) -> Iterator[str]:
    """The paths of values inside the objects of an object."""
    for key, value in document.items():
        if isinstance(value, dict):
            yield from _paths(value, f"{inside}{key}.")
        elif inside:
            yield f"{inside}{key}"


def kinds_in(sources: Iterable[Source], form: LogFormat) -> dict[str, pa.DataType]:
    """The types of the scalars in the first objects of each file, by their keys. Of several types of a key the
    last in the order of _SCALAR counts, whichever file is the first.
    """
    kinds = (pa.bool_(), pa.int64(), pa.float64(), pa.string())
    found: dict[str, int] = {}
    for document in (one for source in sources for one in _objects(_head(source, Form(form.name)), form)):
        for key, value in document.items():
            if type(value) in _SCALAR:
                found[key] = max(found.get(key, 0), _SCALAR.index(type(value)))
    return {key: kinds[place] for key, place in found.items()}


def _head(source: Source, form: Form) -> list[bytes]:
    """The first lines of a file; [] if the first one is too long."""
    part = Range(0, source.url, 0, min(HEAD_BYTES, source.size_bytes), source.codec)
    lines = form.lines_of(part, HEAD_BYTES, most_bytes=2 * MAX_LINE_BYTES)
    first = next(lines, None)
    if not isinstance(first, Lines):
        return []
    values: pa.Array = without_bom(first.values)
    return [value for value in values.to_pylist() if isinstance(value, bytes)]


def _objects(lines: list[bytes], form: LogFormat) -> list[dict[str, Any]]:
    """The objects among the first lines; other lines are reported when they are read as records."""
    assert form.object_of is not None
    found = map(form.object_of, lines[:HEAD_LINES])
    return [document for document in found if document is not None]


@dataclass(frozen=True, slots=True)
class Plan:
    """The files, their ranges, the parser of their lines, and the dataset that they become."""

    sources: tuple[Source, ...]
    work: tuple[Work, ...]
    parser: LineParser
    target: Target
    id_columns: tuple[str, ...]
    past: Past

    @property
    def by_place(self) -> bool:
        """Whether file and position are the id of a record."""
        return self.id_columns == PLACE_COLUMNS

    @property
    def combined(self) -> bool:
        """Whether requests name their referrer and user agent."""
        return isinstance(self.parser, WebLines) and self.parser.combined

    @property
    def created(self) -> dict[str, Any]:
        """What the manifest says of the plan, in addition to the configuration."""
        return {ROLES: dict(self.parser.columns)} if isinstance(self.parser, WebLines) else {}


def sources_of(config: LogsConfig, read: ReadBefore | None = None) -> list[Source]:
    """The files of a log, without those that are empty and those `read` before. Raises the errors of find_lines, and
    DataError for a file that was read before and has grown or changed since.
    """
    find = partial(find_lines, config.inputs, config.has_header, config.input_root)
    return find() if read is None else read.new(find)


def plan_of(config: LogsConfig, parent: Parent | None = None, sources: Sequence[Source] | None = None) -> Plan:
    """Find the files, unless they are known as `sources`, and read the names of their fields; `parent` is the dataset
    that is continued.

    Raises the errors of find_lines, names_in, check_target and, where records are known by their file,
    check_paths; ConfigError for missing columns.
    """
    kind = config.format
    form = config.form
    if config.schema is None:
        for flag, given in (("--id-columns", config.id_columns), ("--time-columns", config.time_columns)):
            require(not given, flag, " ".join(given), "with --schema")
        # Flags are checked before a file is read. Only of dated logs do the files decide which features there are.
        checked = None if kind.dated else _web_target(config, kind.referrers, parent)
        sources = sources_of(config) if sources is None else sources
        names = [_names(source, config) for source in sources]
        by_role = _web_columns(sources, names, config) if kind.has_columns else {}
        _check_parent(by_role, config, parent)
        lines = WebLines(form, by_role, assets(config.page_suffixes, config.asset_suffixes))
        target = checked or _web_target(config, lines.combined, parent)
        work = _work(sources, names, config)
        return Plan(tuple(sources), work, lines, target, web.ID_COLUMNS, Past.of(parent))
    schema = config.stored(config.schema if isinstance(config.schema, Schema) else load_schema(config.schema))
    id_columns = config.id_columns or PLACE_COLUMNS
    sources = sources_of(config) if sources is None else sources
    if not config.id_columns:
        check_paths(sources, parent, "; or name the columns that identify a record by --id-columns")
    names = [() if kind.keyed else _names(source, config) for source in sources]
    kinds = kinds_in(sources, kind) if kind.keyed else dict.fromkeys(names[0], pa.string())
    columns = columns_for(schema, id_columns, _others(config, schema, kinds), kinds, config.label, config.time_columns)
    parser = RecordLines(form, columns, config.time_columns)
    target = _target(config, schema, pa.schema([*PLACE_SCHEMA, *parser.schema]), parent)
    _check_columns(config, schema, parser, sources, names)
    return Plan(tuple(sources), _work(sources, names, config), parser, target, id_columns, Past())


def _web_columns(sources: Sequence[Source], names: Sequence[tuple[str, ...]], config: LogsConfig) -> dict[str, str]:
    """The column of each role, equal in all files."""
    found = []
    for source, there in zip(sources, names, strict=True):
        there, nested = keys_in(source, config.format) if config.format.keyed else (there, ())
        found.append(columns_of(there, config.role_columns, source.url, nested=nested, dated=config.format.dated))
    return check_alike([source.url for source in sources], found)


def _check_parent(columns: Mapping[str, str], config: LogsConfig, parent: Parent | None) -> None:
    """Raise ConfigError if the parent, in the same log format, took other columns for the roles, or other pages."""
    if parent is None:
        return
    stored = parent.manifest.created_by["config"]
    ours: dict[str, Any] = {name: list(getattr(config, name)) for name in ("page_suffixes", "asset_suffixes")}
    if stored.get("log_format") == config.log_format:
        ours[ROLES] = dict(columns)
    for name, value in ours.items():
        theirs = stored.get(name, value)
        if theirs != value:
            raise other_parent(parent.url, name.replace("_", " "), theirs, value)


def _work(sources: Sequence[Source], names: Sequence[tuple[str, ...]], config: LogsConfig) -> tuple[Work, ...]:
    # Only from the start of the file is known where a quote opens, or which fields a section has.
    whole = config.quoted_newlines or config.format.sections is not None
    ranges = plan_ranges(sources, config.split_bytes, whole=whole)
    return tuple(Work(part, names[part.source_index], sources[part.source_index].path) for part in ranges)


def _web_target(config: LogsConfig, combined: bool, parent: Parent | None) -> Target:
    return _target(config, config.stored(web.schema(combined)), web.ID_SCHEMA, parent)


def _target(config: LogsConfig, schema: Schema, read: pa.Schema, parent: Parent | None) -> Target:
    """The dataset of rows with the columns `read` and those of the schema. Raises ConfigError."""
    made = {field.name: c.ddl_type(field) for field in schema if field.name != SAMPLE_ID}
    kinds = {field.name: c.spark_type(field.type) for field in read} | made
    return check_target(config, schema, kinds, parent)


def _names(source: Source, config: LogsConfig) -> tuple[str, ...]:
    if config.columns or not config.format.has_columns:
        return config.columns
    return names_in(source, config.form)


def _others(config: LogsConfig, schema: Schema, known: Iterable[str]) -> list[str]:
    """Columns that only the label's expression, the split or the sample needs."""
    asked = names_asked(config.label or "")
    others = [name for name in known if name and not name.startswith("_") and name.lower() in asked]
    others += config.time_columns
    made = schema.label.name if schema.label is not None and config.label is not None else None
    sampled = None if config.sampling is None else config.sampling.column
    others += [name for name in (config.split_spec.column, sampled) if name not in (None, made)]
    return list(dict.fromkeys(others))


def names_asked(expression: str) -> frozenset[str]:
    """The names in a SQL expression that may be columns, in lower case; strings and functions are none."""
    found = _TOKEN.finditer(expression)
    names = ((token["quoted"] or "").replace("``", "`") or token["bare"] for token in found)
    return frozenset(name.lower() for name in names if name)


def columns_differ(
    url: str, log_format: str, there: Sequence[str], missing: Sequence[str], twice: Sequence[str]
) -> ConfigError:
    """The error for a file with the columns `there` in which some wanted columns are `missing` or there `twice`."""
    faults = [f"{what} {listed(names)}" for what, names in (("no column", missing), ("more than one", twice)) if names]
    way = "Correct the flags that name columns, or the schema."
    if "" in there:  # such as the index that pandas writes
        way += " A field without a name cannot be read: name it in the file's first line."
    return ConfigError(
        f"{url} does not have the columns asked for, each once",
        got="; ".join(faults),
        allowed=f"its columns: {listed([name for name in there if name])}",
        next_step=header_hint(there, log_format) or way,
    )


def _check_columns(
    config: LogsConfig, schema: Schema, parser: RecordLines, sources: Sequence[Source], names: Sequence[tuple[str, ...]]
) -> None:
    wanted = parser.schema.names
    for source, there in zip(sources, names, strict=True):
        missing = [name for name in wanted if name not in there]
        twice = [name for name in wanted if there.count(name) > 1]
        if not config.format.keyed and (missing or twice):
            error = columns_differ(source.url, config.log_format, there, missing, twice)
            if schema.label is not None and schema.label.name in missing:
                error.next_step += TO_PREDICT
            raise error
    odd = [name for name in wanted if name.startswith("_") or name == "split"]
    alike = [name for name, count in Counter(name.lower() for name in wanted).items() if count > 1]
    if odd or alike:
        raise ConfigError(
            f"a column cannot be called {', '.join(odd + alike)}",
            got="a name that the dataset uses itself, or one that differs from another only in case",
            allowed="names that do not begin with `_` and differ in more than case",
            next_step="Rename the fields in the file's first line, or by --columns if it has no header.",
        )
    if config.label is not None and schema.label is None:
        raise ConfigError(
            "--label is given, but the schema has no label",
            got=config.label,
            allowed="a field of kind label",
            next_step="Declare one in the schema, or remove --label.",
        )
