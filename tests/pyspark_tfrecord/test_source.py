"""The data source as Spark calls it, without Spark: what it plans, reads, writes and refuses."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from lockstep.features.schema.schema import Columns, foreign_field
from lockstep.features.shards.read import Lenient
from lockstep.jobs import index
from lockstep.storage.errors import ConfigError, CorruptionError, DataError, ExistsError, LockstepError, StorageError
from lockstep.storage.formats.tfrecord import frame
from lockstep.storage.fs import filesystem
from pyspark_tfrecord import DefaultSource
from pyspark_tfrecord.writing import FileWriter
from tests.builders.records import encode_example
from tests.jobs.test_index import write
from tests.pyspark_tfrecord.published import SCHEMA, publish

LONG, TEXT, BYTES, DOUBLE = LongType(), StringType(), BinaryType(), DoubleType()


def struct(**columns: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


def source(path: Path, **options: object) -> DefaultSource:
    return DefaultSource({"path": str(path), **{name: str(value) for name, value in options.items()}})


def read(path: Path, schema: StructType | None = None, **options: object) -> tuple[list[dict[str, Any]], int]:
    """The rows, and in how many partitions they came; a reader crosses to its tasks as a pickle."""
    found = source(path, **options)
    schema = found.schema() if schema is None else schema
    reader = pickle.loads(pickle.dumps(found)).reader(schema)  # noqa: S301 - our own
    parts = list(reader.partitions())
    there: Any = pickle.loads(pickle.dumps(reader))  # noqa: S301 - our own
    batches = [batch for part in parts for batch in there.read(part)]
    assert all(batch.schema == to_arrow_schema(schema, timezone="UTC") for batch in batches)
    return [row for batch in batches for row in batch.to_pylist()], len(parts)


@pytest.fixture
def save(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Writes tables as the partitions of a data frame."""
    task = SimpleNamespace(partitionId=lambda: 0, taskAttemptId=lambda: 0)
    monkeypatch.setattr(TaskContext, "get", lambda: task)

    def run(path: Path, *parts: pa.Table, overwrite: bool = False, **options: object) -> None:
        schema = from_arrow_schema(parts[0].schema)
        writer: Any = source(path, **options).writer(schema, overwrite)
        messages: list[Any] = [None]  # an attempt that failed has no message
        for number, part in enumerate(parts):
            task.partitionId = lambda number=number: number
            try:
                messages.append(pickle.loads(pickle.dumps(writer)).write(iter(part.to_batches())))  # noqa: S301 - our own
            except LockstepError:
                writer.abort(messages)
                raise
        writer.commit(messages[::-1])

    return run


def test_a_dataset_reads_as_it_was_written(tmp_path: Path) -> None:
    rows = publish(tmp_path, {"train": (30, 17), "test": (9,)})
    both = [{**row, "split": name} for name in ("test", "train") for row in rows[name]]
    found, parts = read(tmp_path, partitionBytes=1000)
    assert found == both and parts > 5
    assert read(tmp_path, struct(split=TEXT))[0] == [{"split": row["split"]} for row in both]
    found, parts = read(tmp_path, split="train", columns="words,label", verify="full")
    assert found == [{"words": row["words"], "label": row["label"]} for row in rows["train"]] and parts == 2
    few = struct(split=TEXT, label=LONG)
    assert read(tmp_path, few)[0] == [{"split": row["split"], "label": row["label"]} for row in both]
    assert source(tmp_path).schema().names == [*(field.name for field in SCHEMA), "split"]


@pytest.mark.parametrize(
    ("options", "schema", "told"),
    [
        ({"split": "dev"}, None, "no split `dev`"),
        ({"columns": "page,pag"}, None, "no column `pag`"),
        ({"split": "test", "columns": "split"}, None, "no column `split`"),  # one split needs no column to tell it
        ({}, struct(pag=TEXT), "no column `pag`"),
        ({}, struct(label=TEXT), "another type"),
        ({"columns": "page"}, struct(label=LONG), "different columns"),
        ({}, struct(), "asks for no column"),
    ],
)
def test_what_a_dataset_has_not(tmp_path: Path, options: dict[str, Any], schema: StructType | None, told: str) -> None:
    publish(tmp_path, {"train": (3,), "test": (2,)})
    with pytest.raises(ConfigError, match=told):
        read(tmp_path, schema, **options)


