"""Whether the JVM's reader of TFRecord returns the written values: every dtype, as in benchmarks.tfx_reads.

    python -m benchmarks.jvm_reads FOLDER_OF_JARS

The jars are org.tensorflow:tensorflow-hadoop:1.15.0, org.tensorflow:proto:1.15.0 and
com.google.protobuf:protobuf-java:3.5.1 from Maven Central (mvn dependency:copy-dependencies): Hadoop's input format,
with which spark-tensorflow-connector reads. It is not a test of the suite, since it needs a download. Exits with 1 if a
record differs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyspark

from benchmarks.tfx_reads import SCHEMA, list_type, rows, wanted
from lockstep.features.examples.codec import RecordEncoder

PEER = Path(__file__).with_name("JvmReads.java")
FORMS = {"INT": "i", "FLOAT": "f", "BYTES": "b"}


def printed(row: dict[str, Any]) -> str:
    """A record as JvmReads.java prints it: features by name, floats and bytes in hex."""
    parts = []
    for field in sorted(SCHEMA, key=lambda field: field.name):
        values = wanted(field, row[field.name])
        if values is None:
            continue
        kind = list_type(field)
        if kind == "FLOAT":
            texts = [f"{bits:x}" for bits in np.array(values, np.float32).view(np.uint32).tolist()]
        else:
            texts = [f"x{value.hex()}" if kind == "BYTES" else str(value) for value in values]
        parts.append(" ".join([f"{field.name}={FORMS[kind]}", *texts]) + ";")
    return "".join(parts)


def main() -> int:
    """Encode, read by the JVM and compare; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jvm_reads", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("jars", help="a folder with the three jars")
    jars = parser.parse_args().jars
    had = [{**row, "sample_id": 7 * number - 3} for number, row in enumerate(rows())]
    batch = pa.RecordBatch.from_pylist(had, schema=SCHEMA.arrow_schema())
    hadoop = Path(pyspark.__file__).parent / "jars"
    places = [*map(str, Path(jars).glob("*.jar")), *map(str, hadoop.glob("hadoop-client-api-*.jar"))]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "x.tfrecord").write_bytes(RecordEncoder(SCHEMA).encode(batch)[0].tobytes())
        java = Path(os.environ["JAVA_HOME"], "bin", "java") if "JAVA_HOME" in os.environ else "java"
        call = [java, "-cp", os.pathsep.join(places), PEER, Path(folder, "x.tfrecord")]
        found = subprocess.run(call, check=True, capture_output=True, text=True, timeout=300).stdout.splitlines()
    differing = sum(printed(row) != line for row, line in zip(had, found, strict=True))
    print(f"{len(found)} records, {differing} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
