"""Where a job starts its ranks: on this host, or in barrier stages of a Spark session of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from jobs._cli import JobParser
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


def add_launch_flags(job: JobParser) -> None:
    """The flags of jobs that compute with a finished model: how many processes, and where."""
    job.add_argument("--num-ranks", type=int, default=1, metavar="N", help="processes (default 1)")
    text = "this host (default) or a Spark barrier stage"
    job.add_argument("--launcher", choices=["local", "barrier"], default="local", help=text)
    text = "Spark master for --launcher barrier (default: spark-submit's)"
    job.add_argument("--master", metavar="URL", help=text)
