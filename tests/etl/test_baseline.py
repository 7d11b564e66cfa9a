"""Baselines of pyspark.ml: every kind on small datasets in one session, and what is refused before Spark starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from sklearn.metrics import roc_auc_score, silhouette_score

from lockstep.etl.baseline.config import KINDS, BaselineConfig
from lockstep.etl.baseline.plan import check
from lockstep.etl.baseline.train import MAX_COLLECTED, Predicted, train_and_predict
from lockstep.etl.baseline.trees import Growth
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError, LockstepError, NotFoundError
from lockstep.training.results.stored_baselines import scores_of
from tests.training._tiny import _ids, write_clicks, write_images, write_rows, write_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RECORDS = {"train": 300, "test": 100}


def write_visits(root: Path) -> None:
    """Texts, nulls, a list, buckets and odd names, of which `kind` and `price` decide the label `rating`, a number."""
    rng, total = np.random.default_rng(5), sum(RECORDS.values())
    kinds, price = rng.choice(["a", "b", "c"], total), rng.normal(10, 3, total)
    user, item = rng.integers(0, 20, total), rng.integers(0, 15, total)
    rating = price / 3 + 2.0 * (kinds == "b") + 0.1 * rng.normal(size=total)
    # `late` is in the test rows only.
    names = [
        None if i % 11 == 0 else "late" if i >= RECORDS["train"] and i % 5 == 0 else kind
        for i, kind in enumerate(kinds)
    ]
    fields = (
        Field(name="who.`is`", dtype="string", encoding={"kind": "hash", "buckets": 8, "seed": 42}),
        Field(name="item", dtype="int64", encoding={"kind": "ignore"}),
        Field(name="kind", dtype="string", nullable=True, encoding={"kind": "hash", "buckets": 4, "seed": 42}),
        Field(name="price", dtype="float64", nullable=True, encoding={"kind": "number", "null_value": 0}),
        Field(name="hour", dtype="int64", nullable=True, encoding={"kind": "bucketise", "boundaries": [6, 12.5]}),
        Field(
            name="tags", dtype="string", shape=(None,),
            encoding={"kind": "hash", "buckets": 8, "seed": 42},
        ),
        Field(name="gaps", dtype="float32", shape=(None,), encoding={"kind": "sequence", "length": 2}),
        Field(name="rating", dtype="float64", kind="label"),
    )  # fmt: skip
    schema = Schema((sample_id_field(), *fields))
    columns = [
        _ids(total),
        [f"u{number}" for number in user],
        item.tolist(),
        names,
        [None if i % 13 == 0 else value for i, value in enumerate(price)],
        [None if i % 7 == 0 else i % 24 for i in range(total)],
        [["x", "y"][: i % 3] for i in range(total)],
        [[1.0]] * total,
        rating.tolist(),
    ]
    arrays = [pa.array(values, field.type) for values, field in zip(columns, schema.arrow_schema(), strict=True)]
    rows = pa.RecordBatch.from_arrays(arrays, schema=schema.arrow_schema())
    write_rows(str(root), schema, rows, RECORDS, "tfrecord", 2, 16, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`table` (yes or no), `images` (Parquet, four classes), `clicks` (weights), `visits` (a number), `zeros` and
    `counts` (whole numbers)."""
    root = tmp_path_factory.mktemp("baselines")
    write_table(root / "table", records=RECORDS)
    write_images(root / "images", records=RECORDS)
    write_clicks(root / "clicks", records={"train": 600, "test": 300}, log_odds=-2.0)
    write_visits(root / "visits")
    schema = Schema((sample_id_field(), Field(name="x", dtype="int64"), Field(name="y", dtype="int64", kind="label")))
    for name, most in (("zeros", 2), ("counts", 3)):
        values = pa.array([number % most for number in range(400)])
        rows = pa.RecordBatch.from_arrays([_ids(400), values, values], schema=schema.arrow_schema())
        write_rows(str(root / name), schema, rows, RECORDS, "tfrecord", 1, 64, 0)
    return root


def config(folder: Path, name: str, kind: str, *settings: str, **options: Any) -> BaselineConfig:
    return BaselineConfig(dataset=str(folder / name), kind=kind, settings=settings, **options)


def scores(found: Predicted) -> dict[str, Any]:
    assert found.rows is not None
    return dict(scores_of(found.rows, found.classes, probabilities=found.probabilities)["metrics"])


Asked = tuple[str, str, tuple[str, ...], str, float]
FEW: tuple[Asked, ...] = (
    ("table", "linear-svc", ("maxIter=20",), "roc_auc", 0.95),
    ("images", "tree", ("maxDepth=3",), "accuracy", 0.7),
    ("visits", "als", ("rank=2", "numUserBlocks=1", "numItemBlocks=1"), "r2", -2.0),
)
OTHERS: tuple[Asked, ...] = (
    ("zeros", "gaussian-mixture", ("k=3",), "roc_auc", 0.8),
    ("images", "kmeans", ("k=8",), "accuracy", 0.7),
    ("clicks", "logistic", (), "roc_auc", 0.6),
    ("clicks", "gbt", ("maxIter=2",), "roc_auc", 0.55),
    ("visits", "linear-regression", (), "r2", 0.8),
    ("visits", "forest", ("numTrees=10", "maxDepth=8"), "r2", 0.6),
)


