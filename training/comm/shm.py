"""Collectives through memory that the ranks of one host share.

Buffers of `allocate` lie in the segment: each rank reduces its part of all of them, in rank order, and writes the
result to all of them, so that every byte is read once and written once. Any other array goes through a stage in
chunks that stay in the caches. Kernels do it all in one call; docs/decisions/042-shared-memory.md has the figures.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.errors import CommunicationError
from training.comm import shm_kernels as k
from training.comm.base import (
    CALL_DEADLINE_S,
    Communicator,
    Op,
    check_buffer,
    check_group,
    check_peer,
    check_rank,
    part_bounds,
)
from training.comm.frames import describe_tag, tag_of
from training.comm.shm_join import JOIN_S, Exchange, Links, close_all, deal, join, take
from training.comm.shm_layout import Layout, default_arena_bytes
from training.comm.shm_reduce import OP_CODES, reducer
from training.comm.shm_segment import Segment

SPINS = 1000  # looks at a flag before sleeping, some 20 microseconds; docs/decisions/042-shared-memory.md
SLICE_S = 0.05  # a kernel that waits comes back so often, to look for the end of a rank, an abort and the deadline
_TAG_BITS = 32  # above them a broadcast's root


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

    `peers_exchange` gives each of these ranks the bytes of all, in rank order (`all_gather_bytes` of a communicator
    over just them); it is called twice on every rank unless it raises. `key` is the generation's secret, `deadline_s`
    the longest that joining may take, `labels` the ranks' numbers in messages (their ranks in the whole run),
    `arena_bytes` what `allocate` may hand out to a rank, by default its share of the machine's memory (no memory is
    taken before it is allocated).
    Raises SharedMemoryUnavailableError on every rank alike, with the reason, where memory cannot be shared.
    `training.comm.shm_join.host_identity` tells beforehand which ranks are of one host.
    """
    arena = default_arena_bytes(num_ranks) if arena_bytes is None else arena_bytes
    segment, links = join(rank, num_ranks, generation, key, peers_exchange, arena, deadline_s)
    return ShmCommunicator(segment, links, rank, generation, call_deadline_s, labels or range(num_ranks))


