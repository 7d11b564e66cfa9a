"""The jobs' Spark session, without Spark."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest

from lockstep.process.installed import ROOT
from lockstep.spark.session import LOG4J, java_options, stop_session
from lockstep.storage.errors import StorageAwayError
from tests.training._tiny import write_table
from tests.waiting import until


class DeadSession:
    """What pyspark's session does when its JVM is gone."""

    def stop(self) -> None:
        raise ConnectionRefusedError(111, "Connection refused")


def test_end_of_a_dead_session_hides_no_error(caplog: pytest.LogCaptureFixture) -> None:
    session: Any = DeadSession()
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="the job's own"):
        try:
            raise ValueError("the job's own")
        finally:
            stop_session(session)
    assert "Java process had ended" in caplog.text


def test_spark_prints_no_trace_while_a_session_ends_by_our_error_or_a_signal() -> None:
    levels: list[str] = []

    class Session:
        sparkContext = type("Context", (), {"setLogLevel": staticmethod(levels.append), "_jvm": MagicMock()})

        def stop(self) -> None:
            levels.append("stop")

    session: Any = Session()
    for error in (StorageAwayError("no NameNode"), SystemExit(143), ValueError("a bug")):
        with pytest.raises(type(error)):
            try:
                raise error
            finally:
                stop_session(session)
    assert levels == ["OFF", "stop", "OFF", "stop", "stop"]


@pytest.mark.slow
def test_the_production_profile_is_refused_where_spark_does_not_authenticate(tmp_path: Path) -> None:
    """Spark refuses to encrypt without it; that comes as four parts and not as a stack trace of Java."""
    call = [
        "lockstep.jobs.train",
        "--config",
        "conf/production.toml",
        "--dataset",
        str(tmp_path / "data"),
        "--run",
        "r",
    ]
    call += ["--model", "logistic", "--num-ranks", "1", "--global-batch", "8", "--epochs", "1"]
    write_table(tmp_path / "data")
    settings = "--conf spark.authenticate=false --conf spark.network.crypto.enabled=true pyspark-shell"
    done = subprocess.run(
        [sys.executable, "-m", *call, "--master", "local-cluster[1,1,512]"],
        cwd=ROOT, env={**os.environ, "PYSPARK_SUBMIT_ARGS": settings}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2
    _, _, error = done.stderr.partition("error: ")
    for part in ("Spark refuses its settings", "got: ", "spark.authenticate must be enabled", "allowed: ", "next: "):
        assert part in error
    assert "\tat " not in error


def test_java_options_of_the_user_s_are_left_alone(tmp_path: Path) -> None:
    quick, quiet = "-XX:TieredStopAtLevel=1", f"-Dlog4j2.configurationFile={LOG4J.as_uri()}"
    plain: dict[str, str] = {}
    java_options(plain, short=True)
    assert plain == {"SPARK_SUBMIT_OPTS": f"{quick} {quiet}"}
    more = {"SPARK_SUBMIT_OPTS": "-Xss4m", "SPARK_HOME": str(tmp_path)}
    java_options(more, short=True)
    assert more["SPARK_SUBMIT_OPTS"] == f"-Xss4m {quick} {quiet}"
    long: dict[str, str] = {}
    java_options(long, short=False)
    assert long == {"SPARK_SUBMIT_OPTS": quiet}
    compiled = {"SPARK_SUBMIT_OPTS": "-XX:TieredStopAtLevel=4"}
    java_options(compiled, short=True)
    assert compiled["SPARK_SUBMIT_OPTS"] == f"-XX:TieredStopAtLevel=4 {quiet}"
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "log4j2.xml").touch()
    for own in (
        {"SPARK_HOME": str(tmp_path)},
        {"SPARK_CONF_DIR": str(tmp_path / "conf")},
        {"SPARK_SUBMIT_OPTS": "-Dlog4j2.configurationFile=mine"},
    ):
        before = own.get("SPARK_SUBMIT_OPTS", "")
        java_options(own, short=True)
        assert own["SPARK_SUBMIT_OPTS"] == f"{before} {quick}".strip()