def test_a_folder_of_one_split_is_not_read_as_files_of_somebody_else(tmp_path: Path) -> None:
    publish(tmp_path / "d", {"train": (3,), "test": (2,)})
    with pytest.raises(ConfigError, match="one split of a dataset") as caught:
        read(tmp_path / "d/split=test")
    assert caught.value.next_step == f'Read it by .option("split", "test").load("{tmp_path / "d"}").'
    (tmp_path / "theirs").mkdir()
    write(tmp_path / "theirs/split=test")
    assert len(read(tmp_path / "theirs/split=test")[0]) == 60  # partitions of others may be called so
    index.main([str(tmp_path / "theirs")])
    assert len(read(tmp_path / "theirs/split=test")[0]) == 60


def test_damage_is_told_with_its_place(tmp_path: Path) -> None:
    publish(tmp_path, {"train": (9,)})
    shard = tmp_path / "split=train/part-00000.tfrecord"
    data = bytearray(shard.read_bytes())
    data[-20] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptionError, match=r"part-00000\.tfrecord, record 8"):
        read(tmp_path)


def test_files_of_others_by_inference_by_schema_and_by_index(tmp_path: Path) -> None:
    write(tmp_path, packed=True)
    numbers = [*range(100, 120), *range(200, 220), *range(20)]
    found, parts = read(tmp_path)
    assert [row["n"] for row in found] == numbers and parts == 3
    assert source(tmp_path).schema() == StructType([StructField("n", LONG), StructField("w", ArrayType(BYTES), False)])
    some = struct(n=IntegerType(), other=TEXT, w=ArrayType(BYTES))
    found, parts = read(tmp_path / "b.tfrecord-00001", some)
    assert found[5] == {"n": 5, "other": None, "w": [b"\xff" * 5] * 2} and parts == 1
    for schema, error, told in (
        (struct(w=ArrayType(LONG)), DataError, r"records from 0 on: record 0 of the batch, field `w`"),
        (struct(n=ByteType()), DataError, r"column `n` holds a value that does not fit int8"),
        (StructType([StructField("other", TEXT, False)]), DataError, r"column `other` holds a null"),
        (struct(n=DecimalType(9)), ConfigError, r"column `n` has no form"),
        (struct(), ConfigError, "asks for no column"),
    ):
        with pytest.raises(error, match=told):
            read(tmp_path, schema)
    with pytest.raises(ConfigError, match="option `split`"):
        read(tmp_path, split="train")
    with pytest.raises(ConfigError, match="option `verify`"):
        read(tmp_path, verify="full")
    assert index.main([str(tmp_path)]) == 0
    settings = json.dumps({"dfs.client.socket-timeout": "10000"})
    assert [row["n"] for row in read(tmp_path, verify="full", hadoopSettings=settings)[0]] == numbers


TABLE = pa.table(
    {
        "n": pa.array([1, None, -(1 << 63)], pa.int64()),
        "small": pa.array([-128, 0, 127], pa.int8()),
        "half": pa.array([0.5, None, 1e-300], pa.float64()),
        "_seen": [True, False, None],
        "text": ["", "ä", None],
        "raw": [b"", b"\xff", None],
        "many": pa.array([[], [1.0, 2.0], [3.0]], pa.list_(pa.float64())),
    }
)


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_plain_files_read_back(tmp_path: Path, save: Callable[..., None], compression: str) -> None:
    out = tmp_path / "out"
    save(out, TABLE, TABLE.slice(0, 0), TABLE.slice(1), doubles="float32", compression=compression)
    end = "tfrecord" if compression == "none" else "tfrecord.gz"
    assert sorted(os.listdir(out)) == ["_SUCCESS", f"part-00000.{end}", f"part-00001.{end}"]
    before = (out / f"part-00001.{end}").read_bytes()
    save(out, TABLE.slice(1), doubles="float32", compression=compression)  # added behind what is there
    assert (out / f"part-00001.{end}").read_bytes() == (out / f"part-00002.{end}").read_bytes() == before
    many, seen = ArrayType(DOUBLE), BooleanType()
    schema = struct(n=LONG, small=ByteType(), half=DOUBLE, _seen=seen, text=TEXT, raw=BYTES, many=many)
    wanted = TABLE.to_pylist()
    wanted[2]["half"] = 0.0  # 1e-300 rounded to float32, which was asked for
    assert read(out, schema)[0] == [*wanted, *wanted[1:], *wanted[1:]]
    save(out, TABLE.select(["n"]).slice(0, 0), overwrite=True)
    assert sorted(os.listdir(out)) == ["_SUCCESS", "part-00000.tfrecord"] and sorted(os.listdir(tmp_path)) == ["out"]
    assert read(out, struct(n=LONG))[0] == []


