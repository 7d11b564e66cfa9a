"""Baselines of pyspark.ml: an estimator fitted on the training rows of a dataset, and its predictions of another split.

This is the Spark part only. lockstep baseline computes the metrics by lockstep.training.scoring, which rooms of etl do
not import. Nothing is learned by code of our own: features go through pyspark.ml's transformers.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lockstep.etl import columns as c
from lockstep.etl.baseline.config import CLUSTERS, KINDS, BaselineConfig
from lockstep.etl.baseline.features import with_features
from lockstep.etl.baseline.plan import Plan, bad_setting, check, classes_of, estimator_class
from lockstep.etl.baseline.trees import TREES, Growth, category_limit, within
from lockstep.etl.spark.errors import translating_errors
from lockstep.etl.spark.session import job_description, watched
from lockstep.etl.spark.tasks import mapped
from lockstep.features.schema.fields import Field
from lockstep.features.schema.sampled import sampled_of
from lockstep.features.shards.blocks import dataset_blocks
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import require
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import temporary_name
from lockstep.storage.settings import hadoop_settings, without_credentials
from lockstep.storage.urls import join

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

MAX_COLLECTED = 20_000_000  # values (160 MB) that the driver collects for exact metrics
# Spark adds the sums of partitions in the order in which tasks end; one partition gives the same bits each time.
ONE_PARTITION_ROWS = 250_000
CHECKPOINT_ITERATIONS = 2  # of als


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predictions of a split. `rows` (n, 1 + outputs) float64: the label, then a number, the score of yes, or the
    probability of each class. None if there are too many to collect, or clusters without classes; `metrics` has those
    of Spark's evaluators then.
    """

    classes: int | None
    """The number of classes; None for a number to predict, and without a label."""
    probabilities: bool
    """Whether scores of yes are probabilities (linear-svc has distances, of which 0 separates yes from no)."""
    kept: tuple[float, ...] | None
    """The share of each class that --sample kept for training; None for all."""
    about: Mapping[str, Any]
    """What was trained on what, as JSON: the configuration, dataset_digest, train_samples, samples, features (columns
    after one-hot encoding) and left_out (features that the estimator does not see, such as encoded pictures); of
    clusters without classes also cluster_rows, how many rows of the split each cluster has.
    """
    rows: NDArray[np.float64] | None
    metrics: Mapping[str, float]


class Scored(NamedTuple):
    """What a fitted estimator says of the split's rows."""

    rows: DataFrame
    """Columns label and output, an array of doubles; the estimator's own columns if there are `cluster_rows`."""
    classes: int | None = None
    features: int = 0
    left_out: Sequence[str] = []
    cluster_rows: Mapping[str, int] | None = None
    metrics: Mapping[str, float] = {}


def train_and_predict(
    spark: SparkSession,
    config: BaselineConfig,
    plan: Plan | None = None,
    *,
    most_values: int = MAX_COLLECTED,
    show: Callable[[str], None] = lambda line: None,
) -> Predicted:
    """Fit the estimator on the training rows and predict the rows of the split; `plan` is what `check` returned.
    `show` gets a line about the size of trees before they grow.

    Raises the errors of check, ConfigError for a setting out of its range, for a label without classes and for trees of
    too many rows and columns, LockstepError after the deadline.
    """
    plan = plan or check(config)
    what = f"the baseline {config.kind}"
    with (
        within(spark, config.deadline_s, what),
        translating_errors(spark, f"training {what}"),
        watched(spark, what),
        job_description(spark, what),
        _checkpoints(spark, config) if config.kind == "als" else nullcontext(),
    ):
        parts = [_rows(spark, config, plan, name) for name in config.train_split.split(",")]
        train = reduce(lambda one, more: one.unionAll(more), parts)
        train = train.coalesce(1) if _train_records(config, plan) <= ONE_PARTITION_ROWS else train
        test = _rows(spark, config, plan, config.split)
        fit = _fit_als if config.kind == "als" else partial(_fit_estimator, show=show)
        scored = fit(train, test, config, plan)
        rows, metrics = _collect(scored, config, plan.manifest.splits[config.split].records, most_values)
    classes, sampled = scored.classes, sampled_of(plan.manifest)
    shares = None if sampled is None or classes is None or plan.label is None else sampled.of_classes(plan.label)
    kept = shares if shares is not None and all(shares) else None
    return Predicted(classes, config.kind != "linear-svc", kept, _about(config, plan, scored), rows, metrics)


