"""Petastorm's readers on a real HDFS, and its metadata written there."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.etl.petastorm.metadata import write_petastorm_metadata
from lockstep.features.schema.schema import Schema
from lockstep.petastorm import enable
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import join
from tests.training._tiny import write_table

enable()

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("pool", ["thread", "process"])
def test_both_readers_read_hdfs(hadoop: Any, pool: str) -> None:
    from petastorm import make_batch_reader, make_reader

    url = join(hadoop.hdfs_url, f"petastorm-{pool}")
    manifest = write_table(url, records={"train": 20, "test": 5}, fmt="parquet")
    with make_batch_reader(f"{url}/split=train", reader_pool_type=pool, workers_count=1) as reader:
        batches = [sample for batch in reader for sample in batch.sample_id.tolist()]
    write_petastorm_metadata(filesystem(url), url, Schema.from_json(manifest.schema), manifest.splits)
    with make_reader(url, reader_pool_type=pool, workers_count=1, filters=[("split", "=", "train")]) as reader:
        rows = [int(row.sample_id) for row in reader]
    assert sorted(rows) == sorted(batches) and len(set(rows)) == 20
    filesystem(url).delete(url, recursive=True)
    with pytest.raises(OSError, match="not a Parquet file"):
        make_batch_reader(url)
