"""Petastorm's readers over our Parquet splits give the values that lie there; nobody else sees the names it gets."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.etl.petastorm import imports
from lockstep.etl.petastorm.old_pyarrow import ParquetDataset
from lockstep.features.sample_id import sample_id
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema
from lockstep.petastorm import enable
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import ConfigError, DataError
from tests.etl.conftest import ROOT
from tests.training._tiny import write_rows

enable()

# enable() comes before anything of Petastorm is imported
from petastorm import TransformSpec, make_batch_reader, make_reader  # noqa: E402
from petastorm.predicates import in_lambda, in_set  # noqa: E402
from petastorm.workers_pool import process_pool  # noqa: E402
from petastorm.workers_pool.ventilator import ConcurrentVentilator  # noqa: E402

process_pool._KEEP_TRYING_WHILE_ZMQ_AGAIN_IS_RAIZED_TIMEOUT_S = 300  # on a loaded machine a start takes its time

RECORDS = {"train": 20, "test": 12}
SCHEMA = Schema(
    (
        Field(name="sample_id", dtype="int64", kind="id"),
        Field(name="clicks", dtype="int64"),
        Field(name="price", dtype="float64"),
        Field(name="name", dtype="string"),
        Field(name="raw", dtype="bytes"),
        Field(name="seen", dtype="bool"),
        Field(name="image", dtype="uint8", shape=(2, 3, 1)),
        Field(name="point", dtype="float64", shape=(2,)),
    )
)


def rows(count: int) -> pa.RecordBatch:
    """Rows whose numbers no float holds, whose text is no ASCII and whose bytes end in zeros."""
    rng = np.random.default_rng(7)
    made = [
        {
            "sample_id": sample_id([str(row).encode()], 0),
            "clicks": 2**60 + row,
            "price": float(rng.standard_normal()),
            "name": f"é{row}",
            "raw": b"\0x" * (row % 3) + b"\0",
            "seen": row % 3 == 0,
            "image": rng.bytes(6),
            "point": rng.standard_normal(2).astype("<f8").tobytes(),
        }
        for row in range(count)
    ]
    return pa.RecordBatch.from_pylist(made, schema=SCHEMA.arrow_schema())


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DatasetManifest]:
    """Two splits of two shards each, four rows a row group."""
    root = tmp_path_factory.mktemp("petastorm") / "set"
    manifest = write_rows(str(root), SCHEMA, rows(sum(RECORDS.values())), RECORDS, "parquet", 2, 4, 0, ())
    return root, manifest


@pytest.fixture(scope="module")
def table(dataset: tuple[Path, DatasetManifest]) -> dict[int, dict[str, Any]]:
    """What lies in the dataset as pyarrow reads it, by sample id."""
    found = pq.read_table(dataset[0] / "split=train").to_pylist()
    return {row["sample_id"]: row for row in found}


def by_id(batches: Iterator[Any]) -> dict[int, dict[str, Any]]:
    """The rows of batches, by sample id; each id comes once."""
    found: dict[int, dict[str, Any]] = {}
    for batch in batches:
        for number, sample in enumerate(batch.sample_id.tolist()):
            assert sample not in found
            columns = batch._asdict().items()
            found[sample] = {name: v[number].item() if v.dtype != object else v[number] for name, v in columns}
    return found


# --- who sees what ---------------------------------------------------------------------------------------------------


def test_only_petastorm_sees_the_names() -> None:
    import petastorm.fs_utils
    import petastorm.unischema

    assert petastorm.unischema.np.unicode_ is np.str_ and petastorm.fs_utils.pyarrow.localfs is not None
    assert not hasattr(np, "unicode_") and not hasattr(pa, "localfs") and "pyarrow.hdfs" not in sys.modules
    assert "pieces" not in vars(pq.ParquetDataset) and pq.ParquetDataset is not ParquetDataset
    assert petastorm.unischema.np.isin is np.isin, "all else is the module's own"


def test_an_earlier_import_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    enable()  # a second call does nothing
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, imports._Finder)])
    monkeypatch.setitem(sys.modules, "petastorm.errors", ModuleType("petastorm.errors"))
    with pytest.raises(ConfigError, match="imported before"):
        enable()


def test_petastorm_loads_neither_spark_nor_tensorflow() -> None:
    code = (
        "import sys; from lockstep.petastorm import enable; assert 'petastorm' not in sys.modules\n"
        "enable(); import petastorm; print([m for m in ('pyspark', 'tensorflow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


# --- readers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["dummy", "thread", pytest.param("process", marks=pytest.mark.slow)])
def test_a_split_comes_with_its_values(dataset: Any, table: dict[int, Any], pool: str) -> None:
    url = f"file://{dataset[0]}/split=train"
    with make_batch_reader(url, reader_pool_type=pool, workers_count=2, seed=1) as reader:
        assert by_id(reader) == table


def test_a_dataset_comes_with_the_column_split(dataset: Any) -> None:
    with make_batch_reader(f"file://{dataset[0]}", schema_fields=["split"], workers_count=2) as reader:
        splits = [name for batch in reader for name in batch.split.tolist()]
    assert {name: splits.count(name) for name in splits} == RECORDS


@pytest.mark.parametrize("shuffle_rows", [False, True])
def test_a_predicate_keeps_values_and_types(dataset: Any, table: dict[int, Any], shuffle_rows: bool) -> None:
    predicate = in_lambda(["clicks", "seen"], lambda clicks, seen: (clicks % 2 == 0) & ~seen)
    with make_batch_reader(
        f"file://{dataset[0]}/split=train", predicate=predicate, workers_count=2, shuffle_rows=shuffle_rows, seed=3
    ) as reader:
        found = by_id(reader)
    assert found == {key: row for key, row in table.items() if row["clicks"] % 2 == 0 and not row["seen"]}
    assert 0 < len(found) < len(table)


@pytest.mark.parametrize(
    "choice",
    [
        {"predicate": in_set(["test"], "split")},
        {"filters": [("split", "=", "test")]},
        {"filters": [[("split", "in", {"test", "other"})], [("split", "<", "a")]]},
    ],
)
def test_a_split_is_chosen_by_its_column(dataset: Any, choice: dict[str, Any]) -> None:
    with make_batch_reader(f"file://{dataset[0]}", workers_count=1, **choice) as reader:
        assert len(by_id(reader)) == RECORDS["test"]


def test_shards_are_disjoint_and_cover_the_split(dataset: Any, table: dict[int, Any]) -> None:
    found: dict[int, dict[str, Any]] = {}
    for shard in range(3):
        with make_batch_reader(
            f"file://{dataset[0]}/split=train", cur_shard=shard, shard_count=3, seed=5, workers_count=1
        ) as reader:
            part = by_id(reader)
        assert part and not found.keys() & part.keys()
        found |= part
    assert found == table


def test_epochs_repeat_and_seeds_shuffle(dataset: Any, table: dict[int, Any]) -> None:
    def order(**how: Any) -> list[int]:
        with make_batch_reader(f"file://{dataset[0]}/split=train", reader_pool_type="dummy", **how) as reader:
            return [sample for batch in reader for sample in batch.sample_id.tolist()]

    plain = order(shuffle_row_groups=False, num_epochs=2)
    assert plain[: len(table)] == plain[len(table) :] == list(table)
    shuffled = order(shuffle_rows=True, seed=1)
    assert shuffled == order(shuffle_rows=True, seed=1) != plain[: len(table)]
    assert sorted(shuffled) == sorted(table)


def test_a_transform_sees_rows_and_its_result_comes_out(dataset: Any, table: dict[int, Any]) -> None:
    def twice(frame: Any) -> Any:
        frame["price"] = frame["price"] * 2
        return frame

    spec = TransformSpec(twice, removed_fields=["raw", "image", "point"])
    with make_batch_reader(f"file://{dataset[0]}/split=train", transform_spec=spec, workers_count=1) as reader:
        found = by_id(reader)
    assert {key: row["price"] for key, row in found.items()} == {key: 2 * row["price"] for key, row in table.items()}
    assert set(found[next(iter(found))]) == set(SCHEMA.arrow_schema().names) - {"raw", "image", "point"}


def test_plain_parquet_is_read_row_by_row(dataset: Any, table: dict[int, Any]) -> None:
    with (
        pytest.warns(UserWarning, match="supports reading only Petastorm datasets"),
        make_reader(f"file://{dataset[0]}/split=train", workers_count=1) as reader,
    ):
        found = {row.sample_id: row for row in reader}
    assert {key: (row.clicks, row.name, bytes(row.raw)) for key, row in found.items()} == {
        key: (row["clicks"], row["name"], row["raw"]) for key, row in table.items()
    }


@pytest.mark.parametrize(
    ("pool", "question"),
    [("thread", 1), pytest.param("process", 2, marks=pytest.mark.slow)],  # the process pool asks once for its log
)
def test_work_handed_out_while_the_pool_looks_idle_is_not_lost(
    dataset: Any, table: dict[int, Any], monkeypatch: pytest.MonkeyPatch, pool: str, question: int
) -> None:
    hand_out, completed = ConcurrentVentilator._ventilate, ConcurrentVentilator.completed
    asked, questions = threading.Event(), itertools.count(1)

    def late(ventilator: Any) -> None:
        asked.wait()
        hand_out(ventilator)

    def all_at_once(ventilator: Any) -> bool:
        if threading.current_thread() is threading.main_thread() and next(questions) >= question:
            asked.set()
            ventilator._ventilation_thread.join()
        return bool(completed(ventilator))

    monkeypatch.setattr(ConcurrentVentilator, "_ventilate", late)
    monkeypatch.setattr(ConcurrentVentilator, "completed", all_at_once)
    with make_batch_reader(f"file://{dataset[0]}/split=train", reader_pool_type=pool, workers_count=3) as reader:
        assert by_id(reader) == table


def test_threads_give_one_order_however_late_work_comes(
    dataset: Any, table: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    hand_out = ConcurrentVentilator._ventilate
    for wait_s in (0.01, 0.02, 0.03, 0.05):

        def late(ventilator: Any, wait_s: float = wait_s) -> None:
            time.sleep(wait_s)
            hand_out(ventilator)

        monkeypatch.setattr(ConcurrentVentilator, "_ventilate", late)
        with make_batch_reader(f"file://{dataset[0]}/split=train", shuffle_row_groups=False, workers_count=3) as reader:
            assert list(by_id(reader)) == list(table)


# --- the dataset as pieces -------------------------------------------------------------------------------------------


def test_pieces_leave_out_what_is_hidden(tmp_path: Path) -> None:
    for path in ("a=1/x.parquet", "a=1/_index/y", "a=1/.z.crc", "a=%2F/x.parquet", "_b=1/x.parquet", "_manifest.json"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"v": [1]}), tmp_path / path)
    found = ParquetDataset(str(tmp_path))
    assert [Path(piece.path).relative_to(tmp_path).as_posix() for piece in found.pieces] == [
        "a=%2F/x.parquet",
        "a=1/x.parquet",
    ]
    read = [piece.read(partitions=found.partitions).to_pydict() for piece in found.pieces]
    assert read == [{"v": [1], "a": ["/"]}, {"v": [1], "a": ["1"]}]
    assert found.common_metadata is None and found.metadata is None


@pytest.mark.parametrize(
    ("files", "what"),
    [
        (["x.parquet", "a/y.parquet"], "next to directories"),  # which of them is the data?
        (["a=1/x.parquet", "b=1/y.parquet"], "one level"),
    ],
)
def test_directories_that_mean_two_things_are_refused(tmp_path: Path, files: list[str], what: str) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    with pytest.raises(DataError, match=what):
        ParquetDataset(str(tmp_path))


def test_calls_that_cannot_be_right(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        make_batch_reader(f"file://{tmp_path}/nowhere")
    pq.write_table(pa.table({"v": [1]}), tmp_path / "x.parquet")
    with pytest.raises(ConfigError, match="give a predicate"):
        make_batch_reader(f"file://{tmp_path}", filters=[("v", "=", 1)])
