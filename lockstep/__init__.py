"""Lockstep: datasets written by Spark, and Keras models trained on them by ranks that make each step together.

The names of `__all__` are public; everything else is internal and may change. `import lockstep` loads none of Spark,
TensorFlow, pyarrow and numba: a name loads what it needs when you first use it.

A path is a text (or a pathlib.Path): a local path, or a URL such as hdfs://namenode:8020/data/clicks. Wrong arguments
raise ConfigError, a path that does not exist NotFoundError, damaged data DataError; all are LockstepError.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack

from lockstep.process.faces import face
from lockstep.process.installed import VERSION as __version__
from lockstep.storage.errors import ConfigError, LockstepError, nearest
from lockstep.storage.shown import Shown, ShownList
from lockstep.storage.urls import absolute, several

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import SparkSession
    from pyspark.sql._typing import UserDefinedFunctionLike

    from lockstep import data, embeddings, horovod, on_ranks, optimizers, petastorm
    from lockstep.etl.frames import propose_schema
    from lockstep.etl.write.dataset import write_dataset
    from lockstep.features.arrow import ArrowTable
    from lockstep.features.schema.declare import load_schema
    from lockstep.features.schema.signature import Signature
    from lockstep.options import FoldOptions, ImagesOptions, LogsOptions, TrainOptions
    from lockstep.storage.dataset.manifest import DatasetManifest
    from lockstep.storage.verify import Finding
    from lockstep.training.config import TrainConfig
    from lockstep.training.launch.session import Launch
    from lockstep.training.models import ModelOptions
    from lockstep.training.results.trained_run import TrainedRun
    from lockstep.training.run.metrics import History

    Model: TypeAlias = str | Callable[[Signature, ModelOptions], object]
    Rows: TypeAlias = pd.DataFrame | ArrowTable | Mapping[str, object]

__all__ = [
    "LockstepError", "ModelOptions", "Signature", "TrainConfig", "__version__", "cross_validate", "data", "describe",
    "embeddings", "evaluate", "horovod", "load_schema", "on_ranks", "optimizers", "petastorm", "predict", "predict_udf",
    "propose_schema", "read_history", "read_manifest", "spark_session", "train", "tune", "verify", "write_dataset",
    "write_images", "write_logs",
]  # fmt: skip

_MODULES = {
    **dict.fromkeys(("data", "embeddings", "horovod", "on_ranks", "optimizers", "petastorm"), "lockstep"),
    "ModelOptions": "lockstep.training.models",
    "Signature": "lockstep.features.schema.signature",
    "TrainConfig": "lockstep.training.config",
    "load_schema": "lockstep.features.schema.declare",
    "propose_schema": "lockstep.etl.frames",
    "write_dataset": "lockstep.etl.write.dataset",
}

if not TYPE_CHECKING:  # a type checker would assume that every name exists
    __getattr__, __dir__ = face(__name__, _MODULES, __all__)


def spark_session(
    app_name: str = "lockstep", master: str | None = None, *, code: str | os.PathLike[str] | None = None
) -> SparkSession:
    """A Spark session with the settings that Lockstep needs, its code on the executors, and your own modules.

    It ends with `spark.stop()`, or at the end of a `with` block; a call while it runs returns the same session. The
    master is `master` if given, else that of spark-submit, else `local[*]`. `code` is the folder whose Python files
    executors get, as they are now: by default that of your script, in a notebook the current one. Raises ConfigError
    for a master that Spark does not know, a folder that does not exist, and if Java cannot be started.

    >>> import lockstep
    >>> with lockstep.spark_session("count", "local[2]") as spark:
    ...     print(spark.range(500).count())
    500
    """
    from lockstep.process.own_code import CodeFolder
    from lockstep.spark.session import spark_session

    if code is None:
        return spark_session(app_name, master, code=CodeFolder.of_script(sys.path[0]))
    own = CodeFolder.of_call(os.fspath(code))
    assert own is not None, "it is named"
    own.use()
    return spark_session(app_name, master, code=own)


def read_manifest(dataset: str | os.PathLike[str]) -> DatasetManifest:
    """Read and check the manifest of a dataset: `splits` (by name, each with `records` and `shards`), `counts`,
    `schema` (JSON), `digest` (equal for equal bytes). Reads no shard.

    Raises NotFoundError if there is no dataset, CorruptionError for a damaged manifest.

    >>> import lockstep
    >>> lockstep.read_manifest("data").splits["train"].records
    100
    """
    from lockstep.storage.dataset.manifest import load_dataset

    return load_dataset(os.fspath(dataset))


def describe(dataset: str | os.PathLike[str], max_records: int = 100_000) -> str:
    """Describe a dataset as a text: schema, counts, sizes in bytes, shards, and statistics of each column over about
    `max_records` records.

    Raises ConfigError for max_records below 1, NotFoundError if there is no dataset, DataError for a damaged one.

    >>> import lockstep
    >>> "written" in lockstep.describe("data")
    True
    """
    from lockstep.etl.describe.dataset import describe
    from lockstep.etl.describe.text import as_text

    return as_text(describe(os.fspath(dataset), max_records))


def verify(path: str | os.PathLike[str]) -> list[Finding]:
    """Read every byte of a dataset, checkpoint, exported model or run, and compare it with its digests.

    Returns a Finding for each fault (`path`, `record` and `offset` in bytes if known, `what`), none if all is intact.
    Raises NotFoundError if there is nothing, ConfigError for another kind of path, StorageError if the storage fails.

    >>> import lockstep
    >>> lockstep.verify("data")
    []
    """
    from lockstep.storage.verify import verify

    return ShownList(verify(os.fspath(path)))


def write_logs(
    spark: SparkSession,
    inputs: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    **options: Unpack[LogsOptions],
) -> DatasetManifest:
    """Write web logs, or records of a declared schema, as the dataset `output`; the job is `lockstep etl_logs`.

    `inputs` are files or folders of lines, also compressed. `options` are the other fields of LogsConfig, such as
    log_format, schema, label, split or max_bad (the share of rejected lines with which it still succeeds); with
    append_to, those left out are as that dataset was made. Nothing appears at `output` before the dataset is complete;
    rejected lines are kept next to it, each with its place.

    Raises ConfigError for invalid arguments, NotFoundError for an absent input, ExistsError for an existing output,
    DataError for too many rejected lines or an input that is not such a log.

    >>> import lockstep
    >>> line = '{}.example.net - - [09/Jul/1995:00:{:02}:07 -0400] "GET /page{}.html HTTP/1.0" 200 100'
    >>> with open("access.log", "w") as file:
    ...     _ = file.writelines(line.format(n % 40, n // 50, n % 7) + chr(10) for n in range(3000))
    >>> with lockstep.spark_session("requests", "local[2]") as spark:
    ...     manifest = lockstep.write_logs(spark, "access.log", "requests", split="group:visitor:80/20")
    >>> manifest.counts.read, manifest.counts.quarantined
    (3000, 0)
    """
    from lockstep.etl.continued import continued
    from lockstep.etl.logs.config import LogsConfig
    from lockstep.etl.logs.job import run

    _require_known("write_logs", options, LogsConfig.__dataclass_fields__.keys() - {"inputs", "output"})
    values = {"inputs": several(inputs), "output": absolute(output), **options}
    return run(spark, LogsConfig(**continued(values, values.keys())))


def write_images(
    spark: SparkSession,
    inputs: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    **options: Unpack[ImagesOptions],
) -> DatasetManifest:
    """Write an image set as the dataset `output`: `image` (height, width, channels) uint8, and `label`, int64 from 0.

    `inputs` are files, archives or folders; the job is `lockstep etl_images`. `options` are the other fields of
    ImagesConfig, such as source (idx, the default, cifar10, cifar100, npz, folder, tar or parquet), image_size
    (height, width), split or store; with append_to, those left out are as that dataset was made. Nothing appears at
    `output` before the dataset is complete; images that cannot be read are kept next to it, each with its file.

    Raises ConfigError for invalid arguments, NotFoundError for an absent input, ExistsError for an existing output,
    DataError for too many rejected images or files that do not hold what they should.

    >>> import lockstep, os
    >>> from PIL import Image
    >>> for n in range(60):
    ...     os.makedirs(f"pictures/{n % 2}", exist_ok=True)
    ...     Image.new("L", (8, 8), 4 * n).save(f"pictures/{n % 2}/{n}.png")
    >>> with lockstep.spark_session("pictures", "local[2]") as spark:
    ...     manifest = lockstep.write_images(spark, "pictures", "images", source="folder", image_size=(8, 8))
    >>> manifest.counts.read, manifest.counts.quarantined
    (60, 0)
    """
    from lockstep.etl.continued import continued
    from lockstep.etl.images.config import ImagesConfig
    from lockstep.etl.images.job import run

    _require_known("write_images", options, ImagesConfig.__dataclass_fields__.keys() - {"inputs", "output"})
    values = {"inputs": several(inputs), "output": absolute(output), **options}
    return run(spark, ImagesConfig(**continued(values, values.keys())))


def train(
    datasets: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    run: str | os.PathLike[str],
    model: Model,
    *,
    global_batch: int,
    epochs: int,
    num_ranks: int = 1,
    spark: SparkSession | None = None,
    take_over: bool = False,
    **options: Unpack[TrainOptions],
) -> TrainedRun:
    """Train a Keras model on one or more datasets; the same call resumes an interrupted run, and returns the result
    of a finished one.

    `model` is a ready model (docs/ready-models.md), `module:function`, or a function of (signature, options) that
    returns a compiled keras.Model; `extra={"width": 64}` are its settings. A function that ranks cannot import, such as
    one of a notebook's cell, is sent to them by cloudpickle, up to 1 MiB with all that it refers to; pass it again to
    resume. `global_batch` is the samples of one step over all ranks. Ranks are processes of this host or, with `spark`,
    run in a barrier stage of that session. `take_over` replaces another driver of the same run. `options` are the other
    fields of TrainConfig, such as seed, augment, checkpoint_every or learning_rate.

    In a notebook the cell shows a line of progress and the curves so far, elsewhere stderr a bar or lines. An interrupt
    (Ctrl-C, or the kernel's) lets the ranks write a checkpoint first; the same call resumes from there.

    With keep_best, the model has the weights of the best checkpoint, `best` (`step`, `value`, `metrics`), else of the
    last step. The result has `metrics` (of the last epoch), `steps`, `epochs` (that were trained, of `epochs_asked`),
    `seconds`, `first_step_s`, `samples_per_s` (after the first step), `checkpoint`, `model` (the URL of the exported
    model), and the methods `evaluate(split)` and `predict(rows)`. Raises ConfigError for invalid arguments, DataError
    for damaged data, TrainingFailedError when ranks keep failing, SupersededError when another driver takes the run
    over.

    >>> import lockstep
    >>> result = lockstep.train("data", "run", "logistic", global_batch=16, epochs=1, num_ranks=2)
    >>> result.steps, "loss" in result.metrics
    (6, True)
    """
    from lockstep.training.config import option_names
    from lockstep.training.driver.live import progress_here
    from lockstep.training.driver.preflight import preflight_before_spark
    from lockstep.training.driver.train import Hooks, train
    from lockstep.training.results.trained_run import TrainedRun

    _require_known("train", options, set(option_names()) - {"launcher"})  # that is `spark`
    asked = {"num_ranks": num_ranks, "global_batch": global_batch, "epochs": epochs, **options}
    config, function = _config_and_text(datasets, run, model, spark, asked)
    checked = preflight_before_spark(config)
    hooks, launch = Hooks(model_function=function, progress=progress_here()), _launch(spark)
    return TrainedRun.of(train(config, launch, take_over=take_over, hooks=hooks, checked=checked), launch)


def cross_validate(
    dataset: str | os.PathLike[str],
    run: str | os.PathLike[str],
    model: Model,
    *,
    global_batch: int,
    epochs: int,
    num_ranks: int = 1,
    spark: SparkSession | None = None,
    take_over: bool = False,
    **options: Unpack[FoldOptions],
) -> dict[str, Any]:
    """Train a model once for each fold of a dataset, and evaluate it on the fold that was held out.

    `dataset` has a split `kfold:K`. `run` is a directory for the K runs; the same call resumes. All other arguments are
    those of `train`. Returns `folds`, a list of {fold, run, model, samples, metrics}, `metrics`: {name: {mean, std,
    n}}, the standard deviation over n folds divided by n - 1, and `pooled`: samples, metrics and intervals (95 %) of
    all held-out rows, each predicted by the model that has not seen it. Raises what `train` and `evaluate` raise.

    >>> import lockstep
    >>> result = lockstep.cross_validate("folds", "cv", "logistic", global_batch=16, epochs=1)
    >>> [fold["samples"] for fold in result["folds"]], result["metrics"]["auc"]["n"]
    ([50, 50], 2)
    """
    from lockstep.process.own_code import imported_here
    from lockstep.training.config import option_names
    from lockstep.training.driver.train import Hooks
    from lockstep.training.models import check_name
    from lockstep.training.search.folds import cross_validate, summary
    from lockstep.training.search.space import NOT_OF_FOLDS

    known = set(option_names()) - {"launcher", *NOT_OF_FOLDS}
    _require_known("cross_validate", options, known)
    asked = {"num_ranks": num_ranks, "global_batch": global_batch, "epochs": epochs, **options}
    config, function = _config_and_text(dataset, run, model, spark, asked)
    check_name(config.model.model, config.model.extra, here=imported_here(config.ranks.launcher))
    result = cross_validate(config, _launch(spark), take_over=take_over, hooks=Hooks(model_function=function))
    return Shown(result, summary)


def tune(
    datasets: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    search: str | os.PathLike[str],
    model: Model,
    space: Mapping[str, object],
    *,
    metric: str,
    global_batch: int,
    epochs: int,
    trials: int | None = None,
    parallel: int = 1,
    sampler: Literal["tpe", "random", "grid"] = "tpe",
    pruner: Literal["none", "median", "hyperband"] = "none",
    test: str | None = None,
    num_ranks: int = 1,
    spark: SparkSession | None = None,
    take_over: bool = False,
    **options: Unpack[TrainOptions],
) -> dict[str, Any]:
    """Search for the hyper-parameters of a model; the same call resumes a search. The job is `lockstep tune`.

    `search` is its directory. `space` has a range {"low": 1e-3, "high": 1.0, "log": True} or {"choices": [16, 32]} for
    names of options, or for settings of the model ("set.width"). `metric` is NAME:max or NAME:min of an epoch's
    metrics, such as val_auc:max with validate="val". `trials` is their number (None: the whole grid), `parallel` how
    many train at once, each on `num_ranks` ranks; a barrier session needs slots for all. The best trial is evaluated on
    the split `test`, which no trial may see (None: the one of this name, if there is one). All other arguments are
    those of `train`.

    Returns the best trial (`trial`, `parameters`, `value`, `run`, `model`, `flags`, `report`), `chosen_on`, the split
    that chose it, `test` (None, or its split, samples, metrics and intervals on the split apart), and `trials`, a list
    of {trial, run, parameters, state, value, epochs} with the state done, pruned or failed. Raises what `train` raises,
    ConfigError also for a space that does not fit, TrainingFailedError if no trial has a value.

    >>> import lockstep
    >>> space = {"learning_rate": {"choices": [0.01, 0.1]}}
    >>> found = lockstep.tune(
    ...     "data", "search", "logistic", space, metric="auc:max", sampler="grid", global_batch=16, epochs=1
    ... )
    >>> [trial["state"] for trial in found["trials"]], found["value"] == found["trials"][found["trial"]]["value"]
    (['done', 'done'], True)
    """
    from lockstep.process.own_code import imported_here
    from lockstep.training.config import option_names
    from lockstep.training.driver.train import Hooks
    from lockstep.training.models import check_name
    from lockstep.training.search.config import SearchConfig
    from lockstep.training.search.live import search_progress_here
    from lockstep.training.search.space import space_of
    from lockstep.training.search.tune import summary_of_search, trials_of, tune

    _require_known("tune", options, set(option_names()) - {"launcher"})
    asked = {"num_ranks": num_ranks, "global_batch": global_batch, "epochs": epochs, **options}
    base, function = _config_and_text(datasets, search, model, spark, asked)
    check_name(base.model.model, base.model.extra, here=imported_here(base.ranks.launcher))
    config = SearchConfig(
        base=base, space=space_of(space, "`space`"), metric=metric, trials=trials, parallel=parallel,
        sampler=sampler, pruner=pruner, test=test,
    )  # fmt: skip
    hooks, progress = Hooks(model_function=function), search_progress_here()
    best = tune(config, _launch(spark), take_over=take_over, hooks=hooks, progress=progress)
    return Shown({**best, "trials": trials_of(config)}, summary_of_search)


def evaluate(
    run: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    dataset: str | os.PathLike[str],
    split: str = "test",
    *,
    where: str | None = None,
    baseline: str | None = None,
    slices: str | Iterable[str] = (),
    clusters: str | None = None,
    checkpoint: int | Literal["last", "best"] | None = None,
    batch: int = 512,
    num_ranks: int = 1,
    spark: SparkSession | None = None,
) -> dict[str, Any]:
    """Evaluate the newest model (or else checkpoint) of a run on a split of a dataset; of several runs the mean of
    their models' probabilities, and each model.

    `where` is a condition in SQL, such as "age >= 18": only samples that meet it are evaluated.
    `baseline` is `majority`, `rate:COLUMN` (the mean label of each value of a column in the training data), or for
    numbers `mean` or `median`, evaluated on the same rows.
    `slices` are stored columns whose parts are evaluated too: COLUMN, or for times COLUMN:day or
    COLUMN:hour. Rows of one value of the stored column `clusters`, such as a visitor, depend on each other: intervals
    count its values (by default of the column of a split by group, if it is stored). `checkpoint` is one to evaluate in
    place of the newest model: `last`, `best` (by keep_best) or a step. `batch` is the rows that a rank computes at a
    time. Ranks are processes of this host or, with `spark`, run in a barrier stage.

    Returns `samples`, `metrics` ({name: value}), `intervals` (95 %, {name: [low, high]}), `chosen_on` (what chose the
    model by these rows, so that its figures are optimistic), `class_counts`,
    `calibration`, `roc`, `confusion`, `slices`, of the baseline `baseline` and `difference`, of several runs `members`.
    Raises ConfigError for invalid arguments, NotFoundError for a run, dataset or split that does not exist.

    >>> import lockstep
    >>> result = lockstep.evaluate("run", "data", "test", baseline="majority")
    >>> result["samples"], 0 <= result["metrics"]["auc"] <= 1
    (30, True)
    """
    from lockstep.training.results.evaluate import EvaluateRequest, evaluate, summary
    from lockstep.training.results.importable import check_importable

    for one in several(run):
        check_importable(absolute(one), here=spark is None)
    request = EvaluateRequest(
        several(run), os.fspath(dataset), split, num_ranks=num_ranks, batch=batch, baseline=baseline,
        slices=several(slices), clusters=clusters, checkpoint=checkpoint, where=where,
    )  # fmt: skip
    return Shown(evaluate(request, _launch(spark)), summary)


def predict(
    run: str | os.PathLike[str],
    rows: Rows | None = None,
    *,
    images: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    batch: int = 512,
) -> Any:
    """Predict raw rows, or picture files, with the newest model of a run, or with an exported model, in this process.

    `rows` are a pandas DataFrame, a pyarrow Table or a dict of columns, with the columns of the dataset's declared
    schema that are features; label, sample id and others are ignored. They are encoded as the training data was; in a
    nullable column a NaN of pandas or NumPy is null. `batch` is the rows computed at a time.

    Returns a NumPy array (n, outputs) as Keras' `model.predict` does, in the structure of the model's outputs.

    `images`, in place of rows, are picture files, or folders that are read with all below, for a model whose dataset
    `write_images` made. They become what that job made of its pictures. Returns a pandas DataFrame with a row for each:
    `file`, `prediction` (a number, or an array of them), and `class` and `class_name` if the label has classes.

    Raises ConfigError for missing columns and other types, DataError for a null where the schema has none and for a
    file that is no picture, NotFoundError for a run without a model and for missing files.

    >>> import lockstep
    >>> lockstep.predict("run", {"a": [0.5, 2.0], "b": [1.0, -1.0]}).shape
    (2, 1)
    """
    from lockstep.training.results.pictures import predict_raw

    return predict_raw(os.fspath(run), rows, images, batch)


def predict_udf(
    run: str | os.PathLike[str], *, batch: int = 512, returns: Literal["double", "array<float>"] | None = None
) -> UserDefinedFunctionLike:
    """A Spark UDF that predicts raw rows with the newest model of a run, or with an exported model, in the executors.

    Its one argument is a struct with the columns that `predict` takes: `df.withColumn("p", udf(struct("*")))`, or
    `spark.udf.register(NAME, udf)` for SQL. Its values are doubles, or arrays of floats if the label is a class;
    `returns` (`double` or `array<float>`) is for a model with other outputs. A Python worker loads the model once.

    Raises ConfigError for a Spark before 4.1 and NotFoundError for a run without a model; the query fails as `predict`
    does.

    >>> import lockstep
    >>> lockstep.predict_udf("run").returnType.simpleString()
    'double'
    """
    from lockstep.training.results.predict_udf import predict_udf

    return predict_udf(os.fspath(run), batch=batch, returns=returns)


def read_history(run: str | os.PathLike[str]) -> History:
    """Read the metrics that a run has written so far; the run need not have ended.

    `steps` has one row ({step, loss, ...}) for each step, `epochs` one ({epoch, metrics, ...}) for each epoch, `times`
    the seconds that each rank spent. Raises NotFoundError if there is no run, CorruptionError for a damaged part.

    >>> import lockstep
    >>> len(lockstep.read_history("run").steps)
    6
    """
    from lockstep.training.run.metrics import read_history

    return read_history(os.fspath(run))


def _require_known(function: str, options: Mapping[str, object], known: Iterable[str]) -> None:
    """Raises ConfigError for an option that `function` does not have."""
    job = {"write_logs": "etl_logs", "write_images": "etl_images"}.get(function, function)
    for name in options.keys() - known:
        raise ConfigError(
            f"{function} has no option `{name}`",
            got=name + nearest(name, known),
            allowed=", ".join(sorted(known)),
            next_step=f"Correct the option; `python -m lockstep {job} --help` explains each.",
        )


def _launch(spark: SparkSession | None) -> Launch:
    """Where ranks run: on this host, or in `spark`."""
    from lockstep.spark.session import hadoop_settings_of
    from lockstep.storage.settings import set_hadoop_settings
    from lockstep.training.launch.barrier import OnSpark
    from lockstep.training.launch.local import run_local

    if spark is None:
        return run_local
    set_hadoop_settings(hadoop_settings_of(spark))
    return OnSpark(spark)


def _config_and_text(
    datasets: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    run: str | os.PathLike[str],
    model: Model,
    spark: SparkSession | None,
    options: dict[str, Any],
) -> tuple[TrainConfig, str | None]:
    """The configuration of a call, and its model's function as text where ranks cannot import it."""
    from lockstep.training.config import TrainConfig

    name, function = _name_and_text(model)
    launcher: Literal["barrier", "local"] = "local" if spark is None else "barrier"
    config = TrainConfig(
        datasets=several(datasets), run=os.fspath(run), model=name, launcher=launcher, **options
    )  # fmt: skip
    return config.with_all_datasets(), function


def _name_and_text(model: Model) -> tuple[str, str | None]:
    """A model's name, and its function as text for the ranks where they cannot import it. Raises ConfigError."""
    if isinstance(model, str):
        return model, None
    if not inspect.isroutine(model) and not isinstance(model, partial):
        raise ConfigError(
            "the model is neither a name nor a function",
            got=repr(model)[:200],
            allowed="a name, `module:function`, or a function of (signature, options)",
            next_step="Pass a function that builds and compiles the model: each rank calls it.",
        )
    module, name = getattr(model, "__module__", ""), getattr(model, "__qualname__", "")
    if module != "__main__" and getattr(sys.modules.get(module), name, None) is model:
        return f"{module}:{name}", None
    from lockstep.training.launch.model_function import as_text
    from lockstep.training.models import SENT

    name = getattr(model, "__name__", "")
    return f"{SENT}:{name if name.isidentifier() else 'model'}", as_text(model)
