"""Restarts in place and by new supervisors, on real processes: who stays, who is new, what is left at the end."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.storage.errors import LockstepError
from lockstep.training.control.failures import LauncherError, RankFailedError
from lockstep.training.control.protocol import new_key
from lockstep.training.control.roster import Roster
from lockstep.training.control.server import Handler
from lockstep.training.control.task import Limits, RankTask
from lockstep.training.launch.local import LocalSession, OnHost, run_local
from lockstep.training.launch.process import SupervisorSpec
from lockstep.training.launch.session import Launches, Session
from lockstep.training.launch.supervisor import supervise
from tests.training._ranks import living_ranks, rank_path

pytestmark = pytest.mark.slow

QUICK = Limits(grace_s=1.0, silent_s=60.0, beat_s=0.2)


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    rank_path(monkeypatch)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert living_ranks(os.getpid()) == []


def answer(rank: int, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {}


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 240
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


def test_frozen_rank_is_restarted_in_place() -> None:
    """Of the old generation nobody lives on; the supervisors are the same threads."""
    session = LocalSession(2, Limits(grace_s=1.0, silent_s=2.0, stopped_s=60.0, beat_s=0.2))
    with session:
        with pytest.raises(RankFailedError, match="no heartbeat for 2 s") as caught:
            session.run(RankTask("_ranks:one_stopped"), 1)
        assert caught.value.rank == 0
        assert living_ranks(os.getpid()) == []
        assert session.usable()
        results = session.run(RankTask("_ranks:hello"), 2, Handler(answer))
        assert [result["world"]["generation"] for result in results] == [2, 2]
        assert session.usable()
        assert len(session._threads) == 2 and all(thread.is_alive() for thread in session._threads)


def test_launches_restart_in_place_and_tell_where_the_time_went(tmp_path: Path) -> None:
    told: list[str] = []
    go = tmp_path / "go"
    go.touch()
    task = RankTask("_ranks:steps_then_killed", {"go": str(go)})

    def tell(line: str) -> None:
        told.append(line)
        go.touch()

    with Launches(run_local, 2, QUICK, report=tell) as launches:
        with pytest.raises(RankFailedError, match="SIGKILL"):
            launches.run(task, 1, Handler(answer))
        go.unlink()
        launches.run(task, 2, Handler(answer))
    (restart,) = launches.restarts
    assert (restart.generation, restart.level) == (2, 1)
    assert restart.seconds is not None and sum(restart.parts.values()) == pytest.approx(restart.seconds)
    assert all(seconds >= 0 for seconds in restart.parts.values()), restart.parts
    assert len(told) == 1 and "generation 2 was started in place (level 1)" in told[0] and "first step" in told[0]
    assert json.loads(json.dumps(restart.to_json()))["level"] == 1


@pytest.mark.parametrize("seen", [True, False])
def test_lost_supervisor_is_replaced(seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two generations, and so late that the driver has counted on it already: the run then begins once more."""
    begun: list[Session] = []
    real = OnHost.session

    def session(self: OnHost, num_ranks: int, limits: Limits) -> Session:
        begun.append(real(self, num_ranks, limits))
        return begun[-1]

    monkeypatch.setattr(OnHost, "session", session)
    with Launches(run_local, 1, QUICK, report=lambda line: None) as launches:
        launches.run(RankTask("_ranks:solo"), 1)
        roster = begun[0]._roster
        assert roster is not None and begun[0].usable()
        for line in list(roster._lines.values()):
            line.close()
        if seen:
            wait_for(lambda: not begun[0].usable())
        else:
            monkeypatch.setattr(begun[0], "usable", lambda: True)
            with pytest.raises(LauncherError, match="the supervisor of rank 0 is lost"):
                launches.run(RankTask("_ranks:solo"), 2)
            monkeypatch.undo()
            rank_path(monkeypatch)
        assert launches.run(RankTask("_ranks:solo"), 3)[0]["rank"] == 0
    assert [restart.level for restart in launches.restarts] == ([2] if seen else [1, 2])


def test_failure_from_outside_ends_what_runs_and_what_would_follow(tmp_path: Path) -> None:
    """As the thread does that learns of another driver."""
    with Launches(run_local, 1, QUICK) as launches:
        threading.Timer(1.0, launches.fail, (LockstepError("another driver has the run"),)).start()
        for generation in (1, 2):
            with pytest.raises(LockstepError, match="another driver has the run"):
                launches.run(RankTask("_ranks:tells_pid", {"folder": str(tmp_path)}), generation, Handler(answer))
    assert len(list(tmp_path.iterdir())) <= 1


def test_supervisor_without_a_driver_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the line breaks, or nothing is heard for `lost_s`: a driver that is stopped, a network that is gone."""
    monkeypatch.setattr("lockstep.training.control.roster.PING_EVERY_S", 3600.0)
    for lost in (True, False):
        secret = new_key()
        roster = Roster(secret, 1, "127.0.0.1", lambda rank: None)
        place = SupervisorSpec(
            0, ("127.0.0.1",), ("127.0.0.1", roster.port), secret, Limits(lost_s=60.0 if lost else 1.0)
        )
        codes: list[int] = []
        post = threading.Thread(target=lambda place=place, codes=codes: codes.append(supervise(place)), daemon=True)
        post.start()
        assert roster.whole(120.0)
        if lost:
            roster._lines[0].close()
        post.join(120.0)
        assert codes == [0]
        roster.close()