def test_all_kinds_are_asked() -> None:
    assert {kind for _, kind, *_ in (*FEW, *OTHERS)} == {*KINDS}


@pytest.mark.slow
@pytest.mark.parametrize("asked", [FEW, pytest.param(OTHERS, marks=pytest.mark.soak)], ids=["few", "others"])
def test_each_kind_learns_what_decides_the_label(spark: SparkSession, folder: Path, asked: tuple[Asked, ...]) -> None:
    for name, kind, settings, metric, least in asked:
        columns = {"user": "who.`is`", "item": "item"} if kind == "als" else {}
        most = 0 if kind in ("tree", "forest", "gbt") else MAX_COLLECTED  # 0: too many rows to collect
        found = train_and_predict(spark, config(folder, name, kind, *settings, **columns), most_values=most)
        metrics = scores(found) if most else found.metrics
        assert metrics[metric] > least, (name, kind, metrics)
        assert (found.rows is None) == (most == 0)
        if kind == "linear-regression":
            assert found.about["left_out"] == ["item", "gaps"]
            assert found.about["features"] == 1 + 9 + 4 + 4 + 8  # price, who, kind, hour, tags
        if kind == "linear-svc":
            many = train_and_predict(spark, config(folder, name, kind, *settings), most_values=0)
            assert many.metrics == pytest.approx({key: metrics[key] for key in ("roc_auc", "accuracy")}, rel=1e-12)
    assert not list(folder.glob(".*")), "checkpoints of als are deleted"
    with pytest.raises(ConfigError, match="--set maxDepth=-3"):
        train_and_predict(spark, config(folder, "table", "tree", "maxDepth=-3"))
    with pytest.raises(ConfigError) as caught:
        train_and_predict(spark, config(folder, "counts", "logistic"))
    assert "numbers such as 0, 1, 2" in caught.value.got


