"""Gzip shards: the same bytes however records come, read whole by anybody and block by block by us, damage told."""

from __future__ import annotations

import gzip
import io
import os
import struct
import tracemalloc
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.storage.dataset.manifest_entries import GZIP_EDGE_BYTES
from lockstep.storage.documents import sha256_hex
from lockstep.storage.errors import CorruptionError, DataError
from lockstep.storage.formats import gzip_blocks
from lockstep.storage.formats.gzip_blocks import HEADER, TRAILER_BYTES, GzipWriter, pack, unpack, unpack_blocks
from lockstep.storage.formats.tfrecord import frame
from tests.builders.records import crc32c_hex

RECORDS = st.lists(st.binary(max_size=40) | st.integers(90, 7000).map(bytes), max_size=30)


def written(batches: list[list[bytes]], block_records: int) -> tuple[bytes, GzipWriter]:
    sink = io.BytesIO()
    writer = GzipWriter(sink, block_records)
    for batch in batches:
        writer.write(np.frombuffer(b"".join(map(frame, batch)), dtype=np.uint8))
    writer.finish()
    return sink.getvalue(), writer


@given(RECORDS, st.lists(st.integers(0, 30), max_size=4), st.integers(1, 7))
@settings(max_examples=80, deadline=None)
def test_batches_of_any_size_give_one_file_that_gzip_reads(records: list[bytes], cuts: list[int], block: int) -> None:
    data, writer = written([records], block)
    places = [0, *sorted(min(cut, len(records)) for cut in cuts), len(records)]
    again, _ = written([records[start:stop] for start, stop in pairwise(places)], block)
    assert again == data
    framed = b"".join(map(frame, records))
    alone = zlib.decompressobj(31)  # one member: what knows nothing of several reads it too
    assert alone.decompress(data) == framed and alone.eof and not alone.unused_data
    assert (writer.records, writer.bytes) == (len(records), len(data))
    assert (writer.sha256, writer.crc32c) == (sha256_hex(data), crc32c_hex(data))
    starts, places = [*writer.block_offsets, len(data) - TRAILER_BYTES], writer.unpacked_offsets
    assert places[-1] == len(framed) and len(places) == len(starts) and starts[0] == len(HEADER)
    for number, ((start, stop), (place, end)) in enumerate(zip(pairwise(starts), pairwise(places), strict=True)):
        content = unpack(data[start:stop], end - place, file="f", record=0, offset=start)
        assert content == framed[place:end] == b"".join(map(frame, records[number * block :][:block]))
    if records:
        blocks = data[starts[0] : starts[-1]]
        assert unpack_blocks(blocks, starts, places, file="f", first_record=0, block_records=block) == framed


def test_the_same_records_give_the_same_bytes() -> None:
    assert len(HEADER) == TRAILER_BYTES == GZIP_EDGE_BYTES
    assert written([], 5)[0] == HEADER + bytes.fromhex("03000000000000000000")  # no records
    data = b"".join(frame(struct.pack("<Q", n * n % 1000) * 5) for n in range(3000))
    # Of zlib 1.2.13, and of 1.3.2 too: an interpreter whose zlib differs makes other bytes of the same content.
    assert sha256_hex(pack(data)) == "a40133a65b01ae98512486fd5fac2b3b052d7cf2865b48c48c541e5348030706"


def test_records_of_a_task_that_are_damaged_are_not_written() -> None:
    _, writer = written([[b"abc"] * 3], 2)
    with pytest.raises(CorruptionError) as caught:
        writer.write(np.frombuffer(frame(b"abc")[:-1] + b"x", dtype=np.uint8))
    assert (caught.value.record, caught.value.offset) == (3, 57)


CONTENT = os.urandom(3000) * 2
BLOCK = pack(CONTENT)


@pytest.mark.parametrize(
    ("block", "size", "what"),
    [
        (b"\x07" + BLOCK[1:], 6000, "damaged"),  # no type of a deflate block
        (BLOCK[:-1], 6000, "does not end"),
        (BLOCK[:3000], 6000, "does not end"),
        (b"", 6000, "does not end"),
        (BLOCK + b"x", 6000, "does not end|damaged"),
        (BLOCK + b"\x03\x00", 6000, "does not end"),  # the end of the file's stream
        (b"\x03\x00" + BLOCK, 6000, "does not end"),
        (BLOCK + BLOCK, 6000, "more than its manifest"),  # another block of records
        (BLOCK, 6001, "less than its manifest"),
        (BLOCK, 5999, "more than its manifest"),
        (BLOCK, (2 << 30) + 1, "longer than any"),  # a forged manifest
    ],
)
def test_damage_is_told_with_its_place(block: bytes, size: int, what: str) -> None:
    assert unpack(BLOCK, 6000, file="f", record=70, offset=900) == CONTENT
    with pytest.raises(CorruptionError, match=what) as caught:
        unpack(block, size, file="f", record=70, offset=900)
    error = caught.value
    assert (error.file, error.record, error.offset) == ("f", 70, 900)
    assert error.got and error.allowed and error.next_step


def test_a_bomb_takes_no_more_memory_than_the_block_that_was_promised() -> None:
    bomb = pack(bytes(64 << 20))  # 65 kB
    tracemalloc.start()
    try:
        with pytest.raises(CorruptionError, match="more than its manifest"):
            unpack(bomb, 100_000, file="f", record=0, offset=0)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_block_that_no_reader_takes_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gzip_blocks, "MAX_BLOCK_BYTES", 10)
    pack(bytes(10))
    with pytest.raises(DataError, match="too long"):
        pack(bytes(11))


def test_tensorflow_reads_blocks_wherever_its_buffers_cut_them(tmp_path: Path) -> None:
    import tensorflow as tf

    # It reads and unpacks 256 KiB at a time, and would lose what follows a gzip member whose end is cut there (068).
    rng, window, path = np.random.default_rng(3), 256 << 10, tmp_path / "x.tfrecord.gz"
    noise = rng.bytes(window)
    for behind in (-1, 0, 1, 4, 9):
        size = window - 200
        while (missing := window + behind - written([[noise[:size]]], 1)[1].bytes + TRAILER_BYTES) != 0:
            size += missing
        records = [noise[:size], b"last", b""]
        data, writer = written([records], 1)
        assert writer.block_offsets[1] == window + behind
        path.write_bytes(data)
        found = [item.numpy() for item in tf.data.TFRecordDataset(str(path), compression_type="GZIP")]
        assert found == records
    records = [bytes(window - 16), b"", noise[:5000], bytes(3 * window - 16), b"last"]  # cut where they are unpacked
    path.write_bytes(written([records], 1)[0])
    found = [item.numpy() for item in tf.data.TFRecordDataset(str(path), compression_type="GZIP", buffer_size=1000)]
    assert found == records and gzip.decompress(path.read_bytes()) == b"".join(map(frame, records))
    path.write_bytes(written([], 5)[0])
    assert list(tf.data.TFRecordDataset(str(path), compression_type="GZIP")) == []
