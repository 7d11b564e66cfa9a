"""Declared schemas in TOML or JSON: each key that is left out has a documented default.

    [[fields]]
    name = "click"
    dtype = "bool"
    kind = "label"

    [[fields]]
    names = ["user_feature_0", "user_feature_1"]     # one declaration for several columns
    dtype = "string"
    nullable = true
    encoding = {kind = "hash", buckets = 1000}       # seed 42, output one_hot

    [[fields]]
    name = "tags"
    dtype = "string"
    list = true
    encoding = {kind = "sequence", length = 8, of = {kind = "vocabulary", max_size = 500}}

docs/schema.md lists every key. The manifest stores the same schema with all defaults filled in.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from lockstep.features.schema.encodings import BAKED, MAX_FILE_STEM, Encoding
from lockstep.features.schema.fields import Field, check_name, sample_id_field
from lockstep.features.schema.schema import EXAMPLE, Schema
from lockstep.storage.documents import sha256_hex
from lockstep.storage.errors import ConfigError, NotFoundError, nearest, require
from lockstep.storage.fs import filesystem

# With seed 42 the hash equals Spark SQL's xxhash64: lockstep/features/encode/hashing.py.
DEFAULT_SEED = 42
_MAX_BYTES = 16 << 20
_MAX_DEPTH, _MAX_BITS = 16, 1024  # a sequence of a vocabulary is six levels deep; a float64 is below 2**1024
_DEFAULTS: dict[str, dict[str, Any]] = {
    "vocabulary": {"max_size": 10_000, "min_count": 1, "oov_buckets": 1},
    "hash": {"seed": DEFAULT_SEED},
}
_TABLE = re.compile(r"\s*\[\[\s*\"?fields\"?\s*\]\]")
_ARRAY = re.compile(r'"fields"\s*:\s*\[')
_BETWEEN = re.compile(r"[ \t\r\n,]*")
_KEYS = (
    "name", "names", "dtype", "shape", "list", "kind", "nullable", "encoding", "num_classes", "class_names", "default",
)  # fmt: skip


def load_schema(text_or_path: str | os.PathLike[str]) -> Schema:
    """Read a declared schema from its text (with a newline, or beginning with `{`) or from the URL of a .toml or .json.

    If no field of kind `id` is declared, the sample id comes first. Raises ConfigError, naming file, entry and line,
    for text that is not TOML or JSON and for a wrong declaration; NotFoundError for a missing file.

    >>> import lockstep
    >>> schema = lockstep.load_schema('{"fields": [{"name": "hour", "dtype": "int64"}]}')
    >>> [(field.name, field.dtype) for field in schema.fields]
    [('sample_id', 'int64'), ('hour', 'int64')]
    """
    if isinstance(text_or_path, os.PathLike):
        text_or_path = os.fspath(text_or_path)
    allowed = "the text of a schema, or the path or URL of a .toml or .json file"
    require(isinstance(text_or_path, str), "a declared schema", repr(text_or_path)[:100], allowed)
    text = text_or_path.lstrip()
    if "\n" in text or text.startswith("{"):
        return _parsed(text_or_path, "the schema's text", as_json=text.startswith("{"))
    fs = filesystem(text_or_path)
    try:
        size = fs.stat(text_or_path).size_bytes
    except NotFoundError as error:
        raise NotFoundError(
            f"--schema: no such file {text_or_path}",
            got=error.got,
            allowed="a .toml or .json file with a declared schema",
            next_step="Correct the path after --schema; docs/schema.md shows how to write a schema.",
        ) from None
    if size > _MAX_BYTES:
        raise _bad(text_or_path, "a file of more than 16 MiB", "a schema")
    data = fs.read_bytes(text_or_path)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad(text_or_path, str(error), "UTF-8") from None
    return _parsed(text, text_or_path, as_json=text_or_path.endswith(".json"))


def declared_field(document: Mapping[str, Any]) -> tuple[Field, ...]:
    """One entry of `fields`: a field, or one for each of `names`. Raises ConfigError for unknown keys, wrong types."""
    names = document.get("names", [document.get("name")])
    for key in map(str, document):
        if key not in _KEYS:
            raise _bad("a field", f"{key}, an unknown key{nearest(key, _KEYS)}", ", ".join(_KEYS))
    good = ("name" in document) != ("names" in document) and isinstance(names, list) and len(names) > 0
    if not good or not all(isinstance(name, str) for name in names):
        got = {key: document[key] for key in ("name", "names") if key in document}
        raise _bad("a field", f"{got or 'neither name nor names'}"[:200], "name = TEXT, or names = [TEXT, ...]")
    for name in names:
        check_name(name)
    shape = document.get("shape", [])
    if "list" in document and (not isinstance(document["list"], bool) or "shape" in document):
        raise _bad(
            f"field `{names[0]}`",
            "list together with shape, or a value other than true and false",
            "list = true, or shape = [...]",
        )
    full = {
        "dtype": document.get("dtype"),
        "shape": [None] if document.get("list") else shape,
        "kind": document.get("kind", "feature"),
        "nullable": document.get("nullable", False),
        "num_classes": document.get("num_classes"),
    }
    if "class_names" in document:
        classes = full["class_names"] = document["class_names"]
        if full["num_classes"] is None and full["dtype"] == "int64" and isinstance(classes, list):
            full["num_classes"] = len(classes)
    if "default" in document:
        full["default"] = document["default"]
    encoding = document.get("encoding")
    return tuple(
        Field.from_json({"name": name, **full, "encoding": complete_encoding(encoding, name)}) for name in names
    )


def complete_encoding(encoding: object, name: str) -> Encoding | None:
    """An encoding with its defaults: a vocabulary's sizes, a hash's seed, the file NAME.json for fitted statistics."""
    if not isinstance(encoding, Mapping):
        if encoding is None:
            return None
        raise _bad(f"field `{name}`", f"encoding {encoding!r}"[:200], "an object with the key `kind`")
    kind = encoding.get("kind")
    if kind == BAKED:
        raise _bad(f"field `{name}`", "encoding kind 'baked'", "the encoding itself; the job's --bake bakes it")
    full = {**_DEFAULTS.get(kind, {}), **encoding} if isinstance(kind, str) else dict(encoding)
    if kind == "vocabulary" and isinstance(encoding.get("tokens"), list):
        full["max_size"] = encoding.get("max_size", len(encoding["tokens"]))
    if kind in ("vocabulary", "standardise"):
        full.setdefault("file", f"{_file_stem(name)}.json")
    if kind == "sequence" and "of" in full:
        full["of"] = complete_encoding(full["of"], name)
    return full


def _parsed(text: str, where: str, *, as_json: bool) -> Schema:
    try:
        document = json.loads(text) if as_json else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(where, str(error).splitlines()[0], "JSON" if as_json else "TOML") from None
    _check_extent(document, where)
    entries = document.get("fields") if isinstance(document, dict) else None
    good = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    if not good or not set(document) <= {"fields", "record"}:
        got = sorted(document) if isinstance(document, dict) else type(document).__name__
        raise _bad(where, f"{got}", "`fields`: a list of objects; optionally `record`")
    assert isinstance(document, dict) and isinstance(entries, list)
    fields: list[Field] = []
    for number, entry in enumerate(entries):
        try:
            fields += declared_field(entry)
        except ConfigError as error:
            raise _named(error, _place(text, where, entries, number, error.got, as_json=as_json)) from None
    if not any(field.kind == "id" for field in fields):
        fields.insert(0, sample_id_field())
    try:
        return Schema(tuple(fields), document.get("record", EXAMPLE))
    except ConfigError as error:
        raise _named(error, where) from None


def _named(error: ConfigError, place: str) -> ConfigError:
    return ConfigError(f"{place}: {error.what}", got=error.got, allowed=error.allowed, next_step=error.next_step)


def _place(text: str, where: str, entries: list[Any], number: int, got: str, *, as_json: bool) -> str:
    """The file, line and entry of an error: the line of the key that `got` begins with, or the entry's first line.

    The TOML and JSON parsers report no lines of values, so an error names a line only if it is found with certainty.
    """
    found = (_json_lines if as_json else _toml_lines)(text, entries)
    if len(found) != len(entries):
        return f"{where}, fields[{number}]"
    first, lines = found[number], text.split("\n")
    last = found[number + 1] if number + 1 < len(found) else len(lines) + 1
    key = re.compile(rf'[\s{{]*"?{re.escape(re.split("[ ,=:]", got)[0])}"?\s*[=:]')
    line = next((place for place in range(first, max(first + 1, last)) if key.match(lines[place - 1])), first)
    return f"{where}, line {line}, fields[{number}]"


def _toml_lines(text: str, entries: list[Any]) -> list[int]:
    """The lines in which entries begin as tables `[[fields]]`; not one for each entry if they are written otherwise."""
    return [number for number, line in enumerate(text.split("\n"), 1) if _TABLE.match(line)]


def _json_lines(text: str, entries: list[Any]) -> list[int]:
    array, line, lines = _ARRAY.search(text), 1, list[int]()
    before = at = 0
    for entry in entries:
        between = _BETWEEN.match(text, array.end() if array is not None and not lines else at)
        assert between is not None, "the pattern matches an empty string"
        try:
            value, at = json.JSONDecoder().raw_decode(text, between.end())
        except ValueError:
            return []
        if value != entry:  # this is another list named `fields`
            return []
        line += text.count("\n", before, between.end())
        before = between.end()
        lines.append(line)
    return lines


def _check_extent(document: object, where: str) -> None:
    """Refuse values that Python parses but cannot print in an error: very long hexadecimal numbers of TOML, and values
    nested almost as deep as Python's stack.
    """
    level = [document]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
        long = next((value for value in level if isinstance(value, int) and value.bit_length() > _MAX_BITS), None)
        if long is not None:
            raise _bad(where, f"a number of {long.bit_length()} bits", f"numbers of at most {_MAX_BITS} bits")
    if level:
        raise _bad(where, f"values nested more than {_MAX_DEPTH} deep", "a list of fields as in docs/schema.md")


def _file_stem(name: str) -> str:
    """A file name for a column: ASCII letters, digits and `_.-` stay, others become their code point in hex; a long
    one ends with a digest of the name instead.
    """
    stem = "".join(c if c.isascii() and (c.isalnum() or c in "_.-") else f"-{ord(c):x}-" for c in name)
    stem = stem if stem[:1].isalnum() else f"f{stem}"
    if len(stem) <= MAX_FILE_STEM:
        return stem
    digest = sha256_hex(name.encode("utf-8", "surrogatepass"))[:16]
    return f"{stem[: MAX_FILE_STEM - len(digest) - 1]}-{digest}"


def _bad(what: str, got: str, allowed: str) -> ConfigError:
    return ConfigError(
        f"{what} does not declare a schema",
        got=got,
        allowed=allowed,
        next_step="Correct it; docs/schema.md has an example of each key.",
    )