class ShmCommunicator(Communicator):
    """A rank of a host. Made by `connect_shm`.

    Order of sums: rank 0 + rank 1 + ..., for every element. float16 and bfloat16 are summed in float32 and rounded
    once, to the nearest, as is their mean.
    """

    def __init__(
        self, segment: Segment, links: Links, rank: int, generation: int, deadline_s: float, labels: Sequence[int]
    ) -> None:
        layout = segment.layout
        super().__init__(rank, layout.num_ranks, generation, deadline_s)
        self._segment, self._links, self._labels = segment, links, tuple(labels)
        self._lock = threading.Lock()
        self._ended: str | None = None
        self._closed = False
        self._groups: list[ShmCommunicator] = []
        self._messages: dict[tuple[int, int], int] = {}
        self._reducers: dict[np.dtype[Any], tuple[int, Any]] = {}
        self._poll = select.poll()
        for link in links:
            if link is not None:
                self._poll.register(link, select.POLLRDHUP)
        n = layout.num_ranks
        self._ctx = ctx = np.zeros(k.TABLES + 3 * n, np.int64)
        ctx[k.RANK], ctx[k.RANKS], ctx[k.SELF] = rank, n, ctx.ctypes.data
        ctx[k.TIMEOUT_NS] = int(SLICE_S * 1e9)
        # More ranks than cores: who spins keeps away the rank that it waits for.
        ctx[k.SPINS] = SPINS if n <= len(os.sched_getaffinity(0)) else 1
        ctx[k.CHUNK], ctx[k.HALF] = layout.chunk_bytes, layout.half_bytes
        ctx[k.SEGMENT] = base = segment.address
        ctx[k.CONTROL], ctx[k.INLINE] = base + layout.control, base + layout.inline
        ctx[k.STAGE], ctx[k.PAIRS] = base + layout.stage, base + layout.pairs
        self._targets = k.TABLES + k.TARGETS * n
        self._sizes = k.TABLES + k.SIZES * n

    def all_reduce(self, buf: NDArray[Any], op: Op = "sum") -> None:
        check_buffer(buf, op)
        if buf.size:
            self._reduce("all_reduce", buf, op, 1)

    def reduce_scatter(self, buf: NDArray[Any], op: Op = "sum") -> NDArray[Any]:
        check_buffer(buf, op)
        if buf.size:
            self._reduce("reduce_scatter", buf, op, 0)
        return self.part_of(buf, self.rank)

    def barrier(self) -> None:
        with self._lock:
            self._announce("barrier", "", np.dtype(np.uint8), 0, 0, 0, 0)
            self._run(k.reduce_all, "barrier")

    def all_gather_parts(self, buf: NDArray[Any]) -> None:
        check_buffer(buf)
        item, address = buf.itemsize, _address(buf)
        bounds = [(start * item, (stop - start) * item) for start, stop in part_bounds(buf.size, self.num_ranks)]
        start, own = bounds[self.rank]
        with self._lock:
            self._announce("all_gather_parts", "", buf.dtype, buf.nbytes, address + start, own, 0)
            self._fill([size for _, size in bounds], [address + at for at, _ in bounds])
            self._run(k.gather, "all_gather_parts")

    def all_gather(self, buf: NDArray[Any]) -> NDArray[Any]:
        check_buffer(buf, writable=False)
        rows = np.empty((self.num_ranks, buf.size), buf.dtype)
        address = _address(rows)
        with self._lock:
            self._announce("all_gather", "", buf.dtype, buf.nbytes, _address(buf), buf.nbytes, 0)
            self._fill([buf.nbytes] * self.num_ranks, [address + r * buf.nbytes for r in range(self.num_ranks)])
            rows[self.rank] = buf
            self._run(k.gather, "all_gather")
        return rows

    def all_gather_ragged(self, buf: NDArray[Any]) -> list[NDArray[Any]]:
        check_buffer(buf, writable=False)
        with self._lock:
            self._announce("all_gather_ragged", "", buf.dtype, buf.nbytes, _address(buf), buf.nbytes, 0)
            self._ctx[k.LOOSE] = 1
            self._run(k.announce, "all_gather_ragged")
            sizes = [int(k.announced_size(self._ctx, rank)) for rank in range(self.num_ranks)]
            rows = [np.empty(size // buf.itemsize, buf.dtype) for size in sizes]
            rows[self.rank][:] = buf
            self._fill(sizes, [_address(row) for row in rows])
            self._run(k.gather, "all_gather_ragged")
        return rows

    def broadcast(self, buf: NDArray[Any], root: int = 0) -> None:
        check_buffer(buf)
        check_rank("broadcast", root, self.num_ranks)
        sizes, targets = [0] * self.num_ranks, [0] * self.num_ranks
        sizes[root], targets[root] = buf.nbytes, _address(buf)
        with self._lock:
            own = buf.nbytes if self.rank == root else 0
            self._announce("broadcast", "", buf.dtype, buf.nbytes, _address(buf), own, root)
            self._fill(sizes, targets)
            self._run(k.gather, "broadcast")

    def send(self, buf: NDArray[Any], to: int) -> None:
        check_buffer(buf, writable=False)
        check_peer("send", to, self.rank, self.num_ranks)
        self._message(k.send, "send", buf, to, (self.rank, to))

    def recv(self, buf: NDArray[Any], source: int) -> None:
        check_buffer(buf)
        check_peer("recv", source, self.rank, self.num_ranks)
        self._message(k.receive, "recv", buf, source, (source, self.rank))

    def allocate(self, size: int, dtype: Any) -> NDArray[Any]:
        """A flat zeroed buffer (size,) in the segment, 64-byte aligned, which collectives work on without a copy.

        Each rank allocates by itself. The memory is free for another one once no array views it, and stays valid after
        `close`. Where the segment has no room left, an array of the process's own, which works too.
        """
        dtype = np.dtype(dtype)
        found = None if self._ended is not None else self._segment.allocate(size, dtype)
        return super().allocate(size, dtype) if found is None else found

    def group(self, ranks: Sequence[int]) -> ShmCommunicator:
        members = check_group(ranks, self.rank, self.num_ranks)
        mine = members.index(self.rank)
        layout = Layout(len(members), self._segment.layout.arena_bytes)
        with self._lock:
            self._check_open()
            try:
                if mine == 0:
                    segment, links = deal(layout, [self._links[member] for member in members])
                else:
                    carrier = self._links[members[0]]
                    assert carrier is not None
                    segment, links = take(layout, mine, carrier, time.monotonic() + min(self.deadline_s, JOIN_S))
            except Exception as error:
                raise self._end(
                    f"rank {self._label(self.rank)}: no group of ranks {members}: {error}",
                    allowed="the same groups in the same order on each member, memory for its segment",
                    next_step=f"Look at the log of rank {self._label(members[0])}.",
                ) from error
        labels = [self._label(member) for member in members]
        made = ShmCommunicator(segment, links, mine, self.generation, self.deadline_s, labels)
        self._groups.append(made)
        return made

    def abort(self, reason: str) -> None:
        if self._ended is None:
            self._ended = reason
            self._segment.end(reason)
        for made in self._groups:
            made.abort(reason)

    def close(self) -> None:
        for made in self._groups:
            made.close()
        if self._ended is None:
            self._ended = "it was closed"
        with self._lock:  # a call that is under way sees the end and leaves first
            if not self._closed:
                self._closed = True
                self._segment.leave()
                close_all(self._links)
                self._segment.close()

    def _label(self, rank: int) -> int:
        return self._labels[rank]

    def _reduce(self, kind: str, buf: NDArray[Any], op: str, to_all: int) -> None:
        found = self._reducers.get(buf.dtype)
        if found is None:
            found = self._reducers[buf.dtype] = reducer(buf.dtype.name)
        ctx = self._ctx
        with self._lock:
            self._announce(kind, op, buf.dtype, buf.nbytes, _address(buf), buf.nbytes, 0)
            ctx[k.REDUCER], ctx[k.OP], ctx[k.ITEM], ctx[k.ALL] = found[0], OP_CODES[op], buf.itemsize, to_all
            self._run(k.reduce_all, kind)

    def _announce(self, kind: str, op: str, dtype: np.dtype[Any], size: int, address: int, own: int, root: int) -> None:
        self._check_open()
        ctx = self._ctx
        ctx[k.TAG] = tag_of(kind, op, dtype) | root << _TAG_BITS
        ctx[k.SIZE], ctx[k.BUFFER], ctx[k.OWN] = size, address, own
        ctx[k.PLACE] = self._segment.place_of(address, own)
        ctx[k.ROUND] = ctx[k.LOOSE] = 0
        ctx[k.ITEM] = ctx[k.ALL] = 1

    def _fill(self, sizes: list[int], targets: list[int]) -> None:
        targets[self.rank] = 0
        self._ctx[self._sizes : self._sizes + self.num_ranks] = sizes
        self._ctx[self._targets : self._targets + self.num_ranks] = targets

    def _message(self, kernel: Any, what: str, buf: NDArray[Any], peer: int, pair: tuple[int, int]) -> None:
        with self._lock:
            self._announce("send", "", buf.dtype, buf.nbytes, _address(buf), buf.nbytes, 0)
            ctx = self._ctx
            ctx[k.PEER], ctx[k.MESSAGE] = peer, self._messages.get(pair, 0)
            self._run(kernel, what)
            self._messages[pair] = int(ctx[k.MESSAGE] + ctx[k.ROUND])

    def _check_open(self) -> None:
        if self._ended is not None:
            raise CommunicationError(
                f"rank {self._label(self.rank)}: the communicator has ended: {self._ended}",
                next_step="Start the rank again.",
            )

    def _run(self, kernel: Callable[[Any], int], what: str) -> None:
        """Run a kernel until it is done; between its slices look for what can keep it from that."""
        status = kernel(self._ctx)
        if status == k.DONE:
            return
        until = time.monotonic() + self.deadline_s - SLICE_S
        while status != k.DONE:
            rank = status // k.RANK_FROM
            if status % k.RANK_FROM == k.DIFFERENT:
                raise self._different(rank, what)
            self._look(rank, what, until)
            status = kernel(self._ctx)

    def _look(self, waited: int, what: str, until: float) -> None:
        me, call = self._label(self.rank), f"{what} of {self._ctx[k.SIZE]} bytes"
        if self._ended is not None:
            raise CommunicationError(f"rank {me}: {call} was ended: {self._ended}")
        if (first := self._segment.ended()) is not None:
            raise self._end(f"rank {me}: {call} was ended by rank {self._label(first[0])}: {first[1]}")
        gone = {fd for fd, _ in self._poll.poll(0)}
        for rank, link in enumerate(self._links):
            if link is None or link.fileno() not in gone:
                continue
            if not self._segment.has_left(rank):
                raise self._end(
                    f"rank {me}: lost rank {self._label(rank)} during {call}",
                    got="its process has ended",
                    next_step=f"Look at the log of rank {self._label(rank)}: it ended first.",
                )
            if rank == waited:
                raise self._end(
                    f"rank {me}: {call} waits for rank {self._label(rank)}, which has closed its communicator",
                    allowed="the same calls on every rank",
                    next_step=f"Compare the logs of ranks {me} and {self._label(rank)}.",
                )
        if time.monotonic() >= until:
            late = self._label(waited)
            raise self._end(
                f"rank {me}: {call} waited {self.deadline_s:g} s for rank {late}",
                allowed="every rank in the same collective within the deadline",
                next_step=f"Look at the log of rank {late}; if its steps are just slow, raise --stall-limit.",
            )

    def _different(self, rank: int, what: str) -> CommunicationError:
        ctx = self._ctx
        if what == "recv":
            theirs = self._segment.header_of(rank, self.rank, int(ctx[k.MESSAGE] + ctx[k.ROUND]))
        else:
            theirs = self._segment.call_of(rank, int(ctx[k.CALL]))
        me, other = self._label(self.rank), self._label(rank)
        return self._end(
            f"ranks {me} and {other} differ in what they call",
            got=f"rank {me}: {_describe(int(ctx[k.TAG]), int(ctx[k.SIZE]))}; rank {other}: {_describe(*theirs)}",
            allowed="the same collectives in the same order, with equal sizes and dtypes",
            next_step="Compare the ranks' logs; all must run one version and one configuration.",
        )

    def _end(self, what: str, **parts: str) -> CommunicationError:
        """The error to raise. Half a collective cannot be mended: the communicator has ended, on all ranks."""
        if self._ended is None:
            self._ended = what
            self._segment.end(what)
        return CommunicationError(what, **parts)


def _address(buf: NDArray[Any]) -> int:
    address: int = buf.__array_interface__["data"][0]
    return address


def _describe(tag: int, size: int) -> str:
    root = tag >> _TAG_BITS
    return f"{describe_tag(tag & (1 << _TAG_BITS) - 1)} of {size} bytes" + (f" from rank {root}" if root else "")
