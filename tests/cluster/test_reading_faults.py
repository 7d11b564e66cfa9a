"""Reading ahead from a real HDFS while a DataNode dies, or replicas on its disk are damaged."""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pytest

from lockstep.storage.errors import StorageError
from lockstep.storage.files.hdfs import HdfsFileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import join
from lockstep.training.reading.open import OpenSplit
from lockstep.training.reading.reader import ReadOptions, SplitReader
from tests.cluster.daemons import Cluster
from tests.training._tiny import write_images
from tests.waiting import until

pytestmark = pytest.mark.cluster


@pytest.fixture
def dataset(hadoop: Cluster) -> Iterator[str]:
    url = join(hadoop.hdfs_url, f"reading-{uuid.uuid4().hex}")
    write_images(url, fmt="tfrecord", records={"train": 3000}, shards=4, block_records=64)
    yield url
    filesystem(url).delete(url, recursive=True)


def blocks_of(reader: SplitReader) -> Iterator[pa.RecordBatch]:
    return reader.sequence(map(reader.table.run, range(reader.table.num_blocks)))


def damage(hadoop: Cluster, name: str, content: bytes) -> int:
    """Flip bits in the replicas that a DataNode has of a file of this content; returns how many it found."""
    found = 0
    for path in (hadoop.folder / name).rglob("blk_*"):
        with contextlib.suppress(FileNotFoundError):  # the DataNode moves blocks, and deletes those of other tests
            if path.suffix != ".meta" and path.stat().st_size == len(content) and path.read_bytes() == content:
                path.write_bytes(content[:5000] + bytes(byte ^ 1 for byte in content[5000:9000]) + content[9000:])
                found += 1
    return found


def test_a_dead_datanode_and_damaged_replicas_are_read_around(
    hadoop: Cluster, dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = pa.concat_batches(list(blocks_of(OpenSplit.at(dataset, "train").reader)))
    assert len(wanted) == 3000
    options = ReadOptions(read_ahead_bytes=60_000, cache=str(tmp_path), cache_bytes=200_000)  # most is not kept
    reader = OpenSplit.at(dataset, "train", options=options).reader
    got = []
    until(lambda: not hadoop.missing_replicas(urlsplit(dataset).path))
    for number, batch in enumerate(blocks_of(reader)):
        if number == 5:
            hadoop.kill("datanode-1")  # of each file both have a replica; streams to this one are open
        got.append(batch)
    assert pa.concat_batches(got).equals(wanted)
    hadoop.start("datanode-1")

    fs, url, _ = OpenSplit.at(dataset, "train").reader.stored[1]
    content = fs.read_bytes(url)
    assert damage(hadoop, "datanode-1", content) == 1
    for _ in range(3):  # whichever replica is tried first
        assert pa.concat_batches(list(blocks_of(OpenSplit.at(dataset, "train").reader))).equals(wanted)

    assert damage(hadoop, "datanode-2", content) == 1
    reader = OpenSplit.at(dataset, "train").reader
    fs = filesystem(url)
    assert isinstance(fs, HdfsFileSystem)
    monkeypatch.setattr(fs, "give_up_s", 1.0)
    with pytest.raises(StorageError) as caught:
        list(blocks_of(reader))
    what = re.escape(f"(block 0) of {url} cannot be read")
    assert re.search(rf"records 0 to 64 {what}", caught.value.what)
    for name in ("datanode-1", "datanode-2"):
        assert f":{hadoop.ports[name]}" in caught.value.got
