"""lockstep index --format parquet: the rows that pyarrow reads of the files, with ids, or a refusal with its place."""

from __future__ import annotations

import datetime as dt
import decimal
import hashlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lockstep
from lockstep.etl import tables
from lockstep.etl.baseline.config import BaselineConfig
from lockstep.etl.baseline.train import train_and_predict
from lockstep.etl.index.parquet import ParquetIndexConfig, index_parquet, spark_kind
from lockstep.etl.tables import TableConfig
from lockstep.features.schema.schema import Schema
from lockstep.features.shards.blocks import dataset_blocks
from lockstep.jobs import describe, index
from lockstep.storage.dataset.manifest import DatasetManifest, load_dataset
from lockstep.storage.documents import seal, unseal
from lockstep.storage.errors import ConfigError, CorruptionError, DataError, ExistsError, LockstepError
from lockstep.storage.verify import verify
from lockstep.training.plan.order import Run
from lockstep.training.reading.reader import SplitReader
from tests.builders.blocks import read_all

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

slow = pytest.mark.slow
STORED: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "tiny": (pa.int8(), st.integers(-128, 127)),
    "int": (pa.int32(), st.integers(-(1 << 31), (1 << 31) - 1)),
    "long": (pa.int64(), st.integers(-(1 << 63), (1 << 63) - 1)),
    "unsigned": (pa.uint32(), st.integers(0, (1 << 32) - 1)),
    "half": (pa.float16(), st.floats(width=16, allow_nan=False).map(np.float16)),
    "float": (pa.float32(), st.floats(width=32, allow_nan=False)),
    "double": (pa.float64(), st.floats(allow_nan=False)),
    "bool": (pa.bool_(), st.booleans()),
    "text": (pa.string(), st.text(max_size=5)),
    "large text": (pa.large_string(), st.text(max_size=5)),
    "category": (pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["a", "b", "ü"])),
    "bytes": (pa.binary(), st.binary(max_size=5)),
    "fixed bytes": (pa.binary(3), st.binary(min_size=3, max_size=3)),
    "longs": (pa.list_(pa.int64()), st.lists(st.integers(-5, 5), max_size=3)),
    "floats": (pa.list_(pa.float32()), st.lists(st.floats(width=32, allow_nan=False), max_size=3)),
    "texts": (pa.large_list(pa.string()), st.lists(st.text(max_size=3), max_size=3)),
    "pair": (pa.list_(pa.int16(), 2), st.lists(st.integers(-9, 9), min_size=2, max_size=2)),
}
COMPRESSIONS = ("none", "snappy", "gzip", "zstd", "brotli", "lz4")


@st.composite
def files(draw: st.DrawFn) -> list[tuple[pa.Table, dict[str, Any]]]:
    """Tables with the same columns, and how each is written."""
    names = draw(st.lists(st.sampled_from(sorted(STORED)), min_size=1, max_size=5, unique=True))
    made = []
    for _ in range(draw(st.integers(1, 3))):
        rows = draw(st.integers(0, 23))
        columns = {}
        for name in names:
            kind, values = STORED[name]
            column = draw(st.lists(values if "list" in str(kind) else st.none() | values, min_size=rows, max_size=rows))
            columns[name] = pa.array(column, kind)
        how = {
            "row_group_size": draw(st.integers(1, 25)),
            "compression": draw(st.sampled_from(COMPRESSIONS)),
            "write_page_checksum": draw(st.booleans()),
            "write_page_index": draw(st.booleans()),
            "data_page_version": draw(st.sampled_from(["1.0", "2.0"])),
            "use_dictionary": draw(st.booleans()),
            "store_schema": draw(st.booleans()),
        }
        made.append((pa.table(columns), how))
    return made


def plain(value: Any) -> Any:
    return float(value) if isinstance(value, np.floating) else value


def rows_of(url: Path, manifest: DatasetManifest, split: str = "train") -> list[dict[str, Any]]:
    """The rows by the reader of ranks; each run within a block, and describe's blocks, give the same."""
    schema = Schema.from_json(manifest.schema)
    reader = SplitReader(str(url), manifest, split, schema)
    whole = read_all(reader)
    blocks = [batch for block in dataset_blocks(str(url), manifest)[split] for batch in block.read()]
    assert pa.Table.from_batches(blocks).combine_chunks().equals(pa.Table.from_batches([whole]).combine_chunks())
    place = 0
    for shard, info in enumerate(manifest.splits[split].shards):
        for first in info.block_offsets:
            last = min(first + manifest.splits[split].block_records, info.records) - 1
            assert reader.read(Run(shard, last, 1)).equals(whole.slice(place + last, 1))
        place += info.records
    reader.close()
    rows: list[dict[str, Any]] = whole.to_pylist()
    return rows


