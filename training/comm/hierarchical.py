"""Two levels: one communicator within each host (usually shared memory), another between the hosts' leaders.

Each host adds its own ranks first, then the leaders add the hosts: a fixed order, so results are equal bit for bit on
every rank and in every run with the same layout. Hosts may have different numbers of ranks. A large buffer is sent in
pieces: while one is between the leaders, the hosts sum the next one and distribute the one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.storage.errors import CommunicationError
from lockstep.training.comm.base import (
    Communicator,
    LinkUse,
    Op,
    check_buffer,
    check_parts,
    check_peer,
    check_rank,
    divide_by_ranks,
    links_of,
    part_bounds,
)
from lockstep.training.comm.comm_plan import HIERARCHICAL
from lockstep.training.comm.cost import pieces_of
from lockstep.training.comm.hosts import Layout

LATER_S = 5.0  # for ranks to reach one call, and to report to each other what they wait for (2.5 s)


def _always_hierarchical(nbytes: int) -> str:
    return HIERARCHICAL


class HierarchicalCommunicator(Communicator):
    """A rank in a layout of several hosts. Made by `lockstep.training.comm.connect`; takes over its communicators."""

    def __init__(
        self,
        flat: Communicator,
        inner: Communicator | None,
        outer: Communicator | None,
        layout: Layout,
        choose: Callable[[int], str] = _always_hierarchical,
    ) -> None:
        """`flat` joins all ranks, `inner` those of this host (None: only this rank), `outer` the leaders (None: this
        rank is not one). `choose` gives the algorithm for a buffer's bytes; `flat` runs any but `hierarchical`.
        """
        self._flat, self._inner, self._outer, self._layout = flat, inner, outer, layout
        super().__init__(flat.rank, flat.num_ranks, flat.generation, flat.deadline_s)
        self._host = layout.host_of[self.rank]
        self._mates = layout.hosts[self._host]
        self._ended: str | None = None
        self.choose = choose
        self._carrier = ThreadPoolExecutor(1, thread_name_prefix="between-hosts")  # a thread once it is needed

    @property
    def deadline_s(self) -> float:
        """The longest that one call (for a large buffer: one piece) may take on the first level.

        Each further level adds LATER_S.
        """
        return self._flat.deadline_s

    @deadline_s.setter
    def deadline_s(self, seconds: float) -> None:
        for level in self._levels():
            level.deadline_s = seconds

    def all_reduce(self, buf: NDArray[Any], op: Op = "sum") -> None:
        check_buffer(buf, op)
        if self.choose(buf.nbytes) != HIERARCHICAL:
            self._guarded(self._flat.all_reduce, buf, op)
            return
        part: Op = "sum" if op == "mean" else op
        bounds = part_bounds(buf.size, pieces_of(buf.nbytes))
        pieces = [buf[start:stop] for start, stop in bounds]
        if len(pieces) == 1:
            self._guarded(self._in_turn, pieces[0], part)
        else:
            self._guarded(self._at_once, pieces, part)
        if op == "mean":
            divide_by_ranks(buf, self.num_ranks)

    def broadcast(self, buf: NDArray[Any], root: int = 0) -> None:
        check_buffer(buf)
        check_rank("broadcast", root, self.num_ranks)
        self._guarded(self._spread, buf, root)

    def all_gather_parts(self, buf: NDArray[Any]) -> None:
        check_buffer(buf)
        self._guarded(self._gather, buf)

    def all_to_all_ragged(self, parts: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        check_parts(parts, self.num_ranks)
        found: list[NDArray[Any]] = []
        self._guarded(self._exchange, parts, found)
        return found

    def send(self, buf: NDArray[Any], to: int) -> None:
        check_buffer(buf, writable=False)
        check_peer("send", to, self.rank, self.num_ranks)
        self._guarded(self._flat.send, buf, to)

    def recv(self, buf: NDArray[Any], source: int) -> None:
        check_buffer(buf)
        check_peer("recv", source, self.rank, self.num_ranks)
        self._guarded(self._flat.recv, buf, source)

    def group(self, ranks: Sequence[int]) -> Communicator:
        """A group of ranks: over shared memory if all members are on this host, else over TCP."""
        if self._inner is not None and len(ranks) > 1 and all(rank in self._mates for rank in ranks):
            return self._inner.group([self._mates.index(rank) for rank in ranks])
        return self._flat.group(ranks)

    def allocate(self, size: int, dtype: Any) -> NDArray[Any]:
        return (self._inner or self._flat).allocate(size, dtype)

    def abort(self, reason: str) -> None:
        if self._ended is None:
            self._ended = reason
        for level in self._levels():
            level.abort(reason)

    def close(self) -> None:
        if self._ended is None:
            self._ended = "it was closed"
        # The flat one last: the others may be groups of it.
        for level in self._levels():
            level.close()
        self._carrier.shutdown(wait=False)

    @property
    def sent_bytes(self) -> int:
        return sum(level.sent_bytes for level in self._levels())

    def links(self) -> dict[int, LinkUse]:
        return links_of(level.links() for level in self._levels() if level is not self._inner)

    def _in_turn(self, buf: NDArray[Any], op: Op) -> None:
        if self._inner is not None:
            self._inner.all_reduce(buf, op)
        self._between(buf, op)
        self._back(buf)

    def _spread(self, buf: NDArray[Any], root: int) -> None:
        """Broadcast within the root's host, then from its leader to the other leaders, then within their hosts."""
        there = self._layout.host_of[root]
        if self._inner is not None and there == self._host:
            self._inner.broadcast(buf, self._mates.index(root))
        if self._outer is not None:
            with self._patient(self._outer, 1):
                self._outer.broadcast(buf, there)
        if there != self._host:
            self._back(buf)

    def _gather(self, buf: NDArray[Any]) -> None:
        """Gather within hosts, then between leaders, then send everything back within hosts."""
        if self._inner is not None:
            mine = self._inner.all_gather_ragged(self.part_of(buf, self.rank))
            for mate, part in zip(self._mates, mine, strict=True):
                self._check_size((mate,), part.size, self.part_of(buf, mate).size)
                self.part_of(buf, mate)[:] = part
        if self._outer is not None:
            packed = np.concatenate([self.part_of(buf, mate) for mate in self._mates])
            with self._patient(self._outer, 1):
                found = self._outer.all_gather_ragged(packed)
            for ranks, parts in zip(self._layout.hosts, found, strict=True):
                start = 0
                self._check_size(ranks, parts.size, sum(self.part_of(buf, rank).size for rank in ranks))
                for rank in ranks:
                    target = self.part_of(buf, rank)
                    target[:] = parts[start : start + target.size]
                    start += target.size
        self._back(buf)

    def _exchange(self, parts: Sequence[NDArray[Any]], found: list[NDArray[Any]]) -> None:
        """Exchange parts between the ranks of a host through its memory, and all other parts from rank to rank."""
        if self._inner is None:
            found += self._flat.all_to_all_ragged(parts)
            return
        near = self._inner.all_to_all_ragged([parts[mate] for mate in self._mates])
        with self._patient(self._flat, 1):
            apart = [part[:0] if rank in self._mates else part for rank, part in enumerate(parts)]
            found += self._flat.all_to_all_ragged(apart)
        for mate, part in zip(self._mates, near, strict=True):
            found[mate] = part

    def _at_once(self, pieces: Sequence[NDArray[Any]], op: Op) -> None:
        """Calls within a host have one order on all of its ranks; those between leaders run at the same time."""
        carried: list[Future[None]] = []
        try:
            for number, piece in enumerate(pieces):
                if self._inner is not None:
                    self._inner.all_reduce(piece, op)
                carried.append(self._carrier.submit(self._between, piece, op))
                if number:
                    carried[number - 1].result()
                    self._back(pieces[number - 1])
            carried[-1].result()
            self._back(pieces[-1])
        except BaseException as error:
            self._end(error)
            wait(carried)  # nothing may write into the buffer after this call
            raise

    def _between(self, buf: NDArray[Any], op: Op) -> None:
        """Reduce among the leaders; do nothing on other ranks."""
        if self._outer is not None:
            with self._patient(self._outer, 1):
                self._outer.all_reduce(buf, op)

    def _back(self, buf: NDArray[Any]) -> None:
        """Send the result from the leader to the ranks of its host."""
        if self._inner is not None:
            with self._patient(self._inner, 2):
                self._inner.broadcast(buf, 0)

    @contextmanager
    def _patient(self, level: Communicator, steps: int) -> Iterator[None]:
        """Wait longer than the ranks this level waits for: their error names the cause, and must come first."""
        usual_s = self.deadline_s  # which is that of `level` itself, if it is the flat one
        level.deadline_s = usual_s + steps * LATER_S
        try:
            yield
        finally:
            level.deadline_s = usual_s

    def _check_size(self, ranks: Sequence[int], size: int, expected: int) -> None:
        """Parts of buffers of different sizes would be copied to wrong positions without an error."""
        if size != expected:
            raise CommunicationError(
                f"rank {self.rank}: ranks {tuple(ranks)} gather the parts of a buffer of another size",
                got=f"{size} elements from them",
                allowed=f"{expected} elements, as in this rank's buffer",
                next_step="Give buffers of equal size on every rank.",
            )

    def _levels(self) -> list[Communicator]:
        return [level for level in (self._inner, self._outer, self._flat) if level is not None]

    def _guarded(self, function: Callable[..., None], *arguments: Any) -> None:
        """Make a call. A level that fails ends the others, so that the ranks that wait on those learn it too."""
        if self._ended is not None:
            raise CommunicationError(
                f"rank {self.rank}: the communicator has ended: {self._ended}", next_step="Start the rank again."
            )
        try:
            function(*arguments)
        except BaseException as error:  # an interrupt too: half a collective cannot be repaired
            self._end(error)
            raise

    def _end(self, error: BaseException) -> None:
        what = error.what if isinstance(error, CommunicationError) else f"{type(error).__name__}: {error}"
        self.abort(what.removeprefix(f"rank {self.rank}: "))  # each level adds the rank again
