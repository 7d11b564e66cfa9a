"""Settings of a session that a job changes while it runs."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import pytest

from lockstep.etl.spark.errors import _LOUD, _LOUD_IN_PYTHON, translating_errors
from lockstep.etl.spark.session import BATCHES, bounded, held_setting
from lockstep.etl.write.dataset import write_dataset

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

ARROW, CACHE = BATCHES


def java_levels(spark: SparkSession) -> dict[str, str | None]:
    """The level that each hushed logger of Java has been given, and None where it follows its parent."""
    assert spark.sparkContext._jvm is not None
    manager = spark.sparkContext._jvm.org.apache.logging.log4j.LogManager
    own = manager.getContext(False).getConfiguration().getLoggers()
    return {name: own.get(name) and own.get(name).getLevel().name() for name in _LOUD}


def python_levels() -> list[int]:
    """The levels of the hushed loggers of pyspark."""
    from pyspark.logger import PySparkLogger

    return [PySparkLogger.getLogger(name).level for name in _LOUD_IN_PYTHON]


def notes_lines() -> bool:
    """Whether pyspark notes for its errors which line of code makes a call."""
    from pyspark.errors.utils import is_debugging_enabled

    return is_debugging_enabled()


@pytest.mark.slow
def test_batches_are_small_inside_and_as_before_behind(spark: SparkSession) -> None:
    spark.conf.set(CACHE, "777")
    try:
        with pytest.raises(RuntimeError, match="a task"), bounded(spark):
            assert {key: spark.conf.get(key) for key in BATCHES} == BATCHES
            raise RuntimeError("a task")
        assert spark.conf.get(ARROW, None) is None and spark.conf.get(CACHE) == "777"
        spark.conf.set(CACHE, "7")
        spark.conf.set(ARROW, "0")
        with bounded(spark):
            assert (spark.conf.get(ARROW), spark.conf.get(CACHE)) == (BATCHES[ARROW], "7")
    finally:
        for key in BATCHES:
            spark.conf.unset(key)


@pytest.mark.slow
def test_two_writes_at_once_leave_the_session_as_it_was(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pyspark asks once a process, and a test without a session may have been the first.
    monkeypatch.setattr("pyspark.errors.utils._enable_debugging_cache", None)
    before = java_levels(spark), python_levels(), notes_lines()
    assert before[2]
    assert "OFF" not in before[0].values() and max(before[1]) <= logging.ERROR
    begun, ended = threading.Event(), threading.Event()

    def first() -> None:
        with translating_errors(spark, "one thing"), bounded(spark):
            assert begun.wait(60)
        ended.set()

    def second() -> None:
        with translating_errors(spark, "another thing"), bounded(spark):
            begun.set()
            assert ended.wait(60)
            assert not notes_lines()
            assert set(java_levels(spark).values()) == {"OFF"} and spark.conf.get(ARROW) == BATCHES[ARROW]

    def write(name: str) -> str:
        return write_dataset(spark.range(50).toDF("n"), str(tmp_path / name), id_columns=["n"]).digest

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(first), threads.submit(second)]:
            done.result()
        assert len(set(threads.map(write, "ab"))) == 1
    assert (java_levels(spark), python_levels(), notes_lines()) == before
    assert [spark.conf.get(key, None) for key in BATCHES] == [None, None]


def test_what_somebody_else_sets_meanwhile_stays_or_comes_back() -> None:
    settings: dict[str, str | None] = {"key": None}

    def use(value: str) -> AbstractContextManager[None]:
        return held_setting("test", value, lambda: settings["key"], lambda new: settings.update(key=new))

    with use("a"):
        assert settings["key"] == "a"
        with use("b"):
            assert settings["key"] == "b"
        assert settings["key"] == "a"
        settings["key"] = "theirs"
    assert settings["key"] == "theirs"
    with use("a"):
        settings["key"] = "other"
        with use("b"):
            assert settings["key"] == "b"
        assert settings["key"] == "a"
    assert settings["key"] == "other"
