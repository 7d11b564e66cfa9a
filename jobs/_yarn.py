"""The error of a job whose driver runs in YARN's application master, for those who see only YARN's diagnostics.

There spark-submit prints the application's diagnostics and exits with 1, whatever the job's exit code. What the job
prints is in the application master's `stdout`. If the job fails before it has a Spark session, the diagnostics are the
end of `stderr`; after that they are a message that Spark's application master composes: without the error, unless it is
passed.
"""

from __future__ import annotations

import os
from typing import Any

_MASTER = "org.apache.spark.deploy.yarn.ApplicationMaster$"


def report_failure(text: str, code: int) -> None:
    """Hand the error of a job that will exit with `code` to the application master; nothing elsewhere."""
    # The first is set for Spark's own containers, the second for the Python process of a driver.
    if "SPARK_YARN_STAGING_DIR" not in os.environ or "PYSPARK_GATEWAY_PORT" not in os.environ:
        return
    from pyspark import SparkContext
    from pyspark.java_gateway import launch_gateway

    try:
        started = SparkContext._gateway is not None
        jvm: Any = (SparkContext._gateway or launch_gateway()).jvm
        jvm.java.lang.System.err.println(text)
        if started:
            _finish(jvm, text, code)
    except Exception as error:  # Java has ended, or another version: the error is in `stdout` in any case
        print(f"YARN's diagnostics lack this error: {type(error).__name__}", flush=True)


def _finish(jvm: Any, text: str, code: int) -> None:
    """End the application as failed with `text` as its diagnostics; Spark has no public way to set them."""
    found = jvm.java.lang.Class.forName(_MASTER)
    (field,) = [each for each in found.getDeclaredFields() if each.getName().endswith("master")]
    field.setAccessible(True)
    master = field.get(found.getField("MODULE$").get(None))
    status = jvm.org.apache.hadoop.yarn.api.records.FinalApplicationStatus.FAILED
    master.finish(status, code, f"exit code {code}\n{text}")
