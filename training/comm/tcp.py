"""Ring collectives over TCP: reduce-scatter and all-gather in one pipelined pass (Patarasuk and Yuan, 2009).

Segment s of the buffer travels once round the ring, each rank adding its part, and once more complete; so each sum is
formed on one rank, in one order, and is equal bit for bit everywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.errors import CommunicationError
from training.comm.base import UFUNCS, Communicator, Op, check_buffer, check_rank, divide_by_ranks
from training.comm.frames import tag_of
from training.comm.links import join
from training.comm.pump import Flat, Incoming, Pump

CHUNK_BYTES = 512 << 10  # stays in the caches between receiving, checking and adding; benchmarks/all_reduce.py chose it


class TcpCommunicator(Communicator):
    """A rank of a ring. Made by `connect_ring`."""

    def __init__(self, pump: Pump, rank: int, num_ranks: int, generation: int, deadline_s: float) -> None:
        super().__init__(rank, num_ranks, generation, deadline_s)
        self._pump = pump
        self._lock = threading.Lock()
        self._ended: str | None = None

    def all_reduce(self, buf: NDArray[Any], op: Op = "sum") -> None:
        check_buffer(buf, op)
        n, rank = self.num_ranks, self.rank
        segments = [_chunks(part, _per_segment(buf, n)) for part in np.array_split(buf, n)]
        if not buf.size:
            return
        ufunc = UFUNCS[op]
        sends, receives = [], []
        for hop in range(2 * n - 2):
            sends += segments[(rank - hop) % n]
            combine = ufunc if hop < n - 1 else None
            receives += [Incoming(chunk, combine) for chunk in segments[(rank - hop - 1) % n]]
        self._run("all_reduce", op, buf, sends, receives, len(segments[0]))
        if op == "mean":
            divide_by_ranks(buf, n)

    def broadcast(self, buf: NDArray[Any], root: int = 0) -> None:
        check_buffer(buf)
        check_rank("broadcast", root, self.num_ranks)
        if not buf.size:
            return
        chunks = _chunks(buf, max(1, -(-buf.nbytes // CHUNK_BYTES)))
        place = (self.rank - root) % self.num_ranks
        sends = chunks if place < self.num_ranks - 1 else []
        receives = [Incoming(chunk, None) for chunk in chunks] if place else []
        self._run("broadcast", "", buf, sends, receives, 0 if place else len(chunks))

    def all_gather_parts(self, buf: NDArray[Any]) -> None:
        check_buffer(buf)
        for rank in range(self.num_ranks):
            self.broadcast(self.part_of(buf, rank), rank)

    def send(self, buf: NDArray[Any], to: int) -> None:
        raise NotImplementedError("send comes with the mesh of connections")

    def recv(self, buf: NDArray[Any], source: int) -> None:
        raise NotImplementedError("recv comes with the mesh of connections")

    def group(self, ranks: Sequence[int]) -> Communicator:
        raise NotImplementedError("groups come with the mesh of connections")

    def all_gather(self, buf: NDArray[Any]) -> NDArray[Any]:
        check_buffer(buf, writable=False)
        n, rank = self.num_ranks, self.rank
        rows = np.empty((n, buf.size), buf.dtype)
        rows[rank] = buf
        if not buf.size:
            return rows
        chunked = [_chunks(row, max(1, -(-buf.nbytes // CHUNK_BYTES))) for row in rows]
        sends, receives = [], []
        for hop in range(n - 1):
            sends += chunked[(rank - hop) % n]
            receives += [Incoming(chunk, None) for chunk in chunked[(rank - hop - 1) % n]]
        self._run("all_gather", "", buf, sends, receives, len(chunked[0]))
        return rows

    def abort(self, reason: str) -> None:
        if self._ended is None:
            self._ended = reason
        self._pump.abort(reason)

    def close(self) -> None:
        if self._ended is None:
            self._ended = "it was closed"
        self._pump.abort(self._ended)
        with self._lock:  # a call that was woken leaves first
            self._pump.close()

    def _run(
        self, kind: str, op: str, buf: Flat, sends: Sequence[Flat], receives: Sequence[Incoming], lag: int
    ) -> None:
        what = f"{kind} of {buf.nbytes} bytes"
        with self._lock:
            if self._ended is not None:
                raise CommunicationError(
                    f"rank {self.rank}: the communicator has ended: {self._ended}", next_step="Start the rank again."
                )
            try:
                self._pump.run(what, tag_of(kind, op, buf.dtype), buf.nbytes, sends, receives, lag, self.deadline_s)
            except CommunicationError as error:
                # Half a collective cannot be mended; closing tells both neighbours at once, and they theirs.
                if self._ended is None:
                    self._ended = error.what
                self._pump.close()
                raise


def connect_ring(
    rank: int,
    num_ranks: int,
    generation: int,
    rendezvous: Callable[[str, int], list[tuple[str, int]]],
    key: bytes,
    deadline_s: float,
    host: str,
    call_deadline_s: float,
) -> TcpCommunicator:
    """Join the ring; see `training.comm.connect`."""
    to_next, from_previous = join(rank, num_ranks, generation, rendezvous, key, deadline_s, host)
    return TcpCommunicator(
        Pump(to_next, from_previous, rank, num_ranks, generation), rank, num_ranks, generation, call_deadline_s
    )


def _per_segment(buf: Flat, num_ranks: int) -> int:
    """Chunks of each segment: as many for every segment, so that the same number of frames goes both ways."""
    return max(1, -(-buf.nbytes // (num_ranks * CHUNK_BYTES)))


def _chunks(part: Flat, count: int) -> list[Flat]:
    """Cut `part` into `count` contiguous views, sizes differing by one element at most (some may be empty)."""
    bounds = [part.size * i // count for i in range(count + 1)]
    return [part[start:stop] for start, stop in pairwise(bounds)]
