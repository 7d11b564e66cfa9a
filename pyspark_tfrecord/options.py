"""The options of `format("tfrecord")`, checked before any file is opened; an unknown one is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from lockstep.storage.dataset.indexed import DATA_GLOB, SAMPLE_RECORDS
from lockstep.storage.errors import ConfigError
from lockstep.storage.urls import absolute

PARTITION_BYTES = 32 << 20  # a second or less of a core: small sets still use all cores; docs/decisions/067
VERIFY = ("records", "full")
DOUBLES = ("refuse", "float32")
# Names as the documentation spells them; Spark compares the names of options without case.
_READ = ("path", "split", "columns", "verify", "partitionBytes", "sampleRecords", "pathGlobFilter", "hadoopSettings")
_WRITE = ("path", "mustBeNew", "compression", "doubles", "hadoopSettings")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """How to read. Raises ConfigError for an invalid value."""

    path: str
    split: str | None = None
    """One split of a dataset; None reads all of them and adds a column `split`."""
    columns: tuple[str, ...] | None = None
    """The columns to read, in this order: Spark 4.3 does not pass a Python source the columns that a query needs."""
    verify: str = "records"
    """"records": both checksums of each record. "full": the SHA-256 of each file too, so a file is one partition."""
    partition_bytes: int = PARTITION_BYTES
    """About how many bytes of a file one task reads."""
    sample_records: int = SAMPLE_RECORDS
    """How many records the schema of files without a manifest is inferred from."""
    path_glob: str = DATA_GLOB
    """Which files of a directory without a manifest are read."""
    hadoop: Mapping[str, str] = field(default_factory=dict)
    """fs.* and dfs.* settings that are not in HADOOP_CONF_DIR."""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Self:
        """Make the options from what `.option(...)` and `.load(...)` gave; names are case-insensitive."""
        given = _known(options, _READ)
        return cls(
            path=_path(given),
            split=given.get("split"),
            columns=None if "columns" not in given else _names(given["columns"]),
            verify=_choice(given, "verify", VERIFY, "records"),
            partition_bytes=_count(given, "partitionbytes", PARTITION_BYTES),
            sample_records=_count(given, "samplerecords", SAMPLE_RECORDS),
            path_glob=given.get("pathglobfilter", DATA_GLOB),
            hadoop=_settings(given),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteOptions:
    """How to write. Raises ConfigError for an invalid value."""

    path: str
    must_be_new: bool = False
    """Refuse a path that exists, as mode("errorifexists") would, which Spark does not pass to a Python source."""
    compression: str | None = None
    """The shards' compression: None or "gzip"."""
    doubles: str = "refuse"
    """What to do with doubles, which tf.Example cannot hold: refuse them, or round them to float32."""
    hadoop: Mapping[str, str] = field(default_factory=dict)
    """fs.* and dfs.* settings that are not in HADOOP_CONF_DIR."""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Self:
        """Make the options from what `.option(...)` and `.save(...)` gave; names are case-insensitive."""
        given = _known(options, _WRITE)
        compression = _choice(given, "compression", ("none", "gzip"), "none")
        return cls(
            path=_path(given),
            must_be_new=_choice(given, "mustbenew", ("true", "false"), "false") == "true",
            compression=None if compression == "none" else compression,
            doubles=_choice(given, "doubles", DOUBLES, "refuse"),
            hadoop=_settings(given),
        )


def _known(options: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    given = {key.lower(): value for key, value in options.items()}
    for key in given:
        if key not in {name.lower() for name in names}:
            raise _bad(f"unknown option `{key}`", f"{key} = {given[key]!r}", ", ".join(names))
    return given


def _path(given: Mapping[str, str]) -> str:
    if not given.get("path"):
        raise _bad("no path was given", "nothing", "one path or URL: .load(URL), .save(URL)")
    return absolute(given["path"])


def _choice(given: Mapping[str, str], key: str, allowed: tuple[str, ...], default: str) -> str:
    value = given.get(key, default).lower()
    if value not in allowed:
        raise _bad(f"option `{key}` is invalid", value, ", ".join(allowed))
    return value


def _count(given: Mapping[str, str], key: str, default: int) -> int:
    text = given.get(key, str(default))
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:20]) < 1 << 63:
        raise _bad(f"option `{key}` is not a number", text, "a whole number from 1 up")
    return int(text)


def _names(text: str) -> tuple[str, ...]:
    """A JSON list, for names with a comma in them, or names with commas between."""
    found: Any = _json("columns", text) if text.lstrip().startswith("[") else [part.strip() for part in text.split(",")]
    if not all(isinstance(name, str) and name for name in found) or len(set(found)) != len(found):
        raise _bad("option `columns` is invalid", text, "different names: a,b,c or a JSON list of strings")
    return tuple(found)


def _settings(given: Mapping[str, str]) -> dict[str, str]:
    found = _json("hadoopSettings", given.get("hadoopsettings", "{}"))
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise _bad("option `hadoopSettings` is invalid", repr(found)[:200], "a JSON object of strings")
    return found


def _json(key: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise _bad(f"option `{key}` is not JSON", str(error), "JSON") from None


def _bad(what: str, got: str, allowed: str) -> ConfigError:
    return ConfigError(f'format("tfrecord"): {what}', got=got, allowed=allowed, next_step="Correct the call.")
