"""Where a job starts its ranks: on this host, or in barrier stages of a Spark session of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.jobs._cli import JobParser
from lockstep.process.own_code import CodeFolder, imported_here
from lockstep.spark.session import hadoop_settings_of, spark_session
from lockstep.storage.settings import set_hadoop_settings
from lockstep.storage.urls import absolute, split_url

if TYPE_CHECKING:
    from lockstep.training.launch.session import Launch


@contextmanager
def launch_of(launcher: str, job: str, master: str | None, code: CodeFolder | None = None) -> Iterator[Launch]:
    """What starts ranks for the `--launcher` of a job: `local`, or `barrier` in a Spark session that ends with it.

    Ranks can import the modules of `code`.
    """
    from lockstep.training.launch.barrier import OnSpark
    from lockstep.training.launch.local import run_local

    if launcher == "local":
        yield run_local
        return
    with spark_session(f"lockstep {job}", master, input_bytes=0, code=code) as spark:
        set_hadoop_settings(hadoop_settings_of(spark))
        yield OnSpark(spark)


def add_launch_flags(job: JobParser) -> None:
    """The flags of jobs that compute with a finished model: how many processes, and where."""
    job.add_argument("--num-ranks", type=int, default=1, metavar="N", help="processes (default 1)")
    text = "this host (default) or a Spark barrier stage"
    job.add_argument("--launcher", choices=["local", "barrier"], default="local", help=text)
    text = "Spark master for --launcher barrier (default: spark-submit's)"
    job.add_argument("--master", metavar="URL", help=text)
    job.add_code_flag()


def check_runs(launcher: str, *runs: str) -> None:
    """Raise ConfigError, before Spark starts, for a run whose model's module ranks cannot import.

    A run on another file system may need Spark's settings to be read: with Spark, ranks find that out.
    """
    from lockstep.training.results.importable import check_importable

    for run in runs:
        if launcher == "local" or split_url(absolute(run))[0] == "file":
            check_importable(absolute(run), here=imported_here(launcher))
