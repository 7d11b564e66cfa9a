"""Framed records in bulk: what the plain writer gives, and the plain reader's errors."""

from __future__ import annotations

import io
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.storage.documents import sha256_hex
from lockstep.storage.errors import CorruptionError
from lockstep.storage.formats.tfrecord import FramedWriter, frame, parse_records, record_offsets
from tests.builders.records import RecordWriter

BATCHES = st.lists(st.lists(st.binary(max_size=40) | st.integers(90, 7000).map(bytes), max_size=8), max_size=4)


@given(BATCHES, st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_batches_of_framed_records_give_the_same_files(batches: list[list[bytes]], block_records: int) -> None:
    plain_sink, sink, index = io.BytesIO(), io.BytesIO(), io.BytesIO()
    plain, writer = RecordWriter(plain_sink), FramedWriter(sink, index, block_records)
    for batch in batches:
        plain.write_many(batch)
        writer.write(np.frombuffer(b"".join(map(frame, batch)), dtype=np.uint8))
    assert sink.getvalue() == plain_sink.getvalue() and index.getvalue() == plain.index_bytes()
    assert (writer.records, writer.bytes) == (plain.records, plain.bytes)
    assert (writer.sha256, writer.crc32c) == (plain.sha256, plain.crc32c)
    assert (writer.index_bytes, writer.index_sha256) == (len(index.getvalue()), sha256_hex(index.getvalue()))
    assert writer.block_offsets == plain.block_offsets(block_records)


class Nowhere:
    def write(self, data: memoryview, /) -> int:
        return len(data)


def test_memory_does_not_grow_with_the_records() -> None:
    batch = np.frombuffer(frame(b"x" * 20) * 2000, dtype=np.uint8)

    def peak(batches: int) -> int:
        writer = FramedWriter(Nowhere(), Nowhere(), block_records=1000)
        tracemalloc.start()
        try:
            for _ in range(batches):
                writer.write(batch)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peaks = [peak(3), peak(60)]
    assert peaks[1] < peaks[0] + 64_000  # 114,000 records more; their offsets alone would be 900 kB


def test_offsets_are_those_of_the_records() -> None:
    records = [b"", b"abc", bytes(range(256)) * 40]
    data = b"".join(map(frame, records))
    offsets = record_offsets(data, file="f").tolist()
    assert [data[start:stop] for start, stop in pairwise(offsets)] == [frame(record) for record in records]
    assert record_offsets(b"", file="f").tolist() == [0]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damage_is_told_as_by_the_plain_reader(draw: st.DataObject) -> None:
    data = bytearray(b"".join(map(frame, [b"abc", b"", bytes(range(200)), b"x" * 300])))
    if draw.draw(st.booleans()):
        del data[draw.draw(st.integers(0, len(data) - 1)) :]
    else:
        data[draw.draw(st.integers(0, len(data) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    try:
        expected = parse_records(bytes(data), file="f", first_record=7, base_offset=1000)
    except CorruptionError as error:
        with pytest.raises(CorruptionError) as caught:
            record_offsets(bytes(data), file="f", first_record=7, base_offset=1000)
        assert str(caught.value) == str(error)
    else:
        assert len(record_offsets(bytes(data), file="f")) == len(expected) + 1  # cut between two records
