"""Verification of a gzip shard: its digests, what each block unpacks to, its records, and the gzip around them."""

from __future__ import annotations

import io
import zlib
from itertools import pairwise
from typing import BinaryIO, cast

from lockstep.storage.dataset.manifest_shards import ShardInfo
from lockstep.storage.errors import CorruptionError, NotFoundError
from lockstep.storage.formats.gzip_blocks import HEADER, TRAILER_BYTES, trailer, unpack
from lockstep.storage.formats.tfrecord import MAX_BLOCK_BYTES, record_offsets
from lockstep.storage.verify.check import CHUNK_BYTES, Check, HashedReader


def check_packed(check: Check, shard: ShardInfo, block_records: int) -> bool:
    """Hold the shard against its manifest, block by block; returns whether all is right. Memory: one block."""
    before = len(check.findings)
    try:
        with check.fs.open_read(check.url(shard.path)) as file:
            if check.too_long(shard.path, shard.bytes):
                return False
            hashed = HashedReader(file, check.on_bytes)
            try:
                _check_blocks(cast(BinaryIO, io.BufferedReader(hashed, CHUNK_BYTES)), shard, block_records)
            except CorruptionError as error:
                check.caught(shard.path, error)
            hashed.drain()
    except (NotFoundError, CorruptionError) as error:
        check.caught(shard.path, error)
        return False
    whole = len(check.findings) == before
    same = check.compare(shard.path, hashed, shard.bytes, shard.sha256, crc32c=shard.crc32c, silent=not whole)
    return whole and same


def _check_blocks(file: BinaryIO, shard: ShardInfo, block_records: int) -> None:
    """Read the file from front to back. Raises CorruptionError for the first thing that is not as it must be."""
    assert shard.unpacked_offsets is not None
    edges, crc32 = shard.block_edges, 0
    _same(file.read(len(HEADER)), HEADER, "a gzip header is not ours", shard.path, 0)
    places = zip(pairwise(edges), pairwise(shard.unpacked_offsets), strict=True)
    for block, ((start, stop), (place, end)) in enumerate(places):
        first = block * block_records
        if stop - start > MAX_BLOCK_BYTES:
            raise _wrong(f"{stop - start} bytes", f"{MAX_BLOCK_BYTES} bytes", shard.path, first, start)
        data = unpack(file.read(stop - start), end - place, file=shard.path, record=first, offset=start)
        found = len(record_offsets(data, file=shard.path, first_record=first, base_offset=place)) - 1
        wanted = min(block_records, shard.records - first)
        if found != wanted:
            raise _wrong(f"{found} records", f"{wanted} records", shard.path, first, start)
        crc32 = zlib.crc32(data, crc32)
    wanted_end = trailer(crc32, shard.unpacked_bytes)
    _same(file.read(TRAILER_BYTES), wanted_end, "a gzip trailer does not fit what it follows", shard.path, edges[-1])


def _same(got: bytes, wanted: bytes, what: str, path: str, offset: int) -> None:
    if got != wanted:
        raise CorruptionError(what, file=path, offset=offset, got=got.hex(), allowed=wanted.hex())


def _wrong(got: str, allowed: str, path: str, record: int, offset: int) -> CorruptionError:
    what = "a gzip block is not of the size that its manifest says"
    return CorruptionError(what, file=path, record=record, offset=offset, got=got, allowed=allowed)
