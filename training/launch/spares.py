"""Spare executors: each keeps a process that has imported TensorFlow, for a rank whose executor is lost.

A barrier stage ends with its first task, and with it all its supervisors. So each spare waits in a Spark job of its
own, on a slot that the stage leaves, and its task ends before the next stage starts. Spark reuses the Python process of
such a task for the supervisor that then gets its slot, and the supervisor finds the rank's process there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lockstep.training.control.client import RosterClient
from lockstep.training.control.last_words import new_page
from lockstep.training.control.protocol import new_key
from lockstep.training.control.roster import Roster
from lockstep.training.control.stacks import new_stacks
from lockstep.training.control.task import Limits
from lockstep.training.launch.executors import GPU, first_line, rank_profile
from lockstep.training.launch.process import OURS, end_left, new_mark, start_process

if TYPE_CHECKING:
    from pyspark import SparkContext

log = logging.getLogger(__name__)
LOOK_S = 0.5
AGAIN_S = 10.0  # after its executor was lost, or its process was killed
KEPT_S = 60.0  # after its task, for a supervisor; restarts wait 30 s at most
CANCEL_EVERY_S = 0.5
END_S = 5.0


@dataclass(frozen=True, slots=True)
class SpareRank:
    """A rank's process that waits for its order, of this Python process."""

    process: subprocess.Popen[bytes]
    page: int
    """The file of its last words."""
    stacks: int
    """The file for its stacks."""
    mark: str
    devices: tuple[str, ...]
    """The GPUs that it sees."""
    modules: tuple[str, ...]
    """Where the process looks for modules: not in a file that the session got later (addPyFile)."""

    @classmethod
    def start(cls, devices: tuple[str, ...]) -> SpareRank:
        """Start a spare process. Spark sets OMP_NUM_THREADS for the processes of a task, so it has those of every other
        rank.
        """
        page, stacks, mark = new_page(), new_stacks(), new_mark()
        process = start_process([",".join(devices)], mark, 1, page, stacks)
        return cls(process, page, stacks, mark, devices, tuple(sys.path))

    def end(self) -> None:
        """Kill the process and what it has started."""
        self.process.kill()
        self.process.communicate()
        end_left(self.process.pid, self.mark)
        os.close(self.page)
        os.close(self.stacks)


_kept: list[SpareRank] = []
_ends: list[threading.Timer] = []
"""Ends the spare that a task has left; a later task that takes it cancels that."""


def take(devices: tuple[str, ...], entry: str = OURS[0]) -> SpareRank | None:
    """The spare of this Python process, if it lives and sees these GPUs and all modules; the caller owns it.

    None for an `entry` of the user's, which may set variables that TensorFlow and Keras read when they are imported.
    """
    while _ends:
        _ends.pop().cancel()
    while _kept:
        spare = _kept.pop()
        sees = spare.devices == devices and spare.modules == tuple(sys.path)
        if spare.process.poll() is None and sees and entry.startswith(OURS):
            return spare
        spare.end()
    return None


def _end_unused(spare: SpareRank) -> None:
    with contextlib.suppress(ValueError):  # it is taken
        _kept.remove(spare)
        spare.end()


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
        spare = take(devices) or SpareRank.start(devices)
        start_s, lost_s = self.limits.start_s, self.limits.lost_s
        line = RosterClient(self.control, self.secret, 0, deadline_s=start_s, lost_s=lost_s)
        while not line.ended(AGAIN_S):  # until the driver has closed the roster, or is gone
            if (spare.process.poll() or 0) < 0:  # a signal: a process that fails itself would do so again
                spare.end()
                spare = SpareRank.start(devices)  # in this thread, with which it ends
        line.close()
        _kept.append(spare)
        # Spark may give this Python process to any later task of the session.
        unused = threading.Timer(KEPT_S, _end_unused, [spare])
        unused.daemon = True
        unused.start()
        _ends.append(unused)
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
        self._waits = False  # whether its task had a slot when it was to end
        self._broken = False  # whether its task was lost
        self._roster: Roster | None = None
        self._thread = InheritableThread(target=self._run, name="spare", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Let its task end; returns at once."""
        self._closed.set()
        if (roster := self._roster) is not None:
            self._waits = self._waits or (roster.came(0.0) and not roster.gone())
            roster.close()

    def close(self) -> None:
        """End its task; its process stays for the supervisor that comes there next."""
        self.stop()
        began = time.monotonic()
        while self._thread.is_alive() and (so_far_s := time.monotonic() - began) < 2 * END_S:
            if not self._waits or so_far_s > END_S:  # its task waits for a slot, or hangs
                with contextlib.suppress(Exception):  # Java has ended: so does the thread
                    self._context.cancelJobGroup(self._group)
            self._thread.join(CANCEL_EVERY_S)

    def _lost(self, rank: int) -> None:
        """Begin a new job, with a new roster: in this one Spark would try the task again, and be refused."""
        if not self._closed.is_set():
            self._broken = True
            with contextlib.suppress(Exception):  # Java has ended
                self._context.cancelJobGroup(self._group)

    def _run(self) -> None:
        while not self._ranks.came(LOOK_S):
            if self._closed.is_set():
                return
        while not self._closed.is_set():
            key, self._broken = new_key(), False
            self._roster = roster = Roster(key, 1, self._bind_host, self._lost)
            try:
                self._context.setJobGroup(self._group, "a spare executor", interruptOnCancel=True)
                rows, profile = self._context.parallelize([0], 1), rank_profile(self._context)
                rows = rows if profile is None else rows.withResources(profile)
                if not self._closed.is_set():
                    rows.mapPartitions(WaitOnTask((self._host, roster.port), key, self._limits)).collect()
            except Exception as error:  # the run does without it, until there is a slot again
                if not self._closed.is_set():
                    why = "its connection broke" if self._broken else first_line(error)
                    log.warning("a spare executor was lost (%s); another one begins when there is a slot", why)
            finally:
                roster.close()
            self._closed.wait(AGAIN_S)


def close_all(spares: Sequence[Spare]) -> None:
    """Close all at once."""
    for spare in spares:
        spare.stop()
    for spare in spares:
        spare.close()
