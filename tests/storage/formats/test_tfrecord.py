"""TFRecord: golden bytes, every kind of damage, and any records there and back."""

from __future__ import annotations

import io
import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.storage.documents import sha256_hex
from lockstep.storage.errors import CorruptionError
from lockstep.storage.formats.tfrecord import (
    FRAMING_BYTES,
    frame,
    index_bytes,
    masked_crc32c,
    parse_records,
    read_records,
)
from tests.builders.records import RecordWriter, crc32c_hex

# Written by tf.io.TFRecordWriter of TensorFlow 2.21.0: the records b"abc", b"" and bytes(range(5)).
GOLDEN = bytes.fromhex(
    "0300000000000000 b099490e 616263 6e57f121"
    "0000000000000000 29039807 d8ea82a2"
    "0500000000000000 eab2043e 0001020304 23338f04"
)
RECORDS = [b"abc", b"", bytes(range(5))]


def records_of(data: bytes) -> list[bytes]:
    """Both readers' view of `data`, which must be the same."""
    streamed = list(read_records(io.BytesIO(data), file="f"))
    assert streamed == [bytes(view) for view in parse_records(data, file="f")]
    assert streamed == list(read_records(data, file="f"))
    return streamed


def damage(data: bytes) -> CorruptionError:
    """The error that both readers raise for `data`, which must be the same."""
    with pytest.raises(CorruptionError) as streamed:
        list(read_records(io.BytesIO(data), file="f"))
    with pytest.raises(CorruptionError) as parsed:
        parse_records(data, file="f")
    assert (streamed.value.record, streamed.value.offset) == (parsed.value.record, parsed.value.offset)
    assert streamed.value.file == "f"
    return streamed.value


def test_golden_bytes() -> None:
    assert b"".join(map(frame, RECORDS)) == GOLDEN
    assert records_of(GOLDEN) == RECORDS


def test_crc_of_the_standard() -> None:
    assert crc32c_hex(b"123456789") == "e3069283"  # the check value of CRC-32C
    assert crc32c_hex(b"6789", int(crc32c_hex(b"12345"), 16)) == "e3069283"
    crc = 0xE3069283
    assert masked_crc32c(b"123456789") == ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) % 2**32


def test_an_empty_file_has_no_records() -> None:
    assert records_of(b"") == []


@pytest.mark.parametrize("size", range(1, len(GOLDEN)))
def test_a_cut_anywhere_is_seen_or_is_a_record_boundary(size: int) -> None:
    if size in (19, 35):  # a clean, shorter file: only counts and digests tell
        assert records_of(GOLDEN[:size]) == RECORDS[: {19: 1, 35: 2}[size]]
        return
    error = damage(GOLDEN[:size])
    assert error.record == (0 if size < 19 else 1 if size < 35 else 2)
    assert error.offset == size
    assert "ends within a record" in str(error)


@pytest.mark.parametrize("bit", range(8 * len(GOLDEN)))
def test_a_flipped_bit_anywhere_is_seen(bit: int) -> None:
    changed = bytearray(GOLDEN)
    changed[bit // 8] ^= 1 << bit % 8
    error = damage(bytes(changed))
    place = bit // 8
    record, start = (0, 0) if place < 19 else (1, 19) if place < 35 else (2, 35)
    assert (error.record, error.offset) == (record, start)
    assert ("length" in error.what) == (place - start < 12)


@pytest.mark.parametrize("length", [1 << 62, (1 << 64) - 1, 1 << 40])
def test_a_forged_length_allocates_nothing(length: int) -> None:
    header = struct.pack("<Q", length)
    data = header + struct.pack("<I", masked_crc32c(header)) + b"x" * 100
    tracemalloc.start()
    try:
        error = damage(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert error.offset == len(data) and error.record == 0
    assert peak < 20 << 20


def test_places_are_those_of_the_whole_file() -> None:
    changed = GOLDEN[19:-1] + b"\xff"
    with pytest.raises(CorruptionError) as caught:
        parse_records(changed, file="hdfs://n/f", first_record=1, base_offset=19)
    assert (caught.value.file, caught.value.record, caught.value.offset) == ("hdfs://n/f", 2, 35)


def test_views_point_into_the_buffer() -> None:
    buffer = bytearray(GOLDEN)
    view = parse_records(buffer, file="f")[0]
    buffer[12] = ord("X")
    assert bytes(view) == b"Xbc"


@given(st.lists(st.binary(max_size=300), max_size=30), st.integers(1, 7))
def test_any_records_there_and_back(records: list[bytes], block_records: int) -> None:
    sink = io.BytesIO()
    writer = RecordWriter(sink)
    half = len(records) // 2
    starts = [writer.write(record) for record in records[:half]]
    writer.write_many(records[half:])
    data = sink.getvalue()
    assert data == b"".join(map(frame, records))
    assert records_of(data) == records
    assert (writer.records, writer.bytes) == (len(records), len(data))
    assert (writer.sha256, writer.crc32c) == (sha256_hex(data), crc32c_hex(data))
    assert list(writer.offsets[:half]) == starts
    pairs = [tuple(map(int, line.split())) for line in writer.index_bytes().splitlines()]
    assert [data[start : start + size] for start, size in pairs] == [frame(record) for record in records]
    blocks = writer.block_offsets(block_records)
    assert blocks == [start for start, _ in pairs][::block_records]
    for number, start in enumerate(blocks):
        end = blocks[number + 1] if number + 1 < len(blocks) else len(data)
        views = parse_records(data[start:end], file="f")
        assert [bytes(view) for view in views] == records[number * block_records :][:block_records]


def test_index_form_of_dali_and_tfrecord_tools() -> None:
    assert index_bytes([0, 19, 35], len(GOLDEN)) == b"0 19\n19 16\n35 21\n"
    assert index_bytes([], 0) == b""


@pytest.mark.slow
def test_tensorflow_reads_ours_and_we_read_tensorflows(tmp_path: Path) -> None:
    import tensorflow as tf

    records = [b"", b"x" * 70_000, *(bytes([i]) * i for i in range(200))]
    theirs = tmp_path / "theirs"
    with tf.io.TFRecordWriter(str(theirs)) as writer:
        for record in records:
            writer.write(record)
    ours = tmp_path / "ours"
    with ours.open("wb") as file:
        RecordWriter(file).write_many(records)
    assert ours.read_bytes() == theirs.read_bytes()
    assert [item.numpy() for item in tf.data.TFRecordDataset(str(ours))] == records
    with tf.io.TFRecordWriter(str(tmp_path / "golden")) as writer:
        for record in RECORDS:
            writer.write(record)
    assert (tmp_path / "golden").read_bytes() == GOLDEN
    assert len(frame(b"")) == FRAMING_BYTES
