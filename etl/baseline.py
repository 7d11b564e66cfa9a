"""Baselines of pyspark.ml: an estimator fitted on the training rows of a dataset, and its predictions of another split.

This is the Spark part only. lockstep baseline computes the metrics by lockstep.training.scoring, which rooms of etl do
not import. Nothing is learned by code of our own: features go through pyspark.ml's transformers.
"""

from __future__ import annotations

import importlib
import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lockstep.etl import columns as c
from lockstep.etl.baseline_trees import MOST_BUCKETS, TREES, Growth, category_limit, indexed, within
from lockstep.etl.spark.errors import translated
from lockstep.etl.spark.session import described, watched
from lockstep.etl.spark.tasks import mapped
from lockstep.features.schema.fields import Field
from lockstep.features.schema.sampled import sampled_of
from lockstep.features.schema.schema import Schema
from lockstep.features.shards.blocks import dataset_blocks
from lockstep.storage.dataset.manifest import DatasetManifest, load_dataset
from lockstep.storage.errors import ConfigError, nearest, require
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import temporary_name
from lockstep.storage.settings import hadoop_settings, without_credentials
from lockstep.storage.urls import absolute, join

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


class Kind(NamedTuple):
    """The estimators of pyspark.ml for classes and for a number, "" where there is none; whether the former takes only
    yes or no.
    """

    of_classes: str
    of_numbers: str
    two_classes: bool = False


CLUSTERS = ("kmeans", "gaussian-mixture")
KINDS = {
    "linear-svc": Kind("classification.LinearSVC", "", two_classes=True),
    "logistic": Kind("classification.LogisticRegression", ""),
    "tree": Kind("classification.DecisionTreeClassifier", "regression.DecisionTreeRegressor"),
    "forest": Kind("classification.RandomForestClassifier", "regression.RandomForestRegressor"),
    "gbt": Kind("classification.GBTClassifier", "regression.GBTRegressor", two_classes=True),
    "kmeans": Kind("clustering.KMeans", ""),
    "gaussian-mixture": Kind("clustering.GaussianMixture", ""),
    "als": Kind("", "recommendation.ALS"),
    "linear-regression": Kind("", "regression.LinearRegression"),
}
MAX_CATEGORIES = 10_000  # of a text without a vocabulary; rarer values share one
MAX_COLLECTED = 20_000_000  # values (160 MB) that the driver collects for exact metrics
# Spark adds the sums of partitions in the order in which tasks end; one partition gives the same bits each time.
ONE_PARTITION_ROWS = 250_000


CHECKPOINT_ITERATIONS = 2  # of als


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineConfig:
    """What to train on what. Raises ConfigError for an unknown kind, and for columns that it does not take."""

    dataset: str
    kind: str
    split: str = "test"
    """The split to predict."""
    train_split: str = "train"
    """The split to train on, or folds with commas between."""
    settings: tuple[str, ...] = ()
    """NAME=VALUE: parameters of the estimator by pyspark.ml's names; values as in TOML, or plain text."""
    user: str | None = None
    item: str | None = None
    """Columns for als, of any type."""
    rating: str | None = None
    """The column that als predicts; None: the label."""
    seed: int = 0
    deadline_s: float = 3600.0
    """Seconds after which Spark's work is cancelled."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset", absolute(self.dataset))
        require(self.kind in KINDS, "--kind", self.kind + nearest(self.kind, KINDS), ", ".join(KINDS))
        given = [f"--{name}" for name in ("user", "item", "rating") if getattr(self, name) is not None]
        good = {"--user", "--item"} <= {*given} if self.kind == "als" else not given
        allowed = "--user and --item, perhaps --rating" if self.kind == "als" else "none of them: they are for als"
        require(good, f"--kind {self.kind}", ", ".join(given), allowed)
        names = self.train_split.split(",")
        require(len({*names}) == len(names), "--train-split", self.train_split, "each split once: its rows count once")
        require(self.deadline_s > 0, "--deadline", f"{self.deadline_s:g}", "a number of seconds above 0")
        require(-(2**63) <= self.seed < 2**63, "--seed", str(self.seed), "an integer from -2^63 to 2^63 - 1")


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked configuration: manifest and schema of the dataset, the label, and the settings as values."""

    manifest: DatasetManifest
    schema: Schema
    label: Field | None
    """The field of the label; None for clusters of a dataset that has no label, or whose label is not classes."""
    settings: Mapping[str, Any]


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


