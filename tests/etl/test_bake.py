"""`--bake`: shards of what a model is fed, the same bytes whatever the partitions, and the same inputs as without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from etl import image_sets, logs
from etl.bake import check_bake, fitted_of
from etl.config import LogsConfig, WriteConfig
from etl.describe_tables import dataset_tables
from etl.image_config import ImagesConfig
from etl.output import check_schema
from etl.splits import SplitSpec
from etl.write import write_dataset
from features.declare import load_schema
from features.schema import Schema
from storage.errors import ConfigError
from storage.manifest import DatasetManifest
from storage.verify import verify
from tests.etl.conftest import OPEN_BANDIT, tree
from training.reader import OpenSplit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = load_schema("""
fields = [
    {name = "bought", dtype = "bool", kind = "label"},
    {name = "page", dtype = "string", nullable = true, encoding = {kind = "vocabulary", max_size = 3}},
    {name = "tags", dtype = "string", list = true, encoding = {kind = "vocabulary", max_size = 9, oov_buckets = 2}},
    {name = "item", dtype = "int64", list = true, encoding = {kind = "sequence", length = 2, of.kind = "vocabulary"}},
    {name = "price", dtype = "float64", nullable = true, encoding = {kind = "standardise"}},
    {name = "odd", dtype = "int64", encoding = {kind = "hash", buckets = 50, output = "index"}},
    {name = "hour", dtype = "int64", encoding = {kind = "bucketise", boundaries = [6, 12, 18]}},
    {name = "count", dtype = "int64"},
]
""")
BY_FOLDS = SplitSpec.parse("kfold:3")


def visits(spark: SparkSession, first: int, last: int) -> DataFrame:
    """Rows that follow from their number: nulls, unknown tokens, empty lists."""
    return spark.range(first, last).selectExpr(
        "id AS visit", "id % 3 = 0 AS bought", "IF(id % 7 = 0, NULL, concat('/p', id % 5)) AS page",
        "transform(sequence(0, id % 4), x -> concat('t', (id + x) % 13)) AS tags",
        "IF(id % 5 = 0, CAST(array() AS array<bigint>), array(id % 6, id, 3L)) AS item",
        "IF(id % 11 = 0, NULL, CAST(id AS double) / 3) AS price", "id * 1000003 AS odd", "id % 24 AS hour",
        "id AS count",
    )  # fmt: skip


def inputs(url: Path, split: str) -> dict[int, dict[str, bytes]]:
    """What a model is fed of each sample of a split, with its label, by sample id."""
    opened = OpenSplit.at([str(url)], split)
    found: dict[int, dict[str, bytes]] = {}
    for rows in opened.reader.in_order(50):
        encoded = opened.encoder.encode(rows)
        for place, sample in enumerate(encoded.sample_id.tolist()):
            assert encoded.y is not None
            found[sample] = {name: array[place].tobytes() for name, array in encoded.x.items()}
            found[sample]["y"] = encoded.y[place].tobytes()
    return found


@pytest.mark.slow
def test_baked_shards_hold_what_a_model_is_fed(spark: SparkSession, tmp_path: Path) -> None:
    def write(name: str, rows: DataFrame, **options: Any) -> DatasetManifest:
        told = {"id_columns": ["visit"], "schema": SCHEMA, "shard_bytes": 20_000, **options}
        return write_dataset(rows, str(tmp_path / name), **told)

    rows = visits(spark, 0, 400)
    raw = write("raw", rows.repartition(2))
    baked = write("baked", rows.coalesce(1), bake=True)
    again = write("again", rows.repartition(4, "hour"), bake=True)
    assert tree(tmp_path / "baked") == tree(tmp_path / "again") and baked.digest == again.digest != raw.digest
    assert verify(str(tmp_path / "baked")) == []
    assert baked.counts == raw.counts and baked.leakage == raw.leakage
    fitted = [{path: info for path, info in made.files.items() if path.startswith("_fitted/")} for made in (raw, baked)]
    assert fitted[0] == fitted[1] and len(fitted[0]) == 4, "the statistics are those of the rows as they came"
    assert [name for name, split in baked.splits.items() if len(split.shards) > 1] == ["train"]
    for split in raw.splits:
        assert inputs(tmp_path / "raw", split) == inputs(tmp_path / "baked", split)
    assert OpenSplit.at(str(tmp_path / "raw"), "train").encoder.signature == (
        OpenSplit.at(str(tmp_path / "baked"), "train").encoder.signature
    )

    # the manifest says what was done, and describe tells it
    fields = {field["name"]: field for field in baked.schema["fields"]}
    tokens = json.loads((tmp_path / "baked" / "_fitted" / "page.json").read_text("utf-8"))["tokens"]
    assert fields["page"]["encoding"]["ids"] == 1 + len(tokens) + 1
    assert fields["page"]["encoding"]["fitted"] == {"file": "page.json", "splits": ["train"]}
    assert [fields[name]["dtype"] for name in ("page", "price", "count", "bought")] == [
        "int64", "float32", "float32", "bool",
    ]  # fmt: skip
    (table,) = [table for table in dataset_tables(baked) if table.title.startswith("Baked")]
    assert ("page", "vocabulary", "int64", str(len(tokens) + 2), "page.json", "train") in [
        row[:6] for row in table.rows
    ]

    # an append is encoded by what its parent was fitted to, and nothing else continues it
    more = visits(spark, 400, 460)
    link = str(tmp_path / "baked")
    appended = write("more", more, bake=True, append_to=link)
    assert appended.schema == baked.schema and tree(tmp_path / "more" / "_fitted") == tree(
        tmp_path / "baked" / "_fitted"
    )
    both = OpenSplit.at([link, str(tmp_path / "more")], "train")
    assert both.reader.table.num_blocks > OpenSplit.at(link, "train").reader.table.num_blocks
    with pytest.raises(ConfigError, match="its form of features is another one"):
        write("other", more, append_to=link)
    with pytest.raises(ConfigError, match="its form of features is another one"):
        write("other", more, bake=True, append_to=str(tmp_path / "raw"))

    # others see plain columns, and nothing bakes them a second time, in whatever way
    frame = spark.read.format("tfrecord").option("split", "train").load(str(tmp_path / "baked"))
    assert {dict(frame.dtypes)[name] for name in ("tags", "item")} == {"array<bigint>"}
    for options in ({"bake": True}, {}):
        with pytest.raises(ConfigError, match="is baked: its values are a model's inputs already"):
            write("twice", frame, schema=Schema.from_json(baked.schema), id_columns=["odd"], **options)
    assert not (tmp_path / "twice").exists() and not (tmp_path / "other").exists()


def test_what_cannot_be_baked_is_told_before_spark_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="folds cannot be baked"):
        check_bake(SCHEMA, BY_FOLDS)
    with pytest.raises(ConfigError, match="folds cannot be baked"):  # folds that the input names
        fitted_of(SCHEMA, {"page.fold-0.json": b"{}", "page.fold-1.json": b"{}"})
    hashed = load_schema('{"fields": [{"name": "a", "dtype": "string", "encoding": {"kind": "hash", "buckets": 9}}]}')
    check_bake(hashed, BY_FOLDS)  # nothing is fitted, so all folds have one encoding
    assert fitted_of(hashed, {}) == {}
    config = WriteConfig(output=str(tmp_path / "d"), bake=True, split="kfold:3")
    with pytest.raises(ConfigError, match="folds cannot be baked") as caught:
        check_schema(config, SCHEMA)
    assert "--split 80/20" in caught.value.next_step
    with pytest.raises(ConfigError, match="folds cannot be baked"):  # the schema of web logs
        logs.check(LogsConfig(inputs=(str(OPEN_BANDIT),), output=str(tmp_path / "d"), bake=True, split="kfold:3"))
    with pytest.raises(ConfigError, match="--bake cannot be right"):
        image_sets.check(ImagesConfig(inputs=("x",), output=str(tmp_path / "d"), bake=True))


def test_a_job_says_that_it_baked() -> None:
    assert WriteConfig(output="/d", bake=True).to_json()["bake"] is True
    assert WriteConfig(output="/d", bake=True).write_options()["bake"] is True
