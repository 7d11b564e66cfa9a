"""What all tests share: markers by folder, how they are shared out to workers, one Spark session a worker."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tests.guard import start_guard
from tests.spark.archive import use_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TESTS = Path(__file__).parent
LONGEST = ("cluster", "etl", "judge", "docs", "examples", "dags", "notebooks", "lockstep", "jobs", "training")
# Folders whose tests share a worker: one Hadoop, and one Spark session for most tests that need one.
TOGETHER = {"cluster": "hadoop", "etl": "spark", "judge": "spark"}
APART = (
    "tests/docs/test_readme.py",
    "tests/examples/test_gallery.py",
)  # each test by itself; all other files stay whole

# Two workers on two cores: a rank or a task that takes every core for its own arithmetic slows its neighbours.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
use_settings(os.environ)

# The same examples in each run, and no example, nor the making of them, against a clock (by default 200 ms an example):
# a test fails for its code alone, on a loaded machine too. `--hypothesis-profile default` looks for new examples.
settings.load_profile("ci")

# A folder of data whose licence keeps it out of the repository; .ci/run sets it where there is one.
SHARED_DATA = "LOCKSTEP_SHARED_DATA"


class ByGroup(LoadScopeScheduling):
    """Hands whole groups of tests to workers. xdist's own groups do nothing under pytest 9.2, whose ids are fixed."""

    def _split_scope(self, nodeid: str) -> str:
        path, *_ = nodeid.split("::")
        group = next((group for name, group in TOGETHER.items() if path.startswith(f"tests/{name}/")), None)
        return group or (nodeid if path in APART else path)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the tests marked soak, and only these; `make soak` does")


@pytest.hookimpl(optionalhook=True)  # without xdist nobody asks
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByGroup:
    return ByGroup(config, log)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # of xdist's workers, whose controller has one
        start_guard()
    folder = os.environ.get(SHARED_DATA)
    if folder and not Path(folder).is_dir():
        raise pytest.UsageError(
            f"{SHARED_DATA}={folder} is no folder; correct it, or unset it to leave those tests out"
        )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Python looks for garbage while five thousand tests and TensorFlow come in, a third of the work, and finds none;
    what is there then stays to the end, and no later search goes through it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not os.environ.get(SHARED_DATA):
        terminalreporter.write_line(f"{SHARED_DATA} is not set: tests marked shared_data are deselected")
    if reason := _no_namespaces():
        terminalreporter.write_line(f"{reason}: tests of several hosts (tests/network) are deselected")
    if not terminalreporter.config.getoption("soak"):
        terminalreporter.write_line("tests marked soak are deselected: `make soak` runs them")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes longest begins first; tests left out here are named in the summary."""
    soak = config.getoption("soak")
    others = [item for item in items if bool(item.get_closest_marker("soak")) != soak]
    items[:] = [item for item in items if bool(item.get_closest_marker("soak")) == soak]
    config.hook.pytest_deselected(items=others)
    if not os.environ.get(SHARED_DATA):
        absent = [item for item in items if item.get_closest_marker("shared_data")]
        items[:] = [item for item in items if not item.get_closest_marker("shared_data")]
        config.hook.pytest_deselected(items=absent)
    for item in items:
        if TESTS / "cluster" in item.path.parents:
            item.add_marker(pytest.mark.cluster)
    networked = [item for item in items if TESTS / "network" in item.path.parents]
    if networked and _no_namespaces():
        items[:] = [item for item in items if item not in networked]
        config.hook.pytest_deselected(items=networked)
    items.sort(key=_rank)  # stable: the order within is kept


@functools.cache
def _no_namespaces() -> str | None:
    """What this machine lacks to lay out several hosts, if anything; takes some milliseconds."""
    from tests.network.hosts import why_not

    return why_not()


def _rank(item: pytest.Item) -> int:
    return next((place for place, folder in enumerate(LONGEST) if TESTS / folder in item.path.parents), len(LONGEST))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of data that may not be committed; tests that use it are marked `shared_data`."""
    return Path(os.environ[SHARED_DATA]).resolve()


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A local session with two slots and the jobs' own settings; tests that use it are marked `slow`."""
    from lockstep.spark.session import spark_session

    os.environ["PYSPARK_SUBMIT_ARGS"] = "--driver-memory 1g pyspark-shell"
    with spark_session("tests", "local[2]") as session:
        yield session


@pytest.fixture(autouse=True)
def _float32_afterwards() -> Iterator[None]:
    """The models of the next test have Keras' usual dtype, also where this one fails or is refused in float64."""
    yield
    if "keras" in sys.modules:
        from lockstep.training.rank.runtime import set_precision

        set_precision("float32")