def write_wide(root: Path, categories: int, total: int) -> pd.DataFrame:
    """Two columns of so many texts each, whose effects decide the label with a number's; half of the rows train."""
    rng = np.random.default_rng(7)
    texts = rng.zipf(1.3, (total, 2)) % categories
    price, effects = rng.normal(size=total), rng.normal(size=(2, categories))
    odds = effects[0][texts[:, 0]] + effects[1][texts[:, 1]] + price
    frame = pd.DataFrame({"site": [f"s{n}" for n in texts[:, 0]], "app": [f"a{n}" for n in texts[:, 1]]})
    frame["price"], frame["label"] = price, rng.random(total) < 1 / (1 + np.exp(-odds))
    hashed = {"kind": "hash", "buckets": categories, "seed": 42}
    fields = (
        Field(name="site", dtype="string", encoding=hashed), Field(name="app", dtype="string", encoding=hashed),
        Field(name="price", dtype="float64"), Field(name="label", dtype="bool", kind="label"),
    )  # fmt: skip
    schema = Schema((sample_id_field(), *fields))
    arrays = [_ids(total), *(pa.array(frame[field.name]) for field in fields)]
    rows = pa.RecordBatch.from_arrays(arrays, schema=schema.arrow_schema())
    write_rows(str(root), schema, rows, {"train": total // 2, "test": total - total // 2}, "parquet", 1, 4096, 0)
    return frame


@pytest.mark.slow
def test_trees_split_categories_as_plain_spark_s_do_and_name_their_size_and_deadline(
    spark: SparkSession, tmp_path: Path
) -> None:
    from pyspark.ml.classification import GBTClassifier
    from pyspark.ml.feature import StringIndexer, VectorAssembler

    half, categories = 4000, 7000  # 14,000 one-hot columns
    frame = write_wide(tmp_path / "wide", categories, 2 * half)
    said: list[str] = []
    found = train_and_predict(spark, config(tmp_path, "wide", "gbt", "maxIter=2"), show=said.append)
    assert found.about["features"] == 3 and len(said) == 1
    assert said[0].startswith("gbt: 4,000 rows of 3 columns, 0 MiB in memory; 2 trees of depth 5, under a minute on ")

    ids = ["site_id", "app_id"]
    everything = spark.createDataFrame(frame.astype({"label": "int"}).assign(row=range(2 * half))).coalesce(1)
    train, test = everything.where(f"row < {half}"), everything.where(f"row >= {half}").orderBy("row")
    indexer = StringIndexer(inputCols=["site", "app"], outputCols=ids, handleInvalid="keep").fit(train)
    vectors = VectorAssembler(inputCols=[*ids, "price"], outputCol="features")
    plain = GBTClassifier(labelCol="label", maxIter=2, maxBins=1000, seed=0)
    fitted = plain.fit(vectors.transform(indexer.transform(train)))
    scored = fitted.transform(vectors.transform(indexer.transform(test))).select("label", "probability").toPandas()
    theirs = roc_auc_score(scored["label"], [float(value[1]) for value in scored["probability"]])
    assert scores(found)["roc_auc"] == pytest.approx(theirs, abs=0.02) and theirs > 0.6
    with pytest.raises(LockstepError, match="the baseline gbt has not ended in time"):
        train_and_predict(spark, config(tmp_path, "wide", "gbt", deadline_s=0.5))


def test_trees_of_too_many_rows_and_columns_are_refused_with_their_size_and_time() -> None:
    estimator = MagicMock()
    estimator.getOrDefault = {"maxIter": 20, "maxDepth": 5}.__getitem__
    Growth.of("gbt", 72_000, 39, estimator, 2).check()
    with pytest.raises(ConfigError) as caught:
        Growth.of("gbt", 1_000_000, 14_000, estimator, 2).check()
    assert "1,000,000 rows of 14,000 columns, 53,406 MiB in memory; 20 trees of depth 5, some " in caught.value.got


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kmeans", pytest.param("gaussian-mixture", marks=pytest.mark.soak)])
def test_clusters_need_no_label(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    """Two clouds: each is a cluster, and the silhouette is scikit-learn's."""
    rng, total = np.random.default_rng(3), sum(RECORDS.values())
    cloud = np.arange(total) % 4 // 3  # a quarter of the rows
    points = rng.normal(size=(total, 2)) + 12.0 * cloud[:, None]
    fields = (sample_id_field(), Field(name="x", dtype="float64"), Field(name="y", dtype="float64"))
    label = Field(name="price", dtype="float64", kind="label")
    for name, schema in (("bare", Schema(fields)), ("priced", Schema((*fields, label)))):
        values = [_ids(total), points[:, 0], points[:, 1], points.sum(axis=1)][: len(schema.arrow_schema())]
        arrays = [pa.array(one, field.type) for one, field in zip(values, schema.arrow_schema(), strict=True)]
        rows = pa.RecordBatch.from_arrays(arrays, schema=schema.arrow_schema())
        write_rows(str(tmp_path / name), schema, rows, RECORDS, "tfrecord", 1, 64, 0)
    train, test = np.split(points, [RECORDS["train"]])
    scaled = (test - train.mean(0)) / train.std(0, ddof=1)
    expected = silhouette_score(scaled, cloud[RECORDS["train"] :], metric="sqeuclidean")
    for name in ("bare", "priced") if kind == "kmeans" else ("bare",):
        found = train_and_predict(spark, config(tmp_path, name, kind, "k=2"))
        assert found.rows is None and found.classes is None
        assert found.metrics == {"silhouette": pytest.approx(expected, rel=1e-9)}
        assert sorted(found.about["cluster_rows"].values()) == [25, 75]
    with pytest.raises(ConfigError, match="no label"):
        check(config(tmp_path, "bare", "logistic"))


@pytest.mark.parametrize(
    ("name", "kind", "options", "got"),
    [
        ("table", "forrest", {}, "forrest (perhaps `forest`)"),
        ("table", "linear-regression", {}, "linear-regression for the label `label`, 2 classes"),
        ("images", "gbt", {}, "4 classes"),
        ("visits", "logistic", {}, "logistic for the label `rating`, a number"),
        ("table", "gbt", {"split": "tset"}, "tset (perhaps `test`)"),
        ("table", "gbt", {"train_split": "train,validation"}, "validation"),
        ("table", "gbt", {"train_split": "train,train"}, "train,train"),
        ("table", "gbt", {"seed": 2**63}, str(2**63)),
        ("table", "gbt", {"settings": ("maxDept=3",)}, "maxDept (perhaps `maxDepth`)"),
        ("table", "gbt", {"settings": ("maxDepth=deep",)}, "Could not convert"),
        ("table", "gbt", {"settings": ("labelCol=a",)}, "labelCol"),
        ("table", "gbt", {"user": "a"}, "--user"),
        ("visits", "als", {"user": "item"}, "--user"),
        ("visits", "als", {"user": "item", "item": "itme"}, "itme (perhaps `item`)"),
    ],
)
def test_what_cannot_be_fitted_is_refused_before_spark_starts(
    folder: Path, name: str, kind: str, options: dict[str, Any], got: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(config(folder, name, kind, *options.pop("settings", ()), **options))
    assert got in caught.value.got and caught.value.allowed and caught.value.next_step


def test_settings_are_typed_as_the_parameters_are(folder: Path) -> None:
    settings = ("maxDepth=3", "stepSize=1", "lossType=logistic", "cacheNodeIds=true")
    assert check(config(folder, "table", "gbt", *settings)).settings == {
        "maxDepth": 3, "stepSize": 1.0, "lossType": "logistic", "cacheNodeIds": True,
    }  # fmt: skip
    with pytest.raises(NotFoundError):
        check(config(folder, "nothing", "gbt"))
