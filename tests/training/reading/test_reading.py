"""What a rank says of its reading, and that every byte is checked where that is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.shared.arrays import in_order
from lockstep.storage.errors import CorruptionError, StorageError
from lockstep.storage.files.local import LocalFileSystem
from lockstep.training.batches.training_set import TrainingSet
from lockstep.training.rank.metrics import reading_row
from lockstep.training.reading.files import ShardFiles
from lockstep.training.reading.open import verify_share
from lockstep.training.reading.reader import ReadOptions
from tests.storage.repacked import repacked
from tests.training._tiny import write_table


@pytest.mark.parametrize("fmt", ["tfrecord", "parquet", "gzip"])
def test_every_byte_of_every_shard_is_read_by_one_rank(tmp_path: Path, fmt: str) -> None:
    write_table(tmp_path / "d", fmt="parquet" if fmt == "parquet" else "tfrecord", shards=3)
    root = tmp_path / ("packed" if fmt == "gzip" else "d")
    if fmt == "gzip":
        repacked(tmp_path / "d", root)
    readers = TrainingSet.at([str(root)], "train", None).readers
    told: list[str] = []
    for rank in range(2):
        verify_share(readers, rank, 2, told.append)
    assert told == [f"verify shard {number} of 3" for number in (1, 3, 2)]
    for number, (_, url, info) in enumerate(readers[0].stored):
        for offset in (0, 3, info.bytes // 2, info.bytes - 9, info.bytes - 1):  # magic, header, trailer, footer too
            whole = Path(url).read_bytes()
            Path(url).write_bytes(whole[:offset] + bytes([whole[offset] ^ 16]) + whole[offset + 1 :])
            with pytest.raises(CorruptionError, match="does not match its digest") as caught:
                verify_share(readers, number % 2, 2, told.append)
            assert caught.value.file == url
            Path(url).write_bytes(whole)


class CountedFile:
    """Bytes of a shard, once; where `fails`, none."""

    def __init__(self, fs: CountedFiles) -> None:
        self._fs, self.closed = fs, False

    def read_at(self, offset: int, length: int) -> bytes:
        assert not self.closed
        if self._fs.fails:
            raise StorageError("gone")
        return bytes(length)

    def close(self) -> None:
        self.closed = True


class CountedFiles(LocalFileSystem):
    """Keeps each file that it opened."""

    def __init__(self) -> None:
        self.opened: list[CountedFile] = []
        self.fails = False

    def open_ranges(self, url: str, size_bytes: int) -> CountedFile:
        self.opened.append(CountedFile(self))
        return self.opened[-1]

    @property
    def open_ones(self) -> list[int]:
        return [number for number, file in enumerate(self.opened) if not file.closed]


def test_files_stay_open_up_to_a_number_and_one_that_failed_is_closed() -> None:
    fs, files = CountedFiles(), ShardFiles(most_open=2)
    for number in range(3):
        files.add(fs, f"/{number}", 100)
    for shard in (0, 1, 1, 2):
        assert files.read(shard, 5, 10) == bytes(5)
    assert fs.open_ones == [1, 2]  # that of shard 0 was not used longest
    assert files.read(1, 0, 3, fresh=True) == bytes(3) and fs.open_ones == [2, 3]  # past the one that was open
    fs.fails = True
    with pytest.raises(StorageError, match="gone"):
        files.read(2, 0, 3)
    assert fs.open_ones == [3]
    files.close()
    assert fs.open_ones == []
    fs.fails = False
    assert files.read(0, 0, 3) == bytes(3) and fs.open_ones == []  # read after the end: opened for it alone


def test_a_row_adds_up_what_all_readers_did(tmp_path: Path) -> None:
    for name, seed in (("d", 0), ("e", 1)):
        write_table(tmp_path / name, records={"train": 20}, shards=1, seed=seed)
    datasets = [str(tmp_path / name) for name in ("d", "e")]
    plain = TrainingSet.at(datasets, "train", (1, 1)).readers
    options = ReadOptions(read_ahead_bytes=1 << 20, cache=str(tmp_path / "cache"), cache_bytes=1 << 20, ranks=2)
    cached = TrainingSet.at(datasets, "train", (1, 1), options).readers
    for reader in (*plain, *cached):
        list(in_order(reader))
    row = reading_row(plain, 1, 7)
    assert (row["kind"], row["rank"], row["step"], row["ahead"] + row["direct"]) == ("reading", 1, 7, 6)
    assert row["fetched_bytes"] == sum(info.bytes for reader in plain for _, _, info in reader.stored)
    assert "cache_hits" not in row
    row = reading_row(cached, 0, 7)
    assert (row["cache_hits"], row["cache_misses"], row["cache_damaged"]) == (0, 6, 0)
    assert row["cache_kept_bytes"] == row["fetched_bytes"]
