"""Collectives through memory that the ranks of one host share.

Buffers of `allocate` lie in the segment: each rank reduces its part of all of them, in rank order, and writes the
result to all of them, so that every byte is read once and written once. Any other array goes through a stage in
chunks that stay in the caches. Kernels do it all in one call; docs/decisions/042-shared-memory.md has the figures.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.storage.errors import CommunicationError
from training.comm import auth
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
from training.comm.shm import shm_rounds as k
from training.comm.shm.join import Exchange, Links, deal, join, take
from training.comm.shm.kernels import reduce_all
from training.comm.shm.reduce import OP_CODES, reducer
from training.comm.shm.segment import Segment
from training.comm.shm.shm_calls import LONGEST_S, Calls
from training.comm.shm.shm_gather import announce, announced_size, gather, receive, send
from training.comm.shm.shm_layout import PAGE_BYTES, Layout, default_arena_bytes
from training.comm.solo import SoloCommunicator


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
    the longest that joining may take once all have met in the first exchange, `labels` the ranks' numbers in messages
    (their ranks in the whole run), `arena_bytes` what `allocate` may hand out to a rank, in whole pages, by default its
    share of the machine's memory (address space: no memory is taken before it is allocated).
    Raises SharedMemoryUnavailableError on every rank alike, with the reason, where memory cannot be shared.
    `training.comm.topology.host_identity` tells beforehand which ranks are of one host.
    """
    if not 0 <= rank < num_ranks or num_ranks < 2:
        raise ValueError(f"shared memory got rank {rank} of {num_ranks}; allowed are 2 ranks or more, numbered from 0")
    arena = default_arena_bytes(num_ranks) if arena_bytes is None else -(-arena_bytes // PAGE_BYTES) * PAGE_BYTES
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
        self._calls = Calls(segment, links, rank, labels)
        self._groups: list[ShmCommunicator] = []
        self._alone: list[SoloCommunicator] = []  # groups of this rank alone
        self._messages: dict[tuple[int, int], int] = {}
        self._reducers: dict[np.dtype[Any], tuple[int, Any]] = {}
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

        Each rank allocates by itself. The memory is free for another one once no array views it, and stays valid after
        `close`. Where the segment has no room left, an array of the process's own, which works too.
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
        if self._calls.ended is not None:  # meanwhile, by another thread
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
