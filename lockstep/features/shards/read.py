"""Reading ranges of a shard: front to back, decoded piece by piece by the decoder for its records."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lockstep.features.examples.codec import RecordDecoder
from lockstep.features.examples.foreign import decode_foreign_frames
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Columns, Schema
from lockstep.features.shards.ranges import ShardRange
from lockstep.storage.errors import CorruptionError, DataError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.formats.gzip_blocks import unpack_blocks
from lockstep.storage.formats.tfrecord import MAX_BLOCK_BYTES, record_offsets

PIECE_BYTES = 4 << 20  # decoded at once: large enough for Arrow, small enough for a cache

Buffer = bytes | NDArray[np.uint8]
# From framed records end to end, their file, and the number and the offset of the first one in it, to columns. Raises
# CorruptionError and DataError naming file and record.
Decode = Callable[[Buffer, str, int, int], pa.RecordBatch]


def strict(schema: Schema, columns: Sequence[str] | None = None) -> Decode:
    """A decoder for records that Lockstep wrote, into columns of schema.arrow_schema(), or those in `columns`."""
    decoder = RecordDecoder(schema, columns)

    def decode(data: Buffer, file: str, first_record: int, base_offset: int) -> pa.RecordBatch:
        with placed(file, first_record):
            return decoder.decode(data, file=file, first_record=first_record, base_offset=base_offset)

    return decode


class Lenient:
    """A decoder for any Examples, into a column for each of `fields`.

    RecordDecoder decodes records in our own form. From the first piece that has others, decode_foreign_frames decodes
    all; `known` is for it. Raises DataError for no fields.
    """

    def __init__(self, fields: Sequence[Field], known: Collection[str] | None = None) -> None:
        if not fields:
            raise DataError(
                "there is no column to read",
                got="records without a feature",
                allowed="a column or more",
                next_step="Look at what wrote these files; index them again.",
            )
        self._fields, self._known, self._decoder = fields, known, RecordDecoder(Columns(tuple(fields)))
        self._ours = True

    def __call__(self, data: Buffer, file: str, first_record: int, base_offset: int) -> pa.RecordBatch:
        """The columns of some framed records."""
        if self._ours:
            try:
                return self._decoder.decode(data, file=file, first_record=first_record, base_offset=base_offset)
            except CorruptionError:
                raise
            except DataError:
                self._ours = False  # most likely the following records are foreign, too
        framed = np.frombuffer(data, dtype=np.uint8)
        offsets = record_offsets(framed, file=file, first_record=first_record, base_offset=base_offset)
        with placed(file, first_record):
            return decode_foreign_frames(self._fields, framed, offsets, known=self._known)


def check_block_bytes(url: str, start: int, stop: int) -> None:
    """Raise CorruptionError for a block from byte `start` to `stop` that is longer than any block may be."""
    if stop - start > MAX_BLOCK_BYTES:
        allowed = f"{MAX_BLOCK_BYTES} bytes"
        raise CorruptionError("a block is too long", file=url, offset=start, got=f"{stop - start}", allowed=allowed)


def check_count(batch: pa.RecordBatch, count: int, url: str, record: int, start: int, stop: int, by: str) -> None:
    """Raise CorruptionError unless the bytes from `start` to `stop`, from record number `record` on, have `count` rows,
    the number that `by` (such as a manifest) says.
    """
    if batch.num_rows != count:
        raise CorruptionError(
            f"a shard has another number of records than {by} says",
            file=url,
            record=record,
            offset=start,
            got=f"{batch.num_rows} records up to offset {stop}",
            allowed=str(count),
        )


def read_range(fs: FileSystem, part: ShardRange, decode: Decode) -> Iterator[pa.RecordBatch]:
    """The records of a range as batches that `decode` makes, in order; both checksums of each record are checked.

    Memory: a few times PIECE_BYTES or the largest block. Raises CorruptionError naming file, record and offset for a
    file of another length, content or number of records, DataError where `decode` does.
    """
    size = fs.stat(part.url).size_bytes
    if size != part.file_bytes:
        raise CorruptionError(
            "a shard has another length than its manifest says",
            file=part.url,
            offset=min(size, part.file_bytes),
            got=f"{size} bytes",
            allowed=f"{part.file_bytes} bytes",
        )
    if not part.records and part.sha256 is None:
        return
    digest = None if part.sha256 is None else hashlib.sha256()
    with fs.open_read(part.url) as file:
        if digest is None:
            file.seek(part.offsets[0])
        else:  # for a gzip file, also the bytes before its first block
            digest.update(_exactly(file, 0, part.offsets[0], part.url))
        for record, count, first, after in pieces_of(part):
            data = _exactly(file, part.offsets[first], part.offsets[after], part.url)
            if digest is not None:
                digest.update(data)
            start, stop = part.places[first], part.places[after]
            if part.unpacked is not None:
                data = unpack_blocks(
                    data,
                    part.offsets[first : after + 1],
                    part.unpacked[first : after + 1],
                    file=part.url,
                    first_record=record,
                    block_records=part.block_records,
                )
            batch = decode(data, part.url, record, start)
            check_count(batch, count, part.url, record, start, stop, "its manifest")
            yield batch
        if digest is not None:
            digest.update(_exactly(file, part.offsets[-1], part.file_bytes, part.url))
    if digest is not None and digest.hexdigest() != part.sha256:
        raise CorruptionError(
            "a shard does not match its digest", file=part.url, got=digest.hexdigest(), allowed=part.sha256 or ""
        )


@contextmanager
def placed(file: str, first_record: int) -> Iterator[None]:
    """Add the file and the number of the first record to an error that names only a record of its batch."""
    try:
        yield
    except CorruptionError:
        raise
    except DataError as error:
        raise DataError(
            f"{file}, records from {first_record} on: {error.what}",
            got=error.got,
            allowed=error.allowed,
            next_step=error.next_step,
        ) from None


def pieces_of(part: ShardRange) -> Iterator[tuple[int, int, int, int]]:
    """Runs of blocks of up to PIECE_BYTES, or of one block: (first record, records, first block, end block)."""
    end_record = part.first_record + part.records
    places, first = part.places, 0
    for block in range(len(places) - 1):
        if block == len(places) - 2 or places[block + 2] - places[first] > PIECE_BYTES:
            record = part.first_record + first * part.block_records
            after = min(end_record, part.first_record + (block + 1) * part.block_records)
            yield record, after - record, first, block + 1
            first = block + 1


def _exactly(file: BinaryIO, start: int, stop: int, url: str) -> bytes:
    check_block_bytes(url, start, stop)
    data = file.read(stop - start)
    if len(data) != stop - start:
        raise CorruptionError(
            "a shard ends early",
            file=url,
            offset=start + len(data),
            got=f"{len(data)} bytes",
            allowed=f"{stop - start}",
        )
    return data
