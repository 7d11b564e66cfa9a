"""The judge's sets, each made once for both files, in one Spark session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.judge import _sets
from tests.judge._sets import JudgedSet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the sets lie."""
    return tmp_path_factory.mktemp("judge")


@pytest.fixture(scope="session")
def small(spark: SparkSession) -> Iterator[SparkSession]:
    """Shuffles of small data in few tasks."""
    before = str(spark.conf.get("spark.sql.shuffle.partitions"))
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    yield spark
    spark.conf.set("spark.sql.shuffle.partitions", before)


@pytest.fixture(scope="session")
def incomes(small: SparkSession, folder: Path, shared_data: Path) -> JudgedSet:
    """See _sets; for tests marked shared_data."""
    return _sets.incomes(small, folder, shared_data)


@pytest.fixture(scope="session")
def clicks(small: SparkSession, folder: Path) -> JudgedSet:
    """See _sets."""
    return _sets.clicks(small, folder)


@pytest.fixture(scope="session")
def visits(small: SparkSession, folder: Path) -> JudgedSet:
    """See _sets."""
    return _sets.visits(small, folder)


@pytest.fixture(scope="session")
def garments(small: SparkSession, folder: Path) -> JudgedSet:
    """See _sets."""
    return _sets.garments(small, folder)