def check(config: BaselineConfig) -> Plan:
    """Check all that needs no Spark session: the dataset, its splits and columns, the label, the names of settings.

    Raises NotFoundError if there is no dataset, ConfigError naming the flag.
    """
    manifest = load_dataset(config.dataset)
    schema, kind, splits = Schema.from_json(manifest.schema), KINDS[config.kind], manifest.splits
    for flag, split in (("--split", config.split), *(("--train-split", one) for one in config.train_split.split(","))):
        filled = [name for name in splits if splits[name].records]
        require(split in filled, flag, split + nearest(split, filled), f"splits with records: {_listed(filled)}")
    for flag, column in (("--user", config.user), ("--item", config.item), ("--rating", config.rating)):
        known = [field.name for field in schema if not field.shape and field.kind != "id"]
        require(column in (None, *known), flag, f"{column}{nearest(column or '', known)}", f"columns: {_listed(known)}")
    label = schema.label if config.rating is None else schema[config.rating]
    numeric = label is not None and not label.shape and label.dtype not in ("string", "bytes")
    if config.kind in CLUSTERS and (
        label is None or not numeric or not _fits(KINDS[config.kind], _classes_of(label), label)
    ):
        return Plan(manifest, schema, None, _settings(config.settings, kind))
    allowed = f"a label, for als --rating; {' and '.join(CLUSTERS)} need none"
    require(numeric, "the dataset", "no label that is a number", allowed, "Correct --dataset.")
    assert label is not None
    classes = None if config.kind == "als" else _classes_of(label)
    fits = [name for name, one in KINDS.items() if _fits(one, classes, label) or (name == "als" and config.user)]
    whose = "a number" if classes is None else f"{classes} classes"
    require(config.kind in fits, "--kind", f"{config.kind} for the label `{label.name}`, {whose}", ", ".join(fits))
    return Plan(manifest, schema, label, _settings(config.settings, kind))


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
    splits, names, what = plan.manifest.splits, config.train_split.split(","), f"the baseline {config.kind}"
    records = sum(splits[name].records for name in names)
    with (
        within(spark, config.deadline_s, what),
        translated(spark, f"training {what}"),
        watched(spark, what),
        described(spark, what),
        _checkpoints(spark, config) if config.kind == "als" else nullcontext(),
    ):
        train = reduce(lambda one, more: one.unionAll(more), [_rows(spark, config, plan, name) for name in names])
        train = train.coalesce(1) if records <= ONE_PARTITION_ROWS else train
        test = _rows(spark, config, plan, config.split)
        cluster_rows, metrics = None, dict[str, float]()
        if config.kind == "als":
            classes, size, left_out = None, 0, list[str]()
            scored = _rated(train, test, config, plan)
        else:
            classes = None if plan.label is None else _classes_in(train, plan.label, config.kind)
            kind = KINDS[config.kind]
            of_classes = classes is not None or config.kind in CLUSTERS
            estimator = _estimator(kind.of_classes if of_classes else kind.of_numbers, config, plan)
            limit = category_limit(plan.settings) if config.kind in TREES else None
            train, test, left_out, most = _with_features(train, test, plan, classes, limit)
            train = train.persist()  # until the session ends
            size = int(train.head(1)[0]["features"].size)
            if limit is not None:
                estimator.setMaxBins(max(most, int(estimator.getOrDefault("maxBins"))))
                slots = 1 if records <= ONE_PARTITION_ROWS else spark.sparkContext.defaultParallelism
                growth = Growth.of(config.kind, records, size, estimator, slots)
                growth.check()
                show(growth.words())
            model = estimator.fit(train)
            scored = model.transform(test)
            if config.kind in CLUSTERS and classes is None:
                cluster_rows, metrics = _of_clusters(scored)
            else:
                output = (
                    _shares(model, train, classes or 0) if config.kind in CLUSTERS else _output(config.kind, classes)
                )
                scored = scored.select("label", output.alias("output"))
        width = 1 if classes in (None, 2) else classes or 1
        rows = None
        if cluster_rows is not None:
            pass  # without classes there is nothing to compare a row with
        elif splits[config.split].records * (1 + width) <= most_values:
            columns = [f"output[{number}] AS output_{number}" for number in range(width)]
            rows = scored.selectExpr("label", *columns).toPandas().to_numpy(np.float64)
        else:
            metrics = _by_evaluators(scored, classes, config.kind)
    sampled = sampled_of(plan.manifest)
    shares = None if sampled is None or classes is None or plan.label is None else sampled.of_classes(plan.label)
    kept = shares if shares is not None and all(shares) else None
    about = {name: value for name, value in asdict(config).items() if name != "deadline_s"}
    about |= {"settings": list(config.settings), "dataset_digest": plan.manifest.digest}
    about |= {"train_samples": records, "samples": splits[config.split].records}
    about |= {"features": size, "left_out": left_out}
    about |= {} if cluster_rows is None else {"cluster_rows": cluster_rows}
    return Predicted(classes, config.kind != "linear-svc", kept, about, rows, metrics)


