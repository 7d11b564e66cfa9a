"""Python workers of Spark in which Petastorm can be imported, for jobs whose tasks use it.

Started by Spark under `--conf spark.python.daemon.module=lockstep.etl.petastorm.daemon`.
"""

from __future__ import annotations

from lockstep.etl.petastorm.imports import enable

if __name__ == "__main__":
    from pyspark.daemon import manager

    enable()
    manager()
