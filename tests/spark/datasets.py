"""Datasets that must be the same bytes under any Spark, Python and NumPy that is supported.

`python -m tests.spark.datasets FOLDER [NAME ...]` writes those of NAMES, or all, with whatever is installed, and prints
their digests as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.etl.logs import job
from lockstep.etl.logs.config import LogsConfig
from lockstep.etl.write.dataset import write_dataset
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError
from lockstep.storage.verify import verify

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[2]
LOG = ROOT / "data" / "weblogs" / "elastic_apache_combined_8001-9500.log.gz"
SCHEMA = Schema(
    (
        sample_id_field(),
        Field(name="bought", dtype="bool", kind="label"),
        Field(name="hour", dtype="int64", nullable=True, encoding={"kind": "standardise", "file": "hour.json"}),
        Field(name="price", dtype="float64"),
        Field(
            name="words",
            dtype="string",
            shape=(None,),
            encoding={"kind": "vocabulary", "file": "words.json", "max_size": 9, "min_count": 2, "oov_buckets": 1},
        ),
    )
)
NAMES = ("log", "tfrecord", "parquet")
ROWS = (
    "concat('visit ', id) AS visit",
    "id % 3 = 0 AS bought",
    "nullif(id % 24, 5) AS hour",
    "id / 7 AS price",
    "transform(sequence(0, id % 4), n -> concat('w', n * id % 11)) AS words",
    "id % 5 AS kind",
)


def datasets(spark: SparkSession, folder: Path, names: Sequence[str] = NAMES) -> dict[str, str]:
    """Write the datasets `names` below `folder`; returns the digest of each and, with `tfrecord`, what the data source
    reads of it.
    """
    found = {}
    if "log" in names:
        log = LogsConfig(
            inputs=(str(LOG),), output=str(folder / "log"), log_format="combined", split="group:visitor:80/20",
            shard_bytes=20_000, max_bad="5%", compression="gzip",
        )  # fmt: skip
        found["log"] = job.run(spark, log).digest
    ways: dict[str, dict[str, Any]] = {
        "tfrecord": {"split": "stratified:kind:80/20", "sample": "bought=false:50%"},
        "parquet": {"fmt": "parquet", "split": "kfold:3:kind", "weights": "balanced"},
    }
    for name, options in ways.items():
        if name in names:
            rows, url = spark.range(2000).selectExpr(*ROWS), str(folder / name)
            manifest = write_dataset(rows, url, schema=SCHEMA, id_columns=["visit"], shard_bytes=30_000, **options)
            assert not (faults := verify(url)), list(map(str, faults))
            assert sum(len(split.shards) for split in manifest.splits.values()) > len(manifest.splits)
            found[name] = manifest.digest
    return {**found, "data source": data_source(spark, folder)} if "tfrecord" in names else found


def data_source(spark: SparkSession, folder: Path) -> str:
    """What comes of writing and reading plain files; Spark 3.5 has no such sources, and must be refused by name."""
    if spark.version.startswith("3."):
        try:
            import pyspark_tfrecord  # noqa: F401 - what is tried is to import it
        except ConfigError as error:
            assert "3.5" in str(error)
        return "none"
    rows = spark.read.format("tfrecord").load(str(folder / "tfrecord")).drop("split", "price")
    rows.write.format("tfrecord").mode("append").save(str(folder / "plain"))
    again = spark.read.format("tfrecord").load(str(folder / "plain"))
    return str(again.selectExpr("count(1)", "sum(hour)", "sum(size(words))").collect()[0].asDict())


def main() -> None:
    """Write and print."""
    from lockstep.spark.session import spark_session

    with spark_session("datasets", "local[2]") as spark:
        found = datasets(spark, Path(sys.argv[1]), sys.argv[2:] or NAMES)
        print(json.dumps({"spark": spark.version, "python": sys.version.split()[0], "datasets": found}))


if __name__ == "__main__":
    main()
