"""Splits and shards as a dataset's manifest has them, and their strict reading."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from lockstep.storage import strict
from lockstep.storage.dataset.layout import shard_path, split_name
from lockstep.storage.errors import ConfigError, DataError

# what lies before the first block of a gzip file, and behind the last one: lockstep/storage/formats/gzip_blocks.py
GZIP_EDGE_BYTES = 10


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One shard: path relative to the dataset, records, bytes, SHA-256 and CRC-32C (hex) of the file, SHA-256 of its
    footer (Parquet) or None (TFRecord), and where blocks begin: byte offsets of their first records (TFRecord; in a
    gzip file, of what they are packed into), numbers of their first rows (Parquet row groups). `unpacked_offsets` of a
    gzip file: where its blocks begin in what it unpacks to, and where the last one ends; None of other files.
    """

    path: str
    records: int
    bytes: int
    sha256: str
    crc32c: str
    footer_sha256: str | None
    block_offsets: tuple[int, ...]
    unpacked_offsets: tuple[int, ...] | None = None

    @property
    def block_edges(self) -> tuple[int, ...]:
        """Where blocks begin in a TFRecord file, and where the last one ends."""
        return (*self.block_offsets, self.bytes if self.unpacked_offsets is None else self.bytes - GZIP_EDGE_BYTES)

    @property
    def unpacked_bytes(self) -> int:
        """Bytes of a file that is not compressed; of a gzip file, those that it unpacks to."""
        return self.bytes if self.unpacked_offsets is None else self.unpacked_offsets[-1]


@dataclass(frozen=True, slots=True)
class SplitInfo:
    """One split: records in a full block, and the shards in order."""

    block_records: int
    shards: tuple[ShardInfo, ...]

    @property
    def records(self) -> int:
        """Records of all shards."""
        return sum(shard.records for shard in self.shards)


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
        }
        for shard in split.shards
    ]
    return {"block_records": split.block_records, "shards": shards}


def read_split(name: str, value: Any, fmt: str, where: str, compression: str | None = None) -> SplitInfo:
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
    paths = [shard_path(name, i, fmt, compression) for i in range(len(shards))]
    packed = compression is not None
    return SplitInfo(
        size,
        tuple(_read_shard(item, path, size, fmt, packed, place) for item, path in zip(shards, paths, strict=True)),
    )


def _read_shard(value: Any, path: str, block_records: int, fmt: str, packed: bool, where: str) -> ShardInfo:
    place = f"{where}: {path}"
    keys = ("path", "records", "bytes", "sha256", "crc32c", "footer_sha256", "block_offsets")
    doc = strict.obj(value, (*keys, "unpacked_offsets") if packed else keys, where=place)
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
        unpacked_offsets=_read_unpacked(doc["unpacked_offsets"], place) if packed else None,
    )
    starts = shard.block_offsets
    blocks = -(-shard.records // block_records)
    first = GZIP_EDGE_BYTES if packed else 0
    if fmt == "parquet":
        # The count first: a forged number of records must not make as many starts to compare with.
        good = len(starts) == blocks and all(start == i * block_records for i, start in enumerate(starts))
    else:
        rising = all(a < b for a, b in itertools.pairwise(shard.block_edges))
        # Without a block the first edge is the end: nothing may lie where no record does.
        good = len(starts) == blocks and rising and shard.block_edges[0] == first
    if not good:
        raise DataError(
            f"{place}: block_offsets do not fit the shard",
            got=f"{len(starts)} offsets, {list(starts[:3])}..., of {shard.bytes} bytes",
            allowed=f"{blocks} rising offsets from {first}, below the shard's end, and nothing that is in no block",
            next_step="Build the dataset anew.",
        )
    ends = shard.unpacked_offsets
    if ends is not None and len(ends) != blocks + 1:
        raise DataError(
            f"{place}: unpacked_offsets do not fit the shard",
            got=f"{len(ends)} offsets",
            allowed=f"{blocks + 1}: the beginnings of {blocks} blocks and the end of the last",
            next_step="Build the dataset anew.",
        )
    return shard


def _read_unpacked(value: Any, place: str) -> tuple[int, ...]:
    """Where blocks begin in what a gzip file unpacks to, and their end: rising numbers from 0."""
    place = f"{place}: unpacked_offsets"
    found = tuple(strict.count(item, where=place) for item in strict.items(value, where=place))
    if found[:1] != (0,) or not all(a < b for a, b in itertools.pairwise(found)):
        raise DataError(
            f"{place} do not rise from 0",
            got=f"{list(found[:3])}...",
            allowed="0, and each number above the one before",
            next_step="Build the dataset anew.",
        )
    return found
