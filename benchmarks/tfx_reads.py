"""Whether tfx-bsl's decoder returns the values that Spark wrote, in a dataset of every dtype.

    python -m benchmarks.tfx_reads PYTHON_WITH_TFX_BSL

It is not a test of the suite: tfx-bsl 1.21.0 needs 143 packages whose pins conflict with this project's, so it runs in
a separate environment (python -m venv TFX; TFX/bin/pip install tfx-bsl==1.21.0 tensorflow==2.21.0). The decoder runs
twice, with and without a schema of TFMetadata. Prints one line for each field; exits with 1 if a value differs.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

from lockstep.etl import columns as c
from lockstep.etl.write.dataset import write_dataset
from lockstep.features.schema.fields import SAMPLE_ID, Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.spark.session import spark_session

PEER = Path(__file__).with_name("peers") / "tfx_reads_peer.py"
ROWS = 500
LARGEST = (1 << 63) - 1
INTS = (0, 1, -1, 300, 1 << 31, -(1 << 40), LARGEST, -LARGEST - 1)
HUGE = (Decimal(0), Decimal(1 << 63), Decimal((1 << 64) - 1))
DOUBLES = (0.0, -0.0, 0.1, -1e308, 5e-324, math.pi, math.inf, -math.inf, math.nan)
FLOATS = tuple(np.array([0, -0.0, 0.1, 3e38, 1e-45, math.inf, math.nan], np.float32).tolist())
TEXTS = ("", "a", "é", "日本語", 'a\nb\t"c"', "𝄞" * 9, "\u202e\u0301")
BYTES = (b"", b"\0", b"\xff\xfe", bytes(range(256)))

SCHEMA = Schema(
    (
        sample_id_field(),
        Field(name="key", dtype="int64"),
        Field(name="whole", dtype="int64", nullable=True),
        Field(name="flag", dtype="bool", nullable=True),
        Field(name="single", dtype="float32", nullable=True),
        Field(name="double", dtype="float64", nullable=True),
        Field(name="huge", dtype="uint64", nullable=True),
        Field(name="text", dtype="string", nullable=True),
        Field(name="raw", dtype="bytes", nullable=True),
        Field(name="wholes", dtype="int64", shape=(None,)),
        Field(name="flags", dtype="bool", shape=(None,)),
        Field(name="singles", dtype="float32", shape=(None,)),
        Field(name="doubles", dtype="float64", shape=(None,)),
        Field(name="texts", dtype="string", shape=(None,)),
        Field(name="pixels", dtype="uint8", shape=(2, 3)),
        Field(name="tensor", dtype="float32", shape=(2,)),
        Field(name="label", dtype="int64", kind="label"),
    )
)


def rows() -> list[dict[str, Any]]:
    """Rows that cycle through each column's values, with a null in each fifth and lists of zero to three values."""

    def one(values: tuple[Any, ...], number: int) -> Any:
        return None if number % 5 == 4 else values[number % len(values)]

    def some(values: tuple[Any, ...], number: int) -> list[Any]:
        return [values[(number + place) % len(values)] for place in range(number % 4)]

    return [
        {
            "key": n,
            "whole": one(INTS, n),
            "flag": one((True, False), n),
            "single": one(FLOATS, n),
            "double": one(DOUBLES, n),
            "huge": one(HUGE, n),
            "text": one(TEXTS, n),
            "raw": one(BYTES, n),
            "wholes": some(INTS, n),
            "flags": some((True, False), n),
            "singles": some(FLOATS, n),
            "doubles": some(DOUBLES, n),
            "texts": some(TEXTS, n),
            "pixels": bytes((n + place) % 256 for place in range(6)),
            "tensor": np.array([n / 7, -n], np.float32).tobytes(),
            "label": n % 3,
        }
        for n in range(ROWS)
    ]


def write(spark: SparkSession, url: str) -> list[dict[str, Any]]:
    """Publish the rows as TFRecord; returns what Spark had of them, by key."""
    ddl = ", ".join(f"{field.name} {c.ddl_type(field)}" for field in SCHEMA if field.name != SAMPLE_ID)
    df = spark.createDataFrame([tuple(row.values()) for row in rows()], ddl)
    write_dataset(df, url, id_columns=["key"], schema=SCHEMA, split="1/1", shard_bytes=64 << 10)
    return [row.asDict() for row in df.orderBy("key").collect()]


def read(python: str, folder: str, mode: str) -> list[dict[str, Any]]:
    """All records by tfx-bsl, by key: each feature a list of values, or None."""
    shards = sorted(str(path) for path in Path(folder, "dataset").glob("split=*/*.tfrecord"))
    kinds = {field.name: list_type(field) for field in SCHEMA}
    out = f"{folder}/{mode}.arrow"
    call = [python, str(PEER), out, mode, json.dumps(kinds), *shards]
    subprocess.run(call, check=True, timeout=600)
    with pa.OSFile(out) as file:
        found = pa.ipc.open_file(file).read_all().to_pylist()
    return sorted(found, key=lambda row: row["key"])


def list_type(field: Field) -> str:
    """Which list of a tf.Example holds a field."""
    if field.is_tensor:
        return "BYTES"
    return {"int64": "INT", "bool": "INT", "float32": "FLOAT"}.get(field.dtype, "BYTES")


def wanted(field: Field, value: Any) -> list[Any] | None:
    """What a tf.Example must hold of a value of Spark's, as tfx-bsl shows it."""
    if value is None:
        return None
    values = value if field.is_list else [value]
    stored: dict[str, Callable[[Any], Any]] = {
        "bool": int,
        "float64": lambda item: struct.pack("<d", item),
        "uint64": lambda item: int(item).to_bytes(8, "little"),
        "string": str.encode,
        "bytes": bytes,
    }
    return [bytes(item) if field.is_tensor else stored.get(field.dtype, lambda item: item)(item) for item in values]


def same(field: Field, value: Any, found: list[Any] | None) -> bool:
    """Whether tfx-bsl's values are Spark's, by their bits: a null is no list to it, an empty list an empty one."""
    want = wanted(field, value)
    if want is None or found is None:
        return want is found
    if field.dtype == "float32" and not field.is_tensor:
        return np.array(want, np.float32).tobytes() == np.array(found, np.float32).tobytes()
    return want == found


def main() -> int:
    """Write, read and compare; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tfx_reads", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("python", help="a Python with tfx-bsl")
    python = parser.parse_args().python
    differing = 0
    with tempfile.TemporaryDirectory() as folder:
        with spark_session("tfx_reads", "local[2]") as spark:
            had = write(spark, f"{folder}/dataset")
        for mode in ("inferred", "declared"):
            found = read(python, folder, mode)
            assert [row["key"][0] for row in found] == [row["key"] for row in had]
            for field in SCHEMA:
                if field.name == SAMPLE_ID:
                    continue
                bad = [n for n, row in enumerate(had) if not same(field, row[field.name], found[n].get(field.name))]
                differing += len(bad)
                what = f"{len(bad)} differ, such as {had[bad[0]][field.name]!r}" if bad else f"{len(had)} equal"
                print(f"{mode} {field.name:8} {field.dtype:8} {what}", flush=True)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
