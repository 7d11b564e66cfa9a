"""Rows a second of lockstep.predict_udf and of Spark's own predict_batch_udf, with the same model, in turns.

    python -m benchmarks.predict_udf [--rows N] [--columns N] [--batch N] [--rounds N]

Float columns without an encoding, so that the peer has as much to do; both give doubles and compute --batch rows at a
time in local[2]. The peer calls `predict_on_batch` of the Keras file, and so do we. Each round is one query over cached
rows whose result is summed. The first round, in which workers load the model, is not counted.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.ml.functions import predict_batch_udf
from pyspark.sql import Column
from pyspark.sql import functions as f
from pyspark.sql.types import DoubleType

import lockstep
from benchmarks.shared.shapes import interleaved, machine, print_rates, seconds


def peer(model: str, names: list[str], batch: int) -> Any:
    """Spark's UDF of one array with the columns `names`."""

    def make() -> Callable[..., Any]:
        import keras

        loaded = keras.models.load_model(model)

        def predict(rows: Any) -> Any:  # (n, columns) float32
            return loaded.predict_on_batch({name: rows[:, at : at + 1] for at, name in enumerate(names)})[:, 0]

        return predict

    return predict_batch_udf(make, return_type=DoubleType(), batch_size=batch, input_tensor_shapes=[[len(names)]])


def main() -> None:
    """Print rows a second of both and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--columns", type=int, default=20)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(machine("pyspark", "tensorflow", "keras"))
    names = [f"x{number:02d}" for number in range(args.columns)]
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder,
        lockstep.spark_session("predict_udf", "local[2]") as spark,
    ):
        columns = [f.rand(number).cast("float").alias(name) for number, name in enumerate(names)]
        rows = spark.range(args.rows, numPartitions=4).select("id", *columns).cache()
        schema = lockstep.load_schema(
            "".join(f'[[fields]]\nname = "{name}"\ndtype = "float32"\n\n' for name in names)
            + '[[fields]]\nname = "label"\ndtype = "bool"\nkind = "label"\n'
        )
        some = rows.limit(2000).coalesce(1).withColumn("label", f.expr("x00 > 0.5"))
        lockstep.write_dataset(some, f"{folder}/data", schema=schema, id_columns="id")
        run = lockstep.train(f"{folder}/data", f"{folder}/run", "logistic", global_batch=64, epochs=1)
        udf = lockstep.predict_udf(run.run, batch=args.batch)(f.struct(*names))
        other = peer(str(Path(str(run.model), "model.keras")), names, args.batch)(f.array(*names))

        def query(column: Column) -> Callable[[], float]:
            return lambda: seconds(lambda: rows.select(column.alias("p")).agg(f.sum("p")).collect())

        both = rows.select(udf.alias("ours"), other.alias("theirs"))
        assert both.filter("abs(ours - theirs) > 1e-6").count() == 0, "the two predict the same"
        spent = interleaved({"predict_batch_udf": query(other), "lockstep": query(udf)}, args.rounds)
        print_rates(f"{args.columns} float columns, batches of {args.batch}", args.rows, spent, "predict_batch_udf")


if __name__ == "__main__":
    main()
