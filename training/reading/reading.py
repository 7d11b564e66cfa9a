"""What a rank does around its reading: every byte checked before the first step, and rows that tell how it went."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.storage.errors import CorruptionError
from lockstep.storage.publish import file_digest
from training.reading.reader import SplitReader
from training.run.history import READING


def verify_share(readers: Sequence[SplitReader], rank: int, num_ranks: int, tell: Callable[[str], None]) -> None:
    """Read every byte of this rank's share of the shards and hold it against the manifest's SHA-256.

    `tell` is told in words what is being read, shard by shard. Raises CorruptionError naming the file.
    """
    shards = [shard for reader in readers for shard in reader.stored]
    for number in range(rank, len(shards), num_ranks):
        fs, url, info = shards[number]
        tell(f"verify shard {number + 1} of {len(shards)}")
        size, digest = file_digest(fs, url)
        if (size, digest) != (info.bytes, info.sha256):
            raise CorruptionError(
                "a shard does not match its digest",
                file=url,
                got=f"{size} bytes, sha256 {digest}",
                allowed=f"{info.bytes} bytes, sha256 {info.sha256}",
            )


def reading_row(readers: Sequence[SplitReader], rank: int, step: int) -> dict[str, Any]:
    """Row {kind: reading, rank, step, ahead, direct, dropped, fetched_bytes, waited_s} of a rank since it began, and
    with a cache {cache_hits, cache_hit_bytes, cache_misses, cache_kept_bytes, cache_damaged}: reads of blocks;
    `resident_bytes` is the process's memory now.
    """
    fetched = [reader.fetched for reader in readers]
    names = ("ahead", "direct", "dropped", "fetched_bytes")
    row: dict[str, Any] = {"kind": READING, "rank": rank, "step": step}
    row |= {name: sum(getattr(counts, name) for counts in fetched) for name in names}
    row["waited_s"] = round(sum(counts.waited_s for counts in fetched), 6)
    caches = [counts for counts in (reader.cached for reader in readers) if counts is not None]
    if caches:
        of_cache = ("hits", "hit_bytes", "misses", "kept_bytes", "damaged")
        row |= {f"cache_{name}": sum(getattr(counts, name) for counts in caches) for name in of_cache}
    row["resident_bytes"] = resident_bytes()
    return row


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
