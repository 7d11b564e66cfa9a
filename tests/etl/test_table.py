"""Tables to datasets: types by rule, splits over real rows, leakage, weights, appends."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow.dataset as ds
import pytest
from sklearn.model_selection import GroupKFold

import lockstep
from lockstep.etl import columns as c
from lockstep.etl import tables
from lockstep.etl.spark.errors import to_wire, translating_errors
from lockstep.etl.spark.tasks import mapped
from lockstep.etl.split import counted
from lockstep.etl.split.assign import Assign
from lockstep.etl.split.counted import assign_by_counts
from lockstep.etl.split.leakage import by_chance, check_leakage, leak_key
from lockstep.etl.split.sampling import Sampling
from lockstep.etl.split.splits import SplitSpec
from lockstep.etl.tables import TableConfig
from lockstep.etl.write.frame import infer_schema, prepared
from lockstep.etl.write.shards import sizes_of
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.features.shards.blocks import dataset_blocks
from lockstep.storage.dataset.manifest import DatasetManifest, load_dataset
from lockstep.storage.errors import ConfigError, DataError, LockstepError, NotFoundError
from lockstep.storage.verify import verify
from tests.etl.conftest import large_offsets, tree

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_partitions")]


@pytest.fixture(scope="module")
def frame(spark: SparkSession) -> DataFrame:
    """600 rows: id, at (30 distinct times), user, kind (a, b, c: 300, 200, 100), click, x."""
    rows = [
        (n, n // 20, f"u{n % 50}", "abc"[(n % 6 >= 3) + (n % 6 >= 5)], n % 10 == 0, float(n % 100)) for n in range(600)
    ]
    return spark.createDataFrame(rows, "id bigint, at int, user string, kind string, click boolean, x float")


def of_texts(label: str) -> Schema:
    """The schema of `frame` with a text as the label, which is stored but no model is trained on."""
    columns = {"id": "int64", "at": "int64", "user": "string", label: "string", "click": "bool", "x": "float32"}
    return Schema.plain(columns, label=label)


HALVES = {"train": 300, "test": 300}


@pytest.mark.parametrize("sample", [None, "click=0:50%"])
def test_balanced_folds_are_dealt_by_what_is_written(spark: SparkSession, frame: DataFrame, sample: str | None) -> None:
    wide = frame.where("id % 50 < 7 OR id < 100 OR user = 'u20'")  # groups of 12 and of 2 rows
    found, spec, schema = split_rows(wide, "kfold:3:user:balanced", sample=sample)
    kept = found.where("_dropped IS NULL").select("user", c.SPLIT).collect()
    users = np.array([row["user"] for row in kept])
    theirs = [len(test) for _, test in GroupKFold(3).split(users, groups=users)]
    sizes = Counter(row[c.SPLIT] for row in kept)
    assert [sizes[name] for name in spec.names] == theirs and (sample is None) == (len(kept) == wide.count())
    again, *_ = split_rows(wide.repartition(5, "x"), "kfold:3:user:balanced", sample=sample)
    assert sorted(again.where("_dropped IS NULL").select("user", c.SPLIT).collect()) == sorted(kept)
    records = {name: sizes[name] for name in spec.names}
    leakage = check_leakage(found.where("_dropped IS NULL"), spec, schema, records)
    assert leakage.to_json() == {
        "kind": "kfold", "checked": ["group", "sample_id"], "found": {"group": 0, "sample_id": 0}
    }  # fmt: skip


def test_too_many_groups_to_balance(spark: SparkSession, frame: DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted, "MAX_GROUPS", 49)
    with pytest.raises(DataError, match="too many groups") as caught:
        split_rows(frame, "kfold:3:user:balanced")
    assert "--split kfold:3:user" in caught.value.next_step


def test_a_subset_of_named_groups(spark: SparkSession, frame: DataFrame, tmp_path: Path) -> None:
    def write(name: str, rows: DataFrame, split: str, **more: Any) -> DatasetManifest:
        return lockstep.write_dataset(
            rows, str(tmp_path / name), id_columns=["id"], label="click", fmt="parquet", split=split, **more
        )

    manifest = write("a", frame.where("id < 300"), "subset:user=u3,u40", sample="click=0:50%")
    assert {row["user"] for row in read(tmp_path / "a", "test")} == {"u3", "u40"}
    assert len(read(tmp_path / "a", "test")) == 12, "the test split is not sampled"
    assert not {"u3", "u40"} & {row["user"] for row in read(tmp_path / "a", "train")}
    assert manifest.leakage is not None and manifest.leakage["found"] == {"group": 0, "sample_id": 0}
    assert manifest.created_by["config"]["split"] == "subset:user=u3,u40"
    with pytest.raises(DataError, match="a value that no row has") as caught:
        write("b", frame, "subset:user=u3,u400")
    assert caught.value.got.startswith("u400 (perhaps `u4") and "`user`: u0, u1, u10" in caught.value.allowed
    more = {"append_to": str(tmp_path / "a"), "sample": "click=0:50%"}
    appended = write("c", frame.where("id >= 300 AND user <> 'u3'"), "subset:user=u3,u40", **more)
    assert {row["user"] for row in read(tmp_path / "c", "test")} == {"u40"} and appended.parent is not None
    with pytest.raises(ConfigError, match="--append-to"):
        write("d", frame, "kfold:3:user:balanced", append_to=str(tmp_path / "a"))


def read(url: Path, split: str) -> list[dict[str, Any]]:
    folder = url / f"split={split}"
    rows: list[dict[str, Any]] = ds.dataset(folder, format="parquet").to_table().to_pylist()
    return rows


def test_types_have_rules(spark: SparkSession) -> None:
    ddl = (
        "id string not null, b boolean, t tinyint, s smallint, i int, l bigint, f float, d double, u string,"
        " y2 array<string>, _source int, _position bigint"
    )
    schema = infer_schema(spark.createDataFrame([], ddl), label="b", exclude="y2", id_columns=["id", "l"])
    encodings = {field.name: (field.encoding or {}).get("kind") for field in schema if field.kind == "feature"}
    null_as_0 = dict.fromkeys("tsifd", "number")
    assert encodings == {"id": "ignore", "l": "ignore", "u": "hash", **null_as_0}, "no model is fed with ids"
    no_label = infer_schema(spark.createDataFrame([], "id bigint not null, y binary, many array<int>, x int not null"))
    assert [field.encoding for field in no_label] == [None] * 5, "without a label nothing is trained"
    told = {field.name: (field.dtype, field.shape, field.nullable) for field in schema}
    whole = ("int64", (), True)
    assert told == {
        "sample_id": ("int64", (), False),
        "id": ("string", (), False),
        "b": ("bool", (), False),  # the label
        "t": whole, "s": whole, "i": whole, "l": whole,
        "f": ("float32", (), True), "d": ("float64", (), True),
        "u": ("string", (), True),
    }  # fmt: skip
    for kind, way in (
        ("decimal(10,2)", "CAST(z AS STRING)"), ("timestamp", "unix_micros(z)"), ("date", "unix_date(z)"),
        ("struct<a:int>", "z.part"), ("map<string,int>", "map_values"), ("array<array<int>>", "flatten(z)"),
        ("array<struct<a:int>>", "transform(z"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="column `z` cannot be used") as caught:
            infer_schema(spark.createDataFrame([], f"id bigint, z {kind}"))
        assert way in caught.value.next_step and caught.value.got == kind
        assert "uint64" not in caught.value.next_step  # which holds whole numbers alone
    for name in ("split", "sample_id", "_x"):
        with pytest.raises(ConfigError, match="cannot be used"):
            infer_schema(spark.createDataFrame([], f"id bigint, {name} int"))
    df = spark.createDataFrame([], "id bigint, s smallint")
    wide = Schema((sample_id_field(), Field(name="s", dtype="int64", nullable=True)))
    assert dict(prepared(df, wide, ["id"], SplitSpec.parse("1/1"))[0].dtypes)["s"] == "bigint"
    with pytest.raises(ConfigError, match="column `s` cannot be used"):
        prepared(df.selectExpr("id", "s", "s AS S"), None, ["id"], SplitSpec.parse("1/1"))
    for ids, spec, flag in ((["ide"], "1/1", "--id-columns"), (["id"], "group:ide:1/1", "--split")):
        with pytest.raises(ConfigError, match="column `ide` cannot be used") as caught:
            prepared(df, None, ids, SplitSpec.parse(spec))
        assert (caught.value.got, caught.value.allowed) == ("no such column", "one of id, s")
        assert flag in caught.value.next_step
    lists = spark.createDataFrame([], "id bigint, s array<array<bigint>>")
    declared = Schema((sample_id_field(), Field(name="s", dtype="int64", shape=(None,))))
    with pytest.raises(ConfigError, match="column `s` cannot be used") as caught:
        prepared(lists, declared, ["id"], SplitSpec.parse("1/1"))
    assert "flatten(s)" in caught.value.next_step and "CAST" not in caught.value.next_step
    narrow = Schema((sample_id_field(), Field(name="id", dtype="float32", nullable=True)))
    with pytest.raises(ConfigError, match="column `id` cannot be used"):
        prepared(df, narrow, ["id"], SplitSpec.parse("1/1"))


def split_rows(
    df: DataFrame, text: str, window: int | None = None, sample: str | None = None
) -> tuple[DataFrame, SplitSpec, Schema]:
    spec = SplitSpec.parse(text)
    rows, schema = prepared(df, None, ["id"], spec)
    assign = Assign(schema, ("id",), spec, 0, "parquet", None if sample is None else Sampling.parse(sample))
    placed = mapped(rows.withColumn(c.LEAK, leak_key(rows, spec, schema)), assign, assign.output)
    return assign_by_counts(placed.persist(), spec, window), spec, schema


def test_classes_and_times_are_cut_exactly_however_rows_lie(spark: SparkSession, frame: DataFrame) -> None:
    found, spec, schema = split_rows(frame.drop("at"), "stratified:kind:7/2/1")
    rows = found.select("id", "kind", c.SPLIT).collect()
    assert Counter((row["kind"], row[c.SPLIT]) for row in rows) == {
        ("a", "train"): 210, ("a", "validation"): 60, ("a", "test"): 30,
        ("b", "train"): 140, ("b", "validation"): 40, ("b", "test"): 20,
        ("c", "train"): 70, ("c", "validation"): 20, ("c", "test"): 10,
    }  # fmt: skip
    with large_offsets(spark):
        other, *_ = split_rows(frame.drop("at").repartition(5, "x"), "stratified:kind:7/2/1")
        assert sorted(other.select("id", "kind", c.SPLIT).collect()) == sorted(rows)
    # The id, which is stored and not fed to a model, makes no difference: contents repeat 2 or 4 times.
    sides: dict[tuple[object, ...], list[str]] = {}
    for row in found.select("user", "kind", "click", "x", c.SPLIT).collect():
        sides.setdefault(tuple(row)[:4], []).append(row[c.SPLIT])
    twins = sum(len(of) for of in sides.values() if len(set(of)) > 1)
    assert twins > 200
    assert check_leakage(found, spec, schema, {"train": 420, "validation": 120, "test": 60}).to_json() == {
        "kind": "stratified", "checked": ["content", "sample_id"], "found": {"content": twins, "sample_id": 0},
        "by_chance": {"content": 335.6}, "distinct": {"content": 250},
    }  # fmt: skip

    found, spec, schema = split_rows(frame, "time:at:81/19")
    times: dict[str, set[int]] = {}
    for row in found.select("at", c.SPLIT).collect():
        times.setdefault(row[c.SPLIT], set()).add(row["at"])
    assert times == {"train": set(range(24)), "test": set(range(24, 30))}  # 80 % is nearer than 83 %
    assert check_leakage(found, spec, schema, {"train": 480, "test": 120}).to_json() == {
        "kind": "time", "checked": ["sample_id", "time"], "found": {"sample_id": 0, "time": 0},
    }  # fmt: skip


def test_labels_that_look_into_the_next_split_are_left_out(frame: DataFrame) -> None:
    """20 rows at each of 0, 3, 6 ... 87; the splits begin at 54 and 72."""
    found, *_ = split_rows(frame.withColumn("at", frame["at"] * 3), "time:at:6/2/2", 3)
    sides: dict[str, Counter[str]] = {}
    for row in found.select("at", c.SPLIT, c.DROPPED).collect():
        sides.setdefault(row[c.SPLIT] or row[c.DROPPED], Counter())[row["at"]] += 1
    assert sides == {
        "train": dict.fromkeys(range(0, 50, 3), 20),
        "validation": dict.fromkeys(range(54, 67, 3), 20),
        "test": dict.fromkeys(range(72, 90, 3), 20),
        "censored_at_border": dict.fromkeys((51, 69), 20),  # 51 + 3 is the first time of the next split
    }
    found, *_ = split_rows(frame.withColumn("at", frame["at"] * 3), "time:at:6/2/2", 2)
    assert found.where(f"{c.DROPPED} IS NOT NULL").count() == 0


@pytest.mark.parametrize("text", ["time:at:81/19", "stratified:kind:7/2/1"])
def test_sampling_moves_no_border_and_thins_training_only(frame: DataFrame, text: str) -> None:
    whole, thinned = (split_rows(frame, text, sample=sample)[0] for sample in (None, "click=false:10%"))
    columns = ("id", "click", c.SPLIT, c.DROPPED)
    before = {row["id"]: row for row in whole.select(*columns).collect()}
    after = {row["id"]: row for row in thinned.select(*columns).collect()}
    assert set(after) == set(before)
    lost = {id for id, row in after.items() if row[c.DROPPED] == "sampled_out"}
    assert {before[id][c.SPLIT] for id in lost} == {"train"} and not any(before[id]["click"] for id in lost)
    assert len(lost) > 300
    assert {id: row for id, row in after.items() if id not in lost} == {
        id: row for id, row in before.items() if id not in lost
    }
    assert all(after[id][c.SPLIT] is None for id in lost)
    label = Field(name="click", dtype="bool", kind="label")
    for rows, found, dropped in ((before, whole, {}), (after, thinned, {"sampled_out": len(lost)})):
        sizes = sizes_of(found, label)
        assert sizes.dropped == dropped
        classes = Counter((row[c.SPLIT], row["click"]) for row in rows.values() if row[c.DROPPED] is None)
        assert sizes.classes == {
            name: {"false": classes[name, False], "true": classes[name, True]} for name in sizes.splits
        }
        assert {name: count for name, (count, _) in sizes.splits.items()} == {
            name: classes[name, False] + classes[name, True] for name in sizes.splits
        }


def test_groups_that_are_far_from_shares_and_have_one_class(
    frame: DataFrame, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: dict[str, Any] = {"id_columns": ["id"], "schema": of_texts("kind"), "split": "group:kind:80/20", "seed": 2}
    lockstep.write_dataset(frame, str(tmp_path / "out"), **told)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "split: test has 33.3 % of the records where --split group:kind:80/20 asks for 20.0 %; of 3 groups the largest,"
        " `kind` = 'a', has 50.0 %: leave it out, or split by a column of smaller groups",
        "label: all 200 records of test have `kind` = b, so no metric there says how well a model separates"
        " classes; give more input, or --split stratified:kind:...",
    ]


@pytest.mark.parametrize(
    ("split", "encoding", "noted"),
    [
        ("group:user:80/20", {"kind": "hash", "buckets": 9, "seed": 0}, True),
        ("kfold:2:user", {"kind": "hash", "buckets": 9, "seed": 0}, True),
        ("group:user:80/20", {"kind": "ignore"}, False),
        ("80/20", {"kind": "hash", "buckets": 9, "seed": 0}, False),
    ],
)
def test_a_group_that_is_fed_is_noted_since_pandas_finds_no_user_on_both_sides(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture, split: str, encoding: Any, noted: bool
) -> None:
    rows = pd.DataFrame({"id": range(200), "user": [f"u{n % 40}" for n in range(200)]})
    schema = Schema((sample_id_field(), Field(name="user", dtype="string", encoding=encoding)))
    out = tmp_path / "out"
    lockstep.write_dataset(
        spark.createDataFrame(rows), str(out), id_columns="id", schema=schema, split=split, fmt="parquet"
    )
    users = [set(pd.read_parquet(folder)["user"]) for folder in sorted(out.glob("split=*"))]
    grouped = split != "80/20"
    assert len(users) == 2 and users[0].isdisjoint(users[1]) == grouped
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("note: `user`")]
    assert len(lines) == int(noted) and all('encoding = { kind = "ignore" }' in line for line in lines)


def test_leakage_is_found(frame: DataFrame) -> None:
    """Splits that the rows do not keep, which only a broken input or writer can bring about."""
    from pyspark.sql import functions as f

    _, spec, schema = split_rows(frame, "group:user:1/1")
    mixed = f.when(f.col("id") % 2 == 0, "train").otherwise("test")
    rows = frame.select("*", f.col("id").alias("sample_id"), f.lit(0).alias(c.SOURCE), f.lit(0).alias(c.POSITION))
    grouped = rows.withColumn(c.LEAK, f.xxhash64("kind")).withColumn(c.SPLIT, mixed)
    with pytest.raises(DataError, match="500 records of different splits share one value of `user`"):
        check_leakage(grouped, spec, schema, HALVES)
    twice = grouped.withColumn("sample_id", (f.col("id") / 2).cast("bigint"))
    with pytest.raises(DataError, match="600 records of different splits share one sample id") as caught:
        check_leakage(twice, spec, schema, HALVES)
    assert "0000000000000000 in test" in caught.value.got and "0000000000000000 in train" in caught.value.got
    timed = SplitSpec.parse("time:at:1/1")
    with pytest.raises(DataError, match="the times of train and test overlap"):
        check_leakage(rows.withColumn(c.LEAK, f.col("at")).withColumn(c.SPLIT, mixed), timed, schema, HALVES)
    content = grouped.withColumn(c.LEAK, f.col("id") % 301)
    random = SplitSpec.parse("1/1")
    assert check_leakage(content, random, schema, HALVES).found == {"content": 598}  # 0-298 and 301-599 but two


def test_content_is_told_apart(spark: SparkSession) -> None:
    ddl = "a bigint, b bigint, c array<bigint>, d array<bigint>, e string, g string"
    rows = [(None, 1, [1], [2], "a", "bc"), (1, None, [1], [2], "a", "bc"), (None, 1, [1, 2], [], "a", "bc"),
            (None, 1, [1], [2], "ab", "c"), (None, 1, [1], [2], "a", "bc")]  # fmt: skip
    df = spark.createDataFrame(rows, ddl)
    schema = infer_schema(df)
    keys = [row[0] for row in df.select(leak_key(df, SplitSpec.parse("1/1"), schema)).collect()]
    assert len(set(keys)) == 4 and keys[0] == keys[4]


@pytest.mark.parametrize(
    ("counts", "records", "expected"),
    [
        ({1: 50}, (40, 10), 0.0),
        ({1: 44, 2: 3}, (40, 10), 1.9),  # 3 * 2 * (1 - 0.64 - 0.04)
        ({2: 3, 3: 1}, (5, 5), 5.2),  # 3 * 2 * 0.5 + 3 * 0.75 = 5.25, to even
        ({2: 5}, (6, 2, 2), 5.6),
        ({100_000: 1}, (50_000, 50_000), 100_000.0),  # one content for all: chance parts it too
    ],
)
def test_what_chance_would_give(counts: dict[int, int], records: tuple[int, ...], expected: float) -> None:
    assert by_chance(counts, records) == expected


def table_config(url: Path, **more: Any) -> TableConfig:
    told: dict[str, Any] = {"id_columns": ("id",), "label": "click", "fmt": "parquet", "exclude": ("id", "at")}
    return TableConfig(output=str(url), **{**told, **more})


def test_a_table_of_the_catalog(spark: SparkSession, frame: DataFrame, tmp_path: Path) -> None:
    spark.sql("DROP TABLE IF EXISTS clicks")
    frame.write.option("path", str(tmp_path / "warehouse")).saveAsTable("clicks")
    try:
        options = {"split": "kfold:3", "sample": "click=0:50%", "weights": "balanced"}
        manifest = tables.run(spark, table_config(tmp_path / "out", table="clicks", **options))
    finally:
        spark.sql("DROP TABLE clicks")
    rows = {name: read(tmp_path / "out", name) for name in ("fold-0", "fold-1", "fold-2")}
    every = [row for part in rows.values() for row in part]
    counts = manifest.counts
    assert sum(row["click"] for row in every) == 60 and 220 < len(every) - 60 < 320
    assert (counts.read, counts.written, counts.dropped) == (600, len(every), {"sampled_out": 600 - len(every)})
    weights = np.array([(row["click"], row["weight"]) for row in every])
    assert np.isclose(weights[weights[:, 0] == 1, 1].sum(), weights[weights[:, 0] == 0, 1].sum())
    assert set(every[0]) == {"sample_id", "user", "kind", "click", "x", "weight"}
    assert manifest.schema["fields"][-1]["kind"] == "weight"
    # Without the id, rows n and n + 300 are equal; both are often kept, in different folds.
    assert manifest.leakage is not None and manifest.leakage["found"]["content"] > 20
    assert manifest.leakage["by_chance"]["content"] > 20 and manifest.leakage["distinct"]["content"] < len(every)
    config = manifest.created_by["config"]
    folds = ["fold-0", "fold-1", "fold-2"]
    assert config["sampled"] == {"column": "click", "shares": {"false": "1/2"}, "splits": folds}
    assert config["table"] == "clicks" and not verify(str(tmp_path / "out"))


def test_appends(spark: SparkSession, frame: DataFrame, tmp_path: Path) -> None:
    frame.createOrReplaceTempView("rows")
    common: dict[str, Any] = {"fmt": "tfrecord", "split": "group:user:80/20", "weights": "balanced"}

    def run(name: str, where: str, parent: str | None = None, **more: Any) -> DatasetManifest:
        above = None if parent is None else str(tmp_path / parent)
        query = f"SELECT * FROM rows WHERE {where};"
        return tables.run(spark, table_config(tmp_path / name, query=query, append_to=above, **{**common, **more}))

    first = run("a", "id < 300")
    second = run("b", "id BETWEEN 300 AND 599 AND (id > 400 OR NOT click)", "a")  # clicks are rarer there
    assert second.parent == {"url": str(tmp_path / "a"), "digest": first.digest, "path": "../a"}
    assert {name: split.block_records for name, split in second.splits.items()} == {
        name: split.block_records for name, split in first.splits.items()
    }
    assert second.created_by["config"]["class_counts"] == first.created_by["config"]["class_counts"]
    weights = [
        {(row["click"], row["weight"]) for block in blocks for batch in block.read() for row in batch.to_pylist()}
        for name, manifest in (("a", first), ("b", second))
        for blocks in dataset_blocks(str(tmp_path / name), manifest).values()
    ]
    assert all(found == weights[0] for found in weights) and len(weights[0]) == 2
    with pytest.raises(DataError, match=r"100 records are in .*b already, or in what it continues"):
        run("c", "id < 100", "b")
    for more, what in (({"seed": 1}, "seed"), ({"split": "80/20"}, "split")):
        with pytest.raises(ConfigError, match=f"its {what} is another one"):
            run("d", "id > 400", "a", **more)
    with pytest.raises(ConfigError, match="it lacks at"):  # which the parent has excluded
        run("d", "id > 400", "a", exclude=("id",))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_mark_in_a_plan_is_no_error_of_a_task(spark: SparkSession) -> None:
    from pyspark.sql import functions as f

    mark = to_wire(DataError("the mark", got="1", allowed="2", next_step="3"))
    with pytest.raises(LockstepError, match="Spark failed while testing"), translating_errors(spark, "testing"):
        spark.range(1).select(f.raise_error(f.lit(mark)), "no_such_column")
    with pytest.raises(DataError, match="the mark"), translating_errors(spark, "testing"):
        spark.range(1).select(f.raise_error(f.lit(mark))).collect()


def test_any_data_frame_and_what_cannot_be_one(spark: SparkSession, frame: DataFrame, tmp_path: Path) -> None:
    odd, name = frame.withColumnRenamed("kind", "k`ind.x"), "k`ind.x"  # a name that must be quoted wherever it goes
    told: dict[str, Any] = {"id_columns": ["id"], "schema": of_texts(name), "split": f"stratified:{name}:80/20"}
    one = lockstep.write_dataset(odd.repartition(3), str(tmp_path / "one"), **told, weights="balanced")
    lockstep.write_dataset(odd.coalesce(1), str(tmp_path / "two"), **told, weights="balanced")
    assert one.created_by["config"]["class_counts"] == {"a": 240, "b": 160, "c": 80}
    assert tree(tmp_path / "one") == tree(tmp_path / "two") and load_dataset(str(tmp_path / "one")) == one
    assert (one.format, list(one.splits), one.source) == ("tfrecord", ["test", "train"], ())
    with pytest.raises(DataError, match="rows have the same id columns") as caught:
        lockstep.write_dataset(frame, str(tmp_path / "x"), id_columns=["user", "kind"])
    assert caught.value.got == "user = 'u0', kind = 'a' in 8 rows; user = 'u0', kind = 'b' in 4 rows"
    url = str(tmp_path / "x")
    nulls = spark.sql("SELECT id, 1L AS x FROM VALUES (NULL), (NULL), (2L) AS t(id)")
    with pytest.raises(DataError, match="id column `id` is null"):  # and not that two rows have the id null
        lockstep.write_dataset(nulls, url, id_columns="id", split="1/1")
    parts = frame.selectExpr("*", "IF(id < 300, 'early', 'late') AS _split")
    with pytest.raises(DataError, match="no split is there to train on"):
        lockstep.write_dataset(parts, url, id_columns=["id"], split="given", sample="click=0:10%")
    for query, kind in (
        ("SELECT * FROM nowhere", NotFoundError),
        ("DROP TABLE rows", ConfigError),  # only a query can stand where it is put
        ("SELECT 1 AS id, rand() AS x", ConfigError),
        ("SELECT 1 AS id, current_date() AS x", ConfigError),
        ("SELECT 1 AS id, 2 AS `split`", ConfigError),
    ):
        with pytest.raises(kind) as refused:
            tables.run(spark, TableConfig(output=url, query=query, id_columns=("id",)))
        assert refused.value.got and refused.value.allowed and refused.value.next_step
    with pytest.raises(ConfigError, match="Spark does not know the format nosuch"):
        tables.run(spark, TableConfig(output=url, inputs=(url,), input_format="nosuch", id_columns=("id",)))
    for values in ([1], None, [2]), ([1], [3], [2, None]):
        lists = spark.createDataFrame(list(enumerate(values)), "id bigint, many array<bigint>")
        with pytest.raises(DataError, match="field `many` is null"):
            lockstep.write_dataset(lists, url, id_columns=["id"], fmt="parquet", split="1/1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