def _train_records(config: BaselineConfig, plan: Plan) -> int:
    return sum(plan.manifest.splits[name].records for name in config.train_split.split(","))


def _about(config: BaselineConfig, plan: Plan, scored: Scored) -> dict[str, Any]:
    """What was trained on what, see Predicted."""
    about = {name: value for name, value in asdict(config).items() if name != "deadline_s"}
    about |= {"settings": list(config.settings), "dataset_digest": plan.manifest.digest}
    about |= {"train_samples": _train_records(config, plan), "samples": plan.manifest.splits[config.split].records}
    about |= {"features": scored.features, "left_out": scored.left_out}
    return about | ({} if scored.cluster_rows is None else {"cluster_rows": scored.cluster_rows})


def _fit_estimator(
    train: DataFrame, test: DataFrame, config: BaselineConfig, plan: Plan, *, show: Callable[[str], None]
) -> Scored:
    """Fit any estimator but als on vectors of features. `show` gets a line about the size of trees."""
    classes = None if plan.label is None else _classes_in(train, plan.label, config.kind)
    kind, clusters = KINDS[config.kind], config.kind in CLUSTERS
    estimator = _estimator(kind.of_classes if classes is not None or clusters else kind.of_numbers, config, plan)
    limit = category_limit(plan.settings) if config.kind in TREES else None
    vectors = with_features(train, test, plan, classes, limit)
    fitted_on = vectors.train.persist()  # until the session ends
    features = int(fitted_on.head(1)[0]["features"].size)
    if limit is not None:
        estimator.setMaxBins(max(vectors.most_categories, int(estimator.getOrDefault("maxBins"))))
        records = _train_records(config, plan)
        slots = 1 if records <= ONE_PARTITION_ROWS else train.sparkSession.sparkContext.defaultParallelism
        growth = Growth.of(config.kind, records, features, estimator, slots)
        growth.check()
        show(growth.words())
    model = estimator.fit(fitted_on)
    scored = model.transform(vectors.test)
    if clusters and classes is None:
        return Scored(scored, None, features, vectors.left_out, *_of_clusters(scored))
    output = _shares(model, fitted_on, classes or 0) if clusters else _output(config.kind, classes)
    return Scored(scored.select("label", output.alias("output")), classes, features, vectors.left_out)


def _collect(
    scored: Scored, config: BaselineConfig, records: int, most_values: int
) -> tuple[NDArray[np.float64] | None, Mapping[str, float]]:
    """Collect the predictions of `records` rows, or compute metrics by Spark where they are more than `most_values`."""
    if scored.cluster_rows is not None:
        return None, scored.metrics  # without classes there is nothing to compare a row with
    width = 1 if scored.classes in (None, 2) else scored.classes or 1
    if records * (1 + width) > most_values:
        return None, _by_evaluators(scored.rows, scored.classes, config.kind)
    columns = [f"output[{number}] AS output_{number}" for number in range(width)]
    return scored.rows.selectExpr("label", *columns).toPandas().to_numpy(np.float64), {}


def _classes_in(train: DataFrame, label: Field, kind: str) -> int | None:
    """The number of classes, None for a number to predict. A column of 0 and 1 is yes or no."""
    classes = classes_of(label)
    if classes is not None or label.dtype != "int64" or not KINDS[kind].of_classes:
        return classes
    found = sorted(row[0] for row in train.select(c.quoted(label.name)).distinct().limit(3).collect())
    yes_or_no = {*found} <= {0, 1}
    allowed = (
        "for it a bool, an int64 with num_classes, or only 0 and 1; or --kind linear-regression, tree, forest, gbt"
    )
    got = f"{kind} for the label `{label.name}`, numbers such as {', '.join(map(str, found))}"
    require(yes_or_no or bool(KINDS[kind].of_numbers) or kind in CLUSTERS, "--kind", got, allowed)
    return 2 if yes_or_no else None


