"""Records and TFRecord files, written plainly."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import google_crc32c
import pyarrow as pa

from lockstep.features.examples.example import encode_examples
from lockstep.features.examples.sequence_example import encode_sequence_batch
from lockstep.features.sample_id import splitmix64
from lockstep.features.schema.schema import SEQUENCE_EXAMPLE, Columns
from lockstep.storage.digest import Digest
from lockstep.storage.formats.tfrecord import FRAMING_BYTES, frame, index_bytes

MASK = (1 << 64) - 1


def encode_batch(schema: Columns, batch: pa.RecordBatch) -> list[bytes]:
    """Each row of the batch as an Example, or as a SequenceExample where the schema says so; columns are found by name.

    Raises DataError for a null that the schema does not allow, for a tensor of the wrong length and for a column that
    lockstep.features.examples.column_checks.as_recorded refuses.
    """
    encode = encode_sequence_batch if schema.record == SEQUENCE_EXAMPLE else encode_examples
    return encode(schema, batch)


def encode_example(schema: Columns, row: Mapping[str, Any]) -> bytes:
    """One row as a record; `row` holds a Python value (None for null) for each field."""
    return encode_batch(schema, pa.RecordBatch.from_pylist([dict(row)], schema=schema.arrow_schema()))[0]


def crc32c_hex(data: bytes | bytearray | memoryview, crc: int = 0) -> str:
    """CRC-32C (Castagnoli, unmasked) as 8 lower-case hex digits; `crc` continues an earlier value."""
    return f"{google_crc32c.extend(crc, bytes(data)):08x}"


def shard_key(sample: int, seed: int) -> int:
    """The unsigned 64-bit key that orders a sample within its split: splitmix64(sample xor splitmix64(seed))."""
    return splitmix64((sample & MASK) ^ splitmix64(seed & MASK))


class Sink(Protocol):
    """Where a file is written to."""

    def write(self, data: bytes, /) -> int: ...


class RecordWriter:
    """Frames records into a sink and keeps what a manifest and an index need.

    Attributes: `records` and `bytes` written so far, `offsets` (array of uint64: where each record begins).
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._digest = Digest()
        self.records = self.bytes = 0
        self.offsets = array("Q")

    def write(self, record: bytes) -> int:
        """Append one record; returns the byte offset at which it begins."""
        start = self.bytes
        self.write_many((record,))
        return start

    def write_many(self, records: Iterable[bytes]) -> None:
        """Append records in one write to the sink."""
        frames, position = [], self.bytes
        for record in records:
            self.offsets.append(position)
            frames.append(frame(record))
            position += len(record) + FRAMING_BYTES
        data = b"".join(frames)
        self._sink.write(data)
        self._digest.add(data)
        self.records += len(frames)
        self.bytes = position

    @property
    def sha256(self) -> str:
        """SHA-256 of all bytes written, in hex."""
        return self._digest.sha256

    @property
    def crc32c(self) -> str:
        """CRC-32C of all bytes written, 8 hex digits."""
        return self._digest.crc32c

    def block_offsets(self, block_records: int) -> list[int]:
        """The byte offset of each block's first record, blocks being `block_records` records long."""
        return list(self.offsets[::block_records])

    def index_bytes(self) -> bytes:
        """The offset index: a line "offset size" a record, size with framing."""
        return index_bytes(self.offsets, self.bytes)
