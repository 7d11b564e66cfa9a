"""`_common_metadata`: make_reader reads a dataset with it, make_batch_reader, pyarrow and verify go on as before."""

from __future__ import annotations

import json
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pds
import pyarrow.parquet as pq
import pytest

from lockstep.etl.petastorm.metadata import ROW_GROUPS, UNISCHEMA, check_petastorm, tensors, write_petastorm_metadata
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema
from lockstep.petastorm import enable
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.dataset.manifest_entries import FileInfo
from lockstep.storage.documents import sha256_hex
from lockstep.storage.errors import ConfigError
from lockstep.storage.fs import filesystem
from tests.training._tiny import write_rows

enable()

# enable() comes before anything of Petastorm is imported
from petastorm import make_batch_reader, make_reader  # noqa: E402

SCHEMA = Schema(
    (
        Field(name="sample_id", dtype="int64", kind="id"),
        Field(name="count", dtype="int64", nullable=True),
        Field(name="share", dtype="float64"),
        Field(name="name", dtype="string", nullable=True),
        Field(name="raw", dtype="bytes"),
        Field(name="seen", dtype="bool", nullable=True),
        Field(name="numbers", dtype="float32", shape=(None,)),
        Field(name="flags", dtype="bool", shape=(None,)),
        Field(name="words", dtype="string", shape=(None,)),
        Field(name="image", dtype="uint8", shape=(2, 3, 1)),
        Field(name="point", dtype="float64", shape=(2,)),
        Field(name="label", dtype="int64", kind="label", num_classes=10),
    )
)
RECORDS = {"train": 7, "test": 4}


def rows(count: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(3)
    return [
        {
            "sample_id": -(2**62) + row,
            "count": None if row % 3 == 0 else 2**60 + row,
            "share": row / 3,
            "name": None if row % 4 == 1 else f"ü{row}",
            "raw": b"a\0" * row,
            "seen": None if row % 2 else True,
            "numbers": [0.5] * (row % 3),
            "flags": [True] * (row % 2),
            "words": ["x", "yz"][: row % 3],
            "image": rng.bytes(6),
            "point": rng.standard_normal(2).astype("<f8").tobytes(),
            "label": row % 10,
        }
        for row in range(count)
    ]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DatasetManifest, dict[str, FileInfo]]:
    root = tmp_path_factory.mktemp("petastorm") / "set"
    batch = pa.RecordBatch.from_pylist(rows(sum(RECORDS.values())), schema=SCHEMA.arrow_schema())
    manifest = write_rows(str(root), SCHEMA, batch, RECORDS, "parquet", 2, 3, 0)
    return root, manifest, write_petastorm_metadata(filesystem(str(root)), str(root), SCHEMA, manifest.splits)


def test_the_files_are_listed_as_they_are(made: Any) -> None:
    root, _, files = made
    assert set(files) == {"_common_metadata", "split=test/_common_metadata", "split=train/_common_metadata"}
    for path, info in files.items():
        data = (root / path).read_bytes()
        assert info == FileInfo(len(data), sha256_hex(data))


def test_each_file_has_both_entries(made: Any) -> None:
    root = made[0]
    groups = {  # 7 rows in shards of 3 and 4, 4 rows in shards of 2, three rows a row group
        "split=train/part-00000.parquet": 1,
        "split=train/part-00001.parquet": 2,
        "split=test/part-00000.parquet": 1,
        "split=test/part-00001.parquet": 1,
    }
    entries = pq.read_metadata(root / "_common_metadata").metadata
    assert json.loads(entries[ROW_GROUPS]) == groups and UNISCHEMA in entries
    entries = pq.read_metadata(root / "split=train" / "_common_metadata").metadata
    assert json.loads(entries[ROW_GROUPS]) == {"part-00000.parquet": 1, "part-00001.parquet": 2}
    for path, count in groups.items():
        assert pq.read_metadata(root / path).num_row_groups == count


def test_equal_schemas_give_equal_bytes(made: Any, tmp_path: Path) -> None:
    root, manifest, files = made
    again = Schema.from_json(json.loads(json.dumps(SCHEMA.to_json())))  # other string objects
    assert write_petastorm_metadata(filesystem(str(root)), str(tmp_path), again, manifest.splits) == files


def test_the_pickle_names_only_what_every_numpy_has(made: Any) -> None:
    pickled = pq.read_metadata(made[0] / "_common_metadata").metadata[UNISCHEMA]
    strings = {arg for _, arg, _ in pickletools.genops(pickled) if isinstance(arg, str)}
    assert "bool_" in strings and "bool" not in strings  # numpy 1 has no type `numpy.bool`


@pytest.mark.parametrize("place", ["", "/split=train"])
def test_make_reader_gives_the_rows(made: Any, place: str) -> None:
    wanted = {row["sample_id"]: row for row in rows(RECORDS["train"] if place else sum(RECORDS.values()))}
    with make_reader(f"file://{made[0]}{place}", reader_pool_type="dummy") as reader:
        found = {int(row.sample_id): row._asdict() for row in reader}
    assert found.keys() == wanted.keys()
    for key, row in wanted.items():
        got = found[key]
        assert ("split" in got) == (not place)
        for name in ("count", "share", "name", "raw", "seen", "label", "image", "point"):
            value = bytes(got[name]) if isinstance(got[name], bytes) else got[name]
            assert value == row[name], name
        for name, dtype in (("numbers", np.float32), ("flags", np.bool_), ("words", np.object_)):
            assert got[name].tolist() == row[name] and got[name].dtype == dtype


def test_tensors_come_as_arrays(made: Any) -> None:
    wanted = {row["sample_id"]: row for row in rows(RECORDS["train"])}
    url = f"file://{made[0]}/split=train"
    names = ["sample_id", "image", "point"]
    how: dict[str, Any] = {"schema_fields": names, "transform_spec": tensors(SCHEMA, names)}
    with make_reader(url, reader_pool_type="dummy", **how) as reader:
        found = [(row.sample_id, row.image, row.point) for row in reader]
    with (
        pytest.warns(UserWarning, match="use make_reader"),
        make_batch_reader(url, reader_pool_type="dummy", **how) as batches,
    ):
        found += [row for batch in batches for row in zip(batch.sample_id, batch.image, batch.point, strict=True)]
    assert len(found) == 2 * RECORDS["train"]
    for sample, image, point in found:
        assert image.shape == (2, 3, 1) and image.dtype == np.uint8 and image.tobytes() == wanted[sample]["image"]
        assert point.shape == (2,) and point.dtype == np.float64 and point.tobytes() == wanted[sample]["point"]


def test_pyarrow_reads_the_dataset_as_before(made: Any) -> None:
    table = pds.dataset(str(made[0]), partitioning="hive").to_table()
    assert sorted(row["sample_id"] for row in table.to_pylist()) == [-(2**62) + row for row in range(11)]


@pytest.mark.parametrize("name", ["a-b", "class", "split", "2nd", "a b"])
def test_names_that_a_namedtuple_cannot_have_are_refused(name: str) -> None:
    schema = Schema((Field(name="sample_id", dtype="int64", kind="id"), Field(name=name, dtype="int64")))
    with pytest.raises(ConfigError, match="cannot name field"):
        check_petastorm(schema, "parquet")


def test_tfrecord_is_refused() -> None:
    with pytest.raises(ConfigError, match="for Parquet"):
        check_petastorm(SCHEMA, "tfrecord")
