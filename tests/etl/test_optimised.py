"""What guards data is checked by Python with -O too, which leaves asserts out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import IO, TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from lockstep.etl.spark.tasks import narrowed
from lockstep.etl.write.dataset import write_dataset
from lockstep.etl.write.shards import WriteShards
from lockstep.features.arrow import flat
from lockstep.storage.errors import DataError
from tests.etl.conftest import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

# Each line is a call that must raise an error of ours.
CALLS = """
write(1, rows(0, [1 << 62, 1 << 63]))
write(0, rows(0, [5, 4]))
write(0, rows(1, [5, 6]))
write(0, rows(0, [5, 1 << 63]))
placed(LocalFileSystem(), DatasetPaths("/nowhere"), [{"shard": 1}], TABLE, "tfrecord")
archive()
rotate(np.zeros((1, 2, 3, 1), np.uint8), 45)
resized_part(np.broadcast_to(np.zeros((1, 1, 1, 1), np.uint8), (1, 1 << 23, 1, 1)), (1, 1), (1, 1))
ExactSums(0).merge(ExactSums(1074))
Draws.of(0, np.zeros(1, np.int64), np.zeros(1, np.int64)).at(0).bits(16)
Draws.of(0, np.zeros(1, np.int64), np.zeros(1, np.int64)).at(0).below(0, 0)
RunPaths("/run").relative("/other/file")
all_reduce_short(0, 2, even_grid(8, 2, 4))
Exchange(SoloCommunicator()).want("rest")
RecordDecoder(NULLABLE, in_place=["n"])
"""
CHILD = f"""
import json, sys, tempfile
import numpy as np, pyarrow as pa
from lockstep.etl.input.unpack import Forward
from lockstep.etl.write.shards import placed
from lockstep.etl.write.shards import ShardTable, WriteShards
from lockstep.features.images.random_numbers import Draws
from lockstep.features.examples.codec import RecordDecoder
from lockstep.etl.fit.exact_sums import ExactSums
from lockstep.features.images.resize import resized_part, rotate
from lockstep.features.schema.fields import Field, sample_id_field; from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import LockstepError
from lockstep.storage.dataset.layout import DatasetPaths
from lockstep.storage.files.local import LocalFileSystem
from lockstep.storage.formats.tfrecord import frame
from lockstep.training.comm import SoloCommunicator; from lockstep.training.exchange.exchange import Exchange
from lockstep.training.comm.tcp.algorithms import halving_all_reduce_short as all_reduce_short
from lockstep.training.comm.tcp.schedule import even_grid
from lockstep.training.run.paths import RunPaths

TABLE = ShardTable((("train", 2, 8),))
NULLABLE = Schema((sample_id_field(), Field(name="n", dtype="int64", nullable=True)))

def rows(shard, keys):
    keys = (np.array(keys, np.uint64) ^ np.uint64(1 << 63)).view(np.int64)
    n = len(keys)
    columns = {{"_shard": pa.array([shard] * n, pa.int32()), "_key": pa.array(keys), "sample_id": pa.array(range(n)),
                "_source": pa.array([0] * n), "_position": pa.array(range(n)), "_record": pa.array([frame(b"x")] * n)}}
    return [pa.record_batch(columns)]

def write(partition, batches):
    with tempfile.TemporaryDirectory() as folder:
        return WriteShards(NULLABLE, "tfrecord", TABLE, folder, ("in",)).write(partition, batches)

def archive():
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(64)); file.flush()
        with Forward(file.name, "none") as forward:
            forward.at(32, 8)
            forward.at(8, 8)

write(0, rows(0, [5, 6]))
found = {{}}
for call in {CALLS.strip().splitlines()!r}:
    try:
        eval(call)
        found[call] = "nothing"
    except LockstepError as error:
        found[call] = "refused" if all((error.what, error.got, error.allowed, error.next_step)) else "a part is missing"
    except Exception as error:
        found[call] = repr(error)
print(json.dumps({{"debug": __debug__, "found": found}}))
"""


def test_optimised_python_refuses_what_asserts_caught() -> None:
    done = subprocess.run(
        [sys.executable, "-O", "-c", CHILD], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["debug"] is False
    assert set(told["found"].values()) == {"refused"}, told["found"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), pa.large_binary(), pa.binary()])
def test_offsets_are_read_by_the_columns_type(kind: pa.DataType) -> None:
    values = pa.array(["left out", "a", None, "bcd"]).cast(kind).slice(1)
    offsets, data = flat(values)
    assert offsets.tolist() == [0, 1, 1, 4] and data.tobytes() == b"abcd"


def test_batches_have_narrow_offsets_behind_spark() -> None:
    lists = pa.array([["a"], None], pa.list_(pa.large_string()))
    batch = pa.record_batch({"n": [1, 2], "s": pa.array(["x", None], pa.large_string()), "l": lists})
    found = narrowed(batch)
    assert found.schema.types == [pa.int64(), pa.string(), pa.list_(pa.string())]
    assert found.to_pydict() == batch.to_pydict() and narrowed(found) is found
    ends = pa.py_buffer(pa.array([0, 1 << 30, 1 << 31], pa.int64()).buffers()[1])
    byte = pa.py_buffer(b"x")  # nobody looks at the 2 GiB that the offsets promise
    wide = pa.Array.from_buffers(pa.large_binary(), 2, [None, ends, pa.foreign_buffer(byte.address, 1 << 31, byte)])
    with pytest.raises(DataError, match="too large"):
        narrowed(pa.record_batch({"b": wide}))


@pytest.mark.slow
def test_rows_that_a_writer_made_to_lose_some_lost_are_missed(spark: SparkSession, tmp_path: Path) -> None:
    def losing(*args: Any) -> WriteShards:
        class Losing(WriteShards):
            def _write_parquet(
                self, name: str, file: IO[bytes], rows: Iterable[pa.RecordBatch], block_records: int
            ) -> dict[str, Any]:
                return WriteShards._write_parquet(self, name, file, _all_but_one(rows), block_records)

        return Losing(*args)

    def _all_but_one(rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return (batch.slice(1) for batch in rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.etl.write.dataset.WriteShards", losing)
        with pytest.raises(DataError, match="rows were lost"):
            write_dataset(spark.range(100).toDF("n"), str(tmp_path / "out"), id_columns=["n"], fmt="parquet")
    assert not list(tmp_path.iterdir())
