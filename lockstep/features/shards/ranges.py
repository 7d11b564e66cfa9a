"""Ranges of a TFRecord shard, cut at the blocks in its manifest: what one task reads.

Planning imports only this file; what reading needs (lockstep/features/shards/read.py) takes half a second to import.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.storage.dataset.manifest_entries import ShardInfo


@dataclass(frozen=True, slots=True)
class ShardRange:
    """Whole blocks of the shard at `url`, from byte offsets[0] to offsets[-1].

    `offsets` are the beginnings of its blocks and its end; `first_record` is the number of its first record in the
    shard, `records` the number of its records. Each block but the last of a shard has `block_records`. `sha256` is the
    digest of the whole shard if it is to be checked. `unpacked` are the offsets in the unpacked gzip file, None for
    other files.
    """

    url: str
    file_bytes: int
    offsets: tuple[int, ...]
    first_record: int
    records: int
    block_records: int
    sha256: str | None = None
    unpacked: tuple[int, ...] | None = None

    @property
    def places(self) -> tuple[int, ...]:
        """Where blocks begin and the last one ends, in the framed records of the shard."""
        return self.offsets if self.unpacked is None else self.unpacked


def cut(url: str, shard: ShardInfo, block_records: int, range_bytes: int | None) -> list[ShardRange]:
    """The ranges of a shard: whole blocks, each about `range_bytes` of framed records and as equal as blocks allow.

    For None, one range of the whole shard, with its SHA-256.
    """
    offsets, unpacked = shard.block_edges, shard.unpacked_offsets
    if range_bytes is None:
        return [ShardRange(url, shard.bytes, offsets, 0, shard.records, block_records, shard.sha256, unpacked)]
    total = shard.unpacked_bytes
    pieces = max(1, round(total / range_bytes))
    ends = (unpacked or offsets)[1:]
    ranges: list[ShardRange] = []
    first = 0
    for block, end in enumerate(ends):
        last = block == len(ends) - 1
        if last or end * pieces >= (len(ranges) + 1) * total:
            begin = first * block_records
            stop = shard.records if last else (block + 1) * block_records
            here = slice(first, block + 2)
            packed = None if unpacked is None else unpacked[here]
            part = ShardRange(url, shard.bytes, offsets[here], begin, stop - begin, block_records, None, packed)
            ranges.append(part)
            first = block + 1
    return ranges if shard.records else []
