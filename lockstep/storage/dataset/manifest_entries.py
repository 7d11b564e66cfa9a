"""The parts of a dataset's manifest besides its shards, and their strict reading."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.storage import documents
from lockstep.storage.dataset.layout import (
    CARRIED_FOLDER,
    FILES_FOLDER,
    foreign_relative,
    safe_relative,
    shard_path,
    split_name,
)
from lockstep.storage.errors import ConfigError, DataError

_FOLDERS = ("_index", "_quarantine", "_fitted", CARRIED_FOLDER, FILES_FOLDER)  # of files that a manifest lists

# the bytes before the first block of a gzip file and after the last: lockstep/storage/formats/gzip_blocks.py
GZIP_EDGE_BYTES = 10


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One shard: path relative to the dataset, records, bytes, SHA-256 and CRC-32C (hex) of the file, SHA-256 of its
    footer (Parquet) or None (TFRecord), and where blocks begin: byte offsets of their first records (TFRecord; in a
    gzip file, of the compressed blocks), numbers of their first rows (Parquet row groups; in an indexed file of another
    program, blocks need not be row groups). `unpacked_offsets` (gzip only): where its blocks begin in the uncompressed
    bytes, and where the last one ends. `partition` (indexed files only): names and texts of the file's partition
    columns, None for null.
    """

    path: str
    records: int
    bytes: int
    sha256: str
    crc32c: str
    footer_sha256: str | None
    block_offsets: tuple[int, ...]
    unpacked_offsets: tuple[int, ...] | None = None
    partition: tuple[tuple[str, str | None], ...] | None = None

    @property
    def block_edges(self) -> tuple[int, ...]:
        """Where blocks begin in a TFRecord file, and where the last one ends."""
        return (*self.block_offsets, self.bytes if self.unpacked_offsets is None else self.bytes - GZIP_EDGE_BYTES)

    @property
    def unpacked_bytes(self) -> int:
        """Bytes of a file that is not compressed; of a gzip file, those that it unpacks to."""
        return self.bytes if self.unpacked_offsets is None else self.unpacked_offsets[-1]

    def __repr__(self) -> str:
        blocks = len(self.block_offsets)
        return f"ShardInfo({self.path!r}, {self.records} records in {blocks} blocks, {self.bytes} bytes)"


@dataclass(frozen=True, slots=True)
class SplitInfo:
    """One split: records in a full block, and the shards in order."""

    block_records: int
    shards: tuple[ShardInfo, ...]
    where: str | None = None
    """The condition that a run selects records by, in one form of writing; None in a manifest: all records."""
    kept: tuple[int, ...] | None = None
    """With `where`, how many records of each block meet it, in the order of the shards."""

    @property
    def records(self) -> int:
        """Records of all shards that meet `where`."""
        return self.stored_records if self.kept is None else sum(self.kept)

    @property
    def stored_records(self) -> int:
        """Records of all shards."""
        return sum(shard.records for shard in self.shards)

    def __repr__(self) -> str:
        # The fields hold an offset for each block: pages of them.
        where = "" if self.where is None else f", where={self.where!r}"
        return f"SplitInfo({self.records} records in {len(self.shards)} shards{where})"


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
            **({} if shard.unpacked_offsets is None else {"unpacked_offsets": list(shard.unpacked_offsets)}),
            **({} if shard.partition is None else {"partition": [list(part) for part in shard.partition]}),
        }
        for shard in split.shards
    ]
    return {"block_records": split.block_records, "shards": shards}


def read_split(
    name: str, value: Any, fmt: str, where: str, compression: str | None = None, *, indexed: bool = False
) -> SplitInfo:
    """One split of a manifest, strictly; `indexed` files have names and partitions of their own."""
    try:
        split_name(name)
    except ConfigError as error:
        raise DataError(
            f"{where}: {error.what}", got=error.got, allowed=error.allowed, next_step="Build the dataset again."
        ) from None
    place = f"{where}: split {name}"
    doc = documents.obj(value, ("block_records", "shards"), where=place)
    size = documents.count(doc["block_records"], where=f"{place}: block_records", least=1)
    shards = documents.items(doc["shards"], where=f"{place}: shards")
    packed = compression is not None
    if indexed:
        found = tuple(_read_shard(item, None, size, fmt, packed, place) for item in shards)
        names = [shard.path for shard in found]
        if names != sorted(set(names)):
            raise DataError(
                f"{place}: files are not in order",
                got=f"{names[:3]}..."[:200],
                allowed="each file once, sorted by path",
                next_step="Delete _manifest.json, and run lockstep index again.",
            )
        return SplitInfo(size, found)
    paths = [shard_path(name, i, fmt, compression) for i in range(len(shards))]
    return SplitInfo(
        size,
        tuple(_read_shard(item, path, size, fmt, packed, place) for item, path in zip(shards, paths, strict=True)),
    )


