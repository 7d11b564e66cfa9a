"""Where a job starts its ranks: on this host, or in barrier stages of a Spark session of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from jobs._session import hadoop_settings_of, spark_session
from lockstep.storage.settings import set_hadoop_settings
from training.launch.barrier import OnSpark
from training.launch.local import run_local
from training.launch.session import Launch


@contextmanager
def launch_of(launcher: str, job: str, master: str | None) -> Iterator[Launch]:
    """What starts ranks for the `--launcher` of a job: `local`, or `barrier` in a Spark session that ends with it."""
    if launcher == "local":
        yield run_local
        return
    with spark_session(f"lockstep {job}", master, input_bytes=0) as spark:
        set_hadoop_settings(hadoop_settings_of(spark))
        yield OnSpark(spark)