def test_what_must_not_be_written(tmp_path: Path, save: Callable[..., None]) -> None:
    out = tmp_path / "out"
    numbers = TABLE.select(["n"])
    save(out, numbers)
    with pytest.raises(ExistsError, match="exists already"):
        save(out, numbers, mustBeNew="true")
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ExistsError, match=r"notes\.txt"):
        save(out, numbers, overwrite=True)
    publish(tmp_path / "d", {"train": (2,)})
    for overwrite in (True, False):
        with pytest.raises(ExistsError, match="published dataset"):
            save(tmp_path / "d", numbers, overwrite=overwrite)
    with pytest.raises(ExistsError):
        save(out / "notes.txt", numbers)
    for table, told, error in (
        (TABLE.select(["half"]), "`half` is a double", ConfigError),
        (pa.table({"d": pa.array([1], pa.date32())}), "`d` has no form", ConfigError),
        (pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]), "the same name twice", ConfigError),
        (pa.table({"x": pa.array([None, [1]], pa.list_(pa.int64()))}), "`x` is null", DataError),
        (pa.table({"x": pa.array([[None]], pa.list_(pa.int64()))}), "null inside a list", DataError),
    ):
        with pytest.raises(error, match=told):
            save(tmp_path / "new", table)
    with pytest.raises(DataError, match="float32 cannot"):
        save(tmp_path / "new", pa.table({"x": [1e300]}), doubles="float32")
    assert sorted(os.listdir(tmp_path)) == ["d", "out"]  # nothing of what failed, and nothing aside


def test_a_path_that_changed_while_the_job_ran_is_not_overwritten(tmp_path: Path, save: Callable[..., None]) -> None:
    options = {"path": str(tmp_path / "out"), "mustBeNew": "true"}
    writer = FileWriter.of(options, struct(n=LONG), False)
    save(tmp_path / "out", TABLE.select(["n"]))
    with pytest.raises(ExistsError):
        writer.commit([])
    assert os.listdir(tmp_path) == ["out"] and (tmp_path / "out/part-00000.tfrecord").stat().st_size > 0


@pytest.mark.parametrize("stays_broken", [True, False])
def test_what_could_not_be_replaced_is_never_deleted(
    tmp_path: Path, save: Callable[..., None], monkeypatch: pytest.MonkeyPatch, stays_broken: bool
) -> None:
    out, files = tmp_path / "out", type(filesystem(str(tmp_path)))
    save(out, TABLE.select(["n"]))
    before, rename = (out / "part-00000.tfrecord").read_bytes(), files.rename_new

    def broken(self: Any, source: str, target: str) -> None:
        if target == str(out) and (stays_broken or source.endswith("/ready")):
            # Not of ours: an interrupt must not cost the data either.
            raise StorageError("a dead server") if stays_broken else KeyboardInterrupt
        rename(self, source, target)

    writer = FileWriter.of({"path": str(out)}, struct(n=LONG), True)
    monkeypatch.setattr(files, "rename_new", broken)
    with pytest.raises(StorageError if stays_broken else KeyboardInterrupt) as caught:
        writer.commit([])
    writer.abort([])  # as Spark does behind a commit that failed
    if stays_broken:
        out = Path(writer.staging) / "replaced"
        assert str(out) in str(caught.value)
    assert (out / "part-00000.tfrecord").read_bytes() == before
    assert len(os.listdir(tmp_path)) == 1


def test_records_without_features_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.tfrecord").write_bytes(frame(b"") * 3)
    for reads in (lambda: read(tmp_path), lambda: index.main([str(tmp_path)])):
        with pytest.raises(DataError, match="no record has a feature"):
            reads()
    with pytest.raises(DataError, match="no column to read"):
        Lenient(())


def test_a_feature_that_the_schema_lacks_is_refused_unless_the_call_chooses(tmp_path: Path) -> None:
    fields = (foreign_field("n", "int64", False), foreign_field("promo", "int64", False))
    early = [encode_example(Columns(fields[:1]), {"n": n}) for n in range(1000)]
    late = [encode_example(Columns(fields), {"n": n, "promo": 7}) for n in range(1000, 1100)]
    path = tmp_path / "late.tfrecord"
    path.write_bytes(b"".join(map(frame, early + late)))
    for columns in ("n", '["n"]'):
        with pytest.raises(DataError, match="record 1000 of the batch has a feature that the schema lacks") as caught:
            read(path, columns=columns)
        assert caught.value.got == "`promo`" and "lockstep index" in caught.value.next_step
    with pytest.raises(DataError, match="has a feature that the schema lacks"):
        read(path)
    rows, _ = read(path, sampleRecords="1001")
    assert [row["promo"] for row in rows] == [None] * 1000 + [7] * 100
    rows, _ = read(path, struct(n=LongType()))
    assert [row["n"] for row in rows] == list(range(1100))
