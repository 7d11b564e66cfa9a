"""The former name of `etl.petastorm.daemon`, for `--conf spark.python.daemon.module=etl.petastorm_compat.daemon`."""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("etl.petastorm.daemon", run_name="__main__")