def brute_id(*fields: str | bytes) -> int:
    """The sample id by its definition."""
    digest = hashlib.sha256()
    for field in fields:
        data = field.encode() if isinstance(field, str) else field
        digest.update(struct.pack("<Q", len(data)) + data)
    digest.update(struct.pack("<Q", 0))
    return int(struct.unpack_from("<q", digest.digest())[0])


@given(files())
@settings(max_examples=60, deadline=None)
def test_rows_are_those_that_pyarrow_reads(tmp_path_factory: pytest.TempPathFactory, made: Any) -> None:
    folder = tmp_path_factory.mktemp("theirs")
    for number, (table, how) in enumerate(made):
        pq.write_table(table, folder / f"part {number}.parquet", **how)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    config = ParquetIndexConfig(url=str(folder))
    if not any(len(table) for table, _ in made):
        with pytest.raises(DataError, match="hold no row"):
            index_parquet(config)
        return
    manifest = index_parquet(config)
    assert load_dataset(str(folder)).digest == manifest.digest and not verify(str(folder))
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name in before} == before
    wanted = []
    for number, (table, _) in enumerate(made):
        for row, values in enumerate(pq.read_table(folder / f"part {number}.parquet").to_pylist()):
            values = {name: plain(value) for name, value in values.items()}
            wanted.append({"sample_id": brute_id(f"part {number}.parquet", str(row)), **values})
        assert len(pq.read_table(folder / f"part {number}.parquet")) == len(table)
    assert rows_of(folder, manifest) == wanted


def people(rows: int = 20, first: int = 0) -> pa.Table:
    numbers = range(first, first + rows)
    return pa.table(
        {
            "id": pa.array(numbers, pa.int32()),
            "when": pa.array([dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(seconds=n) for n in numbers]),
            "share": pa.array([n / 7 for n in numbers], pa.float64()),
            "name": pa.array([None if n % 5 == 4 else f"n{n % 3}" for n in numbers]),
            "tags": pa.array([["a"] * (n % 3) for n in numbers]),
            "y": pa.array([n % 2 == 0 for n in numbers]),
        }
    )


def write_people(folder: Path, parts: int = 2, **how: Any) -> None:
    folder.mkdir(parents=True)
    for part in range(parts):
        pq.write_table(people(first=20 * part), folder / f"part-{part}.parquet", **{"row_group_size": 8, **how})


@slow
def test_schema_and_ids_are_those_of_etl_table(tmp_path: Path, spark: SparkSession) -> None:
    (tmp_path / "theirs").mkdir()
    rows = people(20, 40)
    moments = pa.array([-1_500_000_001 * n for n in range(20)], pa.int64())
    more = {
        "local": pa.array([dt.datetime(1969, 12, 31) + dt.timedelta(microseconds=n) for n in range(20)]),  # noqa: DTZ001
        "nanos": moments.cast(pa.timestamp("ns", "UTC")),
        "plain nanos": moments.cast(pa.timestamp("ns")),
        "day": pa.array([dt.date(1969, 12, 20) + dt.timedelta(days=n) for n in range(20)]),
        "price": pa.array([decimal.Decimal(n) / 4 for n in range(20)], pa.decimal128(9, 2)),
        "raw": pa.array([bytes([n]) for n in range(20)]),
        "flag": pa.array([-0.0, 0.5] * 10, pa.float32()),
    }
    for name, column in more.items():
        rows = rows.append_column(name, column)
    pq.write_table(rows, tmp_path / "theirs" / "a.parquet", row_group_size=7)
    ids = ("id", "when", "share", "y", *more)
    without = ("when", *more)
    manifest = index_parquet(
        ParquetIndexConfig(url=str(tmp_path / "theirs"), id_columns=ids, label="y", exclude=without), spark=spark
    )
    config = TableConfig(
        inputs=(str(tmp_path / "theirs" / "*.parquet"),), output=str(tmp_path / "made"), id_columns=ids, label="y",
        exclude=without, split="1/1", fmt="parquet",
    )  # fmt: skip
    made = tables.run(spark, config)
    assert manifest.schema == made.schema
    copied = [row for split in made.splits for row in rows_of(tmp_path / "made", made, split)]
    assert sorted(copied, key=lambda row: row["id"]) == rows_of(tmp_path / "theirs", manifest)


