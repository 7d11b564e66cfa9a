"""Collectives through memory that the ranks of one host share.

Buffers of `allocate` are in the segment: each rank reduces its part of all of them, in rank order, and writes the
result to all of them, so that every byte is read once and written once. Any other array goes through a stage in
chunks that stay in the caches. One kernel does a whole call; docs/decisions/042-shared-memory.md has the figures.
"""

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
from numpy.typing import NDArray

from lockstep.storage.errors import CommunicationError
from lockstep.training.comm import auth
from lockstep.training.comm.base import (
    CALL_DEADLINE_S,
    Communicator,
    Op,
    SoloCommunicator,
    check_buffer,
    check_group,
    check_peer,
    check_rank,
    part_bounds,
)
from lockstep.training.comm.frames import describe_tag, tag_of
from lockstep.training.comm.shm import kernels as k
from lockstep.training.comm.shm.join import Exchange, Links, close_all, deal, join, take
from lockstep.training.comm.shm.kernels import announce, announced_size, exchange, gather, receive, reduce_all, send
from lockstep.training.comm.shm.reduce import OP_CODES, reducer
from lockstep.training.comm.shm.segment import PAGE_BYTES, Layout, Segment, default_arena_bytes

SPINS = 400  # reads of a flag before sleeping, 10 microseconds; docs/decisions/042-shared-memory.md
SLICE_S = 0.05  # a waiting kernel returns this often, to check for lost ranks, an abort and the deadline
LONGEST_S = 3600.0  # of one wait on a socket: the system takes at most 24 days, a deadline may be any number
_open: weakref.WeakSet[Calls] = weakref.WeakSet()


class Calls:
    """The calls of one rank: announces them, runs their kernels, and ends the communicator if one fails."""

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
        # With more ranks than cores, a rank that spins keeps the one it waits for from running.
        ctx[k.SPINS] = SPINS if n <= len(os.sched_getaffinity(0)) else 1
        ctx[k.CHUNK], ctx[k.HALF] = layout.chunk_bytes, layout.half_bytes
        ctx[k.SEGMENT] = base = segment.address
        ctx[k.CONTROL], ctx[k.INLINE] = base + layout.control, base + layout.inline
        ctx[k.STAGE], ctx[k.PAIRS] = base + layout.stage, base + layout.pairs
        _open.add(self)

    def announce(self, kind: str, op: str, dtype: np.dtype[Any], size: int, address: int, own: int, root: int) -> None:
        """Prepare a call over `size` bytes; this rank contributes `own` bytes at `address`. The caller has the lock."""
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
        """Run a kernel until it is done. An error ends the communicator: half a collective cannot be repaired."""
        try:
            if kernel(self.ctx) != k.DONE:
                self._continue(kernel, what, time.monotonic() + deadline_s - SLICE_S, deadline_s)
        except BaseException as error:
            self.abort_by(error, what)
            raise

    def wait_for_message(self, rank: int, what: str, deadline_s: float) -> socket.socket:
        """The socket of `rank`, once it is readable. Raises CommunicationError like `run`, but ends nothing."""
        link, until = self.links[rank], time.monotonic() + deadline_s
        assert link is not None
        poll = select.poll()
        poll.register(link, select.POLLIN)
        while not poll.poll(SLICE_S * 1000):
            if (problem := self._look(rank, what, until, deadline_s)) is not None:
                raise problem
        return link

    def find_end(self, waited: int, call: str) -> CommunicationError | None:
        """The end of a rank or of the communicator that explains the failure of `call`, if there is one."""
        return self._look(waited, call, math.inf, 0.0)

    def abort_by(self, error: BaseException, what: str) -> None:
        """End the communicator because a call has raised `error`."""
        me = self.labels[self._rank]
        self.abort(error.what if isinstance(error, CommunicationError) else f"rank {me}: {what} raised {error!r}")

    def abort(self, reason: str) -> None:
        """End the communicator on all ranks, from any thread."""
        if self.ended is None:
            self.ended = reason
            self.segment.end(reason)

    def close(self) -> None:
        """Leave; a call under way in another thread notices and ends first."""
        if self.ended is None:
            self.ended = "it was closed"
        with self.lock:
            if not self.closed:
                self.closed = True
                self.segment.leave()
                close_all(self.links)
                self.segment.close()

    def _continue(self, kernel: Callable[[Any], int], what: str, until: float, deadline_s: float) -> None:
        """Run a kernel slice by slice, and check between slices for what can keep it from ending."""
        while (status := kernel(self.ctx)) != k.DONE:
            rank, round_before = status // k.RANK_FROM, self.ctx[k.ROUND]
            if status % k.RANK_FROM == k.DIFFERENT:
                raise self._different(rank, what)
            if (problem := self._look(rank, f"{what} of {self.ctx[k.SIZE]} bytes", until, deadline_s)) is None:
                continue
            # A rank that has ended may have done its part of this call before: fail only if the kernel is stuck.
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
            error = CommunicationError(f"rank {me}: {call} was ended by rank {self.labels[first[0]]}: {first[1]}")
            error.of_another = first[0] != self._rank
            return error
        gone = {fd for fd, _ in self._poll.poll(0)}
        for rank, link in enumerate(self.links):
            if link is None or link.fileno() not in gone:
                continue
            if not self.segment.has_left(rank):
                error = CommunicationError(
                    f"rank {me}: lost rank {self.labels[rank]} during {call}",
                    got="its process has ended",
                    next_step=f"Look at the log of rank {self.labels[rank]}: it ended first.",
                )
                error.of_another = True
                return error
            if rank == waited:
                error = CommunicationError(
                    f"rank {me}: {call} waits for rank {late}, which has closed its communicator",
                    allowed="the same calls on every rank",
                    next_step=f"Compare the logs of ranks {me} and {late}.",
                )
                error.left = late
                return error
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
            f"ranks {me} and {other} make different calls",
            got=f"rank {me}: {_describe(int(ctx[k.TAG]), int(ctx[k.SIZE]))}; rank {other}: {_describe(*theirs)}",
            allowed="the same collectives in the same order, with equal sizes and dtypes",
            next_step="Compare the ranks' logs; all must run one version and one configuration.",
        )