def _read_shard(value: Any, path: str | None, block_records: int, fmt: str, packed: bool, where: str) -> ShardInfo:
    """One shard at `path`; None is for an indexed file, which has any path and a partition."""
    place = where if path is None else f"{where}: {path}"
    keys = ("path", "records", "bytes", "sha256", "crc32c", "footer_sha256", "block_offsets")
    more = (*(["unpacked_offsets"] if packed else []), *(["partition"] if path is None else []))
    doc = documents.obj(value, (*keys, *more), where=place)
    partition = None
    if path is None:
        path = foreign_relative(doc["path"], where=f"{place}: path")
        place = f"{where}: {path}"
        partition = _read_partition(doc["partition"], place)
    documents.string(doc["path"], where=f"{place}: path", choices=(path,))
    footer_of = documents.sha256 if fmt == "parquet" else documents.null
    offsets = documents.items(doc["block_offsets"], where=f"{place}: block_offsets")
    shard = ShardInfo(
        path=path,
        records=documents.count(doc["records"], where=f"{place}: records"),
        bytes=documents.count(doc["bytes"], where=f"{place}: bytes"),
        sha256=documents.sha256(doc["sha256"], where=f"{place}: sha256"),
        crc32c=documents.crc32c(doc["crc32c"], where=f"{place}: crc32c"),
        footer_sha256=footer_of(doc["footer_sha256"], where=f"{place}: footer_sha256"),
        block_offsets=tuple(documents.count(item, where=f"{place}: block_offsets") for item in offsets),
        unpacked_offsets=_read_unpacked(doc["unpacked_offsets"], place) if packed else None,
        partition=partition,
    )
    starts = shard.block_offsets
    blocks = -(-shard.records // block_records)
    first = GZIP_EDGE_BYTES if packed else 0
    if fmt == "parquet":
        # The count first: a forged number of records must not make as many starts to compare with.
        good = len(starts) == blocks and all(start == i * block_records for i, start in enumerate(starts))
    else:
        rising = all(a < b for a, b in itertools.pairwise(shard.block_edges))
        # Without blocks the first edge is the end: a file without records must have no other bytes.
        good = len(starts) == blocks and rising and shard.block_edges[0] == first
    if not good:
        raise DataError(
            f"{place}: block_offsets do not fit the shard",
            got=f"{len(starts)} offsets, {list(starts[:3])}..., of {shard.bytes} bytes",
            allowed=f"{blocks} rising offsets from {first}, below the shard's end, and nothing that is in no block",
            next_step="Build the dataset again.",
        )
    ends = shard.unpacked_offsets
    if ends is not None and len(ends) != blocks + 1:
        raise DataError(
            f"{place}: unpacked_offsets do not fit the shard",
            got=f"{len(ends)} offsets",
            allowed=f"{blocks + 1}: the beginnings of {blocks} blocks and the end of the last",
            next_step="Build the dataset again.",
        )
    return shard


def _read_partition(value: Any, place: str) -> tuple[tuple[str, str | None], ...]:
    """Names of partition columns, each once, with a text or null."""
    place = f"{place}: partition"
    found = [tuple(documents.items(item, where=place)) for item in documents.items(value, where=place)]
    good = all(len(one) == 2 and isinstance(one[0], str) and isinstance(one[1], str | None) for one in found)
    if not good or len({one[0] for one in found}) < len(found):
        raise DataError(
            f"{place} is not a list of names and values",
            got=repr(value)[:200],
            allowed="each name once, with a text or null",
            next_step="Delete _manifest.json, and run lockstep index again.",
        )
    return tuple((name, text) for name, text in found)


def _read_unpacked(value: Any, place: str) -> tuple[int, ...]:
    """Where blocks begin in what a gzip file unpacks to, and their end: rising numbers from 0."""
    place = f"{place}: unpacked_offsets"
    found = tuple(documents.count(item, where=place) for item in documents.items(value, where=place))
    if found[:1] != (0,) or not all(a < b for a, b in itertools.pairwise(found)):
        raise DataError(
            f"{place} do not rise from 0",
            got=f"{list(found[:3])}...",
            allowed="0, and each number above the one before",
            next_step="Build the dataset again.",
        )
    return found


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
    """One input file: URL, length in bytes and SHA-256 (hex) as it was read. `path` is how the ids of its records name
    it, None if they do not; then length and CRC-32C (hex) of its content, unpacked, None where they are not known.
    """

    url: str
    bytes: int
    sha256: str
    path: str | None = None
    content_bytes: int | None = None
    content_crc32c: str | None = None


def source_json(source: SourceInfo) -> dict[str, Any]:
    """An input file as the manifest has it."""
    return {
        "url": source.url,
        "bytes": source.bytes,
        "sha256": source.sha256,
        **({} if source.path is None else {"path": source.path}),
        **({} if source.content_bytes is None else {"content_bytes": source.content_bytes}),
        **({} if source.content_crc32c is None else {"content_crc32c": source.content_crc32c}),
    }


def read_file(path: str, value: Any, where: str) -> FileInfo:
    """One entry of `files`, strictly."""
    safe_relative(path, where=f"{where}: files")
    place = f"{where}: {path}"
    petastorm = re.fullmatch(r"(split=[^/]+/)?_common_metadata", path)
    if path.split("/")[0] not in _FOLDERS and petastorm is None:
        raise DataError(
            f"{place} is not a file that a dataset lists",
            got=path,
            allowed=f"{'/, '.join(_FOLDERS)}/, Petastorm's _common_metadata",
            next_step="Build the dataset again.",
        )
    doc = documents.obj(value, ("bytes", "sha256"), where=place)
    size = documents.count(doc["bytes"], where=f"{place}: bytes")
    return FileInfo(size, documents.sha256(doc["sha256"], where=f"{place}: sha256"))


def read_counts(value: Any, splits: Mapping[str, SplitInfo], where: str) -> Counts:
    """The counts, which must add up and match the shards."""
    place = f"{where}: counts"
    doc = documents.obj(value, ("read", "written", "quarantined", "dropped"), where=place)
    dropped = documents.mapping(doc["dropped"], where=f"{place}: dropped")
    counts = Counts(
        read=documents.count(doc["read"], where=f"{place}: read"),
        written=documents.count(doc["written"], where=f"{place}: written"),
        quarantined=documents.count(doc["quarantined"], where=f"{place}: quarantined"),
        dropped={why: documents.count(n, where=f"{place}: dropped: {why}") for why, n in dropped.items()},
    )
    total = counts.written + counts.quarantined + sum(counts.dropped.values())
    records = sum(split.records for split in splits.values())
    if counts.read != total or counts.written != records:
        raise DataError(
            f"{place} do not add up",
            got=f"read {counts.read}, written + quarantined + dropped {total}, records in shards {records}",
            allowed="read = written + quarantined + dropped, written = records in shards",
            next_step="Build the dataset again.",
        )
    return counts


def read_created_by(value: Any, where: str) -> dict[str, Any]:
    """The object `created_by`."""
    place = f"{where}: created_by"
    doc = documents.obj(value, ("version", "config", "seed"), where=place)
    documents.string(doc["version"], where=f"{place}: version")
    documents.mapping(doc["config"], where=f"{place}: config")
    documents.count(doc["seed"], where=f"{place}: seed")
    return doc


def read_source(value: Any, where: str) -> SourceInfo:
    """One input file."""
    place = f"{where}: source"
    optional: dict[str, Callable[..., Any]] = {
        "path": documents.string,
        "content_bytes": documents.count,
        "content_crc32c": documents.crc32c,
    }
    there = [name for name in optional if isinstance(value, dict) and name in value]
    doc = documents.obj(value, ("url", "bytes", "sha256", *there), where=place)
    return SourceInfo(
        documents.string(doc["url"], where=f"{place}: url"),
        documents.count(doc["bytes"], where=place),
        documents.sha256(doc["sha256"], where=place),
        **{name: optional[name](doc[name], where=f"{place}: {name}") for name in there},
    )


def read_leakage(value: Any, where: str) -> dict[str, Any] | None:
    """The result of the leakage checks, or None."""
    if value is None:
        return None
    place = f"{where}: leakage"
    chance = ("by_chance", "distinct") if isinstance(value, dict) and "by_chance" in value else ()
    doc = documents.obj(value, ("kind", "checked", "found", *chance), where=place)
    documents.string(doc["kind"], where=f"{place}: kind")
    checked = [
        documents.string(item, where=f"{place}: checked") for item in documents.items(doc["checked"], where=place)
    ]
    found = documents.obj(doc["found"], checked, where=f"{place}: found")
    for name, count in found.items():
        documents.count(count, where=f"{place}: found: {name}")
    for key in chance:
        for name, number in documents.mapping(doc[key], where=f"{place}: {key}").items():
            documents.string(name, where=f"{place}: {key}", choices=checked)
            documents.number(number, where=f"{place}: {key}: {name}")
    return doc


def read_parent(value: Any, where: str) -> dict[str, Any] | None:
    """The dataset that this one appends to, or None."""
    if value is None:
        return None
    keys = ("url", "digest", *(key for key in ("path",) if isinstance(value, dict) and key in value))
    doc = documents.obj(value, keys, where=f"{where}: parent")
    for key in doc.keys() - {"digest"}:
        documents.string(doc[key], where=f"{where}: parent: {key}")
    documents.sha256(doc["digest"], where=f"{where}: parent: digest")
    return doc
