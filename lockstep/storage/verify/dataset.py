"""Verification of a dataset: shards, records, block tables, offset indexes, fitted and quarantine files."""

from __future__ import annotations

import io
import zlib
from array import array
from collections.abc import Collection
from itertools import pairwise
from typing import TYPE_CHECKING, BinaryIO, cast

from lockstep.storage.dataset.indexed import INDEX_FOLDER, index_name, read_indexed
from lockstep.storage.dataset.layout import index_path
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.dataset.manifest_entries import FileInfo, ShardInfo
from lockstep.storage.digest import CHUNK_BYTES, HashedReader
from lockstep.storage.documents import sha256_hex
from lockstep.storage.errors import CorruptionError, NotFoundError
from lockstep.storage.formats.gzip_blocks import HEADER, TRAILER_BYTES, trailer, unpack
from lockstep.storage.formats.parquet_footer import columns_are_readable, read_published_footer
from lockstep.storage.formats.tfrecord import FRAMING_BYTES, MAX_BLOCK_BYTES, index_bytes, read_records, record_offsets
from lockstep.storage.publish import MANIFEST_NAME
from lockstep.storage.verify.check import Check

if TYPE_CHECKING:
    import pyarrow.parquet as pq


def check_indexed(check: Check) -> None:
    """Compare every indexed file, and every index, with the manifest; files that were added later are ignored.

    Raises DataError or NotFoundError if the manifest is unusable.
    """
    url = check.url(MANIFEST_NAME)
    manifest = read_indexed(check.fs.read_bytes(url), url)
    check.on_ok(MANIFEST_NAME, f"{len(manifest.files)} files")
    for file in manifest.files:
        if check.file(file.path, file.bytes, file.sha256, crc32c=file.crc32c):
            check.on_ok(file.path, f"{file.records} records, {file.bytes} bytes")
        index = manifest.indexes.get(file.path)
        if index is not None:
            path = f"{INDEX_FOLDER}/{index_name(file.path)}"
            if check.file(path, index.bytes, index.sha256):
                check.on_ok(path, f"{file.records} offsets")
    check.extra_files({f"{INDEX_FOLDER}/{index_name(path)}" for path in manifest.indexes}, INDEX_FOLDER)


def check_packed(check: Check, shard: ShardInfo, block_records: int) -> bool:
    """Compare the shard with its manifest, block by block; returns whether it is intact. Memory: one block."""
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
    same = check.compare(shard.path, hashed.digest, shard.bytes, shard.sha256, crc32c=shard.crc32c, silent=not whole)
    return whole and same


def _check_blocks(file: BinaryIO, shard: ShardInfo, block_records: int) -> None:
    """Read the file from front to back. Raises CorruptionError for the first fault."""
    assert shard.unpacked_offsets is not None
    edges, crc32 = shard.block_edges, 0
    _same(file.read(len(HEADER)), HEADER, "a gzip header is not the one that Lockstep writes", shard.path, 0)
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
    what = "a gzip trailer does not match the data before it"
    _same(file.read(TRAILER_BYTES), wanted_end, what, shard.path, edges[-1])


def _same(got: bytes, wanted: bytes, what: str, path: str, offset: int) -> None:
    if got != wanted:
        raise CorruptionError(what, file=path, offset=offset, got=got.hex(), allowed=wanted.hex())


def _wrong(got: str, allowed: str, path: str, record: int, offset: int) -> CorruptionError:
    what = "a gzip block is not of the size that its manifest says"
    return CorruptionError(what, file=path, record=record, offset=offset, got=got, allowed=allowed)


def check_dataset(check: Check) -> None:
    """Compare every file with the manifest. Raises DataError or NotFoundError where the manifest is unusable."""
    url = check.url(MANIFEST_NAME)
    manifest = DatasetManifest.from_bytes(check.fs.read_bytes(url), url)
    check.on_ok(MANIFEST_NAME, f"digest {manifest.digest}")
    done: set[str] = set()
    for name, split in manifest.splits.items():
        for number, shard in enumerate(split.shards):
            if manifest.format == "parquet":
                good = _check_parquet(check, shard, indexed=manifest.indexed is not None)
            elif manifest.compression is not None:
                good = check_packed(check, shard, split.block_records)
            else:
                path = index_path(name, number)
                good = _check_tfrecord(check, shard, split.block_records, path, manifest.files[path])
                done.add(path)
            if good:
                check.on_ok(shard.path, f"{shard.records} records, {shard.bytes} bytes")
    for path, info in manifest.files.items():
        if path not in done and check.file(path, info.bytes, info.sha256):
            done.add(path)
            check.on_ok(path, f"{info.bytes} bytes")
    _check_counts(check, manifest, done)
    shards = {shard.path for split in manifest.splits.values() for shard in split.shards}
    if manifest.indexed is None:  # a directory of another program may get further files
        check.extra_files({MANIFEST_NAME, *manifest.files, *shards})


def _check_counts(check: Check, manifest: DatasetManifest, whole: Collection[str]) -> None:
    """Compare the manifest's counts with the files, beyond what reading the manifest checks: no split is empty, except
    in an append, and the number of rejected records is right, if the dataset keeps them and their files are `whole`.
    """
    for name, split in manifest.splits.items():
        if not split.records and manifest.parent is None:
            check.bad(MANIFEST_NAME, f"split {name} has no records, and no split is published empty")
    if not manifest.splits:
        check.bad(MANIFEST_NAME, "no splits, and no dataset is published without one")
    parts = [path for path in manifest.files if path.startswith("_quarantine/")]
    rows = [found for path in parts if path in whole and (found := _rows_of(check, path)) is not None]
    if parts and len(rows) == len(parts) and sum(rows) != manifest.counts.quarantined:
        check.bad(parts[0], f"{sum(rows)} rejected records in all such files instead of {manifest.counts.quarantined}")


