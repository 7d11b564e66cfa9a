"""Gzip shards through the data source, without Spark: the plain shards' rows and partitions; damage told."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.storage.errors import CorruptionError
from tests.pyspark_tfrecord.published import publish
from tests.pyspark_tfrecord.test_source import read
from tests.storage.repacked import repacked


def test_rows_and_partitions_are_those_of_the_plain_shards(tmp_path: Path) -> None:
    publish(tmp_path / "plain", {"train": (30, 0, 17), "test": (9,)})
    shard = repacked(tmp_path / "plain", tmp_path / "d").splits["train"].shards[0]
    wanted, parts = read(tmp_path / "plain", partitionBytes=1000)
    assert read(tmp_path / "d", partitionBytes=1000) == (wanted, parts) and parts > 5
    assert read(tmp_path / "d")[0] == wanted  # several blocks in one piece
    assert read(tmp_path / "d", verify="full")[0] == wanted
    path, start = tmp_path / "d" / shard.path, shard.block_offsets[2]
    data = path.read_bytes()
    path.write_bytes(data[:start] + b"\xff" + data[start + 1 :])
    with pytest.raises(CorruptionError, match=r"part-00000\.tfrecord\.gz, record 14, offset") as caught:
        read(tmp_path / "d", partitionBytes=1000)
    assert caught.value.offset == start
    for place in (4, len(data) - 1):  # around the blocks: seen where all of the file is looked at
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert read(tmp_path / "d")[0] == wanted
        with pytest.raises(CorruptionError, match="digest"):
            read(tmp_path / "d", verify="full")
