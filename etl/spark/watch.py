"""What Spark is doing, while it does it: finished tasks, polled in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.storage.progress import Progress

if TYPE_CHECKING:
    from pyspark import SparkStageInfo, StatusTracker
    from pyspark.sql import SparkSession

POLL_S = 0.5


@contextmanager
def watched(spark: SparkSession, label: str) -> Iterator[None]:
    """Show the tasks that Spark finishes meanwhile; any failure to ask Spark ends the display, not the job."""
    stop = threading.Event()
    with Progress(label, None, "tasks") as progress:
        thread = threading.Thread(target=_poll, args=(spark, progress, stop), name="lockstep-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(timeout=10 * POLL_S)


def _poll(spark: SparkSession, progress: Progress, stop: threading.Event) -> None:
    from py4j.protocol import Py4JError

    counted = _Counted(spark.sparkContext.statusTracker())
    ended = False
    while not ended:
        ended = stop.wait(POLL_S)
        try:
            active = counted.look()
        except (Py4JError, OSError):
            return  # the session ends; whoever runs the job hears of it there
        progress.set(counted.tasks, note="" if ended else _now(active))  # the last line is about the whole


class _Counted:
    """Tasks finished in all stages from the first that is seen at work, those between two looks too."""

    def __init__(self, tracker: StatusTracker) -> None:
        self._tracker = tracker
        self._finished: dict[int, int] = {}
        self._open: set[int] = set()
        self._next: int | None = None

    @property
    def tasks(self) -> int:
        return sum(self._finished.values())

    def look(self) -> list[SparkStageInfo]:
        """Ask Spark; returns the stages that are at work."""
        active = sorted(self._tracker.getActiveStageIds())
        if active:
            # Spark numbers its stages one after another: what lies between was too short to be seen.
            self._open.update(range(active[0] if self._next is None else self._next, active[-1] + 1))
            self._next = max(active[-1] + 1, self._next or 0)
        found = {number: self._tracker.getStageInfo(number) for number in sorted(self._open)}
        for number, stage in found.items():
            if stage is not None:
                self._finished[number] = stage.numCompletedTasks
            if active and number < active[0]:
                self._open.remove(number)
        return [stage for number in active if (stage := found.get(number)) is not None]


def _now(stages: Sequence[SparkStageInfo]) -> str:
    """What runs at this moment: the tasks of each stage that are done, and of how many."""
    told = [f"{stage.numCompletedTasks} of {stage.numTasks} tasks of stage {stage.stageId}" for stage in stages]
    return f"now {', '.join(told)}" if told else ""
