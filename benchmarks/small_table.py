"""A table of 8,000 rows to a dataset in a warm Spark session, against plain Spark that makes the same products.

    python -m benchmarks.small_table [--rows 8000] [--repeats 15] [--master local[2]] [--format parquet] [--jobs]

The table is a Parquet file of an id, four numbers, three texts and a yes-or-no label. All ways read that file, split
by a hash of the id into train and test (80 and 20 %), fit on train alone a vocabulary of each text and mean and
variance of each number, count the records of each split and class, order each split by a hash of the id and write it
as one file; all in turns, in one session, after two rounds that are dropped.

* `write_dataset`: lockstep.write_dataset of a data frame of that file, with a declared schema.
* `etl_table`: the job lockstep etl_table of that file, with the same schema, in the same session.
* `plain SQL`: the file is read once and cached; one aggregate counts the classes of each split, one has mean and
  variance of all numbers, one counts the texts of all columns, in order of count; repartition by split, sort by hash,
  write.partitionBy("split").parquet; a JSON file of what was fitted and counted.
* `plain write`: the split, the order and the write alone: nothing is fitted and nothing counted.
* `plain ML`: as `plain SQL`, but pyspark.ml's StringIndexer and StandardScaler (over VectorAssembler) in place of the
  second and third aggregate, as its guide shows them.

Plain Spark makes no sample ids from content, no exact sums, no check for leakage and for equal ids, no digests, index
or manifest, and publishes by Spark's own committer. --jobs lists the Spark jobs of one call, as log_job does.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

import lockstep
from benchmarks.log_job import tell_jobs
from benchmarks.shared.shapes import interleaved, machine, seconds, spread
from lockstep.etl import tables
from lockstep.etl.tables import TableConfig
from lockstep.features.schema.declare import load_schema
from lockstep.spark.session import spark_session
from lockstep.storage.dataset.layout import Format

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Fit = Callable[["DataFrame"], dict[str, Any]]
NUMBERS = {"age": "int64", "hours": "int64", "income": "float64", "score": "float32"}
TEXTS = {"city": 300, "job": 60, "device": 5}
SCHEMA = "\n".join(
    [
        '[[fields]]\nname = "visit"\ndtype = "int64"\nencoding = {kind = "ignore"}',
        *(
            f'[[fields]]\nname = "{name}"\ndtype = "{kind}"\nencoding = {{kind = "standardise"}}'
            for name, kind in NUMBERS.items()
        ),
        *(f'[[fields]]\nname = "{name}"\ndtype = "string"\nencoding = {{kind = "vocabulary"}}' for name in TEXTS),
        '[[fields]]\nname = "bought"\ndtype = "bool"\nkind = "label"\n',
    ]
)
ASIDE = 2  # rounds that are dropped


def make_table(path: Path, rows: int) -> None:
    """Write the table: texts by Zipf's law, numbers of several scales."""
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {
        "visit": np.arange(rows),
        "age": rng.integers(18, 90, rows),
        "hours": rng.integers(0, 60, rows),
        "income": rng.lognormal(10, 1, rows),
        "score": rng.random(rows, dtype=np.float32),
    }
    for name, distinct in TEXTS.items():
        columns[name] = [f"{name}-{n % distinct}" for n in rng.zipf(1.3, rows)]
    columns["bought"] = rng.random(rows) < 0.2
    pq.write_table(pa.table(columns), path)


def by_call(spark: SparkSession, table: Path, out: str, fmt: Format) -> None:
    """lockstep.write_dataset."""
    frame = spark.read.parquet(str(table))
    lockstep.write_dataset(frame, out, id_columns="visit", schema=load_schema(SCHEMA), fmt=fmt)


def by_job(spark: SparkSession, table: Path, out: str, fmt: Format) -> None:
    """What lockstep etl_table runs."""
    schema = table.with_name("schema.toml")
    schema.write_text(SCHEMA)
    config = TableConfig(inputs=(str(table),), id_columns=("visit",), schema=str(schema), output=out, fmt=fmt)
    tables.run(spark, config, tables.check(config))


