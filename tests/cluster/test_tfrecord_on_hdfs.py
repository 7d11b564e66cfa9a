"""The data source, an index and a description on a real HDFS."""

from __future__ import annotations

import uuid
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from lockstep.etl.describe.dataset import describe
from lockstep.jobs import index
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import join
from pyspark_tfrecord import DefaultSource
from pyspark_tfrecord.options import WriteOptions
from pyspark_tfrecord.part_file import write_part
from pyspark_tfrecord.writing import FileWriter, Written
from tests.pyspark_tfrecord.published import publish

TABLE = pa.table({"n": pa.array(range(1000)), "text": [f"ä{number}" for number in range(1000)]})


def read(url: str) -> list[dict[str, Any]]:
    source = DefaultSource({"path": url})
    reader = source.reader(source.schema())
    batches: list[Any] = [batch for part in reader.partitions() for batch in reader.read(part)]
    return [row for batch in batches for row in batch.to_pylist()]


def save(url: str, overwrite: bool, *parts: pa.Table) -> None:
    writer = FileWriter.of({"path": url}, from_arrow_schema(TABLE.schema), overwrite)
    done = []
    for number, part in enumerate(parts):
        place = join(writer.staging, f"attempt-{number}")
        write_part(place, iter(part.to_batches()), writer.fields, WriteOptions.of({"path": url}))
        done.append(Written(number, place))
    writer.commit(done)


@pytest.mark.cluster
def test_read_write_index_and_describe(hadoop: Any) -> None:
    root = join(hadoop.hdfs_url, f"tfrecord-{uuid.uuid4().hex}")
    fs = filesystem(root)
    rows = publish(join(root, "d"), {"train": (30, 17)})["train"]
    assert read(join(root, "d")) == [{**row, "split": "train"} for row in rows]
    out = join(root, "out")
    save(out, False, TABLE, TABLE.slice(0, 10))
    save(out, False, TABLE.slice(10, 10))
    assert read(out) == [*TABLE.to_pylist(), *TABLE.slice(0, 20).to_pylist()]
    save(out, True, TABLE)
    assert [entry.name for entry in fs.list(out)] == ["_SUCCESS", "part-00000.tfrecord"]
    assert index.main([out]) == 0
    assert read(out) == TABLE.to_pylist()
    assert describe(out).looked_at == "all 1000 records"
    assert [entry.name for entry in fs.list(root)] == ["d", "out"]
