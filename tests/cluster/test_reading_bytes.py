"""How many bytes an epoch asks of a real HDFS: those of the shards, and no block of them twice."""

from __future__ import annotations

import threading
import uuid
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pytest

from lockstep.storage.files.hdfs import HdfsRaw
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import join
from lockstep.training.batches import assembly
from lockstep.training.batches.feed import RankFeed
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.reading.open import OpenSplit
from lockstep.training.reading.reader import ReadOptions
from lockstep.training.world import World
from tests.cluster.daemons import Cluster
from tests.storage.repacked import repacked
from tests.training._tiny import write_images

pytestmark = pytest.mark.cluster
RECORDS = 20_000
BLOCK_RECORDS = 400


@pytest.fixture
def root(hadoop: Cluster) -> Iterator[str]:
    url = join(hadoop.hdfs_url, f"bytes-{uuid.uuid4().hex}")
    yield url
    filesystem(url).delete(url, recursive=True)


@pytest.mark.parametrize("fmt", ["parquet", "gzip"])
def test_an_epoch_of_two_ranks_reads_each_block_once(fmt: str, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = join(root, fmt)
    plain = join(root, "plain") if fmt == "gzip" else dataset
    write_images(
        plain, fmt="tfrecord" if fmt == "gzip" else fmt, records={"train": RECORDS}, block_records=BLOCK_RECORDS
    )
    if fmt == "gzip":
        repacked(plain, dataset)
    # Blocks are of some 30 KiB here; a strip is a part of one, as of a block of 2 MiB.
    monkeypatch.setattr(assembly, "STRIP_BYTES", 4 << 10)
    asked: dict[str, int] = defaultdict(int)
    lock = threading.Lock()
    read_at = HdfsRaw.read_at

    def counted(raw: HdfsRaw, offset: int, length: int) -> bytes:
        with lock:
            asked[raw._url] += length
        return read_at(raw, offset, length)

    ids, shards = [], dict[str, int]()
    for rank in range(2):
        opened = OpenSplit.at(dataset, "train", options=ReadOptions(read_ahead_bytes=1 << 20))
        plan = EpochPlan.for_dataset(opened.manifest, "train", seed=1, global_batch=32, lanes=8)
        feed = RankFeed(plan, opened.reader, opened.encoder, World.local(rank, 2))
        with monkeypatch.context() as counting:  # not the footers, of which 64 KiB are read when a split is opened
            counting.setattr(HdfsRaw, "read_at", counted)
            ids += [batch.sample_ids for batch in feed.batches(0, plan.steps(1))]
        counts = opened.reader.counts.fetched
        assert counts.direct == counts.dropped == 0 and counts.ahead >= RECORDS // BLOCK_RECORDS // 2
        opened.reader.close()
        shards = {url: info.bytes for _, url, info in opened.reader.stored}
    assert len(np.unique(np.concatenate(ids))) == RECORDS
    total = sum(asked[url] for url in shards)
    # Each once; both ranks read the block in which the lanes of one end and those of the other begin.
    assert 0.9 * sum(shards.values()) < total <= 1.05 * sum(shards.values())
