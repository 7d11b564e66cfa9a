"""Running the kernels of shared memory, and all that can keep a call from its end: dead, late and differing ranks."""

from __future__ import annotations

import math
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lockstep.storage.errors import CommunicationError
from training.comm.frames import describe_tag, tag_of
from training.comm.shm import shm_rounds as k
from training.comm.shm.join import Links, close_all
from training.comm.shm.segment import Segment

SPINS = 400  # looks at a flag before sleeping, 10 microseconds; docs/decisions/042-shared-memory.md
SLICE_S = 0.05  # a kernel that waits comes back so often, to look for the end of a rank, an abort and the deadline
LONGEST_S = 3600.0  # of one wait on a socket: the system takes no more than 24 days, a deadline may be any number
_open: weakref.WeakSet[Calls] = weakref.WeakSet()


class Calls:
    """The calls of one rank: announces them, runs their kernels, ends the communicator where one fails."""

    def __init__(self, segment: Segment, links: Links, rank: int, labels: Sequence[int]) -> None:
        self.segment, self.links, self.labels = segment, links, tuple(labels)
        self.lock = threading.Lock()
        self.ended: str | None = None
        self.closed, self._rank = False, rank
        self._poll = select.poll()
        for link in links:
            if link is not None:
                self._poll.register(link, select.POLLRDHUP)
        layout = segment.layout
        n = layout.num_ranks
        self.ctx = ctx = np.zeros(k.TABLES + 3 * n, np.int64)
        ctx[k.RANK], ctx[k.RANKS], ctx[k.SELF] = rank, n, ctx.ctypes.data
        ctx[k.TIMEOUT_NS] = int(SLICE_S * 1e9)
        # More ranks than cores: who spins keeps away the rank that it waits for.
        ctx[k.SPINS] = SPINS if n <= len(os.sched_getaffinity(0)) else 1
        ctx[k.CHUNK], ctx[k.HALF] = layout.chunk_bytes, layout.half_bytes
        ctx[k.SEGMENT] = base = segment.address
        ctx[k.CONTROL], ctx[k.INLINE] = base + layout.control, base + layout.inline
        ctx[k.STAGE], ctx[k.PAIRS] = base + layout.stage, base + layout.pairs
        _open.add(self)

    def announce(self, kind: str, op: str, dtype: np.dtype[Any], size: int, address: int, own: int, root: int) -> None:
        """Prepare a call over `size` bytes, of which `own` at `address` are this rank's to give; holds the lock."""
        self.check_open()
        ctx = self.ctx
        ctx[k.TAG] = tag_of(kind, op, dtype, root)
        ctx[k.SIZE], ctx[k.BUFFER], ctx[k.OWN] = size, address, own
        ctx[k.PLACE] = self.segment.place_of(address, own)
        ctx[k.ROUND] = ctx[k.LOOSE] = 0
        ctx[k.ITEM] = ctx[k.ALL] = 1

    def check_open(self) -> None:
        """Raise CommunicationError if the communicator has ended."""
        if self.ended is not None:
            raise CommunicationError(
                f"rank {self.labels[self._rank]}: the communicator has ended: {self.ended}",
                next_step="Start the rank again.",
            )
        if (first := self.segment.ended()) is not None:
            self.ended = first[1]
            raise CommunicationError(
                f"rank {self.labels[self._rank]}: rank {self.labels[first[0]]} has ended the communicator: {first[1]}"
            )

    def run(self, kernel: Callable[[Any], int], what: str, deadline_s: float) -> None:
        """Run a kernel until it is done. Half a collective cannot be mended: whatever ends it ends the communicator."""
        try:
            if kernel(self.ctx) != k.DONE:
                self._go_on(kernel, what, time.monotonic() + deadline_s - SLICE_S, deadline_s)
        except BaseException as error:
            self.abort_by(error, what)
            raise

    def wait_for_message(self, rank: int, what: str, deadline_s: float) -> socket.socket:
        """The socket of `rank` once it can be read. Raises CommunicationError as `run` does, but ends nothing."""
        link, until = self.links[rank], time.monotonic() + deadline_s
        assert link is not None
        poll = select.poll()
        poll.register(link, select.POLLIN)
        while not poll.poll(SLICE_S * 1000):
            if (problem := self._look(rank, what, until, deadline_s)) is not None:
                raise problem
        return link

    def find_end(self, waited: int, call: str) -> CommunicationError | None:
        """The end of a rank or of the communicator, if there is one, by which what has just failed is explained."""
        return self._look(waited, call, math.inf, 0.0)

    def abort_by(self, error: BaseException, what: str) -> None:
        """End the communicator because a call has met `error`."""
        me = self.labels[self._rank]
        self.abort(error.what if isinstance(error, CommunicationError) else f"rank {me}: {what} met {error!r}")

    def abort(self, reason: str) -> None:
        """End the communicator on all ranks, from any thread."""
        if self.ended is None:
            self.ended = reason
            self.segment.end(reason)

    def close(self) -> None:
        """Leave; a call that is under way in another thread sees it and leaves first."""
        if self.ended is None:
            self.ended = "it was closed"
        with self.lock:
            if not self.closed:
                self.closed = True
                self.segment.leave()
                close_all(self.links)
                self.segment.close()

    def _go_on(self, kernel: Callable[[Any], int], what: str, until: float, deadline_s: float) -> None:
        """Between a kernel's slices look for what can keep it from its end."""
        while (status := kernel(self.ctx)) != k.DONE:
            rank, round_before = status // k.RANK_FROM, self.ctx[k.ROUND]
            if status % k.RANK_FROM == k.DIFFERENT:
                raise self._different(rank, what)
            if (problem := self._look(rank, f"{what} of {self.ctx[k.SIZE]} bytes", until, deadline_s)) is None:
                continue
            # Who has ended may have done its part of this call just before: only what does not move now is stuck.
            status = kernel(self.ctx)
            if status == k.DONE:
                return
            if status == k.WAITING + k.RANK_FROM * rank and self.ctx[k.ROUND] == round_before:
                raise problem

    def _look(self, waited: int, call: str, until: float, deadline_s: float) -> CommunicationError | None:
        me, late = self.labels[self._rank], self.labels[waited]
        if self.ended is not None:
            return CommunicationError(f"rank {me}: {call} was ended: {self.ended}")
        if (first := self.segment.ended()) is not None:
            return CommunicationError(f"rank {me}: {call} was ended by rank {self.labels[first[0]]}: {first[1]}")
        gone = {fd for fd, _ in self._poll.poll(0)}
        for rank, link in enumerate(self.links):
            if link is None or link.fileno() not in gone:
                continue
            if not self.segment.has_left(rank):
                return CommunicationError(
                    f"rank {me}: lost rank {self.labels[rank]} during {call}",
                    got="its process has ended",
                    next_step=f"Look at the log of rank {self.labels[rank]}: it ended first.",
                )
            if rank == waited:
                return CommunicationError(
                    f"rank {me}: {call} waits for rank {late}, which has closed its communicator",
                    allowed="the same calls on every rank",
                    next_step=f"Compare the logs of ranks {me} and {late}.",
                )
        if time.monotonic() >= until:
            return CommunicationError(
                f"rank {me}: {call} waited {deadline_s:g} s for rank {late}",
                allowed="every rank in the same collective within the deadline",
                next_step=f"Look at the log of rank {late}; if its steps are just slow, raise --stall-limit.",
            )
        return None

    def _different(self, rank: int, what: str) -> CommunicationError:
        ctx = self.ctx
        if what == "recv":
            theirs = self.segment.header_of(rank, self._rank, int(ctx[k.MESSAGE] + ctx[k.ROUND]))
        else:
            theirs = self.segment.call_of(rank, int(ctx[k.CALL]))
        me, other = self.labels[self._rank], self.labels[rank]
        return CommunicationError(
            f"ranks {me} and {other} differ in what they call",
            got=f"rank {me}: {_describe(int(ctx[k.TAG]), int(ctx[k.SIZE]))}; rank {other}: {_describe(*theirs)}",
            allowed="the same collectives in the same order, with equal sizes and dtypes",
            next_step="Compare the ranks' logs; all must run one version and one configuration.",
        )


def _describe(tag: int, size: int) -> str:
    return f"{describe_tag(tag)} of {size} bytes"


def _in_child() -> None:
    """In a forked process: let go of the sockets, or the end of the rank itself would stay unseen while it lives."""
    for calls in list(_open):
        calls.ended = "this process was forked from the rank"
        calls.closed = True  # or its `close` would say in the segment that the rank itself has left
        calls.lock = threading.Lock()  # the old one may be held by a thread that is not here
        close_all(calls.links)


os.register_at_fork(after_in_child=_in_child)