def plain(spark: SparkSession, table: Path, out: str, fit: Fit | None) -> None:
    """Make the same products by Spark alone; `fit` learns from the rows of train."""
    from pyspark.sql import functions as f

    side = f.when(f.pmod(f.xxhash64("visit"), f.lit(100)) < 80, "train").otherwise("test")
    rows = spark.read.parquet(str(table)).withColumn("split", side)
    rows = rows.persist() if fit else rows
    try:
        counts = [row.asDict() for row in rows.groupBy("split", "bought").count().collect()] if fit else []
        fitted = fit(rows.where("split = 'train'")) if fit else {}
        ordered = rows.withColumn("key", f.xxhash64("visit", f.lit(1))).repartition(2, "split")
        ordered.sortWithinPartitions("split", "key").write.partitionBy("split").parquet(out)
    finally:
        rows.unpersist()
    Path(out, "_fitted.json").write_text(json.dumps({"counts": counts, **fitted}))


def fit_by_sql(train: DataFrame) -> dict[str, Any]:
    """Means, variances and vocabularies by two aggregates."""
    from pyspark.sql import functions as f

    moments = [one for name in NUMBERS for one in (f.avg(name), f.var_pop(name))]
    means = train.agg(*moments).collect()[0].asDict()
    pairs = f.explode(f.array(*(f.struct(f.lit(name).alias("field"), f.col(name).alias("token")) for name in TEXTS)))
    tokens = train.select(pairs.alias("_")).groupBy("_.field", "_.token").count().orderBy("field", f.desc("count"))
    return {"means": means, "tokens": [list(row) for row in tokens.collect()]}


def fit_by_ml(train: DataFrame) -> dict[str, Any]:
    """Fit the same by pyspark.ml."""
    from pyspark.ml.feature import StandardScaler, StringIndexer, VectorAssembler

    texts = list(TEXTS)
    indexes = StringIndexer(inputCols=texts, outputCols=[f"{name}_at" for name in texts]).fit(train)
    vectors = VectorAssembler(inputCols=list(NUMBERS), outputCol="numbers").transform(train)
    scaler = StandardScaler(inputCol="numbers", outputCol="scaled", withMean=True).fit(vectors)
    tokens = dict(zip(texts, map(list, indexes.labelsArray), strict=True))
    means, deviations = (vector.toArray().tolist() for vector in (scaler.mean, scaler.std))
    return {"means": means, "deviations": deviations, "tokens": tokens}


def cpu_of_all() -> float:
    """CPU seconds so far of this process, Java and Spark's Python workers; next to other work they vary least."""
    total = 0.0
    for process in (own := psutil.Process(), *own.children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


def main(argv: list[str]) -> int:
    """Print seconds of each way, and how many times those of each plain one; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--repeats", type=int, default=15, help=f"counted rounds, after {ASIDE} dropped ones")
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--format", choices=("tfrecord", "parquet"), default="parquet", help="of the dataset's shards")
    parser.add_argument("--jobs", action="store_true", help="only list the Spark jobs of one warm call of each way")
    args = parser.parse_args(argv)
    print(f"{machine('pyspark', 'pyarrow', 'numpy')}; {args.master}, load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as name, spark_session("small table", args.master) as spark:
        folder = Path(name)
        make_table(folder / "table.parquet", args.rows)
        ways: dict[str, Callable[[str], None]] = {
            "write_dataset": lambda out: by_call(spark, folder / "table.parquet", out, args.format),
            "etl_table": lambda out: by_job(spark, folder / "table.parquet", out, args.format),
            "plain SQL": lambda out: plain(spark, folder / "table.parquet", out, fit_by_sql),
            "plain write": lambda out: plain(spark, folder / "table.parquet", out, None),
            "plain ML": lambda out: plain(spark, folder / "table.parquet", out, fit_by_ml),
        }

        def work(way: Callable[[str], None]) -> float:
            out = folder / secrets.token_hex(8)
            before = cpu_of_all()
            took = seconds(lambda: way(str(out)))
            cpu[way].append(cpu_of_all() - before)
            shutil.rmtree(out)
            return took

        cpu: dict[Callable[[str], None], list[float]] = {way: [] for way in ways.values()}
        for way in (way for _ in range(ASIDE - 1) for way in ways.values()):
            work(way)
        if args.jobs:
            for label, way in ways.items():
                print(label)
                tell_jobs(spark, partial(work, way))
            return 0
        times = interleaved({label: partial(work, way) for label, way in ways.items()}, args.repeats)
    for label, found in times.items():
        ratios = (
            f"{spread(one / own for one, own in zip(found, times[peer], strict=True))} of {peer}"
            for peer in ("plain SQL", "plain ML", "plain write")
        )
        print(f"{label:14} {spread(found)} s, CPU {spread(cpu[ways[label]][ASIDE:])} s; {', '.join(ratios)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
