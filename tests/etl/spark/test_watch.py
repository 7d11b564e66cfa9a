"""What is shown while Spark works, with a session that is none."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.etl.spark import session as watch
from lockstep.storage import progress


class Session:
    """A status tracker of stages (number, tasks done, tasks), one list at each look; `active` of them are at work."""

    def __init__(self, *moments: tuple[set[int], list[tuple[int, int, int]]]) -> None:
        self.sparkContext = self
        self.moments = list(moments)

    def statusTracker(self) -> Session:
        return self

    def getActiveStageIds(self) -> list[int]:
        active, self._stages = self.moments.pop(0) if len(self.moments) > 1 else self.moments[0]
        return list(active)

    def getStageInfo(self, number: int) -> Any:
        for stage, done, tasks in self._stages:
            if stage == number:
                return SimpleNamespace(stageId=stage, numCompletedTasks=done, numTasks=tasks)
        return None


def test_a_line_tells_of_how_many_tasks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(watch, "POLL_S", 0.01)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    session: Any = Session(
        ({4}, [(4, 3, 8)]),
        ({4, 7}, [(4, 5, 8), (5, 2, 2), (7, 1, 2)]),  # 5 came and went between two looks, 6 was skipped
        (set(), [(4, 8, 8), (5, 2, 2), (7, 2, 2)]),
    )
    with watch.watched(session, "etl logs"):
        while len(session.moments) > 1:
            time.sleep(0.01)
    told = re.sub(r"[0-9]+ s\b", "0 s", capsys.readouterr().err)  # a loaded machine may take a second for it
    first, second, *_, last = told.splitlines()
    assert first == "etl logs: 3 tasks, 0 s, stage 4: 3 of 8 tasks (38%)"
    assert second == "etl logs: 8 tasks, 0 s, stage 7: 6 of 10 tasks (60%)"
    assert last == "etl logs: 12 tasks, 0 s", "what ran before the end is not running any more"


def test_shards_are_counted_where_each_task_writes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("lockstep.storage.progress.time.monotonic", lambda: now[0])
    monkeypatch.setattr(watch, "_doing", [("read the log", None)])
    shown = watch._Now(("read the log", "make records", "order the records and write the shards"))

    def words(seconds: float, *stages: tuple[int, int, int]) -> str:
        now[0] = seconds
        return shown.words([SimpleNamespace(stageId=n, numCompletedTasks=d, numTasks=t) for n, d, t in stages])  # type: ignore[misc]

    assert words(0, (1, 0, 8)) == "step 1 of 3 (0% of all), read the log: 0 of 8 tasks (0%)"
    watch._doing.append(("count words", None))
    assert words(5, (2, 1, 2)) == "step 1 of 3 (33% of all), count words: 1 of 2 tasks (50%)", "of no step of its own"
    watch._doing.append(("order the records and write the shards", 40))
    assert (
        words(10, (2, 4, 8)) == "step 3 of 3 (83% of all), order the records and write the shards: 4 of 8 tasks (50%)"
    )
    assert words(20, (2, 8, 8), (3, 0, 40)) == "step 3 of 3 (67% of all), shards 0 of 40 (0%)"
    assert words(30, (3, 4, 40)) == "step 3 of 3 (70% of all), shards 4 of 40 (10%)"
    assert words(40, (3, 8, 40)) == "step 3 of 3 (73% of all), shards 8 of 40 (20%), 0:01:20 left"
    assert words(50, (4, 1, 5), (5, 1, 5)).endswith("2 of 10 tasks (20%)"), "another stage has another pace"
