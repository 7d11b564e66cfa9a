"""A schema as a person writes it, in TOML or JSON: what is left out has a stated default.

    [[fields]]
    name = "click"
    dtype = "bool"
    kind = "label"

    [[fields]]
    names = ["user_feature_0", "user_feature_1"]     # the same for several columns
    dtype = "string"
    nullable = true
    encoding = {kind = "hash", buckets = 1000}       # seed 42, output one_hot

    [[fields]]
    name = "tags"
    dtype = "string"
    list = true
    encoding = {kind = "sequence", length = 8, of = {kind = "vocabulary", max_size = 500}}

docs/features.md has every key. The manifest holds the same schema with nothing left out.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from typing import Any

from features.baked_form import BAKED
from features.encodings import Encoding
from features.schema import EXAMPLE, Field, Schema, sample_id_field
from storage.errors import ConfigError, NotFoundError
from storage.fs import filesystem

# With seed 42 the hash is that of Spark SQL's xxhash64: features/hashing.py.
DEFAULT_SEED = 42
_MAX_BYTES = 16 << 20
_MAX_DEPTH, _MAX_BITS = 16, 1024  # a sequence of a vocabulary lies six deep; no float holds more bits before its point
_DEFAULTS: dict[str, dict[str, Any]] = {
    "vocabulary": {"max_size": 10_000, "min_count": 1, "oov_buckets": 1},
    "hash": {"seed": DEFAULT_SEED},
}
_KEYS = ("name", "names", "dtype", "shape", "list", "kind", "nullable", "encoding", "num_classes")


def load_schema(text_or_path: str) -> Schema:
    """Read a declared schema: the text itself (it holds a newline or begins with `{`), or the URL of a .toml or .json.

    The field of the sample id comes first if none is declared. Raises ConfigError for text that is no TOML or JSON
    and for a schema that cannot be, NotFoundError for a missing file.
    """
    text = text_or_path.lstrip()
    if "\n" in text or text.startswith("{"):
        return _parsed(text, "the schema's text", as_json=text.startswith("{"))
    fs = filesystem(text_or_path)
    try:
        size = fs.stat(text_or_path).size_bytes
    except NotFoundError as error:
        raise NotFoundError(
            f"--schema: no such file {text_or_path}",
            got=error.got,
            allowed="a .toml or .json file with a declared schema",
            next_step="Correct the path after --schema; docs/features.md says how to write one.",
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
    """One entry of `fields`: a field, or one for each of `names`. Raises ConfigError for keys or types not known."""
    unknown = sorted(map(str, set(document) - set(_KEYS)))
    names = document.get("names", [document.get("name")])
    good = not unknown and ("name" in document) != ("names" in document)
    if not good or not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise _bad("a field", f"keys {sorted(map(str, document))}, unknown {unknown}", f"name or names; {_KEYS[2:]}")
    shape = document.get("shape", [])
    if "list" in document and (not isinstance(document["list"], bool) or "shape" in document):
        raise _bad(f"field `{names[0]}`", "list beside shape, or not true or false", "list = true, or shape = [...]")
    full = {
        "dtype": document.get("dtype"),
        "shape": [None] if document.get("list") else shape,
        "kind": document.get("kind", "feature"),
        "nullable": document.get("nullable", False),
        "num_classes": document.get("num_classes"),
    }
    encoding = document.get("encoding")
    return tuple(
        Field.from_json({"name": name, **full, "encoding": complete_encoding(encoding, name)}) for name in names
    )


def complete_encoding(encoding: object, name: str) -> Encoding | None:
    """An encoding with what was left out: a vocabulary's sizes, a hash's seed, the file NAME.json of what is fitted."""
    if not isinstance(encoding, Mapping):
        if encoding is None:
            return None
        raise _bad(f"field `{name}`", f"encoding {encoding!r}"[:200], "an object with the key `kind`")
    kind = encoding.get("kind")
    if kind == BAKED:
        raise _bad(f"field `{name}`", "encoding kind 'baked'", "the encoding itself, and --bake for the job")
    full = {**_DEFAULTS.get(kind, {}), **encoding} if isinstance(kind, str) else dict(encoding)
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
        raise _bad(where, f"{got}", "`fields`: a list of objects; and perhaps `record`")
    assert isinstance(document, dict) and isinstance(entries, list)
    fields = tuple(field for entry in entries for field in declared_field(entry))
    if not any(field.kind == "id" for field in fields):
        fields = (sample_id_field(), *fields)
    return Schema(fields, document.get("record", EXAMPLE))


def _check_extent(document: object, where: str) -> None:
    """Refuse what Python reads, but cannot tell of in an error: TOML's hexadecimal numbers of any length, and values
    nested as deep as its own stack.
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
        raise _bad(
            where, f"values nested more than {_MAX_DEPTH} deep", "a list of fields, as docs/features.md has them"
        )


def _file_stem(name: str) -> str:
    """A file's name for a column: letters, digits and `_.-` stay, others become their code point in hex."""
    stem = "".join(c if c.isascii() and (c.isalnum() or c in "_.-") else f"-{ord(c):x}-" for c in name)
    return stem if stem[:1].isalnum() else f"f{stem}"


def _bad(what: str, got: str, allowed: str) -> ConfigError:
    return ConfigError(
        f"{what} does not declare a schema",
        got=got,
        allowed=allowed,
        next_step="Correct it; docs/features.md has an example of each key.",
    )
