"""Spark's Python workers with Petastorm's names, for jobs whose tasks use Petastorm.

Started by Spark under `--conf spark.python.daemon.module=etl.petastorm.daemon`.
"""

from __future__ import annotations

from etl.petastorm.imports import enable

if __name__ == "__main__":
    from pyspark.daemon import manager

    enable()
    manager()
