"""Spare executors: each keeps a process that has imported TensorFlow, for a rank whose executor is lost.

A barrier stage ends with its first task, and with it all its supervisors. So each spare waits in a Spark job of its
own, on a slot that the stage leaves, and its task ends before the next stage starts. Spark reuses the Python process of
such a task for the supervisor that then gets its slot, and the supervisor finds the rank's process there.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from training.control.client import RosterClient
from training.control.last_words import new_page
from training.control.protocol import new_key
from training.control.roster import Roster
from training.control.stacks import new_stacks
from training.control.task import Limits
from training.launch.executors import GPU, rank_profile
from training.launch.process import RankProcess, end_left, new_mark, start_process

if TYPE_CHECKING:
    from pyspark import SparkContext

log = logging.getLogger(__name__)
LOOK_S = 0.5
AGAIN_S = 10.0  # after its executor was lost
END_S = 5.0


@dataclass(frozen=True, slots=True)
class SpareRank:
    """A rank's process that waits for its order, of this Python process."""

    process: RankProcess
    page: int
    """The file of its last words."""
    stacks: int
    """The file for its stacks."""
    mark: str
    devices: tuple[str, ...]
    """The GPUs that it sees."""

    @classmethod
    def start(cls, devices: tuple[str, ...]) -> SpareRank:
        """Start one. Spark sets OMP_NUM_THREADS for the processes of a task, so it has those of every other rank."""
        page, stacks, mark = new_page(), new_stacks(), new_mark()
        return cls(start_process([",".join(devices)], mark, 1, page, stacks), page, stacks, mark, devices)

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.communicate()
        end_left(self.process.pid, self.mark)
        os.close(self.page)
        os.close(self.stacks)


_kept: list[SpareRank] = []


def take(devices: tuple[str, ...]) -> SpareRank | None:
    """The spare of this Python process, if it has one that lives and sees these GPUs; the caller owns it."""
    while _kept:
        spare = _kept.pop()
        if spare.process.poll() is None and spare.devices == devices:
            return spare
        spare.end()
    return None


@dataclass(frozen=True, slots=True)
class WaitOnTask:
    """The function of a spare's job; picklable by reference, so that executors import it."""

    control: tuple[str, int]
    secret: bytes = field(repr=False)
    limits: Limits

    def __call__(self, rows: Iterable[int]) -> Iterator[int]:
        """Keep a spare in this Python process until the driver needs the slot; yields `rows`."""
        from pyspark import SparkFiles, TaskContext

        context = TaskContext.get()
        assert context is not None, "a task has one"
        os.environ["LOCKSTEP_FILES"] = SparkFiles.getRootDirectory()  # as for every rank
        gpu = context.resources().get(GPU)
        devices = tuple(gpu.addresses) if gpu else ()
        _kept.append(take(devices) or SpareRank.start(devices))
        start_s, lost_s = self.limits.start_s, self.limits.lost_s
        line = RosterClient(self.control, self.secret, 0, deadline_s=start_s, lost_s=lost_s)
        line.next_order()  # none comes: it returns when the driver has closed the roster, or is gone
        line.close()
        return iter([*rows])  # Spark ends a process that has not read all rows of its task


class Spare:
    """A spare on a slot that a barrier stage leaves, from when that stage has all its ranks to `close`."""

    def __init__(self, context: SparkContext, limits: Limits, bind_host: str, host: str, ranks: Roster) -> None:
        """`ranks` are the stage's: before they are there, a spare could take one of their slots."""
        from pyspark import InheritableThread

        self._context, self._limits, self._ranks = context, limits, ranks
        self._bind_host, self._host = bind_host, host
        self._group = f"lockstep-spare-{secrets.token_hex(8)}"
        self._closed = threading.Event()
        self._roster: Roster | None = None
        self._thread = InheritableThread(target=self._run, name="spare", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End its task; its process stays for the supervisor that comes there next."""
        self._closed.set()
        if (roster := self._roster) is not None:
            roster.close()
        self._thread.join(END_S)
        if self._thread.is_alive():  # its task waits for a slot
            self._context.cancelJobGroup(self._group)
            self._thread.join(END_S)

    def _run(self) -> None:
        while not self._ranks.came(LOOK_S):
            if self._closed.is_set():
                return
        self._context.setJobGroup(self._group, "a spare executor", interruptOnCancel=True)
        rows, profile = self._context.parallelize([0], 1), rank_profile(self._context)
        rows = rows if profile is None else rows.withResources(profile)
        while not self._closed.is_set():
            key = new_key()
            self._roster = Roster(key, 1, self._bind_host, lambda rank: None)
            try:
                if not self._closed.is_set():
                    rows.mapPartitions(WaitOnTask((self._host, self._roster.port), key, self._limits)).collect()
            except Exception as error:  # the run does without it, until there is a slot again
                if not self._closed.is_set():
                    reason = next(iter(str(error).splitlines()), type(error).__name__)
                    log.warning("a spare executor was lost: %s", reason)
            finally:
                self._roster.close()
            self._closed.wait(AGAIN_S)
