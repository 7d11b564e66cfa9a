"""Every flipped bit and every cut of a small dataset's files is refused with its place, read ahead and with a cache."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from lockstep.storage.dataset.manifest import DatasetManifest, load_dataset
from lockstep.storage.errors import CorruptionError, LockstepError
from lockstep.training.batches.feed import RankFeed
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.reading.open import OpenSplit, verify_share
from lockstep.training.reading.reader import ReadOptions, SplitReader
from lockstep.training.world import World
from tests.storage.repacked import repacked
from tests.training._tiny import write_table

BLOCK = 2
FORMATS = ("tfrecord", "gzip", "parquet")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of warnings of one kind."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def written(tmp_path: Path, fmt: str) -> tuple[Path, Path]:
    """A dataset of three records in two blocks, and its shard."""
    root = tmp_path / "d"
    manifest = write_table(
        root, fmt="parquet" if fmt == "parquet" else "tfrecord", records={"train": 3}, shards=1, block_records=BLOCK
    )
    if fmt == "gzip":
        root = tmp_path / "packed"
        manifest = repacked(tmp_path / "d", root)
    return root, root / manifest.splits["train"].shards[0].path


@contextmanager
def flips(path: Path) -> Iterator[Iterator[int]]:
    """One bit after another of a file is flipped, in place; gives its number, and mends it for the next."""
    whole = path.read_bytes()
    with path.open("r+b", buffering=0) as file:

        def each() -> Iterator[int]:
            for bit in range(8 * len(whole)):
                at = bit // 8
                os.pwrite(file.fileno(), bytes([whole[at] ^ 1 << bit % 8]), at)
                yield bit
                os.pwrite(file.fileno(), whole[at : at + 1], at)

        yield each()


def rows(reader: SplitReader) -> pa.RecordBatch:
    try:
        return pa.concat_batches(list(reader.sequence(map(reader.table.run, range(reader.table.num_blocks)))))
    finally:
        reader.forget_hints()  # what was read ahead of an error


@pytest.mark.parametrize("cached", [False, True])
def test_tfrecord_while_reading(tmp_path: Path, cached: bool) -> None:
    root, shard = written(tmp_path, "tfrecord")
    offsets = load_dataset(str(root)).splits["train"].shards[0].block_offsets
    options = ReadOptions(cache=str(tmp_path / "cache"), cache_bytes=1 << 20) if cached else None
    reader = OpenSplit.at(str(root), "train", options=options).reader
    with flips(shard) as bits:
        for bit in bits:
            if cached:  # of the cache's own entries every bit is in test_block_cache
                if bit % 7:
                    continue
                for entry in (tmp_path / "cache").rglob("????????*"):
                    if entry.is_file():
                        entry.unlink()
            with pytest.raises(CorruptionError) as caught:
                rows(reader)
            block = sum(offset <= bit // 8 for offset in offsets) - 1
            record = caught.value.record
            assert caught.value.file == str(shard) and record is not None and record // BLOCK == block, bit
    assert len(rows(reader)) == 3


def test_batches_of_a_feed(tmp_path: Path) -> None:
    root, shard = written(tmp_path, "tfrecord")
    opened = OpenSplit.at(str(root), "train")
    plan = EpochPlan.for_dataset(opened.manifest, "train", seed=0, global_batch=3, lanes=1)
    with flips(shard) as bits:
        for bit in bits:
            if bit % 13:
                continue
            feed = RankFeed(plan, opened.reader, opened.encoder, World.local(0, 1))
            with pytest.raises(CorruptionError) as caught:
                feed.batch(0)
            assert caught.value.file == str(shard) and caught.value.record is not None, bit
            opened.reader.forget_hints()


@pytest.mark.parametrize("fmt", ["gzip", "parquet"])
def test_packed_blocks_while_reading(tmp_path: Path, fmt: str) -> None:
    """Bits that deflate and headers of pages do not use may change no value; all others are refused."""
    root, shard = written(tmp_path, fmt)
    reader = OpenSplit.at(str(root), "train").reader
    wanted, edges, refused = rows(reader), reader._shards[0].edges, 0
    with flips(shard) as bits:
        for bit in bits:
            if bit % (3 if fmt == "gzip" else 19) or not edges[0] <= bit // 8 < edges[-1]:
                continue
            try:
                found = rows(reader)
            except LockstepError as error:
                assert str(shard) in str(error), bit
                refused += 1
            else:
                assert found.equals(wanted), bit
    assert refused > (edges[-1] - edges[0]) / 10


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_bit_by_digest(tmp_path: Path, fmt: str) -> None:
    """`--verify full`."""
    root, shard = written(tmp_path, fmt)
    reader = OpenSplit.at(str(root), "train").reader
    verify_share([reader], 0, 1, lambda words: None)
    with flips(shard) as bits:
        for bit in bits:
            with pytest.raises(CorruptionError, match="does not match its digest") as caught:
                verify_share([reader], 0, 1, lambda words: None)
            assert caught.value.file == str(shard), bit


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_cut_at_the_start_and_while_reading(tmp_path: Path, fmt: str) -> None:
    root, shard = written(tmp_path, fmt)
    opened = OpenSplit.at(str(root), "train")
    whole, last = shard.read_bytes(), opened.reader._shards[0].edges[-1]
    for size in range(len(whole) - 1, -1, -1):
        os.truncate(shard, size)
        with pytest.raises(CorruptionError, match="another length") as caught:
            SplitReader(str(root), opened.manifest, "train", opened.encoder)
        assert (caught.value.file, caught.value.offset) == (str(shard), size)
        if size < last and size % 3 == 0:  # cut after the start
            with pytest.raises(CorruptionError, match="shorter than it must be") as caught:
                rows(opened.reader)
            assert (caught.value.file, caught.value.offset) == (str(shard), size)


def test_index_and_manifest(tmp_path: Path) -> None:
    root, _ = written(tmp_path, "tfrecord")
    opened = OpenSplit.at(str(root), "train")
    index = root / "_index" / "train" / "part-00000.idx"
    with flips(index) as bits:
        for bit in bits:
            with pytest.raises(CorruptionError, match="does not match its digest") as caught:
                SplitReader(str(root), opened.manifest, "train", opened.encoder)
            assert caught.value.file == str(index), bit
    for size in range(index.stat().st_size - 1, -1, -1):
        os.truncate(index, size)
        with pytest.raises(CorruptionError, match="another length"):
            SplitReader(str(root), opened.manifest, "train", opened.encoder)
    whole = (root / "_manifest.json").read_bytes()
    for bit in range(8 * len(whole)):
        at = bit // 8
        with pytest.raises(LockstepError, match=r"here\.json"):
            DatasetManifest.from_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit % 8]) + whole[at + 1 :], "here.json")
    for size in range(len(whole)):
        with pytest.raises(LockstepError, match=r"here\.json"):
            DatasetManifest.from_bytes(whole[:size], "here.json")
