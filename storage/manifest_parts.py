"""The parts of a dataset's manifest, and their strict reading."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from storage import strict
from storage.errors import ConfigError, DataError
from storage.layout import safe_relative, shard_path, split_name


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One shard: path relative to the dataset, records, bytes, SHA-256 and CRC-32C (hex) of the file, SHA-256 of its
    footer (Parquet) or None (TFRecord), and where blocks begin: byte offsets of their first records (TFRecord),
    numbers of their first rows (Parquet row groups).
    """

    path: str
    records: int
    bytes: int
    sha256: str
    crc32c: str
    footer_sha256: str | None
    block_offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SplitInfo:
    """One split: records in a full block, and the shards in order."""

    block_records: int
    shards: tuple[ShardInfo, ...]

    @property
    def records(self) -> int:
        """Records of all shards."""
        return sum(shard.records for shard in self.shards)


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


def split_json(split: SplitInfo) -> dict[str, Any]:
    """A split as the manifest has it."""
    shards = [
        {
            "path": shard.path,
            "records": shard.records,
            "bytes": shard.bytes,
            "sha256": shard.sha256,
            "crc32c": shard.crc32c,
            "footer_sha256": shard.footer_sha256,
            "block_offsets": list(shard.block_offsets),
        }
        for shard in split.shards
    ]
    return {"block_records": split.block_records, "shards": shards}


def read_split(name: str, value: Any, fmt: str, where: str) -> SplitInfo:
    """One split of a manifest, strictly."""
    try:
        split_name(name)
    except ConfigError as error:
        raise DataError(
            f"{where}: {error.what}", got=error.got, allowed=error.allowed, next_step="Build it anew."
        ) from None
    place = f"{where}: split {name}"
    doc = strict.obj(value, ("block_records", "shards"), where=place)
    size = strict.count(doc["block_records"], where=f"{place}: block_records", least=1)
    shards = strict.items(doc["shards"], where=f"{place}: shards")
    return SplitInfo(
        size, tuple(_read_shard(item, shard_path(name, i, fmt), size, fmt, place) for i, item in enumerate(shards))
    )


def _read_shard(value: Any, path: str, block_records: int, fmt: str, where: str) -> ShardInfo:
    place = f"{where}: {path}"
    keys = ("path", "records", "bytes", "sha256", "crc32c", "footer_sha256", "block_offsets")
    doc = strict.obj(value, keys, where=place)
    strict.string(doc["path"], where=f"{place}: path", choices=(path,))
    footer_of = strict.sha256 if fmt == "parquet" else strict.null
    offsets = strict.items(doc["block_offsets"], where=f"{place}: block_offsets")
    shard = ShardInfo(
        path=path,
        records=strict.count(doc["records"], where=f"{place}: records"),
        bytes=strict.count(doc["bytes"], where=f"{place}: bytes"),
        sha256=strict.sha256(doc["sha256"], where=f"{place}: sha256"),
        crc32c=strict.crc32c(doc["crc32c"], where=f"{place}: crc32c"),
        footer_sha256=footer_of(doc["footer_sha256"], where=f"{place}: footer_sha256"),
        block_offsets=tuple(strict.count(item, where=f"{place}: block_offsets") for item in offsets),
    )
    starts = shard.block_offsets
    blocks = -(-shard.records // block_records)
    if fmt == "parquet":
        # The count first: a forged number of records must not make as many starts to compare with.
        good = len(starts) == blocks and all(start == i * block_records for i, start in enumerate(starts))
    else:
        rising = all(a < b for a, b in itertools.pairwise(starts))
        good = len(starts) == blocks and rising and (not starts or (starts[0] == 0 and starts[-1] < shard.bytes))
    if not good:
        raise DataError(
            f"{place}: block_offsets do not fit the shard",
            got=f"{len(starts)} offsets, {list(starts[:3])}...",
            allowed=f"{blocks} rising offsets from 0, below the shard's end",
            next_step="Build the dataset anew.",
        )
    return shard


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
    doc = strict.obj(value, ("kind", "checked", "found"), where=place)
    strict.string(doc["kind"], where=f"{place}: kind")
    checked = [strict.string(item, where=f"{place}: checked") for item in strict.items(doc["checked"], where=place)]
    found = strict.obj(doc["found"], checked, where=f"{place}: found")
    for name, count in found.items():
        strict.count(count, where=f"{place}: found: {name}")
    return doc


def read_parent(value: Any, where: str) -> dict[str, Any] | None:
    """The dataset that this one appends to, or None."""
    if value is None:
        return None
    doc = strict.obj(value, ("url", "digest"), where=f"{where}: parent")
    strict.string(doc["url"], where=f"{where}: parent: url")
    strict.sha256(doc["digest"], where=f"{where}: parent: digest")
    return doc