def _classes_of(label: Field) -> int | None:
    return 2 if label.dtype == "bool" else label.num_classes


def _fits(kind: Kind, classes: int | None, label: Field) -> bool:
    """Whether a kind takes such a label; whole numbers that are not declared as classes may be 0 and 1."""
    if classes is None:
        return kind.of_numbers.startswith("regression") or (label.dtype == "int64" and bool(kind.of_classes))
    return bool(kind.of_classes) and (classes == 2 or not kind.two_classes)


def _classes_in(train: DataFrame, label: Field, kind: str) -> int | None:
    """The number of classes, None for a number to predict. A column of 0 and 1 is yes or no."""
    classes = _classes_of(label)
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


def _with_features(
    train: DataFrame, test: DataFrame, plan: Plan, classes: int | None, limit: int | None
) -> tuple[DataFrame, DataFrame, list[str], int]:
    """Return both frames with the columns label, weight and features (a vector), fitted on `train`; the features left
    out; and the most categories of a column. With a `limit`, for trees, categories are numbers of up to so many and not
    one-hot.
    """
    from pyspark.ml import Pipeline
    from pyspark.ml import feature as ml
    from pyspark.sql import functions as F

    weight = "1.0" if plan.schema.weight is None else c.quoted(plan.schema.weight.name)
    # Estimators would count the classes in the data, which may lack the last one.
    nominal = {"ml_attr": {"name": "label", "type": "nominal", "num_vals": classes}} if classes else {}
    label = F.lit(0.0) if plan.label is None else F.expr(c.quoted(plan.label.name)).cast("double")
    derived = [label.alias("label", metadata=nominal)]
    derived.append(F.expr(weight).cast("double").alias("weight"))
    numbers, tensors, texts, lists, left_out = [list[str]() for _ in range(5)]
    sizes, most = dict[str, int](), dict[str, int]()
    for position, field in enumerate(plan.schema.features):
        encoding, name, column = field.encoding or {}, f"f{position}", c.quoted(field.name)
        inner = encoding.get("of", encoding)
        categories = inner.get("buckets") or inner.get("ids") or inner.get("max_size")
        number = f"nanvl(CAST({column} AS double), CAST(NULL AS double))"
        if encoding.get("kind") in ("ignore", "image") or (field.is_list and not categories):
            left_out.append(field.name)
        elif field.is_tensor:
            tensors.append(name)
            derived.append(_vector(field).alias(name))
        elif field.is_list:
            lists.append(name)
            derived.append(F.expr(f"transform({column}, x -> CAST(x AS string))").alias(name))
        elif encoding.get("kind") == "bucketise":
            texts.append(name)
            bucket = " + ".join(f"CAST({number} >= {float(bound)!r}D AS int)" for bound in encoding["boundaries"])
            derived.append(F.expr(f"CAST({bucket} AS string)").alias(name))
        elif categories or field.dtype in ("string", "bytes"):
            texts.append(name)
            derived.append(F.expr(f"CAST({column} AS string)").alias(name))
        else:
            numbers.append(name)
            derived.append(F.expr(number).alias(name))
        sizes[name] = categories or MAX_CATEGORIES
    train, test = train.select(*derived), test.select(*derived)
    if numbers:  # null and NaN become the mean, as where a model is fed
        means = train.agg(*(F.mean(name).alias(name) for name in numbers)).head(1)[0]
        filled = {name: F.coalesce(F.col(name), F.lit(means[name] or 0.0)) for name in numbers}
        train, test = train.withColumns(filled), test.withColumns(filled)
    stages: list[Any] = []
    ids, hot = [f"{name}_id" for name in texts], [f"{name}_hot" for name in texts]
    if texts:
        indexer = ml.StringIndexer(inputCols=texts, outputCols=ids, handleInvalid="keep").fit(train)
        train, test = indexer.transform(train), indexer.transform(test)
        known = {name: len(labels) for name, labels in zip(texts, indexer.labelsArray, strict=True)}
        most = {name: min(known[name], sizes[name]) + 1 for name in texts}  # with the one for unseen texts
    if texts and limit is not None:
        train, test = indexed(train, most, limit), indexed(test, most, limit)
        hot = [f"{name}_tree" for name in texts]
    elif texts:
        capped = ", ".join(f"least({name}_id, {float(sizes[name])}) AS {name}_capped" for name in texts)
        stages = [
            ml.SQLTransformer(statement=f"SELECT *, {capped} FROM __THIS__"),
            ml.OneHotEncoder(inputCols=[f"{name}_capped" for name in texts], outputCols=hot, handleInvalid="keep"),
        ]
    for name in lists:
        buckets = sizes[name] if limit is None else min(sizes[name], MOST_BUCKETS)
        stages.append(ml.HashingTF(inputCol=name, outputCol=f"{name}_bag", numFeatures=buckets, binary=True))
    parts = [*hot, *(f"{name}_bag" for name in lists)]
    if numbers or tensors:
        stages.append(ml.VectorAssembler(inputCols=[*numbers, *tensors], outputCol="unscaled"))
        stages.append(ml.StandardScaler(inputCol="unscaled", outputCol="scaled", withMean=True, withStd=True))
        parts.insert(0, "scaled")
    seen = "features that are numbers, texts, lists of texts or tensors"
    require(bool(parts), "the dataset", f"only {_listed(left_out)}", seen, "Declare others, or use --kind als.")
    stages.append(ml.VectorAssembler(inputCols=parts, outputCol="features"))
    fitted = Pipeline(stages=stages).fit(train)
    made = [fitted.transform(rows).select("label", "weight", "features") for rows in (train, test)]
    return made[0], made[1], left_out, max([2, *(min(one, limit or 0) for one in most.values())])


