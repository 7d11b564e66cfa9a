"""The life of a communicator over TCP: one call at a time, and an end that it shares with the groups made of it.

Whatever ends it, `close`, `abort` or a call that fails, wakes what is blocked, ends the groups and tells other ranks.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from lockstep.storage.errors import CommunicationError
from training.comm.base import Communicator
from training.comm.solo import SoloCommunicator
from training.comm.tcp.engine import Engine
from training.comm.tcp.mesh import Mesh

_open: weakref.WeakSet[TcpLife] = weakref.WeakSet()


class TcpLife(Communicator):
    """What `TcpCommunicator` is without its collectives; those run in `_guarded`."""

    def __init__(self, mesh: Mesh, members: Sequence[int], rank: int, deadline_s: float, channel: int) -> None:
        super().__init__(rank, len(members), mesh.generation, deadline_s)
        self._mesh, self._members, self._channel = mesh, tuple(members), channel
        self._engine = Engine(mesh, channel, members, rank)
        self._lock = threading.Lock()
        self._ended: str | None = None
        self._aborted = False
        self._groups: list[TcpLife | SoloCommunicator] = []
        _open.add(self)

    @property
    def has_ended(self) -> bool:
        """Whether it was closed or aborted, or has failed."""
        return self._ended is not None

    def look(self, what: str) -> str | None:
        """Why this communicator has ended, None while it lives: hears of a rank's end without a call, while `what`.

        Waits for nothing but a call of another thread, which hears of it by itself.
        """
        with suppress(CommunicationError):  # what is kept of it is returned
            self._guarded(lambda: self._engine.look(what))
        return self._ended

    def abort(self, reason: str) -> None:
        self._mark(reason, aborted=True)
        self._tell_where_idle()

    def close(self) -> None:
        words = {one: one._last_word() for one in self._family()}
        self._mark("it was closed", aborted=False)
        with ExitStack() as calls:
            for one in words:
                calls.enter_context(one._lock)  # a call that was woken leaves first
            Engine.end({one._engine: word for one, word in words.items()}, self.generation)
            if self._channel == 0:
                self._mesh.close()

    def let_go(self) -> None:
        """In a forked process: close its copies of the sockets, which stay open in this rank."""
        self._ended = "this process was forked from the rank"
        self._lock = threading.Lock()  # the old one may be held by a thread that is not here
        self._mesh.let_go()
        self._engine.drop()

    def _family(self) -> list[TcpLife]:
        """This one and its groups, and theirs."""
        groups = [group for group in self._groups if isinstance(group, TcpLife)]
        return [self, *(one for group in groups for one in group._family())]

    def _mark(self, reason: str, *, aborted: bool) -> None:
        """Let a blocked call and every later one raise, here and in the groups."""
        self._ended, self._aborted = self._ended or reason, self._aborted or aborted
        self._engine.abort(self._ended)
        for group in self._groups:
            if isinstance(group, TcpLife):
                group._mark(self._ended, aborted=aborted)
            else:
                group.abort(self._ended)

    def _last_word(self) -> str | None:
        return None if self._ended is None else f"rank {self._members[self.rank]}: {self._ended}"

    def _tell_where_idle(self) -> None:
        """Tell the others now, who may be waiting; where a call is under way it wakes, and tells them itself."""
        idle = [one for one in self._family() if one._lock.acquire(blocking=False)]
        try:
            Engine.end({one._engine: one._last_word() for one in idle}, self.generation)
        finally:
            for one in idle:
                one._lock.release()

    def _guarded(self, call: Callable[[], None]) -> None:
        with self._lock:
            self._check_open()
            try:
                call()
                if self._aborted:  # by another thread, too late for this call to see it
                    Engine.end({self._engine: self._last_word()}, self.generation)
            except BaseException as error:
                # Half a collective cannot be mended; the neighbours are told at once, and tell theirs.
                what = error.what if isinstance(error, CommunicationError) else f"{type(error).__name__}: {error}"
                reason = self._engine.reason or what
                self._ended = self._ended or reason
                Engine.end({self._engine: reason}, self.generation)
                self._mark(reason, aborted=True)
                self._tell_where_idle()  # the groups: this one's lock is taken
                raise

    def _check_open(self) -> None:
        if self._ended is not None:
            name = self._members[self.rank]
            raise CommunicationError(
                f"rank {name}: the communicator has ended: {self._ended}", next_step="Start the rank again."
            )


def _in_child() -> None:
    """A forked process holds every socket of the rank, whose end would stay unseen as long as it lives."""
    for communicator in list(_open):
        communicator.let_go()


os.register_at_fork(after_in_child=_in_child)
