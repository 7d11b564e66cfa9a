"""What a log job will read and as what: files, ranges and columns, found out before Spark starts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import pyarrow as pa

from etl import columns as c
from etl.input.ranges import Source, find_sources, plan_ranges, source_name
from etl.input.text_files import check_lines
from etl.logs import weblog
from etl.logs.fields import DELIMITERS
from etl.logs.parse import LineParser, Work, ddl_type
from etl.logs.plan import kinds_in, names_in
from etl.logs.records import PLACE_COLUMNS, PLACE_SCHEMA, RecordLines, columns_for
from etl.logs.table_lines import TABLE_FORMATS, Form
from etl.logs.web import WebLines
from etl.logs.webtable import roles
from etl.split.sampling import Sampling
from etl.write.config import LogsConfig
from etl.write.output import check_columns, check_schema
from lockstep.features.schema.declare import load_schema
from lockstep.features.schema.fields import SAMPLE_ID
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError

MAX_LISTED = 400  # characters of names in an error
# In Spark's SQL: what is no name (raw strings, strings, comments), a name in backquotes, or a bare one. What stands
# before a bracket is a function.
_TOKEN = re.compile(
    r"""\br(?:'[^']*'|"[^"]*")|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|--[^\n]*|/\*.*?\*/"""
    r"""|`(?P<quoted>(?:[^`]|``)+)`|(?P<bare>\w+)(?!\w|\s*\()""",
    re.DOTALL | re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The files, their ranges, and what becomes of the lines."""

    sources: tuple[Source, ...]
    work: tuple[Work, ...]
    parser: LineParser
    schema: Schema
    id_columns: tuple[str, ...]

    @property
    def told(self) -> bool:
        """Whether requests name their referrer and user agent."""
        return isinstance(self.parser, WebLines) and _told(self.parser.form)


def plan_of(config: LogsConfig) -> Plan:
    """Find the files and read the names of their fields.

    Raises the errors of find_sources, check_lines, names_in and check_schema, and ConfigError for columns that are not
    there.
    """
    header = config.log_format in ("tsv", "csv") and not config.columns
    form = Form(config.log_format, config.null_texts, header, config.quoted_newlines)
    if config.schema is None:
        _check_asked(config, weblog.schema(_told(form)), weblog.ID_SCHEMA)
        sources = find_sources(config.inputs, check_lines)
        names = [_names(source, config) for source in sources]
        if config.log_format in TABLE_FORMATS:
            for source, there in zip(sources, names, strict=True):
                roles(there, source.url)
        work = _work(sources, names, config)
        return Plan(tuple(sources), work, WebLines(form), weblog.schema(_told(form)), weblog.ID_COLUMNS)
    schema, id_columns = load_schema(config.schema), config.id_columns or PLACE_COLUMNS
    sources = find_sources(config.inputs, check_lines)
    names = [() if config.log_format == "json" else _names(source, config) for source in sources]
    kinds = kinds_in(sources[0]) if config.log_format == "json" else dict.fromkeys(names[0], pa.string())
    columns = columns_for(schema, id_columns, _others(config, schema, kinds), kinds, config.label, config.time_columns)
    parser = RecordLines(form, columns, config.time_columns)
    _check_asked(config, schema, pa.schema([*PLACE_SCHEMA, *parser.schema]))
    _check_columns(config, schema, parser, sources, names)
    return Plan(tuple(sources), _work(sources, names, config), parser, schema, id_columns)


def _told(form: Form) -> bool:
    return form.log_format == "combined"


def _work(sources: Sequence[Source], names: Sequence[tuple[str, ...]], config: LogsConfig) -> tuple[Work, ...]:
    """The ranges; files of one name are told apart by how many came before."""
    seen: Counter[str] = Counter()
    called = []
    for source in sources:
        name = source_name(source.url)
        called.append((name, seen[name]))
        seen[name] += 1
    ranges = plan_ranges(sources, config.split_bytes, whole=config.quoted_newlines)
    return tuple(Work(part, names[part.source_index], *called[part.source_index]) for part in ranges)


def _check_asked(config: LogsConfig, schema: Schema, read: pa.Schema) -> None:
    """What can be told of rows with the columns `read` and those of the schema. Raises ConfigError."""
    made = {field.name: c.ddl_type(field) for field in schema if field.name != SAMPLE_ID}
    check_columns(config, schema, {field.name: ddl_type(field.type) for field in read} | made)
    check_schema(config, schema)


def _names(source: Source, config: LogsConfig) -> tuple[str, ...]:
    if config.columns or config.log_format not in TABLE_FORMATS:
        return config.columns
    return names_in(source, config.log_format, config.quoted_newlines)


def _others(config: LogsConfig, schema: Schema, known: Iterable[str]) -> list[str]:
    """Columns that only the label's expression, the split or the sample asks for."""
    asked = names_asked(config.label or "")
    others = [name for name in known if name and not name.startswith("_") and name.lower() in asked]
    others += config.time_columns
    made = schema.label.name if schema.label is not None and config.label is not None else None
    sampled = None if config.sample is None else Sampling.parse(config.sample).column
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
    """The error for a file with the columns `there` that lacks some that are asked for, or has them `twice`."""
    faults = [f"{what} {_listed(names)}" for what, names in (("no column", missing), ("more than one", twice)) if names]
    other = next((name for name, mark in DELIMITERS.items() if name != log_format and there and mark in there[0]), None)
    way = "Correct the flags that name columns, or the schema; --columns names fields anew."
    if len(there) == 1 and other is not None:
        way = f"The file looks like {other}: correct --log-format, which is {log_format}."
    return ConfigError(
        f"{url} has not the columns asked for, each once",
        got="; ".join(faults),
        allowed=f"its columns: {_listed([name for name in there if name])}",
        next_step=way,
    )


def _listed(names: Sequence[str]) -> str:
    """The first names, whole, and how many more there are."""
    ends = accumulate(len(name) + 2 for name in names)
    shown = max(1, sum(end <= MAX_LISTED for end in ends))
    more = len(names) - shown
    return ", ".join(name[:MAX_LISTED] for name in names[:shown]) + (f" and {more} more" if more > 0 else "")


def _check_columns(
    config: LogsConfig, schema: Schema, parser: RecordLines, sources: Sequence[Source], names: Sequence[tuple[str, ...]]
) -> None:
    wanted = parser.schema.names
    for source, there in zip(sources, names, strict=True):
        missing = [name for name in wanted if name not in there]
        twice = [name for name in wanted if there.count(name) > 1]
        if config.log_format != "json" and (missing or twice):
            raise columns_differ(source.url, config.log_format, there, missing, twice)
    odd = [name for name in wanted if name.startswith("_") or name == "split"]
    alike = [name for name, count in Counter(name.lower() for name in wanted).items() if count > 1]
    if odd or alike:
        raise ConfigError(
            f"a column cannot be called {', '.join(odd + alike)}",
            got="a name that the dataset uses itself, or one that differs in its letters' case alone",
            allowed="names that do not begin with `_` and differ in more than case",
            next_step="Name the fields anew by --columns.",
        )
    if config.label is not None and schema.label is None:
        raise ConfigError(
            "--label is given, but the schema has no label",
            got=config.label,
            allowed="a field of kind label",
            next_step="Declare one in the schema, or leave --label out.",
        )
