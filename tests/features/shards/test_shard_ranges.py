from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.features.shards.ranges import ShardRange, cut
from lockstep.features.shards.read import PIECE_BYTES, pieces_of, read_range, strict
from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.dataset.manifest_entries import ShardInfo
from lockstep.storage.errors import CorruptionError
from lockstep.storage.formats.gzip_blocks import GzipWriter
from lockstep.storage.fs import filesystem
from tests.pyspark_tfrecord.published import SCHEMA, publish


def shard(records: int, block_records: int, record_bytes: int) -> ShardInfo:
    offsets = tuple(range(0, records * record_bytes, block_records * record_bytes))
    return ShardInfo(
        "split=train/part-00000.tfrecord", records, records * record_bytes, "0" * 64, "0" * 8, None, offsets
    )


@given(st.integers(0, 400), st.integers(1, 50), st.integers(16, 2000), st.integers(1, 100_000))
def test_ranges_lie_end_to_end_and_hold_whole_blocks(records: int, block: int, size: int, range_bytes: int) -> None:
    info = shard(records, block, size)
    parts = cut("u", info, block, range_bytes)
    assert sum(part.records for part in parts) == records
    place = record = 0
    for part in parts:
        assert (part.offsets[0], part.first_record) == (place, record) and record % block == 0
        assert part.records * size == part.offsets[-1] - part.offsets[0] > 0
        assert all(
            (end - start) == block * size for start, end in zip(part.offsets[:-2], part.offsets[1:-1], strict=True)
        )
        place, record = part.offsets[-1], record + part.records
    assert place == records * size
    assert len(parts) <= max(1, round(records * size / range_bytes))
    equal = records * size / max(1, round(records * size / range_bytes))
    assert all(part.offsets[-1] - part.offsets[0] < equal + block * size for part in parts)


def test_pieces_stay_below_their_bytes_unless_a_block_is_larger() -> None:
    megabyte = 1 << 20
    part = ShardRange("u", 0, tuple(megabyte * at for at in (0, 1, 2, 3, 5, 6, 16, 17)), 70, 7 * 10 - 3, 10)
    pieces = list(pieces_of(part))
    assert [(first, after) for _, _, first, after in pieces] == [(0, 3), (3, 5), (5, 6), (6, 7)]  # 3, 3, 10 and 1 MiB
    assert [count for _, count, _, _ in pieces] == [30, 20, 10, 7]  # the last block of a shard is shorter
    assert [record for record, _, _, _ in pieces] == [70, 100, 120, 130]
    assert 4 * megabyte == PIECE_BYTES


def damaged(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_a_shard_reads_as_it_was_written_and_damage_is_told_with_its_place(tmp_path: Path) -> None:
    rows = publish(tmp_path / "d", {"train": (30,)})["train"]
    info = load_dataset(str(tmp_path / "d")).splits["train"]
    path = tmp_path / "d" / info.shards[0].path
    fs = filesystem(str(path))

    def read(range_bytes: int | None) -> list[dict[str, object]]:
        parts = cut(str(path), info.shards[0], info.block_records, range_bytes)
        return [row for part in parts for batch in read_range(fs, part, strict(SCHEMA)) for row in batch.to_pylist()]

    assert read(1) == read(1000) == read(None) == rows
    damaged(path, info.shards[0].block_offsets[2] + 40)
    with pytest.raises(CorruptionError) as caught:
        read(1)
    assert (caught.value.record, caught.value.offset) == (14, info.shards[0].block_offsets[2])
    damaged(path, info.shards[0].block_offsets[2] + 40)
    forged = replace(info.shards[0], sha256="0" * 64)  # what is whole in itself but not what was published
    with pytest.raises(CorruptionError, match="digest"):
        list(read_range(fs, cut(str(path), forged, info.block_records, None)[0], strict(SCHEMA)))
    (part,) = cut(str(path), info.shards[0], info.block_records, 1 << 20)
    with pytest.raises(CorruptionError, match="another number of records"):
        list(read_range(fs, replace(part, records=29), strict(SCHEMA)))
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(CorruptionError, match="another length"):
        read(1)


def test_an_empty_gzip_shard_is_held_against_its_digest(tmp_path: Path) -> None:
    """A header and a trailer with nothing between them are read by other programs all the same."""
    path, sink = tmp_path / "empty", io.BytesIO()
    writer = GzipWriter(sink, 8)
    writer.finish()
    digests = writer.sha256, writer.crc32c, None
    info = ShardInfo("empty", 0, writer.bytes, *digests, tuple(writer.block_offsets), tuple(writer.unpacked_offsets))
    path.write_bytes(sink.getvalue())
    (part,) = cut(str(path), info, 8, None)
    assert list(read_range(filesystem(str(path)), part, strict(SCHEMA))) == []
    damaged(path, 0)
    with pytest.raises(CorruptionError, match="digest"):
        list(read_range(filesystem(str(path)), part, strict(SCHEMA)))


def test_a_forged_block_is_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    part = ShardRange(str(path), 1 << 40, (0, 1 << 40), 0, 1, 1)
    with pytest.raises(CorruptionError, match="a block is too long"):
        list(read_range(filesystem(str(path)), part, strict(SCHEMA)))
