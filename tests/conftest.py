"""What all tests share: markers by folder, how they are shared out to workers, one Spark session a worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CLUSTER = Path(__file__).parent / "cluster"

# Two workers on two cores: a rank or a task that takes every core for its own arithmetic slows its neighbours.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests on Hadoop go to one worker (one cluster), first, since they take longest; others go by file."""
    for item in items:
        on_cluster = CLUSTER in item.path.parents
        if on_cluster:
            item.add_marker(pytest.mark.cluster)
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group("cluster" if on_cluster else str(item.path)))
    items.sort(key=lambda item: CLUSTER not in item.path.parents)  # stable: the order within is kept


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A local session with two slots and the jobs' own settings; tests that use it are marked `slow`."""
    from jobs._session import spark_session

    os.environ["PYSPARK_SUBMIT_ARGS"] = (
        "--conf spark.ui.enabled=false --conf spark.sql.shuffle.partitions=4 --driver-memory 1g pyspark-shell"
    )
    with spark_session("tests", "local[2]") as session:
        yield session
