"""Collectives over TCP: chooses a program for each call and runs it. docs/decisions/040-communicator.md."""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.storage.errors import CommunicationError
from lockstep.training.comm.base import (
    UFUNCS,
    Communicator,
    LinkUse,
    Op,
    SoloCommunicator,
    check_buffer,
    check_group,
    check_peer,
    check_rank,
    divide_by_ranks,
    links_of,
)
from lockstep.training.comm.frames import tag_of
from lockstep.training.comm.tcp.algorithms import (
    SMALL_BYTES,
    ProgramKey,
    Programs,
    default_choice,
    halving_all_gather,
    pairwise_exchange,
    ring_all_gather,
)
from lockstep.training.comm.tcp.engine import Engine
from lockstep.training.comm.tcp.link import Call
from lockstep.training.comm.tcp.mesh import Mesh
from lockstep.training.comm.tcp.schedule import Program, grid_of
from lockstep.training.comm.tls import Tls

_open: weakref.WeakSet[TcpCommunicator] = weakref.WeakSet()


class TcpCommunicator(Communicator):
    """A rank of a mesh, or of one of its groups. Made by `connect_tcp` and `group`.

    `choose` returns the algorithm of `all_reduce` and `reduce_scatter` for a buffer's bytes, "ring", "halving-doubling"
    or "double-tree"; it must be the same on every rank, and may be set between calls. The others choose by size.
    Two ranks that `send` large buffers to each other at the same time wait for each other.
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
        super().__init__(rank, len(members), mesh.generation, deadline_s)
        self.choose = choose
        self._mesh, self._members, self._channel = mesh, tuple(members), channel
        self._engine = Engine(mesh, channel, members, rank)
        self._lock = threading.Lock()
        self._ended: str | None = None
        self._aborted = False
        self._groups: list[TcpCommunicator | SoloCommunicator] = []
        self._group_counts: Counter[tuple[int, ...]] = Counter()
        self._programs = Programs(rank, len(members))
        _open.add(self)

    def connect_neighbours(self, deadline_s: float) -> None:
        """Connect with the ranks before and after this one; raises CommunicationError naming the one that failed."""
        around = {(self.rank + 1) % self.num_ranks, (self.rank - 1) % self.num_ranks}
        self._guarded(self._engine.connect, sorted(around), deadline_s)

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

        self._guarded(self._engine.run_each, next_call, done, self._deadline_now)

    def look_again(self) -> None:
        self._engine.look_again()

    def reduce_scatter(self, buf: NDArray[Any], op: Op = "sum") -> NDArray[Any]:
        check_buffer(buf, op)
        mine = self.part_of(buf, self.rank)
        self._run("reduce_scatter", self.choose(buf.nbytes), buf, op=op)
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
        gather = halving_all_gather if flat.nbytes <= SMALL_BYTES else ring_all_gather
        program = gather(self.rank, self.num_ranks, grid_of(bounds, buf.itemsize))
        self._run_call(_call_of("all_gather_ragged", program, flat))
        return [flat[start:stop] for start, stop in bounds]

    def all_to_all_ragged(self, parts: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        sizes = self._agree_on_parts(parts)
        outgoing, incoming = sizes[self.rank].tolist(), sizes[:, self.rank].tolist()
        edges = np.cumsum([0, *outgoing, *incoming]).tolist()
        bounds = list(pairwise(edges))
        flat = np.empty(edges[-1], parts[0].dtype)
        np.concatenate(parts, out=flat[: sum(outgoing)])
        call = _call_of(
            "all_to_all_ragged", pairwise_exchange(self.rank, self.num_ranks, grid_of(bounds, flat.itemsize)), flat
        )
        call.total = int(sizes.sum()) * flat.itemsize
        self._run_call(call)
        found = [flat[start:stop] for start, stop in bounds[self.num_ranks :]]
        found[self.rank][:] = parts[self.rank]
        return found

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
            # All members have made the same groups of these ranks before, so they count the same number.
            label = f"{self._channel} {members} {self._group_counts[members]}"
            channel = int.from_bytes(hashlib.sha256(label.encode()).digest()[:7], "big") + 1
            world = [self._members[member] for member in members]
            place = members.index(self.rank)
            made = TcpCommunicator(self._mesh, world, place, self.deadline_s, channel, self._choice_now)
        self._groups = [group for group in self._groups if not group.has_ended] + [made]
        if self._ended is not None:  # by another thread, meanwhile
            made.abort(self._ended)
        return made

    @property
    def sent_bytes(self) -> int:
        return sum(one._engine.sent_bytes for one in self._family())

    def links(self) -> dict[int, LinkUse]:
        return links_of(one._engine.links() for one in self._family())

    @property
    def has_ended(self) -> bool:
        """Whether it was closed or aborted, or has failed."""
        return self._ended is not None

    def look(self, what: str) -> str | None:
        """Check for the end of a rank without a collective; returns why this communicator has ended, None if it lives.

        `what` names the caller's activity in the reason. Waits only for a call of another thread.
        """
        with suppress(CommunicationError):  # the reason is kept, and returned
            self._guarded(self._engine.look, what)
        return self._ended

    def abort(self, reason: str) -> None:
        self._mark(reason, aborted=True)
        self._report_where_idle()

    def close(self) -> None:
        words = {one: one._last_word() for one in self._family()}
        self._mark("it was closed", aborted=False)
        with ExitStack() as calls:
            for one in words:
                calls.enter_context(one._lock)  # wait for a call that was woken
            Engine.end({one._engine: word for one, word in words.items()}, self.generation)
            if self._channel == 0:
                self._mesh.close()

    def let_go(self) -> None:
        """Close this forked process's copies of the sockets, which stay open in the rank."""
        self._ended = "this process was forked from the rank"
        self._lock = threading.Lock()  # a thread that does not exist here may hold the old one
        self._mesh.let_go()
        self._engine.drop()

    def _choice_now(self, nbytes: int) -> str:
        """The groups' choice, which follows this communicator's."""
        return self.choose(nbytes)

    def _run(self, kind: str, algorithm: str, buf: NDArray[Any], peer: int = 0, op: str = "") -> None:
        program = self._programs.of(ProgramKey(kind, algorithm, buf.size, buf.itemsize, peer))
        root = peer if kind == "broadcast" else 0
        self._run_call(_call_of("send" if kind == "recv" else kind, program, buf, op, root))

    def _run_call(self, call: Call) -> None:
        self._guarded(self._engine.run, call, self.deadline_s)

    def _deadline_now(self) -> float:
        return self.deadline_s

    def _family(self) -> list[TcpCommunicator]:
        """This communicator, its groups, and theirs."""
        groups = [group for group in self._groups if isinstance(group, TcpCommunicator)]
        return [self, *(one for group in groups for one in group._family())]

    def _mark(self, reason: str, *, aborted: bool) -> None:
        """Make a blocked call and every later one raise, here and in the groups."""
        self._ended, self._aborted = self._ended or reason, self._aborted or aborted
        self._engine.abort(self._ended)
        for group in self._groups:
            if isinstance(group, TcpCommunicator):
                group._mark(self._ended, aborted=aborted)
            else:
                group.abort(self._ended)

    def _last_word(self) -> str | None:
        return None if self._ended is None else f"rank {self._members[self.rank]}: {self._ended}"

    def _report_where_idle(self) -> None:
        """Send the reason to the other ranks, which may be waiting; a call under way wakes and sends it itself."""
        idle = [one for one in self._family() if one._lock.acquire(blocking=False)]
        try:
            Engine.end({one._engine: one._last_word() for one in idle}, self.generation)
        finally:
            for one in idle:
                one._lock.release()

    def _guarded(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function of the engine, one at a time. If it fails, this communicator and its groups end, and the
        other ranks learn the reason.
        """
        with self._lock:
            self._check_open()
            try:
                function(*arguments)
                if self._aborted:  # by another thread, too late for this call to see it
                    Engine.end({self._engine: self._last_word()}, self.generation)
            except BaseException as error:
                # Half a collective cannot be repaired; the neighbours learn it at once, and pass it on.
                what = error.what if isinstance(error, CommunicationError) else f"{type(error).__name__}: {error}"
                reason = self._engine.reason or what
                self._ended = self._ended or reason
                Engine.end({self._engine: reason}, self.generation)
                self._mark(reason, aborted=True)
                self._report_where_idle()  # the groups: this one's lock is taken
                raise
        if self._aborted:  # since the look above, by a thread that found the lock taken
            self._report_where_idle()

    def _check_open(self) -> None:
        if self._ended is not None:
            name = self._members[self.rank]
            raise CommunicationError(
                f"rank {name}: the communicator has ended: {self._ended}", next_step="Start the rank again."
            )


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
    """Join the ranks; see `lockstep.training.comm.connect`. `tls` encrypts what leaves this host."""
    mesh = Mesh(rank, num_ranks, generation, key, host, tls)
    try:
        mesh.rendezvous(rendezvous)
        comm = TcpCommunicator(mesh, range(num_ranks), rank, call_deadline_s)
        comm.connect_neighbours(deadline_s)
    except BaseException:
        mesh.close()
        raise
    return comm


def _in_child() -> None:
    """Close the sockets in a forked process, or others would not see the rank's end while this process lives."""
    for communicator in list(_open):
        communicator.let_go()


os.register_at_fork(after_in_child=_in_child)