def test_many_small_row_groups_are_blocks_of_the_largest(tmp_path: Path) -> None:
    write_people(tmp_path / "theirs", row_group_size=3)
    pq.write_table(people(50, 40), tmp_path / "theirs" / "z.parquet", row_group_size=50)
    manifest = index_parquet(ParquetIndexConfig(url=str(tmp_path / "theirs"), exclude=("when",)))
    split = manifest.splits["train"]
    assert split.block_records == 50 and [shard.block_offsets for shard in split.shards] == [(0,)] * 3
    assert [row["id"] for row in rows_of(tmp_path / "theirs", manifest)] == list(range(90))


def test_a_block_may_begin_within_a_row_group(tmp_path: Path) -> None:
    pq.write_table(people(20), tmp_path / "a.parquet")
    pq.write_table(people(50, 20), tmp_path / "b.parquet", row_group_size=7)
    manifest = index_parquet(ParquetIndexConfig(url=str(tmp_path), exclude=("when",)))
    assert [shard.block_offsets for shard in manifest.splits["train"].shards] == [(0,), (0, 20, 40)]
    assert [row["id"] for row in rows_of(tmp_path, manifest)] == list(range(70))
    reader = SplitReader(str(tmp_path), manifest, "train", Schema.from_json(manifest.schema))
    assert [shard.edges == () for shard in reader._shards] == [False, True], "such blocks are not cached"
    assert reader.read(Run(1, 25, 9)).column("id").to_pylist() == list(range(45, 54))
    reader.close()


@pytest.mark.parametrize(
    ("change", "flags", "words"),
    [
        (lambda t: t, {}, ("part-1.parquet", "`when`", "unix_micros", "--exclude when")),
        (lambda t: t.append_column("d", pa.array([decimal.Decimal("1.5")] * 20)), {}, ("part-1", "`d`", "decimal")),
        (lambda t: t.append_column("s", pa.array([{"a": 1}] * 20)), {}, ("part-1.parquet", "`s`", "struct")),
        (lambda t: t.append_column("t", pa.array([dt.time(1)] * 20)), {}, ("part-1.parquet", "`t`", "time64")),
        (lambda t: t.append_column("n", pa.nulls(20)), {}, ("part-1.parquet", "`n`", "null")),
        (lambda t: t.append_column("u", pa.array([1] * 20, pa.uint64())), {}, ("part-1.parquet", "`u`", "uint64")),
        (lambda t: t.append_column("l", pa.array([[[1]]] * 20)), {}, ("part-1.parquet", "`l`", "array<array")),
        (lambda t: t.append_column("sample_id", pa.array([1] * 20)), {}, ("part-1.parquet", "`sample_id`", "its name")),
        (lambda t: t.set_column(2, "share", t["name"]), {}, ("`share`", "part-0.", "part-1.", "two types")),
        (lambda t: t.drop_columns("tags"), {}, ("part-1.parquet", "`tags`")),
        (lambda t: t.drop_columns("y"), {"label": "y"}, ("part-1.parquet", "`y`")),
        (lambda t: t.drop_columns("id"), {"id_columns": ("id",)}, ("part-1.parquet", "`id`")),
        (lambda t: t, {"id_columns": ("nmae",)}, ("part-0.parquet", "perhaps `name`")),
        (lambda t: t, {"id_columns": ("name",)}, ("part-0.parquet", "`name`", "null")),
        (lambda t: t, {"label": "name"}, ("`name`", "a label of string")),
        (lambda t: t.set_column(5, "y", pa.array([True, None] * 10)), {"label": "y"}, ("part-1", "`y`", "null")),
        (lambda t: t.set_column(4, "tags", pa.array([["a"], None] * 10)), {}, ("part-1.parquet", "`tags`", "null")),
        (lambda t: t.set_column(4, "tags", pa.array([["a", None]] * 20)), {}, ("part-1", "`tags`", "null inside")),
    ],
)  # fmt: skip
def test_what_no_field_holds_is_refused_with_its_place(
    tmp_path: Path, change: Callable[[pa.Table], pa.Table], flags: dict[str, Any], words: tuple[str, ...]
) -> None:
    theirs = tmp_path / "theirs"
    write_people(theirs)
    pq.write_table(change(people(first=20)), theirs / "part-1.parquet")
    if "`when`" in words:
        (theirs / "part-0.parquet").unlink()
    left_out = () if "`when`" in words else ("when",)
    with pytest.raises(LockstepError) as caught:
        index_parquet(ParquetIndexConfig(url=str(theirs), exclude=left_out, **flags))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not (theirs / "_manifest.json").exists()