def _describe(tag: int, size: int) -> str:
    return f"{describe_tag(tag)} of {size} bytes"


def _in_child() -> None:
    """Close the sockets in a forked process, or others would not see the rank's end while this process lives."""
    for calls in list(_open):
        calls.ended = "this process was forked from the rank"
        calls.closed = True  # or its `close` would record in the segment that the rank has left
        calls.lock = threading.Lock()  # the old one may be held by a thread that does not exist here
        close_all(calls.links)


os.register_at_fork(after_in_child=_in_child)


def connect_shm(
    rank: int,
    num_ranks: int,
    generation: int,
    key: bytes,
    peers_exchange: Exchange,
    deadline_s: float,
    call_deadline_s: float = CALL_DEADLINE_S,
    *,
    labels: Sequence[int] | None = None,
    arena_bytes: int | None = None,
) -> ShmCommunicator:
    """Join `num_ranks` >= 2 processes of one host in a communicator; rank 0 makes the segment.

    `peers_exchange` gathers the bytes of these ranks, in rank order (`all_gather_bytes` of a communicator over them);
    it is called twice on every rank unless it raises. `key` is the generation's secret, `deadline_s` the longest that
    joining may take after the first exchange, `labels` the ranks' numbers in messages (their ranks in the whole run),
    `arena_bytes` the most that a rank may `allocate`, rounded up to whole pages, by default its share of the machine's
    memory (address space: memory is taken only when it is allocated).
    Raises SharedMemoryUnavailableError on every rank, with the reason, if memory cannot be shared. Ranks whose
    `lockstep.training.comm.hosts.host_identity` is equal are of one host.
    """
    if not 0 <= rank < num_ranks or num_ranks < 2:
        raise ValueError(f"shared memory got rank {rank} of {num_ranks}; allowed are 2 ranks or more, numbered from 0")
    arena = default_arena_bytes(num_ranks) if arena_bytes is None else -(-arena_bytes // PAGE_BYTES) * PAGE_BYTES
    segment, links = join(rank, num_ranks, generation, key, peers_exchange, arena, deadline_s)
    return ShmCommunicator(segment, links, rank, generation, call_deadline_s, labels or range(num_ranks))


class ShmCommunicator(Communicator):
    """A rank of a host. Made by `connect_shm`.

    Order of additions: rank 0 + rank 1 + ..., for every element. float16 and bfloat16 are summed in float32 and
    rounded once, to the nearest, as is their mean.
    """

    def __init__(
        self, segment: Segment, links: Links, rank: int, generation: int, deadline_s: float, labels: Sequence[int]
    ) -> None:
        layout = segment.layout
        super().__init__(rank, layout.num_ranks, generation, deadline_s)
        self._calls = Calls(segment, links, rank, labels)
        self._groups: list[ShmCommunicator] = []
        self._alone: list[SoloCommunicator] = []  # groups that have only this rank
        self._messages: dict[tuple[int, int], int] = {}
        self._reducers: dict[np.dtype[Any], tuple[int, Any]] = {}
        self._outbox: NDArray[np.uint8] = np.empty(0, np.uint8)  # of all_to_all_ragged; it grows as needed
        self._targets, self._sizes = (k.TABLES + table * self.num_ranks for table in (k.TARGETS, k.SIZES))

    def all_reduce(self, buf: NDArray[Any], op: Op = "sum") -> None:
        check_buffer(buf, op)
        self._reduce("all_reduce", buf, op, 1)

    def reduce_scatter(self, buf: NDArray[Any], op: Op = "sum") -> NDArray[Any]:
        check_buffer(buf, op)
        self._reduce("reduce_scatter", buf, op, 0)
        return self.part_of(buf, self.rank)

    def barrier(self) -> None:
        with self._calls.lock:
            self._calls.announce("barrier", "", np.dtype(np.uint8), 0, 0, 0, 0)
            self._calls.run(reduce_all, "barrier", self.deadline_s)

    def all_gather_parts(self, buf: NDArray[Any]) -> None:
        check_buffer(buf)
        item, address = buf.itemsize, _address(buf)
        bounds = [(start * item, (stop - start) * item) for start, stop in part_bounds(buf.size, self.num_ranks)]
        start, own = bounds[self.rank]
        with self._calls.lock:
            self._calls.announce("all_gather_parts", "", buf.dtype, buf.nbytes, address + start, own, 0)
            self._fill([size for _, size in bounds], [address + at for at, _ in bounds])
            self._calls.run(gather, "all_gather_parts", self.deadline_s)

    def all_gather(self, buf: NDArray[Any]) -> NDArray[Any]:
        check_buffer(buf, writable=False)
        rows = np.empty((self.num_ranks, buf.size), buf.dtype)
        address = _address(rows)
        with self._calls.lock:
            self._calls.announce("all_gather", "", buf.dtype, buf.nbytes, _address(buf), buf.nbytes, 0)
            self._fill([buf.nbytes] * self.num_ranks, [address + r * buf.nbytes for r in range(self.num_ranks)])
            rows[self.rank] = buf
            self._calls.run(gather, "all_gather", self.deadline_s)
        return rows

    def all_gather_ragged(self, buf: NDArray[Any]) -> list[NDArray[Any]]:
        check_buffer(buf, writable=False)
        with self._calls.lock:
            self._calls.announce("all_gather_ragged", "", buf.dtype, buf.nbytes, _address(buf), buf.nbytes, 0)
            self._calls.ctx[k.LOOSE] = 1
            self._calls.run(announce, "all_gather_ragged", self.deadline_s)
            sizes = [int(announced_size(self._calls.ctx, rank)) for rank in range(self.num_ranks)]
            rows = [np.empty(size // buf.itemsize, buf.dtype) for size in sizes]
            rows[self.rank][:] = buf
            self._fill(sizes, [_address(row) for row in rows])
            self._calls.run(gather, "all_gather_ragged", self.deadline_s)
        return rows

    def all_to_all_ragged(self, parts: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Each rank packs its parts in the segment, and copies those for it out of the others'."""
        sizes = self._agree_on_parts(parts)
        item, outgoing = parts[0].itemsize, sizes[self.rank].tolist()
        total = sum(outgoing) * item
        if self._outbox.nbytes <= total:
            self._outbox = np.empty(0, np.uint8)  # free the old one before the new one is allocated
            self._outbox = self.allocate(total + total // 4 + PAGE_BYTES, np.uint8)
        np.concatenate(parts, out=self._outbox[:total].view(parts[0].dtype))
        found = [np.empty(size, parts[0].dtype) for size in sizes[:, self.rank].tolist()]
        starts = np.cumsum(sizes, axis=1) - sizes  # (num_ranks, num_ranks): where a rank's part begins, in elements
        ctx, tables = self._calls.ctx, (k.SOURCES, k.TARGETS, k.SIZES)
        sources = (starts[:, self.rank] * item).tolist()
        values = (sources, [_address(part) for part in found], [part.nbytes for part in found])
        with self._calls.lock:
            self._calls.announce("all_to_all_ragged", "", parts[0].dtype, total, _address(self._outbox), total, 0)
            ctx[k.LOOSE] = 1
            for table, numbers in zip(tables, values, strict=True):
                first = k.TABLES + table * self.num_ranks
                ctx[first : first + self.num_ranks] = numbers
            self._calls.run(exchange, "all_to_all_ragged", self.deadline_s)
            everyone = bool(ctx[k.ALL])
        return found if everyone else super().all_to_all_ragged(parts)  # some rank has no room in the segment

    def broadcast(self, buf: NDArray[Any], root: int = 0) -> None:
        check_buffer(buf)
        check_rank("broadcast", root, self.num_ranks)
        sizes, targets = [0] * self.num_ranks, [0] * self.num_ranks
        sizes[root], targets[root] = buf.nbytes, _address(buf)
        with self._calls.lock:
            own = buf.nbytes if self.rank == root else 0
            self._calls.announce("broadcast", "", buf.dtype, buf.nbytes, _address(buf), own, root)
            self._fill(sizes, targets)
            self._calls.run(gather, "broadcast", self.deadline_s)

    def send(self, buf: NDArray[Any], to: int) -> None:
        check_buffer(buf, writable=False)
        check_peer("send", to, self.rank, self.num_ranks)
        self._message(send, "send", buf, to, (self.rank, to))

    def recv(self, buf: NDArray[Any], source: int) -> None:
        check_buffer(buf)
        check_peer("recv", source, self.rank, self.num_ranks)
        self._message(receive, "recv", buf, source, (source, self.rank))

    def allocate(self, size: int, dtype: Any) -> NDArray[Any]:
        """A flat zeroed buffer (size,) in the segment, 64-byte aligned, which collectives work on without a copy.

        Each rank allocates by itself. The memory is reused once no array views it, and stays valid after `close`. If
        the segment has no room, this returns an array of the process's own, which works too.
        """
        dtype = np.dtype(dtype)
        found = None if self._calls.ended is not None else self._calls.segment.allocate(size, dtype)
        return super().allocate(size, dtype) if found is None else found

    def group(self, ranks: Sequence[int]) -> Communicator:
        members = check_group(ranks, self.rank, self.num_ranks)
        mine = members.index(self.rank)
        if len(members) == 1:
            alone = SoloCommunicator(self.generation, self.deadline_s)
            self._alone.append(alone)
            return alone
        layout = Layout(len(members), self._calls.segment.layout.arena_bytes)
        labels, what = [self._calls.labels[member] for member in members], f"group {members}"
        with self._calls.lock:
            self._calls.check_open()
            until = time.monotonic() + min(self.deadline_s, LONGEST_S)
            try:
                if mine == 0:
                    segment, links = deal(layout, [self._calls.links[member] for member in members], labels, until)
                else:
                    carrier = self._calls.wait_for_message(members[0], what, self.deadline_s)
                    segment, links = take(layout, mine, carrier, labels, until)
            except CommunicationError as error:
                self._calls.abort_by(error, what)
                raise
            except (OSError, auth.HandshakeError) as error:
                if (gone := self._calls.find_end(members[0], what)) is not None:
                    self._calls.abort_by(gone, what)
                    raise gone from error
                self._calls.abort_by(error, what)
                raise CommunicationError(
                    f"rank {self._calls.labels[self.rank]}: no group of ranks {members}",
                    got=str(error),
                    allowed="the same groups in the same order on each member, memory for its segment",
                    next_step=f"Compare the logs of ranks {labels}.",
                ) from error
        self._groups = [made for made in self._groups if not made._calls.closed]
        made = ShmCommunicator(segment, links, mine, self.generation, self.deadline_s, labels)
        self._groups.append(made)
        if self._calls.ended is not None:  # by another thread, meanwhile
            made.abort(self._calls.ended)
        return made

    def abort(self, reason: str) -> None:
        for made in (*self._groups, *self._alone):
            made.abort(reason)
        self._calls.abort(reason)

    def close(self) -> None:
        for made in (*self._groups, *self._alone):
            made.close()
        self._calls.close()

    def _reduce(self, kind: str, buf: NDArray[Any], op: str, to_all: int) -> None:
        if not buf.size:
            self._calls.check_open()
            return
        found = self._reducers.get(buf.dtype)
        if found is None:
            found = self._reducers[buf.dtype] = reducer(buf.dtype.name)
        ctx = self._calls.ctx
        with self._calls.lock:
            self._calls.announce(kind, op, buf.dtype, buf.nbytes, _address(buf), buf.nbytes, 0)
            ctx[k.REDUCER], ctx[k.OP], ctx[k.ITEM], ctx[k.ALL] = found[0], OP_CODES[op], buf.itemsize, to_all
            self._calls.run(reduce_all, kind, self.deadline_s)

    def _fill(self, sizes: list[int], targets: list[int]) -> None:
        targets[self.rank] = 0
        self._calls.ctx[self._sizes : self._sizes + self.num_ranks] = sizes
        self._calls.ctx[self._targets : self._targets + self.num_ranks] = targets

    def _message(self, kernel: Any, what: str, buf: NDArray[Any], peer: int, pair: tuple[int, int]) -> None:
        with self._calls.lock:
            self._calls.announce("send", "", buf.dtype, buf.nbytes, _address(buf), buf.nbytes, 0)
            ctx = self._calls.ctx
            ctx[k.PEER], ctx[k.MESSAGE] = peer, self._messages.get(pair, 0)
            self._calls.run(kernel, what, self.deadline_s)
            self._messages[pair] = int(ctx[k.MESSAGE] + ctx[k.ROUND])


def _address(buf: NDArray[Any]) -> int:
    address: int = buf.__array_interface__["data"][0]
    return address
