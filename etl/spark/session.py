"""A Spark session while one of our jobs uses it: temporary settings, descriptions of Spark jobs, a progress line."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from lockstep.storage.progress import Pace, Progress

if TYPE_CHECKING:
    from pyspark import SparkStageInfo, StatusTracker
    from pyspark.sql import SparkSession

    from lockstep.etl.input.files import Source

S = TypeVar("S")
T = TypeVar("T")
PARTITION_BYTES = 32 << 20
LEAST_BYTES = 1 << 20  # for less input, another core saves no time
PACKED_GROWTH = 10  # logs shrink by about this much
# A batch is a unit of memory in a Python task and, for cached rows, in Java, whose serializer holds several of them at
# once. Spark's default of 10,000 rows of some KiB each is too much (docs/decisions/060-codec-kernels.md).
BATCHES = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": "4096",
    "spark.sql.inMemoryColumnarStorage.batchSize": "128",
}
POLL_S = 0.5


@contextmanager
def tuned(spark: SparkSession, sources: Sequence[Source]) -> Iterator[None]:
    """Have the session shuffle by the size of the input, see `sized`; includes `bounded`."""
    size = sum(source.size_bytes * (PACKED_GROWTH if source.codec != "none" else 1) for source in sources)
    with sized(spark, size), bounded(spark):
        yield


@contextmanager
def sized(spark: SparkSession, size_bytes: int) -> Iterator[None]:
    """Set the number of partitions of a shuffle by the size of the rows, so that a small job does not
    run 200 tasks a shuffle.

    Adaptive planning is off: it has nothing to choose here, and it makes a Spark job of each stage.
    """
    cores = spark.sparkContext.defaultParallelism
    partitions = max(1, min(cores, -(-size_bytes // LEAST_BYTES)), -(-size_bytes // PARTITION_BYTES))
    settings = {"spark.sql.shuffle.partitions": str(partitions), "spark.sql.adaptive.enabled": "false"}
    with with_settings(spark, settings):
        yield


@contextmanager
def bounded(spark: SparkSession) -> Iterator[None]:
    """Limit the batches of Arrow and of Spark's cache, so that a task's memory does not grow with the size of its rows.
    A session that has a lower limit keeps it.
    """
    own = {key: int(spark.conf.get(key) or 0) for key in BATCHES}  # 0 or less: without a limit
    with with_settings(
        spark, {key: str(min(int(most), own[key])) if own[key] > 0 else most for key, most in BATCHES.items()}
    ):
        yield


@dataclass
class _Changed:
    """A setting: its value before, the values that running jobs want, in the order in which they began, and the last
    set.
    """

    before: str | None
    wanted: list[str] = field(default_factory=list)
    now: str | None = None


_lock = threading.Lock()
_changed: dict[Hashable, _Changed] = {}


@contextmanager
def held_setting(
    name: Hashable, value: str, get: Callable[[], str | None], put: Callable[[str | None], object]
) -> Iterator[None]:
    """Hold a setting of the process, known by `name`, at `value`. `get` and `put` read and set it; None means unset.

    If several jobs run at once, the one that began last decides, and the last one to end restores the value from before
    the first. A value that other code sets meanwhile stays or is restored.
    """
    with _lock:
        found = get()
        put(value)
        state = _changed.setdefault(name, _Changed(found))
        if state.wanted and found != state.now:
            state.before = found
        state.wanted.append(value)
        state.now = value
    try:
        yield
    finally:
        with _lock:
            state.wanted.remove(value)
            if not state.wanted:
                del _changed[name]
            if get() == state.now:
                state.now = state.wanted[-1] if state.wanted else state.before
                put(state.now)


@contextmanager
def with_settings(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Hold settings of the session at these values."""
    session = spark._jsparkSession.sessionUUID()  # pyspark may have several objects of one session

    def put(key: str, value: str | None) -> None:
        spark.conf.unset(key) if value is None else spark.conf.set(key, value)

    with ExitStack() as stack:
        for key, value in settings.items():
            get = partial(spark.conf.get, key, None)
            stack.enter_context(held_setting((session, key), value, get, partial(put, key)))
        yield


_doing: list[tuple[str, int | None]] = []  # the descriptions that are in effect now, the newest last


@contextmanager
def job_description(spark: SparkSession, text: str, shards: int | None = None) -> Iterator[None]:
    """Have the Spark jobs that this thread starts described by `text`, on Spark's page, in its logs and by `watched`.

    `shards`: how many the last stage writes, one a task.
    """
    context = spark.sparkContext
    before = context.getLocalProperty("spark.job.description")
    context.setJobDescription(f"Lockstep: {text}")
    doing = (text, shards)
    _doing.append(doing)
    try:
        yield
    finally:
        _doing.remove(doing)
        context.setLocalProperty("spark.job.description", before)  # type: ignore[arg-type] # None unsets it