def test_text_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    names = pa.array([b"ok", b"\xff\xfe"]).view(pa.string())
    pq.write_table(pa.table({"name": names}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet.*`name`.*UTF-8"):
        index_parquet(ParquetIndexConfig(url=str(tmp_path)))


def test_two_rows_with_one_id_are_named(tmp_path: Path) -> None:
    write_people(tmp_path / "theirs")
    pq.write_table(people(5, 13), tmp_path / "theirs" / "z.parquet")
    with pytest.raises(DataError, match=r"5 rows have the sample id") as caught:
        index_parquet(ParquetIndexConfig(url=str(tmp_path / "theirs"), exclude=("when",), id_columns=("id",)))
    found = set(caught.value.got.replace(" of", "").split(" and "))
    assert len(found) == 2 and any("z.parquet" in one for one in found)
    row, other = (int(one.split()[1]) for one in sorted(found, key=lambda one: "z.parquet" in one))
    assert row == (13 + other) % 20


@pytest.mark.parametrize("harm", [lambda d: d[:-5], lambda d: b"PAR1" + d[9:], lambda d: b"text\n", lambda d: b""])
def test_a_damaged_file_is_named(tmp_path: Path, harm: Callable[[bytes], bytes]) -> None:
    write_people(tmp_path / "theirs", write_page_checksum=True)
    path = tmp_path / "theirs" / "part-1.parquet"
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(DataError, match=r"part-1\.parquet"):
        index_parquet(ParquetIndexConfig(url=str(tmp_path / "theirs"), exclude=("when",)))


def test_a_later_change_is_found(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    write_people(theirs)
    manifest = index_parquet(ParquetIndexConfig(url=str(theirs), exclude=("when",)))
    (theirs / "added later.parquet").write_bytes(b"anything")
    assert not verify(str(theirs))
    path = theirs / "part-1.parquet"
    data = path.read_bytes()
    path.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    assert [finding.path for finding in verify(str(theirs))] == ["part-1.parquet"]
    path.write_bytes(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
    with pytest.raises(CorruptionError, match="footer"):
        rows_of(theirs, manifest)
    path.unlink()
    with pytest.raises(CorruptionError, match="missing"):
        rows_of(theirs, manifest)
    assert [str(finding) for finding in verify(str(theirs))] == ["part-1.parquet: missing"]


def test_a_declared_schema_gives_types_and_classes(tmp_path: Path) -> None:
    big = (1 << 64) - 1
    table = pa.table(
        {"n": pa.array([1, big], pa.uint64()), "f": pa.array([0.5, None], pa.float32()),
         "grid": pa.array([b"\0\1\2\3"] * 2), "kind": ["cat", "dog"], "other": [dt.date(2026, 1, 1)] * 2}
    )  # fmt: skip
    pq.write_table(table, tmp_path / "a.parquet")
    fields = """
        [[fields]]
        name = "n"
        dtype = "uint64"
        encoding = {kind = "hash", buckets = 7}
        [[fields]]
        name = "f"
        dtype = "float64"
        nullable = true
        encoding = {kind = "number", null_value = 0}
        [[fields]]
        name = "grid"
        dtype = "uint8"
        shape = [2, 2]
        [[fields]]
        name = "kind"
        dtype = "int64"
        kind = "label"
        num_classes = 2
        class_names = ["cat", "dog"]
    """
    (tmp_path / "schema.toml").write_text(fields)
    manifest = index_parquet(ParquetIndexConfig(url=str(tmp_path), schema=str(tmp_path / "schema.toml")))
    rows = [{k: v for k, v in row.items() if k != "sample_id"} for row in rows_of(tmp_path, manifest)]
    grid = b"\0\1\2\3"
    assert rows == [{"n": 1, "f": 0.5, "grid": grid, "kind": 0}, {"n": big, "f": None, "grid": grid, "kind": 1}]
    (tmp_path / "_manifest.json").unlink()
    for old, new, words in (
        ('"cat", "dog"', '"cat", "cow"', "'dog'"),
        ("[2, 2]", "[2, 3]", "4 bytes"),
        ("nullable = true\n", "", "a.parquet"),
        ('dtype = "uint64"', 'dtype = "string"', "`n`"),
        ('{kind = "hash", buckets = 7}', '{kind = "vocabulary"}', "statistics"),
        ('name = "n"', 'name = "nn"', "perhaps `n`"),
    ):
        assert old in fields
        (tmp_path / "schema.toml").write_text(fields.replace(old, new))
        with pytest.raises(LockstepError) as caught:
            index_parquet(ParquetIndexConfig(url=str(tmp_path), schema=str(tmp_path / "schema.toml")))
        assert words in str(caught.value), str(caught.value)


def test_a_label_of_0_and_1_is_yes_or_no(tmp_path: Path) -> None:
    pq.write_table(pa.table({"y": [0, 1, 1]}), tmp_path / "a.parquet")
    (tmp_path / "s.toml").write_text('[[fields]]\nname = "y"\ndtype = "bool"\nkind = "label"\n')
    config = ParquetIndexConfig(url=str(tmp_path), schema=str(tmp_path / "s.toml"))
    assert [row["y"] for row in rows_of(tmp_path, index_parquet(config))] == [False, True, True]
    (tmp_path / "_manifest.json").unlink()
    pq.write_table(pa.table({"y": [0, 2]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="none of its classes"):
        index_parquet(config)


@slow
def test_files_of_spark_are_read(tmp_path: Path, spark: SparkSession) -> None:
    df = spark.range(1000).selectExpr(
        "id", "id % 7 AS seven", "CAST(id AS string) AS text", "array(id, id + 1) AS both"
    )
    df.repartition(3).write.parquet(str(tmp_path / "theirs"))
    manifest = index_parquet(ParquetIndexConfig(url=str(tmp_path / "theirs"), id_columns=("id",)))
    rows = sorted(rows_of(tmp_path / "theirs", manifest), key=lambda row: row["id"])
    wanted = df.toPandas().to_dict("records")
    assert [{**row, "both": list(row["both"])} for row in wanted] == [
        {k: v for k, v in row.items() if k != "sample_id"} for row in rows
    ]
    assert [row["sample_id"] for row in rows] == [brute_id(str(n)) for n in range(1000)]


def test_a_pandas_frame_is_read_and_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame = pd.DataFrame({"x": [0.5, None, 2.5], "c": pd.Categorical(["u", "v", "u"]), "y": [True, False, True]})
    frame.to_parquet(tmp_path / "a.parquet")
    assert index.main([str(tmp_path), "--format", "parquet", "--label", "y"]) == 0
    printed = capsys.readouterr().out
    assert "1 files, 3 records" in printed and "y: bool, label" in printed and "sample ids of file and row" in printed
    rows = [
        {k: v for k, v in row.items() if k != "sample_id"} for row in rows_of(tmp_path, load_dataset(str(tmp_path)))
    ]
    read = pd.read_parquet(tmp_path / "a.parquet")
    assert rows == [{k: None if pd.isna(v) else v for k, v in row.items()} for row in read.to_dict("records")]
    assert describe.main([str(tmp_path)]) == 0
    assert "another program" in capsys.readouterr().out
    with pytest.raises(ExistsError, match="indexed already"):
        index.main([str(tmp_path), "--format", "parquet"])


@pytest.mark.parametrize(
    "flags",
    [
        ["--label", "y"],
        ["--format", "parquet", "--sample-records", "5"],
        ["--format", "parquet", "--schema", "x.toml", "--label", "y"],
        ["--format", "parquet", "--id-columns", "id,id"],
        ["--format", "parquet", "--exclude", "nothing"],
        ["--format", "parquet", "--pattern", "*.none"],
    ],
)
def test_a_call_that_cannot_be_right(tmp_path: Path, flags: list[str]) -> None:
    write_people(tmp_path / "theirs")
    with pytest.raises(LockstepError):
        index.main([str(tmp_path / "theirs"), *flags])


def test_a_forged_manifest_is_refused(tmp_path: Path) -> None:
    write_people(tmp_path / "theirs")
    index_parquet(ParquetIndexConfig(url=str(tmp_path / "theirs"), exclude=("when",)))
    data = (tmp_path / "theirs" / "_manifest.json").read_bytes()
    for path, value in (
        (("splits", "train", "shards", 0, "path"), "../a.parquet"),
        (("splits", "train", "shards", 0, "path"), "/etc/passwd"),
        (("splits", "train", "shards", 0, "path"), "part-1.parquet"),
        (("splits", "train", "shards", 0, "partition"), {"a": "b"}),
        (("splits", "train", "shards", 0, "partition"), [["a", 1]]),
        (("splits", "train", "shards", 0, "block_offsets"), [1]),
        (("splits", "train", "shards"), []),
        (("indexed",), {}),
        (("indexed", "id_columns"), ["id"]),  # another identity: the digest does not follow
        (("format",), "tfrecord"),
    ):
        doc = unseal(data, "m")
        place: Any = doc
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        with pytest.raises(DataError):
            DatasetManifest.from_bytes(seal(doc), "m")
    doc = unseal(data, "m")
    doc["splits"]["train"]["shards"].reverse()
    with pytest.raises(DataError, match="not in order"):
        DatasetManifest.from_bytes(seal(doc), "m")


def test_types_in_the_notation_of_spark() -> None:
    assert spark_kind(pa.list_(pa.dictionary(pa.int8(), pa.string()))) == "array<string>"
    assert spark_kind(pa.decimal128(9, 2)) == "decimal(9,2)" and spark_kind(pa.uint64()) == "decimal(20,0)"


def test_pages_are_compared_with_their_checksums(tmp_path: Path) -> None:
    numbers = pa.table({"n": np.arange(1000)})
    pq.write_table(numbers, tmp_path / "a.parquet", write_page_checksum=True, compression="none", use_dictionary=False)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[4000] ^= 1
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(DataError, match=r"a\.parquet"):
        index_parquet(ParquetIndexConfig(url=str(tmp_path)))


def test_an_indexed_dataset_is_not_continued(tmp_path: Path) -> None:
    write_people(tmp_path / "theirs")
    index_parquet(ParquetIndexConfig(url=str(tmp_path / "theirs"), exclude=("when",)))
    config = TableConfig(
        table="t", output=str(tmp_path / "out"), id_columns=("id",), append_to=str(tmp_path / "theirs"), fmt="parquet"
    )
    with pytest.raises(ConfigError, match="cannot be continued: its kind"):
        tables.check(config)


@slow
def test_training_and_evaluation_read_it_and_baselines_too(tmp_path: Path, spark: SparkSession) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=600)
    for number in range(3):
        part = slice(200 * number, 200 * number + 200)
        pd.DataFrame({"x": x[part].astype("float32"), "y": np.where(x[part] > 0, "yes", "no")}).to_parquet(
            tmp_path / f"{number}.parquet", row_group_size=90
        )
    (tmp_path / "s.toml").write_text(
        '[[fields]]\nname = "x"\ndtype = "float32"\n'
        '[[fields]]\nname = "y"\ndtype = "bool"\nkind = "label"\nclass_names = ["no", "yes"]\n'
    )
    index_parquet(ParquetIndexConfig(url=str(tmp_path), schema=str(tmp_path / "s.toml")))
    result = lockstep.train(str(tmp_path), str(tmp_path / "_run"), "logistic", global_batch=32, epochs=4, num_ranks=2)
    assert result.steps == 4 * 600 // 32
    found = lockstep.evaluate(str(tmp_path / "_run"), str(tmp_path), "train")
    assert found["samples"] == 600 and found["metrics"]["auc"] > 0.99
    config = BaselineConfig(dataset=str(tmp_path), kind="logistic", split="train")
    predicted = train_and_predict(spark, config)
    assert predicted.rows is not None and predicted.about["samples"] == 600
    assert (predicted.rows[:, 0] == (predicted.rows[:, 1] > 0.5)).mean() > 0.99