def _rows_of(check: Check, path: str) -> int | None:
    """The rows of a Parquet file; None, noted, where its footer cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with check.fs.open_read(check.url(path)) as file:
            return int(pq.read_metadata(file).num_rows)
    except (pa.ArrowException, OSError, ValueError) as error:
        check.bad(path, f"the Parquet footer cannot be read: {str(error).splitlines()[0]}")
        return None


def _check_tfrecord(check: Check, shard: ShardInfo, block_records: int, index: str, info: FileInfo) -> bool:
    before = len(check.findings)
    offsets = array("Q")
    try:
        with check.fs.open_read(check.url(shard.path)) as file:
            if check.too_long(shard.path, shard.bytes):
                check.file(index, info.bytes, info.sha256)
                return False
            hashed = HashedReader(file, check.on_bytes)
            try:
                position = 0
                for record in read_records(io.BufferedReader(hashed, CHUNK_BYTES), file=shard.path):
                    offsets.append(position)
                    position += len(record) + FRAMING_BYTES
            except CorruptionError as error:
                check.caught(shard.path, error)
            hashed.drain()
    except (NotFoundError, CorruptionError) as error:
        check.caught(shard.path, error)
        check.file(index, info.bytes, info.sha256)
        return False
    whole = len(check.findings) == before
    same = check.compare(shard.path, hashed.digest, shard.bytes, shard.sha256, crc32c=shard.crc32c, silent=not whole)
    if whole and len(offsets) != shard.records:
        check.bad(shard.path, f"{len(offsets)} records instead of {shard.records}", record=len(offsets))
    if whole and same:
        for block, (wanted, found) in enumerate(zip(shard.block_offsets, offsets[::block_records], strict=False)):
            if wanted != found:
                what = f"block {block} begins elsewhere than the manifest says ({wanted})"
                check.bad(shard.path, what, record=block * block_records, offset=found)
                break
    good = len(check.findings) == before
    expected = index_bytes(offsets, hashed.digest.bytes) if good else None
    if _check_index(check, index, info, expected):
        check.on_ok(index, f"{shard.records} offsets")
    return good


def _check_index(check: Check, path: str, info: FileInfo, expected: bytes | None) -> bool:
    try:
        data = check.fs.read_bytes(check.url(path))
    except (NotFoundError, CorruptionError) as error:
        check.caught(path, error)
        return False
    check.on_bytes(len(data))
    if expected is not None and data != expected:
        offset = next((i for i, (a, b) in enumerate(zip(data, expected, strict=False)) if a != b), -1)
        offset = min(len(data), len(expected)) if offset < 0 else offset
        record = expected.count(b"\n", 0, offset)
        line = expected.split(b"\n")[record].decode()
        check.bad(path, f"an offset that is not the shard's ({line or 'nothing'})", record=record, offset=offset)
        return False
    if len(data) != info.bytes or sha256_hex(data) != info.sha256:
        check.bad(
            path,
            "changed: it does not match its digest",
            offset=min(len(data), info.bytes) if len(data) != info.bytes else None,
        )
        return False
    return True


def _check_parquet(check: Check, shard: ShardInfo, *, indexed: bool) -> bool:
    before = len(check.findings)
    same = check.file(shard.path, shard.bytes, shard.sha256, crc32c=shard.crc32c)
    if len(check.findings) > before and check.findings[-1].what == "missing":
        return False
    coarse = check.findings[before:]
    try:
        footer = read_published_footer(check.fs, check.url(shard.path), shard)
    except CorruptionError as error:
        check.caught(shard.path, error)
    else:
        _look_inside(check, shard, footer, localise=not same, indexed=indexed)
    if not same and len(check.findings) > before + len(coarse):
        # A place within the file is more precise than a digest of all of it; a wrong length is reported as well.
        check.findings[before : before + len(coarse)] = [item for item in coarse if item.offset is not None]
    return same and len(check.findings) == before


def _look_inside(check: Check, shard: ShardInfo, footer: bytes, *, localise: bool, indexed: bool) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    first = 0
    try:
        with check.fs.open_read(check.url(shard.path)) as file:
            metadata = pq.read_metadata(pa.BufferReader(footer))
            reader = pq.ParquetFile(file, metadata=metadata, page_checksum_verification=True)
            groups = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            starts = [sum(groups[:i]) for i in range(len(groups))]
            if metadata.num_rows != shard.records:
                check.bad(shard.path, f"{metadata.num_rows} rows instead of {shard.records}")
            elif not indexed and starts != list(shard.block_offsets):
                check.bad(shard.path, "row groups begin at other rows than the manifest says")
            if not columns_are_readable(footer):
                check.bad(shard.path, "the Parquet footer cannot be read: its columns contradict its schema")
                return
            for group, first in enumerate(starts if localise else []):
                _read_group(check, reader, group, first, shard.path)
    except (pa.ArrowException, OSError, ValueError, CorruptionError) as error:  # ValueError: a name that is no UTF-8
        check.bad(shard.path, f"the Parquet footer cannot be read: {str(error).splitlines()[0]}")


def _read_group(check: Check, reader: pq.ParquetFile, group: int, first: int, path: str) -> None:
    import pyarrow as pa

    metadata = reader.metadata.row_group(group)
    for number in range(metadata.num_columns):
        column = metadata.column(number)
        start = column.dictionary_page_offset or column.data_page_offset
        try:
            reader.read_row_group(group, columns=[column.path_in_schema])
        except (pa.ArrowException, OSError) as error:
            text = str(error).splitlines()[0]
            check.bad(path, f"row group {group}, column {column.path_in_schema}: {text}", record=first, offset=start)
