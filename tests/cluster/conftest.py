"""The fixture `hadoop`: one real HDFS (and YARN, when asked for) for all tests of this folder."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from lockstep.storage.files.deadlines import left_behind
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from tests.cluster.daemons import Cluster

HERE = Path(__file__).parent
SHARED = pytest.StashKey[Cluster]()


@pytest.fixture(scope="session")
def hadoop_session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = request.session.stash[SHARED] = Cluster(tmp_path_factory.mktemp("hadoop"))
    try:
        yield cluster.start_hdfs()
    finally:
        cluster.stop()
        # Calls that were left behind end with their servers, not while Python is torn down; of some clients never.
        until = time.monotonic() + 5
        while left_behind() and time.monotonic() < until:
            time.sleep(0.1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """The daemons end with the last test of this folder, not of the session: idle they take 4 % of a processor."""
    result = yield
    if SHARED in item.session.stash and (nextitem is None or HERE not in nextitem.path.parents):
        item.session.stash[SHARED].stop()
    return result


@pytest.fixture
def hadoop(hadoop_session: Cluster) -> Iterator[Cluster]:
    """A serving HDFS; a test may kill or pause its daemons: what it leaves broken is mended after it.

    `.hdfs_url`, `.conf_dir`, `.env`, `.start_yarn()`, `.submit_conf`; `.kill/.pause/.resume/.start(name)`.
    """
    yield hadoop_session
    hadoop_session.heal()


@pytest.fixture
def fs(root: str) -> FileSystem:
    """The backend of `root`, a directory that the test file's own fixture makes."""
    return filesystem(root)