@dataclass(frozen=True)
class _ReadIndexed:
    """The function for mapInArrow: numbers of blocks of a split in, their rows out."""

    url: str
    manifest: DatasetManifest
    split: str

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        blocks = dataset_blocks(self.url, self.manifest)[self.split]
        for batch in batches:
            for number in batch.column("id").to_pylist():
                yield from blocks[number].read()


def _rows(spark: SparkSession, config: BaselineConfig, plan: Plan, split: str) -> DataFrame:
    if plan.manifest.indexed is not None:  # Spark has other types, no classes of texts and no sample ids
        blocks = sum(len(shard.block_offsets) for shard in plan.manifest.splits[split].shards)
        read = _ReadIndexed(config.dataset, plan.manifest, split)
        return mapped(spark.range(0, blocks, 1, min(blocks, 1000)), read, plan.schema.arrow_schema())
    if plan.manifest.format == "parquet":
        shards = plan.manifest.splits[split].shards
        return spark.read.parquet(*(_for_spark(join(config.dataset, shard.path)) for shard in shards))
    asked = json.dumps([field.name for field in plan.schema if field.kind != "id"])
    reader = spark.read.format("tfrecord").option("split", split).option("columns", asked)
    return reader.option("hadoopSettings", json.dumps(without_credentials(hadoop_settings()))).load(config.dataset)


def _output(kind: str, classes: int | None) -> Column:
    """The outputs of a fitted estimator, an array of doubles."""
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F

    if classes is None:
        return F.array(F.col("prediction").cast("double"))
    outputs = vector_to_array(F.col("rawPrediction" if kind == "linear-svc" else "probability"))
    return F.array(outputs[1]) if classes == 2 else outputs


def _shares(model: Any, train: DataFrame, classes: int) -> Column:
    """The shares of the classes among the training rows of a row's cluster: the largest is the majority label."""
    from pyspark.sql import functions as F

    rows: dict[int, NDArray[np.float64]] = {}
    for found in model.transform(train).groupBy("prediction", "label").agg(F.sum("weight").alias("rows")).collect():
        rows.setdefault(int(found["prediction"]), np.zeros(classes))[int(found["label"])] += found["rows"]
    rows[-1] = np.sum([*rows.values()], axis=0)  # of all rows, for a cluster without any
    shares = {cluster: counts / (counts.sum() or 1.0) for cluster, counts in rows.items()}
    arrays = {
        cluster: F.array(*map(F.lit, (one[1:] if classes == 2 else one).tolist())) for cluster, one in shares.items()
    }
    output = arrays.pop(-1)
    for cluster, array in sorted(arrays.items()):
        output = F.when(F.col("prediction") == cluster, array).otherwise(output)
    return output


def _of_clusters(scored: DataFrame) -> tuple[dict[str, int], dict[str, float]]:
    """The rows of each cluster, and how well clusters are apart: the mean silhouette, from -1 to 1, by squared
    distances. It needs two clusters with rows.
    """
    ml: Any = importlib.import_module("pyspark.ml.evaluation")  # its types lack ClusteringEvaluator

    found = sorted(scored.groupBy("prediction").count().collect())
    rows = {str(row["prediction"]): int(row["count"]) for row in found}
    return rows, {"silhouette": ml.ClusteringEvaluator().evaluate(scored)} if len(rows) > 1 else {}


@contextmanager
def _checkpoints(spark: SparkSession, config: BaselineConfig) -> Iterator[None]:
    """A folder next to the dataset for checkpoints of als, deleted at the end. Without them a task reads the plan of
    all iterations before, which overflowed Java's stack at the tenth.
    """
    folder = temporary_name(config.dataset)
    spark.sparkContext.setCheckpointDir(_for_spark(folder))
    try:
        yield
    finally:
        filesystem(folder).delete(folder, recursive=True)