def _vector(field: Field) -> Column:
    """A tensor's bytes as a vector of all its values."""
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions as F

    dtype = np.dtype(field.dtype).newbyteorder("<")

    values = F.udf(lambda data: np.frombuffer(data, dtype).astype(np.float64).tolist(), "array<double>")
    return array_to_vector(values(F.col(c.quoted(field.name))))


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


def _rated(train: DataFrame, test: DataFrame, config: BaselineConfig, plan: Plan) -> DataFrame:
    """Columns label and output of als. A user or item that training does not have gets the mean rating."""
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
    return fitted.transform(test).select(
        "label", F.array(F.nanvl(F.col("prediction").cast("double"), mean)).alias("output")
    )


def _estimator(name: str, config: BaselineConfig, plan: Plan) -> Any:
    """The estimator with its settings. Raises ConfigError for a value out of range."""
    from pyspark.errors import IllegalArgumentException

    estimator = _class_of(name)()
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
        raise _bad_setting(given, str(error).splitlines()[0][:300], "values in the range of each parameter") from None
    return estimator


def _class_of(name: str) -> Any:
    module, _, called = name.partition(".")
    return getattr(importlib.import_module(f"pyspark.ml.{module}"), called)


def _settings(given: Sequence[str], kind: Kind) -> dict[str, Any]:
    """NAME=VALUE as values of the parameters' types. Raises ConfigError with the nearest name."""
    if not given:
        return {}
    from pyspark.ml.param import Param

    members: dict[str, Any] = {}
    for estimator in map(_class_of, filter(None, (kind.of_numbers, kind.of_classes))):
        members |= {name: getattr(estimator, name) for name in dir(estimator)}
    known = {name: one for name, one in members.items() if isinstance(one, Param) and not name.endswith("Col")}
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if name not in known or not equals:
            raise _bad_setting(text, name + nearest(name, known), f"NAME=VALUE, with a name of {_listed(known)}")
        try:
            parsed = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            parsed = value
        try:
            found[name] = known[name].typeConverter(parsed)
        except TypeError as error:
            raise _bad_setting(text, str(error), known[name].doc) from None
    return found


def _bad_setting(text: str, got: str, allowed: str) -> ConfigError:
    next_step = "Correct --set; pyspark.ml's documentation explains each parameter."
    return ConfigError(f"--set {text} is invalid", got=got, allowed=allowed, next_step=next_step)


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


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))[:500] or "none"
