"""Collectives over TCP: picks a program for each call and runs it over the connections of its channel."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.comm.base import (
    UFUNCS,
    Communicator,
    Op,
    check_buffer,
    check_group,
    check_peer,
    check_rank,
    divide_by_ranks,
)
from training.comm.frames import tag_of
from training.comm.solo import SoloCommunicator
from training.comm.tcp import algorithms, halving_doubling
from training.comm.tcp.call import Call
from training.comm.tcp.mesh import Mesh
from training.comm.tcp.programs import (
    ALGORITHMS,
    SMALL_BYTES,
    TREE_CHUNK_BYTES,
    WHOLE_BYTES,
    ProgramKey,
    Programs,
    default_choice,
    program_of,
)
from training.comm.tcp.schedule import Program, grid_of
from training.comm.tcp.tcp_life import TcpLife
from training.comm.tls import Tls

__all__ = [
    "ALGORITHMS",
    "TREE_CHUNK_BYTES",
    "WHOLE_BYTES",
    "ProgramKey",
    "TcpCommunicator",
    "connect_tcp",
    "default_choice",
    "program_of",
]


class TcpCommunicator(TcpLife):
    """A rank of a mesh, or of one of its groups. Made by `connect_tcp` and `group`.

    `choose` gives the algorithm of `all_reduce` for a buffer's bytes, "ring", "halving-doubling" or "double-tree"; it
    must be the same on every rank, and may be set between calls. The other collectives choose by size alone.
    Two ranks that `send` to each other at the same time may wait for each other where the buffers are large.
    """

    def __init__(
        self,
        mesh: Mesh,
        members: Sequence[int],
        rank: int,
        deadline_s: float,
        channel: int = 0,
        choose: Callable[[int], str] = default_choice,
    ) -> None:
        super().__init__(mesh, members, rank, deadline_s, channel)
        self.choose = choose
        self._group_counts: Counter[tuple[int, ...]] = Counter()
        self._programs = Programs(rank, len(members))

    def connect_neighbours(self, deadline_s: float) -> None:
        """Connect with the ranks before and after this one; raises CommunicationError naming the one that failed."""
        around = {(self.rank + 1) % self.num_ranks, (self.rank - 1) % self.num_ranks}
        self._guarded(lambda: self._engine.connect(sorted(around), deadline_s))

    def all_reduce(self, buf: NDArray[Any], op: Op = "sum") -> None:
        check_buffer(buf, op)
        self._run("all_reduce", self.choose(buf.nbytes), buf, op=op)
        if op == "mean":
            divide_by_ranks(buf, self.num_ranks)

    def all_reduce_each(self, take: Callable[[], NDArray[Any] | None], done: Callable[[], None]) -> None:
        def next_call() -> Call | None:
            buf = take()
            if buf is None:
                return None
            check_buffer(buf)
            key = ProgramKey("all_reduce", self.choose(buf.nbytes), buf.size, buf.itemsize)
            return _call_of("all_reduce", self._programs.of(key), buf, "sum")

        self._guarded(lambda: self._engine.run_each(next_call, done, lambda: self.deadline_s))

    def look_again(self) -> None:
        self._engine.look_again()

    def reduce_scatter(self, buf: NDArray[Any], op: Op = "sum") -> NDArray[Any]:
        check_buffer(buf, op)
        mine = self.part_of(buf, self.rank)
        self._run("reduce_scatter", default_choice(buf.nbytes), buf, op=op)
        if op == "mean":
            divide_by_ranks(mine, self.num_ranks)
        return mine

    def all_gather_parts(self, buf: NDArray[Any]) -> None:
        check_buffer(buf)
        self._run("all_gather_parts", default_choice(buf.nbytes), buf)

    def all_gather_ragged(self, buf: NDArray[Any]) -> list[NDArray[Any]]:
        check_buffer(buf, writable=False)
        sizes = self.all_gather(np.array([buf.size], np.int64))[:, 0].tolist()
        starts = np.cumsum([0, *sizes]).tolist()
        bounds = [(starts[rank], starts[rank + 1]) for rank in range(self.num_ranks)]
        flat = np.empty(starts[-1], buf.dtype)
        flat[bounds[self.rank][0] : bounds[self.rank][1]] = buf
        gather = halving_doubling.all_gather if flat.nbytes <= SMALL_BYTES else algorithms.all_gather
        program = gather(self.rank, self.num_ranks, grid_of(bounds, buf.itemsize))
        self._run_call(_call_of("all_gather_ragged", program, flat))
        return [flat[start:stop] for start, stop in bounds]

    def broadcast(self, buf: NDArray[Any], root: int = 0) -> None:
        check_buffer(buf)
        check_rank("broadcast", root, self.num_ranks)
        self._run("broadcast", "tree" if buf.nbytes <= SMALL_BYTES else "chain", buf, root)

    def send(self, buf: NDArray[Any], to: int) -> None:
        check_buffer(buf, writable=False)
        check_peer("send", to, self.rank, self.num_ranks)
        self._run("send", "", buf, to)

    def recv(self, buf: NDArray[Any], source: int) -> None:
        check_buffer(buf)
        check_peer("recv", source, self.rank, self.num_ranks)
        self._run("recv", "", buf, source)

    def barrier(self) -> None:
        program = self._programs.of(ProgramKey("all_reduce", "halving-doubling", 1, 1))
        self._run_call(_call_of("barrier", program, np.zeros(1, np.uint8), "max"))

    def group(self, ranks: Sequence[int]) -> Communicator:
        members = check_group(ranks, self.rank, self.num_ranks)
        self._check_open()
        made: TcpCommunicator | SoloCommunicator
        if len(members) == 1:
            made = SoloCommunicator(self.generation, self.deadline_s)
        else:
            self._group_counts[members] += 1
            # All members have made the same groups of these ranks before, so they arrive at the same number.
            label = f"{self._channel} {members} {self._group_counts[members]}"
            channel = int.from_bytes(hashlib.sha256(label.encode()).digest()[:7], "big") + 1
            world = [self._members[member] for member in members]
            made = TcpCommunicator(
                self._mesh,
                world,
                members.index(self.rank),
                self.deadline_s,
                channel,
                lambda nbytes: self.choose(nbytes),
            )
        self._groups = [group for group in self._groups if not group.has_ended] + [made]
        if self._ended is not None:  # meanwhile, by another thread
            made.abort(self._ended)
        return made

    def _run(self, kind: str, algorithm: str, buf: NDArray[Any], peer: int = 0, op: str = "") -> None:
        program = self._programs.of(ProgramKey(kind, algorithm, buf.size, buf.itemsize, peer))
        root = peer if kind == "broadcast" else 0
        self._run_call(_call_of("send" if kind == "recv" else kind, program, buf, op, root))

    def _run_call(self, call: Call) -> None:
        self._guarded(lambda: self._engine.run(call, self.deadline_s))


def _call_of(kind: str, program: Program, buf: NDArray[Any], op: str = "", root: int = 0) -> Call:
    what, tag = f"{kind} of {buf.nbytes} bytes", tag_of(kind, op, buf.dtype, root)
    return Call(what, tag, program, buf, UFUNCS.get(op, np.add), counts=kind != "send")


def connect_tcp(
    rank: int,
    num_ranks: int,
    generation: int,
    rendezvous: Callable[[str, int], list[tuple[str, int]]],
    key: bytes,
    deadline_s: float,
    host: str,
    call_deadline_s: float,
    tls: Tls | None = None,
) -> TcpCommunicator:
    """Join the ranks; see `training.comm.connect`. `tls` encrypts what leaves this host."""
    mesh = Mesh(rank, num_ranks, generation, key, host, tls)
    try:
        mesh.rendezvous(rendezvous)
        comm = TcpCommunicator(mesh, range(num_ranks), rank, call_deadline_s)
        comm.connect_neighbours(deadline_s)
    except BaseException:
        mesh.close()
        raise
    return comm
