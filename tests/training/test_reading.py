"""What a rank says of its reading, and that every byte is checked where that is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.errors import CorruptionError
from tests.storage.repacked import repacked
from tests.training._tiny import write_table
from training.read_options import ReadOptions
from training.reading import reading_row, verify_share
from training.training_set import TrainingSet


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


def test_a_row_adds_up_what_all_readers_did(tmp_path: Path) -> None:
    for name, seed in (("d", 0), ("e", 1)):
        write_table(tmp_path / name, records={"train": 20}, shards=1, seed=seed)
    datasets = [str(tmp_path / name) for name in ("d", "e")]
    plain = TrainingSet.at(datasets, "train", (1, 1)).readers
    options = ReadOptions(read_ahead_bytes=1 << 20, cache=str(tmp_path / "cache"), cache_bytes=1 << 20, ranks=2)
    cached = TrainingSet.at(datasets, "train", (1, 1), options).readers
    for reader in (*plain, *cached):
        list(reader.in_order(10))
    row = reading_row(plain, 1, 7)
    assert (row["kind"], row["rank"], row["step"], row["ahead"] + row["direct"]) == ("reading", 1, 7, 6)
    assert row["fetched_bytes"] == sum(info.bytes for reader in plain for _, _, info in reader.stored)
    assert "cache_hits" not in row
    row = reading_row(cached, 0, 7)
    assert (row["cache_hits"], row["cache_misses"], row["cache_damaged"]) == (0, 6, 0)
    assert row["cache_kept_bytes"] == row["fetched_bytes"]
