"""The blocks of a dataset or of indexed files, one at a time and in any order: for inspecting data without a plan."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.features.examples.column_checks import check_unsigned
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema, foreign_field
from lockstep.features.shards.foreign_files import pieces
from lockstep.features.shards.indexed_parquet import IndexedRows, group_starts, groups_of
from lockstep.features.shards.ranges import ShardRange, cut
from lockstep.features.shards.read import Decode, Lenient, read_range, strict
from lockstep.storage.dataset.indexed import IndexedManifest
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.dataset.manifest_entries import ShardInfo
from lockstep.storage.digest import CHUNK_BYTES, HashedReader
from lockstep.storage.errors import CorruptionError, NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.formats.parquet_footer import read_published_footer
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import join


@dataclass(frozen=True)
class Block:
    """Consecutive records; `read` returns them as batches."""

    records: int
    read: Callable[[], Iterator[pa.RecordBatch]]


def dataset_blocks(url: str, manifest: DatasetManifest) -> dict[str, list[Block]]:
    """The blocks of each split of the dataset at `url`; batches have its Schema.arrow_schema().

    Reading a block raises CorruptionError and DataError as read_range does.
    """
    return {
        name: [block for number in range(len(split.shards)) for block in shard_blocks(url, manifest, name, number)]
        for name, split in manifest.splits.items()
    }


def shard_blocks(url: str, manifest: DatasetManifest, split: str, number: int) -> list[Block]:
    """The blocks of one shard of a split, in order, as `dataset_blocks` has them."""
    fs, schema, info = filesystem(url), Schema.from_json(manifest.schema), manifest.splits[split]
    shard = info.shards[number]
    place = join(url, shard.path)
    if manifest.format == "tfrecord":
        blocks = _ranges(fs, place, shard, info.block_records, strict(schema))
        return [Block(block.records, partial(_listed, place, block.read)) for block in blocks]
    rows, found = IndexedRows.of(url, manifest, shard, schema), []
    for first in shard.block_offsets:
        count = min(info.block_records, shard.records - first)
        read = partial(_rows, fs, place, shard, first, count, rows)
        found.append(Block(count, partial(_listed, place, read)))
    return found


def indexed_fields(manifest: IndexedManifest) -> tuple[Field, ...]:
    """The columns of indexed files as fields."""
    return tuple(foreign_field(*column) for column in manifest.columns)


def indexed_blocks(url: str, manifest: IndexedManifest) -> list[Block]:
    """The blocks of the indexed files at `url`; a gzip file is one block."""
    fields = indexed_fields(manifest)
    fs, decode = filesystem(url), Lenient(fields, [field.name for field in fields])
    found: list[Block] = []
    for file in manifest.files:
        place = join(url, file.path)
        if file.path in manifest.gzip:
            found.append(Block(file.records, partial(read_gzip, fs, place, file, decode)))
        else:
            found += _ranges(fs, place, file, manifest.block_records, decode)
    return found


def read_gzip(
    fs: FileSystem, url: str, info: ShardInfo, decode: Decode, *, full: bool = False
) -> Iterator[pa.RecordBatch]:
    """The records of an indexed gzip file as batches that `decode` makes; `full` checks its digest, too.

    Raises CorruptionError for another length, number of records or digest than in `info`, and what `pieces` raises.
    """
    size = fs.stat(url).size_bytes
    if size != info.bytes:
        raise CorruptionError(
            "a file has another length than its manifest says",
            file=url,
            offset=min(size, info.bytes),
            got=f"{size} bytes",
            allowed=f"{info.bytes} bytes",
        )
    records = 0
    with fs.open_read(url) as file:
        hashed = HashedReader(file)
        packed = io.BufferedReader(hashed, CHUNK_BYTES) if full else file
        with gzip.GzipFile(fileobj=packed) as unpacked:
            for piece in pieces(cast(BinaryIO, unpacked), url):
                records += piece.records
                if records > info.records:
                    break
                yield decode(piece.data, url, piece.first_record, piece.base_offset)
        if records != info.records:
            raise CorruptionError(
                "a file has another number of records than its manifest says",
                file=url,
                got=f"at least {records}" if records > info.records else str(records),
                allowed=str(info.records),
            )
        if full:
            hashed.drain()
            found = hashed.digest.sha256
            if found != info.sha256:
                raise CorruptionError("a file does not match its digest", file=url, got=found, allowed=info.sha256)


def _ranges(fs: FileSystem, url: str, shard: ShardInfo, block_records: int, decode: Decode) -> list[Block]:
    parts: list[ShardRange] = cut(url, shard, block_records, 1)  # a range of one byte or more is one block
    return [Block(part.records, partial(read_range, fs, part, decode)) for part in parts]


def _listed(url: str, read: Callable[[], Iterator[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
    """The batches of `read`; a missing file that the manifest lists is damage of the dataset."""
    try:
        yield from read()
    except NotFoundError as error:
        raise CorruptionError(
            "a file of the manifest does not exist", file=url, got="no such file", allowed="each file that it lists"
        ) from error


def _rows(
    fs: FileSystem, url: str, shard: ShardInfo, first: int, count: int, indexed: IndexedRows | None
) -> Iterator[pa.RecordBatch]:
    """The rows of a block: a row group or, where another program wrote the file, what row groups hold of it."""
    footer = read_published_footer(fs, url, shard)
    try:
        with fs.open_read(url) as file:
            metadata = pq.read_metadata(pa.BufferReader(footer))
            groups, skip = groups_of(group_starts(metadata), first, count)
            reader = pq.ParquetFile(file, metadata=metadata, page_checksum_verification=True)
            if indexed is not None:
                names = indexed.columns(reader.schema_arrow.names)
                yield indexed.batch(reader.read_row_groups(list(groups), columns=names).slice(skip, count), first)
                return
            for batch in reader.read_row_groups(list(groups)).to_batches():
                for name, column in zip(batch.schema.names, batch.columns, strict=True):
                    if pa.types.is_decimal(getattr(column.type, "value_type", column.type)):
                        check_unsigned(name, column, file=url, record=first)
                yield batch
    except (pa.ArrowException, OSError) as error:
        raise CorruptionError(
            "a block of rows cannot be read",
            file=url,
            record=first,
            got=str(error).splitlines()[0],
            allowed="pages that match their checksums",
        ) from None
