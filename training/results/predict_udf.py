"""A UDF of Spark that predicts raw rows with an exported model, in the executors' Python workers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from lockstep.storage.errors import ConfigError, require
from lockstep.storage.settings import set_hadoop_settings, settings_for_tasks
from lockstep.training.rank import runtime
from lockstep.training.results.predictor import BATCH, ExportedModel, Predictor, prediction_column

RETURNS = ("double", "array<float>")


def predict_udf(run: str, *, batch: int = BATCH, returns: str | None = None) -> Any:
    """A UDF of one struct column, which has the model's columns by name.

    Its values are doubles, or arrays of floats for a label of classes; `returns` is `double` or `array<float>` for a
    model whose outputs do not follow from its label. `batch` is the rows that are computed at a time. A worker loads
    the model once. Raises ConfigError for a Spark before 4.1, NotFoundError for a run without a model. In a task it
    raises ConfigError for missing columns and for outputs of another form, DataError as
    lockstep.training.results.predictor.
    """
    import pyspark
    from pyspark.sql import functions
    from pyspark.sql.types import ArrayType, DoubleType, FloatType

    if not hasattr(functions, "arrow_udf"):
        raise ConfigError(
            "this Spark has no UDFs over Arrow data",
            got=f"Spark {pyspark.__version__}",
            allowed="Spark 4.1 and later",
            next_step="Write the rows as a dataset and use `lockstep predict`, or upgrade Spark.",
        )
    require(returns in (None, *RETURNS), "returns", repr(returns), " or ".join(RETURNS), "Correct returns.")
    # Looked up here: the run may have a newer model while the query runs.
    exported, hadoop = ExportedModel.at(run), settings_for_tasks()
    several = exported.signature.num_classes is not None if returns is None else returns == RETURNS[1]

    def predictions(structs: Iterator[pa.Array]) -> Iterator[pa.Array]:
        set_hadoop_settings(hadoop)
        predict = _model_in_worker(exported)
        for rows in structs:
            yield prediction_column(predict(rows, batch), several=several)

    return functions.arrow_udf(predictions, ArrayType(FloatType()) if several else DoubleType())


def _model_in_worker(exported: ExportedModel) -> Predictor:
    fresh = "tensorflow" not in sys.modules
    runtime.import_tensorflow()
    if fresh:
        import tensorflow as tf

        # A worker is one task's slot of the executor: with TensorFlow's default each would use all cores.
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    return exported.predictor()
