"""`--bake`: shards of what a model is fed, the same bytes whatever the partitions, and the same inputs as without."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from benchmarks.shared.arrays import in_order
from lockstep.etl.describe.dataset import dataset_tables
from lockstep.etl.fit.bake import check_bake, fitted_of
from lockstep.etl.images import job as image_sets
from lockstep.etl.images.config import ImagesConfig
from lockstep.etl.logs import job as logs
from lockstep.etl.logs.config import LogsConfig
from lockstep.etl.split.splits import SplitSpec
from lockstep.etl.write.checks import check_output, check_schema
from lockstep.etl.write.config import WriteConfig
from lockstep.etl.write.dataset import write_dataset
from lockstep.features.encode.bake import Baker
from lockstep.features.encode.encoder import Encoder
from lockstep.features.sample_id import sample_ids
from lockstep.features.schema.declare import load_schema
from lockstep.features.schema.fitted import read_fitted
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest import DatasetManifest, load_dataset
from lockstep.storage.errors import ConfigError
from lockstep.storage.verify import verify
from lockstep.training.reading.open import OpenSplit
from tests.etl.conftest import OPEN_BANDIT, large_offsets, tree
from tests.training._tiny import write_rows

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
HASHED = load_schema('{"fields": [{"name": "h", "dtype": "string", "encoding": {"kind": "hash", "buckets": 9}}]}')
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


def inputs(encoder: Encoder, batches: Iterable[pa.RecordBatch]) -> dict[int, dict[str, bytes]]:
    """What a model is fed of each sample, with its label, by sample id."""
    found: dict[int, dict[str, bytes]] = {}
    for rows in batches:
        encoded = encoder.encode(rows)
        for place, sample in enumerate(encoded.sample_id.tolist()):
            assert encoded.y is not None
            found[sample] = {name: array[place].tobytes() for name, array in encoded.x.items()}
            found[sample]["y"] = encoded.y[place].tobytes()
    return found


def as_declared(rows: DataFrame) -> pa.RecordBatch:
    """The rows with the sample ids that the writer gives them, as columns of SCHEMA."""
    table = rows.toArrow().combine_chunks()
    ids = sample_ids([table.column("visit").combine_chunks().cast(pa.string())], np.zeros(len(table), np.int64))
    columns = {name: table.column(name).combine_chunks() for name in table.column_names} | {"sample_id": pa.array(ids)}
    arrays = [columns[field.name].cast(field.arrow_type) for field in SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA.arrow_schema())


@pytest.mark.slow
def test_baked_shards_hold_what_a_model_is_fed(spark: SparkSession, tmp_path: Path) -> None:
    def write(name: str, rows: DataFrame, **options: Any) -> DatasetManifest:
        told = {"id_columns": ["visit"], "schema": SCHEMA, "shard_bytes": 10_000, "bake": True, **options}
        return write_dataset(rows, str(tmp_path / name), **told)

    rows = visits(spark, 0, 300)
    baked = write("baked", rows.coalesce(1))
    with large_offsets(spark):
        again = write("again", rows.repartition(3, "hour"))
    assert tree(tmp_path / "baked") == tree(tmp_path / "again") and baked.digest == again.digest
    assert verify(str(tmp_path / "baked")) == []
    assert len(baked.splits["train"].shards) > 1
    files = {path.name: json.loads(path.read_bytes()) for path in (tmp_path / "baked" / "_fitted").iterdir()}
    fitted = {field.name: read_fitted(files[str(field.fitted_file)]) for field in SCHEMA.fitted_fields}
    opened = {split: OpenSplit.at(str(tmp_path / "baked"), split) for split in baked.splits}
    declared = as_declared(rows)
    found = {split: inputs(one.encoder, in_order(one.reader)) for split, one in opened.items()}
    raw = Encoder(SCHEMA, fitted)
    assert found["train"] | found["test"] == inputs(raw, [declared])
    assert opened["train"].encoder.signature == raw.signature
    trained = declared.filter(pc.is_in(declared["sample_id"], value_set=pa.array(list(found["train"]))))
    pages = Counter(page for page in trained["page"].to_pylist() if page is not None).most_common(3)
    assert sorted(files["page.json"]["counts"]) == sorted(count for _, count in pages), "of the training split alone"

    # the manifest says what was done, and describe tells it
    fields = {field["name"]: field for field in baked.schema["fields"]}
    assert fields["page"]["encoding"]["ids"] == 1 + 3 + 1
    assert fields["page"]["encoding"]["fitted"] == {"file": "page.json", "splits": ["train"]}
    assert [fields[name]["dtype"] for name in ("page", "price", "count", "bought")] == [
        "int64", "float32", "float32", "bool",
    ]  # fmt: skip
    (table,) = [table for table in dataset_tables(baked) if table.title.startswith("Baked")]
    assert ("page", "vocabulary", "int64", "5", "page.json", "train") in table.rows
    assert ("item", "sequence of vocabulary", "int64 list") in [row[:3] for row in table.rows]

    # an append is encoded by what its parent was fitted to
    appended = write("more", visits(spark, 300, 340), append_to=str(tmp_path / "baked"))
    assert appended.schema == baked.schema
    assert tree(tmp_path / "more" / "_fitted") == tree(tmp_path / "baked" / "_fitted")
    both = OpenSplit.at([str(tmp_path / "baked"), str(tmp_path / "more")], "train")
    assert both.reader.table.num_blocks > opened["train"].reader.table.num_blocks

    # others see plain columns, and nothing bakes them a second time, in whatever way
    frame = spark.read.format("tfrecord").option("split", "train").load(str(tmp_path / "baked"))
    assert {dict(frame.dtypes)[name] for name in ("tags", "item")} == {"array<bigint>"}
    for bake in (True, False):
        with pytest.raises(ConfigError, match="is baked: its values are a model's inputs"):
            write("twice", frame, schema=Schema.from_json(baked.schema), id_columns=["odd"], bake=bake)
    assert not (tmp_path / "twice").exists()


def test_an_append_has_its_parents_form_of_features(tmp_path: Path) -> None:
    rows = pa.RecordBatch.from_pydict({"sample_id": [1, 2], "h": ["a", "b"]}, schema=HASHED.arrow_schema())
    baker = Baker(HASHED, {})
    (baked,) = baker.batches(rows)
    for name, schema, batch in (("raw", HASHED, rows), ("baked", baker.schema, baked)):
        write_rows(str(tmp_path / name), schema, batch, {"train": 2}, "tfrecord", 1, 8, 0)
        manifest = load_dataset(str(tmp_path / name))
        own = {**manifest.created_by, "config": {"split": "80/20", "weights": "none"}}
        (tmp_path / name / "_manifest.json").write_bytes(replace(manifest, created_by=own).to_bytes())
        for bake in (True, False):
            config = WriteConfig(output=str(tmp_path / "d"), bake=bake, append_to=str(tmp_path / name))
            if bake == (name == "baked"):
                parent = check_output(config)
                assert parent is not None
                check_schema(config, HASHED, parent)
                continue
            with pytest.raises(ConfigError, match="its form of features is another one") as caught:
                check_output(config)
            assert "--bake" in str(caught.value.allowed)


def test_what_cannot_be_baked_is_told_before_spark_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="folds cannot be baked"):
        check_bake(SCHEMA, BY_FOLDS)
    with pytest.raises(ConfigError, match="folds cannot be baked"):  # folds that the input names
        fitted_of(SCHEMA, {"page.fold-0.json": b"{}", "page.fold-1.json": b"{}"})
    check_bake(HASHED, BY_FOLDS)  # nothing is fitted, so all folds have one encoding
    assert fitted_of(HASHED, {}) == {}
    config = WriteConfig(output=str(tmp_path / "d"), bake=True, split="kfold:3")
    with pytest.raises(ConfigError, match="folds cannot be baked") as caught:
        check_schema(config, SCHEMA)
    assert "--split 80/20" in caught.value.next_step
    with pytest.raises(ConfigError, match="folds cannot be baked"):  # the schema of web logs
        logs.check(LogsConfig(inputs=(str(OPEN_BANDIT),), output=str(tmp_path / "d"), bake=True, split="kfold:3"))
    with pytest.raises(ConfigError, match="--bake is invalid"):
        image_sets.check(ImagesConfig(inputs=("x",), output=str(tmp_path / "d"), bake=True))


def test_a_job_says_that_it_baked() -> None:
    assert WriteConfig(output="/d", bake=True).to_json()["bake"] is True
