"""The parts of a dataset's manifest besides its shards, and their strict reading."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.storage import strict
from lockstep.storage.dataset.layout import safe_relative
from lockstep.storage.dataset.manifest_shards import SplitInfo
from lockstep.storage.errors import DataError


@dataclass(frozen=True, slots=True)
class FileInfo:
    """Length and SHA-256 (hex) of any other published file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Counts:
    """Input records: read = written + quarantined + all dropped, by reason."""

    read: int
    written: int
    quarantined: int
    dropped: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """One input file: URL, length in bytes and SHA-256 (hex) as it was read."""

    url: str
    bytes: int
    sha256: str


def read_file(path: str, value: Any, where: str) -> FileInfo:
    """One entry of `files`, strictly."""
    safe_relative(path, where=f"{where}: files")
    place = f"{where}: {path}"
    petastorm = re.fullmatch(r"(split=[^/]+/)?_common_metadata", path)
    if path.split("/")[0] not in ("_index", "_quarantine", "_fitted") and petastorm is None:
        raise DataError(
            f"{place} is not a file that a dataset lists",
            got=path,
            allowed="_index/, _quarantine/, _fitted/, Petastorm's _common_metadata",
            next_step="Build the dataset anew.",
        )
    doc = strict.obj(value, ("bytes", "sha256"), where=place)
    size = strict.count(doc["bytes"], where=f"{place}: bytes")
    return FileInfo(size, strict.sha256(doc["sha256"], where=f"{place}: sha256"))


def read_counts(value: Any, splits: Mapping[str, SplitInfo], where: str) -> Counts:
    """The counts, which must add up and fit the shards."""
    place = f"{where}: counts"
    doc = strict.obj(value, ("read", "written", "quarantined", "dropped"), where=place)
    dropped = strict.mapping(doc["dropped"], where=f"{place}: dropped")
    counts = Counts(
        read=strict.count(doc["read"], where=f"{place}: read"),
        written=strict.count(doc["written"], where=f"{place}: written"),
        quarantined=strict.count(doc["quarantined"], where=f"{place}: quarantined"),
        dropped={why: strict.count(n, where=f"{place}: dropped: {why}") for why, n in dropped.items()},
    )
    total = counts.written + counts.quarantined + sum(counts.dropped.values())
    records = sum(split.records for split in splits.values())
    if counts.read != total or counts.written != records:
        raise DataError(
            f"{place} do not add up",
            got=f"read {counts.read}, written + quarantined + dropped {total}, records in shards {records}",
            allowed="read = written + quarantined + dropped, written = records in shards",
            next_step="Build the dataset anew.",
        )
    return counts


def read_created_by(value: Any, where: str) -> dict[str, Any]:
    """The object `created_by`."""
    place = f"{where}: created_by"
    doc = strict.obj(value, ("version", "config", "seed"), where=place)
    strict.string(doc["version"], where=f"{place}: version")
    strict.mapping(doc["config"], where=f"{place}: config")
    strict.count(doc["seed"], where=f"{place}: seed")
    return doc


def read_source(value: Any, where: str) -> SourceInfo:
    """One input file."""
    place = f"{where}: source"
    doc = strict.obj(value, ("url", "bytes", "sha256"), where=place)
    url = strict.string(doc["url"], where=f"{place}: url")
    return SourceInfo(url, strict.count(doc["bytes"], where=place), strict.sha256(doc["sha256"], where=place))


def read_leakage(value: Any, where: str) -> dict[str, Any] | None:
    """What was looked for on two sides of the split, or None."""
    if value is None:
        return None
    place = f"{where}: leakage"
    chance = ("by_chance", "distinct") if isinstance(value, dict) and "by_chance" in value else ()
    doc = strict.obj(value, ("kind", "checked", "found", *chance), where=place)
    strict.string(doc["kind"], where=f"{place}: kind")
    checked = [strict.string(item, where=f"{place}: checked") for item in strict.items(doc["checked"], where=place)]
    found = strict.obj(doc["found"], checked, where=f"{place}: found")
    for name, count in found.items():
        strict.count(count, where=f"{place}: found: {name}")
    for key in chance:
        for name, number in strict.mapping(doc[key], where=f"{place}: {key}").items():
            strict.string(name, where=f"{place}: {key}", choices=checked)
            strict.number(number, where=f"{place}: {key}: {name}")
    return doc


def read_parent(value: Any, where: str) -> dict[str, Any] | None:
    """The dataset that this one appends to, or None."""
    if value is None:
        return None
    doc = strict.obj(value, ("url", "digest"), where=f"{where}: parent")
    strict.string(doc["url"], where=f"{where}: parent: url")
    strict.sha256(doc["digest"], where=f"{where}: parent: digest")
    return doc
