"""The long form of races, and runs that are killed, on each server."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterator

import pytest

from lockstep.storage.files.interface import FileSystem
from lockstep.training.config import TrainConfig
from tests.object_stores.conftest import in_use
from tests.object_stores.server import ObjectServer
from tests.object_stores.servers import SERVERS
from tests.object_stores.test_publication import races
from tests.object_stores.test_run import (  # noqa: F401  they run here too
    config,
    race,
    started,
    test_a_driver_killed_at_any_call_leaves_a_run_that_resumes_to_the_same_bits,
    test_a_run_has_the_bits_of_one_on_a_disk_and_holds_no_secret,
    whole,
)

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(1800)]
RACES = 1000
DRIVER_RACES = 20


@pytest.fixture(scope="module", params=SERVERS)
def s3(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with in_use(request.param, tmp_path_factory.mktemp(request.param)) as server:
        yield server


def test_of_a_thousand_races_one_writer_wins_each(s3: ObjectServer, fs: FileSystem, root: str) -> None:
    winners = races(fs, root, RACES)
    print(f"{s3.url} at {s3.endpoint}: {winners}")
    assert winners.total() == RACES and len(winners) == 2


def test_of_twenty_races_one_driver_wins_each(
    s3: ObjectServer,
    config: TrainConfig,  # noqa: F811  a fixture
    started: list[subprocess.Popen[str]],  # noqa: F811
    whole: dict[str, bytes],  # noqa: F811
) -> None:
    winners = Counter(race(config.but(run=f"{config.run}-{n}"), started, whole) for n in range(DRIVER_RACES))
    print(f"{s3.url} at {s3.endpoint}: {winners}")
    assert winners.total() == DRIVER_RACES