def at_once(first: Callable[[], S], second: Callable[[], T]) -> tuple[S, T]:
    """Run both functions at the same time, the first in its own thread, and return their results: most of a small Spark
    job's time is planning, on one core. When both have ended, raises the first one's error, else the second one's.
    """
    from pyspark import InheritableThread

    begun = Future[S]()
    thread = InheritableThread(target=_run_into, args=(begun, first), name="lockstep-at-once")
    thread.start()
    ended = Future[T]()
    _run_into(ended, second)
    thread.join()
    return begun.result(), ended.result()


def _run_into(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


@contextmanager
def watched(spark: SparkSession, label: str, steps: Sequence[str] = ()) -> Iterator[None]:
    """Show how many tasks Spark finishes meanwhile; if Spark cannot be asked, the display ends, not the job.

    `steps`: the texts of `job_description` that take most of the time, in order, for the share of the whole.
    """
    stop = threading.Event()
    with Progress(label, None, "tasks") as progress:
        thread = threading.Thread(target=_poll, args=(spark, progress, stop, steps), name="lockstep-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(timeout=10 * POLL_S)


def _poll(spark: SparkSession, progress: Progress, stop: threading.Event, steps: Sequence[str]) -> None:
    from py4j.protocol import Py4JError

    counted, now = _Counted(spark.sparkContext.statusTracker()), _Now(steps)
    ended = False
    while not ended:
        ended = stop.wait(POLL_S)
        try:
            active = counted.look()
        except (Py4JError, OSError):
            return  # the session ends; the code that runs the job gets the error
        progress.set(counted.tasks, note="" if ended else now.words(active))  # the last line is the total


class _Counted:
    """Counts finished tasks of all stages from the first active one on, also of stages that ran between two polls."""

    def __init__(self, tracker: StatusTracker) -> None:
        self._tracker = tracker
        self._finished: dict[int, int] = {}
        self._open: set[int] = set()
        self._next: int | None = None

    @property
    def tasks(self) -> int:
        return sum(self._finished.values())

    def look(self) -> list[SparkStageInfo]:
        """Ask Spark; returns the active stages."""
        active = sorted(self._tracker.getActiveStageIds())
        if active:
            # Spark numbers stages consecutively: those in between were too short to be seen.
            self._open.update(range(active[0] if self._next is None else self._next, active[-1] + 1))
            self._next = max(active[-1] + 1, self._next or 0)
        found = {number: self._tracker.getStageInfo(number) for number in sorted(self._open)}
        for number, stage in found.items():
            if stage is not None:
                self._finished[number] = stage.numCompletedTasks
            if active and number < active[0]:
                self._open.remove(number)
        return [stage for number in active if (stage := found.get(number)) is not None]


class _Now:
    """The stages that are active, in words, with their share and the time left, and the share of all steps."""

    def __init__(self, steps: Sequence[str]) -> None:
        self._steps, self._begun = steps, 0
        self._stages: list[int] = []
        self._pace = Pace()

    def words(self, stages: Sequence[SparkStageInfo]) -> str:
        """What Spark does now: shards if all tasks write one each, else tasks."""
        if not stages:
            return ""
        text, shards = _doing[-1] if _doing else (f"stage {stages[-1].stageId}", None)
        if shards == stages[-1].numTasks:
            stages = stages[-1:]
        if self._stages != (numbers := [stage.stageId for stage in stages]):
            self._stages, self._pace = numbers, Pace()
        done, total = sum(one.numCompletedTasks for one in stages), sum(one.numTasks for one in stages)
        self._pace.add(done)
        what = f"shards {done} of {total}" if shards == stages[-1].numTasks else f"{text}: {done} of {total} tasks"
        share = done / max(1, total)
        return ", ".join(filter(None, [self._whole(text, share), f"{what} ({share:.0%})", self._pace.left(total)]))

    def _whole(self, text: str, share: float) -> str:
        """The share of all steps, each counted alike: how long a later one takes is not known."""
        done = float(self._begun)
        if text in self._steps:
            self._begun = self._steps.index(text) + 1
            done = self._begun - 1 + share
        if not self._begun:
            return ""
        return f"step {self._begun} of {len(self._steps)} ({done / len(self._steps):.0%} of all)"
