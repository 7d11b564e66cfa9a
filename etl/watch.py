"""What Spark is doing, while it does it: finished tasks, polled in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from storage.progress import Progress

if TYPE_CHECKING:
    from pyspark import SparkStageInfo
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

    tracker = spark.sparkContext.statusTracker()
    finished: dict[int, int] = {}
    while not stop.wait(POLL_S):
        try:
            found = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        except (Py4JError, OSError):
            break  # the session ends; whoever runs the job hears of it there
        stages = [stage for stage in found if stage is not None]
        for stage in stages:
            finished[stage.stageId] = max(finished.get(stage.stageId, 0), stage.numCompletedTasks)
        progress.set(sum(finished.values()), note=_now(stages))
    progress.set(sum(finished.values()), note="")  # the last line is about the whole


def _now(stages: Sequence[SparkStageInfo]) -> str:
    """What runs at this moment: the tasks of each stage that are done, and of how many."""
    told = [f"{stage.numCompletedTasks} of {stage.numTasks} tasks of stage {stage.stageId}" for stage in stages]
    return f"now {', '.join(told)}" if told else ""
