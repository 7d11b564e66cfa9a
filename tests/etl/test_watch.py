"""What is shown while Spark works, with a session that is none."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from etl import watch
from storage import progress


class Session:
    """A status tracker of stages (number, tasks done, tasks), one list at each look, then of none."""

    def __init__(self, *moments: list[tuple[int, int, int]]) -> None:
        self.sparkContext = self
        self.moments = [*moments, []]

    def statusTracker(self) -> Session:
        return self

    def getActiveStageIds(self) -> list[int]:
        self._active = self.moments.pop(0) if len(self.moments) > 1 else []
        return [stage for stage, _, _ in self._active]

    def getStageInfo(self, number: int) -> Any:
        stage, done, tasks = next(active for active in self._active if active[0] == number)
        return SimpleNamespace(stageId=stage, numCompletedTasks=done, numTasks=tasks)


def test_a_line_tells_of_how_many_tasks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(watch, "POLL_S", 0.01)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    session: Any = Session([(4, 3, 8)], [(4, 5, 8), (6, 1, 2)])
    with watch.watched(session, "etl logs"):
        while len(session.moments) > 1:
            time.sleep(0.01)
    first, second, *_, last = capsys.readouterr().err.splitlines()
    assert first == "etl logs: 3 tasks, 0 s, now 3 of 8 tasks of stage 4"
    assert second == "etl logs: 6 tasks, 0 s, now 5 of 8 tasks of stage 4, 1 of 2 tasks of stage 6"
    assert last == "etl logs: 6 tasks, 0 s", "what ran before the end is not running any more"