def _for_spark(url: str) -> str:
    """A URL for Spark, which takes a plain path for one of Hadoop's default file system."""
    return f"file://{url}" if url.startswith("/") else url


def _fit_als(train: DataFrame, test: DataFrame, config: BaselineConfig, plan: Plan) -> Scored:
    """Fit als on ratings. A user or item that training does not have gets the mean rating."""
    from pyspark.ml import Pipeline
    from pyspark.ml.feature import StringIndexer
    from pyspark.sql import functions as F

    asked = [F.expr(f"CAST({c.quoted(name or '')} AS string)") for name in (config.user, config.item)]
    assert plan.label is not None, "checked"
    label = F.expr(c.quoted(plan.label.name)).cast("double").alias("label")
    train, test = (rows.select(asked[0].alias("user"), asked[1].alias("item"), label) for rows in (train, test))
    ids = StringIndexer(inputCols=["user", "item"], outputCols=["user_id", "item_id"], handleInvalid="keep")
    fitted = Pipeline(stages=[ids, _estimator("recommendation.ALS", config, plan)]).fit(train)
    mean = F.lit(float(train.agg(F.mean("label")).head(1)[0][0]))
    output = F.array(F.nanvl(F.col("prediction").cast("double"), mean)).alias("output")
    return Scored(fitted.transform(test).select("label", output))


def _estimator(name: str, config: BaselineConfig, plan: Plan) -> Any:
    """The estimator with its settings. Raises ConfigError for a value out of range."""
    from pyspark.errors import IllegalArgumentException

    estimator = estimator_class(name)()
    fixed: dict[str, Any] = {"seed": config.seed} if estimator.hasParam("seed") else {}
    if config.kind == "als":
        fixed |= {"userCol": "user_id", "itemCol": "item_id", "ratingCol": "label", "coldStartStrategy": "nan"}
        fixed |= {"checkpointInterval": CHECKPOINT_ITERATIONS}
    elif plan.schema.weight is not None:
        fixed["weightCol"] = "weight"
    for key, value in {**fixed, **plan.settings}.items():
        estimator.set(estimator.getParam(key), value)
    try:
        estimator._transfer_params_to_java()  # otherwise ranges are checked only when it fits
    except IllegalArgumentException as error:
        given = ", ".join(config.settings)
        raise bad_setting(given, str(error).splitlines()[0][:300], "values in the range of each parameter") from None
    return estimator


def _by_evaluators(scored: DataFrame, classes: int | None, kind: str) -> dict[str, float]:
    """Metrics by Spark's evaluators, of more rows than the driver collects."""
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions as F

    ml: Any = importlib.import_module("pyspark.ml.evaluation")  # its types lack logLoss
    threshold = 0.0 if kind == "linear-svc" else 0.5
    score = F.col("output")[0]
    chosen = F.expr("array_position(output, array_max(output)) - 1").cast("double")
    prediction = score if classes is None else F.when(score > threshold, 1.0).otherwise(0.0) if classes == 2 else chosen
    outputs = F.array(1 - score, score) if classes == 2 else F.col("output")
    rows = scored.select(
        "label", score.alias("score"), prediction.alias("prediction"), array_to_vector(outputs).alias("p")
    )
    if classes is None:
        asked = {
            "root_mean_squared_error": "rmse",
            "mean_squared_error": "mse",
            "mean_absolute_error": "mae",
            "r2": "r2",
        }
        return {name: ml.RegressionEvaluator(metricName=metric).evaluate(rows) for name, metric in asked.items()}
    found = {"accuracy": ml.MulticlassClassificationEvaluator(metricName="accuracy").evaluate(rows)}
    if kind != "linear-svc":
        found["log_loss"] = ml.MulticlassClassificationEvaluator(metricName="logLoss", probabilityCol="p").evaluate(
            rows
        )
    if classes == 2:  # numBins=0: exact
        found["roc_auc"] = ml.BinaryClassificationEvaluator(rawPredictionCol="score", numBins=0).evaluate(rows)
    return found