def signalled(
    tmp_path: Path, number: int, sign: str, later_s: float, send: Callable[[int, int], None], pinned: str = "true"
) -> bool:
    """An ETL job that gets a signal `later_s` after a file `sign` is there ends silently and leaves nothing; returns
    whether the signal ended it, False for a job that was done before.
    """
    scratch, output = tmp_path / "scratch", tmp_path / "output"
    scratch.mkdir()
    output.mkdir()
    call = [sys.executable, "-m", "lockstep.jobs.etl_logs", "--input", "data/weblogs", "--master", "local[2]"]
    call += ["--output", str(output / "data"), "--split", "group:visitor:80/20", "--max-bad", "1%"]
    environment = {**os.environ, "TMPDIR": str(scratch), "PYSPARK_PIN_THREAD": pinned}
    job = subprocess.Popen(
        call, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )  # fmt: skip
    until(lambda: job.poll() is not None or any(tmp_path.glob(sign)))
    with suppress(subprocess.TimeoutExpired):
        job.wait(later_s)
    with suppress(ProcessLookupError, psutil.NoSuchProcess):  # it was done before
        send(job.pid, number)
    _, said = job.communicate(timeout=300)
    if job.returncode == 0 and (output / "data" / "_manifest.json").exists():
        return False
    assert job.returncode == 128 + number, said
    assert not any(word in said for word in ("Traceback", "Exception", "\tat ", "ERROR", "error:", "WARNING:jobs")), (
        said
    )
    assert not list(output.iterdir()), "no staging folder stays"
    until(lambda: not list(scratch.iterdir()))  # Java, which ends by itself, has files there too
    return True


def to_all(leader: int, number: int) -> None:
    """To every process of a job, as systemd and batch systems do that know its control group; the leader is last."""
    for process in [*psutil.Process(leader).children(recursive=True), psutil.Process(leader)]:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sign", "later_s", "send", "pinned"),
    [
        ("scratch/tmp*/", 0.0, os.kill, "true"),  # pyspark's, while Java starts
        ("scratch/lockstep-????????/*", 0.0, os.killpg, "true"),  # before its first Spark job
        ("scratch/lockstep-????????/*", 2.0, os.kill, "false"),  # in the middle of a call, of another connection
        ("output/_staging-*/", 1.0, os.killpg, "true"),  # while Spark works for the dataset
    ],
)
def test_sigterm_to_an_etl_job_or_to_its_group_is_silent_and_leaves_nothing(
    tmp_path: Path, sign: str, later_s: float, send: Callable[[int, int], None], pinned: str
) -> None:
    """`timeout`, Airflow, a terminal and batch systems send it to the whole group: Java and Python's workers too."""
    ended = signalled(tmp_path, signal.SIGTERM, sign, later_s, send, pinned)
    assert ended or sign.startswith("output/"), "a job that has no staging folder yet is not done"


@pytest.mark.soak
@pytest.mark.parametrize("send", [os.killpg, to_all])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_every_process_of_an_etl_job_at_any_moment(
    tmp_path: Path, number: int, send: Callable[[int, int], None]
) -> None:
    moments = [("scratch/tmp*/", later_s) for later_s in (0.5, 3.0, 5.0, 7.0)]
    moments += [("output/_staging-*/", later_s) for later_s in (0.0, 2.0, 4.0, 6.0, 8.0)]
    moments += [("output/_staging-*/split=train/*", later_s) for later_s in (0.0, 0.3)]
    ended = 0
    for at, (sign, later_s) in enumerate(moments):
        folder = tmp_path / str(at)
        folder.mkdir()
        ended += signalled(folder, number, sign, later_s, send)
    assert ended >= 4, "at least those before the staging folder"


SESSIONS = """
import os, lockstep
from pyspark.sql import SparkSession
spark = lockstep.spark_session(master="local[1]")  # as in a notebook's cell, which then runs again
assert lockstep.spark_session(master="local[1]") is spark and isinstance(spark, SparkSession)
print(spark.range(5).count())
spark.stop()
with lockstep.spark_session("block", "local[1]") as spark:
    print(spark.range(3).count())
try:
    with lockstep.spark_session("error", "local[1]") as spark:
        raise ValueError("mine")
except ValueError as error:
    print(error, len(os.listdir(os.environ["TMPDIR"])))
print(lockstep.spark_session("left open", "local[1]").range(2).count())
"""


@pytest.mark.slow
def test_a_session_is_one_of_spark_and_ends_by_stop_by_a_block_and_with_the_process(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (tmp_path / "script.py").write_text(SESSIONS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-X", "dev", "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={**environment, "TMPDIR": str(scratch), "SPARK_LOCAL_DIRS": str(tmp_path / "spark")},
    )  # fmt: skip
    assert done.stdout.split() == ["5", "3", "mine", "0", "2"], done.stderr
    assert done.returncode == 0 and not [*scratch.iterdir()], done.stderr
