"""TensorFlow's collective operations as a communicator: gRPC's ring (the slow cross-check) and NCCL on GPUs.

The sums, gathers and broadcasts are TensorFlow's (CollectiveReduceV2, CollectiveGatherV2, CollectiveBcast*V2). Before
each of them the ranks meet on their ordinary communicator and compare the calls they are about to make: so an error
names a rank that is absent or makes another call within the deadline, where TensorFlow would wait or name no rank.

After an error TensorFlow refuses every later collective of the process, of other groups too: only a new process helps,
and the launcher starts new ones. docs/decisions/045-tensorflow-collectives-and-gpus.md.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.storage.errors import CommunicationError
from lockstep.training.comm.base import (
    FLOATS,
    UFUNCS,
    Communicator,
    Op,
    check_buffer,
    check_group,
    check_parts,
    check_peer,
    check_rank,
    divide_by_ranks,
    part_bounds,
)
from lockstep.training.comm.hosts import require_trust
from lockstep.training.comm.options import CommOptions
from lockstep.training.comm.tcp.communicator import TcpCommunicator
from lockstep.training.comm.tf.cluster import (
    RESTART,
    WORD,
    Call,
    Cluster,
    Operation,
    from_words,
    gathering,
    giving,
    key_of,
    start,
    summing,
    taking,
    words_of,
)

Header = NDArray[np.int64]
FIRST_INSTANCE = 1


class Meeting:
    """Ranks meet on `ordinary` and compare calls; raises CommunicationError naming a rank absent, lost or differing."""

    def __init__(self, ordinary: Communicator) -> None:
        self._ordinary = ordinary

    def all(self, what: str, size: int, number: int) -> None:
        """Return once all ranks are to make call `number`, of `size` elements; `what` names operation and dtype."""
        mine = _header(what, size, number)
        self._compare(what, mine, enumerate(self._ordinary.all_gather(mine)))

    def two(self, source: int, to: int, what: str, size: int, number: int) -> None:
        """Meet as `all` does, with two ranks only; neither continues before it knows the other one's call."""
        mine, theirs = _header(what, size, number), np.zeros(3, np.int64)
        if self._ordinary.rank == source:
            self._ordinary.send(mine, to)
            self._ordinary.recv(theirs, to)
        else:
            self._ordinary.recv(theirs, source)
            self._ordinary.send(mine, source)
        self._compare(what, mine, [(to if self._ordinary.rank == source else source, theirs)])

    def _compare(self, what: str, mine: Header, others: Iterable[tuple[int, NDArray[Any]]]) -> None:
        for rank, theirs in others:
            if not np.array_equal(theirs, mine):
                raise CommunicationError(
                    f"rank {self._ordinary.rank}: rank {rank} makes another call than {what}",
                    got=f"call {theirs[0]}, of {theirs[1]} elements",
                    allowed=f"call {mine[0]}, of {mine[1]} elements, with the same operation and dtype",
                    next_step="Make the same calls in the same order on every rank.",
                )


def _header(what: str, size: int, number: int) -> Header:
    return np.array([number, size, zlib.crc32(what.encode())], np.int64)


class TensorflowCommunicator(Communicator):
    """A rank among TensorFlow's servers. Made by `join_servers`; `abort` of a group ends all groups of the process.

    Sums of float16 and bfloat16 are rounded after each addition, in the order of TensorFlow's ring.
    """

    def __init__(self, cluster: Cluster, ordinary: Communicator, tasks: Sequence[int], key: int) -> None:
        super().__init__(ordinary.rank, ordinary.num_ranks, ordinary.generation, ordinary.deadline_s)
        self.cluster, self.ordinary = cluster, ordinary
        """`ordinary` is the ranks' authenticated communicator, for data other than tensors."""
        self.gathers_extremes = cluster.hint == "nccl"
        """Whether minima and maxima of floats are computed here, since the backend's may lose a NaN."""
        self._tasks, self._key = tuple(tasks), key
        self._instances: dict[int, int] = {}  # group key -> the next instance's, counted alike on each of its ranks
        self._groups: list[TensorflowCommunicator] = []
        self._made: dict[tuple[int, ...], int] = {}
        self._lock = threading.RLock()
        self._closed = False
        self._meeting = Meeting(ordinary)
        # TensorFlow's call blocks its thread; in the main thread no signal handler would run meanwhile.
        self._caller = ThreadPoolExecutor(1, thread_name_prefix="tensorflow-call")
        # TensorFlow has its own order of a group's members.
        self._places = np.argsort(self._gather(np.array([self.rank], WORD), "join")[:, 0], kind="stable")

    def all_reduce(self, buf: NDArray[Any], op: Op = "sum") -> None:
        check_buffer(buf, op)
        if op in ("min", "max") and self.gathers_extremes and buf.dtype in FLOATS:
            UFUNCS[op].reduce(self.all_gather(buf), axis=0, out=buf)
            return
        total = self._run(f"all_reduce {op} of {buf.dtype}", buf.size, summing(buf, op))
        buf[:] = total.astype(buf.dtype, copy=False)
        if op == "mean":
            divide_by_ranks(buf, self.num_ranks)

    def all_gather(self, buf: NDArray[Any]) -> NDArray[Any]:
        check_buffer(buf, writable=False)
        rows = self.allocate(self.num_ranks * buf.size, buf.dtype).reshape(self.num_ranks, buf.size)
        words = self._gather(words_of(buf), f"all_gather of {buf.nbytes} bytes of {buf.dtype}")  # (num_ranks, words)
        rows[:] = from_words(words[self._places], buf)
        return rows

    def all_gather_parts(self, buf: NDArray[Any]) -> None:
        check_buffer(buf)
        mine = self.part_of(buf, self.rank)
        padded = np.zeros(part_bounds(buf.size, self.num_ranks)[0][1], buf.dtype)  # the first part is the longest
        padded[: mine.size] = mine
        for rank, row in enumerate(self.all_gather(padded)):
            part = self.part_of(buf, rank)
            part[:] = row[: part.size]

    def broadcast(self, buf: NDArray[Any], root: int = 0) -> None:
        check_buffer(buf)
        check_rank("broadcast", root, self.num_ranks)
        words = words_of(buf)
        operation = giving(words) if self.rank == root else taking(words)
        found = self._run(f"broadcast from {root} of {buf.dtype}", buf.size, operation)
        if self.rank != root:
            buf[:] = from_words(found, buf)

    def all_to_all_ragged(self, parts: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Exchange parts from rank to rank on the ordinary communicator: TensorFlow's collectives take parts of one
        size only.
        """
        check_parts(parts, self.num_ranks)
        with self._lock:
            self._check_open()
            self.ordinary.deadline_s = self.deadline_s
            try:
                return self.ordinary.all_to_all_ragged(parts)
            except BaseException as error:
                self.abort(error.what if isinstance(error, CommunicationError) else repr(error))
                raise

    def send(self, buf: NDArray[Any], to: int) -> None:
        check_buffer(buf, writable=False)
        check_peer("send", to, self.rank, self.num_ranks)
        self._pass(buf, giving(words_of(buf)), self.rank, to)

    def recv(self, buf: NDArray[Any], source: int) -> None:
        check_buffer(buf)
        check_peer("recv", source, self.rank, self.num_ranks)
        buf[:] = from_words(self._pass(buf, taking(words_of(buf)), source, self.rank), buf)

    def group(self, ranks: Sequence[int]) -> Communicator:
        members = check_group(ranks, self.rank, self.num_ranks)
        self._check_open()
        made = self._made[members] = self._made.get(members, 0) + 1
        ordinary = self.ordinary.group(members)  # which ends with this one's
        ordinary.deadline_s = self.deadline_s
        if len(members) == 1:
            return ordinary
        tasks = [self._tasks[member] for member in members]
        group = TensorflowCommunicator(self.cluster, ordinary, tasks, key_of(self._key, "group", *members, made))
        self._groups = [one for one in self._groups if not one.has_ended] + [group]
        return group

    @property
    def has_ended(self) -> bool:
        """Whether it was closed or aborted, or has failed."""
        return self._closed or self.cluster.ended is not None

    @property
    def on_host(self) -> Communicator:
        return self.ordinary

    def abort(self, reason: str) -> None:
        self.cluster.end(reason)

    def close(self) -> None:
        self._closed = True
        if self.ordinary is self.cluster.ordinary:
            self.cluster.close()
        self.ordinary.close()
        for group in self._groups:
            group.close()

    def graph_key(self) -> int:
        """The group key for operations in a graph, whose instances this communicator does not count."""
        return key_of(self._key, "graph")

    def _gather(self, words: NDArray[Any], what: str) -> NDArray[Any]:
        """Return (num_ranks, n): the `words` (n,) of every rank, in TensorFlow's order of them."""
        return self._run(what, words.size, gathering(words)).reshape(self.num_ranks, words.size)

    def _pass(self, buf: NDArray[Any], operation: Operation, source: int, to: int) -> NDArray[Any]:
        """A call of two ranks, which form a group, since TensorFlow has no calls between two."""
        return self._run(f"send of {buf.dtype} from {source} to {to}", buf.size, operation, (source, to))

    def _run(self, what: str, size: int, operation: Operation, pair: tuple[int, int] | None = None) -> NDArray[Any]:
        """Meet all others, or the other one of the `pair`, then make TensorFlow's call, unless `size` is 0."""
        import tensorflow as tf

        key = self._key if pair is None else key_of(self._key, "pair", *pair)
        with self._lock:
            self._check_open()
            instance = self._instances.get(key, FIRST_INSTANCE)
            self._instances[key] = instance + 1
            self.ordinary.deadline_s = self.deadline_s
            try:
                if pair is None:
                    self._meeting.all(what, size, instance)
                else:
                    self._meeting.two(*pair, what, size, instance)
                if not size:
                    return np.zeros(0, WORD)
                call = Call(key, 2 if pair else self.num_ranks, instance, self.cluster.hint, self.deadline_s)
                return self._caller.submit(self._call, operation, call).result()
            except tf.errors.OpError as error:
                lost = self._lost(f"{what}, {size} elements", error)
                self.abort(lost.what)
                raise lost from error
            except BaseException as error:  # an interrupt too: the others have met this rank, and wait for it
                text = f"{type(error).__name__}: {error}".removesuffix(": ")
                self.abort(error.what if isinstance(error, CommunicationError) else text)
                raise

    def _call(self, operation: Operation, call: Call) -> NDArray[Any]:
        """Runs in a thread that traces no graph, so at once: ranks that trace compare their shapes by such calls."""
        import tensorflow as tf

        with tf.device(self.cluster.device):
            found: NDArray[Any] = operation(call).numpy()
        return found

    def _lost(self, what: str, error: Exception) -> CommunicationError:
        reason = self.cluster.reason()
        if reason is not None:
            return CommunicationError(f"rank {self.rank}: {what} was ended: {reason}", next_step=RESTART)
        silent = [self._tasks.index(task) for task in self.cluster.silent(self._tasks)]
        who = f"rank {', '.join(map(str, silent))}" if silent else "the other ranks, which all respond"
        return CommunicationError(
            f"rank {self.rank}: {what} failed while waiting for {who}",
            got=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:500]}",
            allowed=f"an end within {self.deadline_s:.0f} s",
            next_step=f"{RESTART} Look at the log of the rank that is named, or at all logs.",
        )

    def _check_open(self) -> None:
        if self._closed or self.cluster.ended is not None:
            raise self._has_ended()

    def _has_ended(self) -> CommunicationError:
        return CommunicationError(
            f"rank {self.rank}: the communicator has ended: {self.cluster.ended or 'it was closed'}", next_step=RESTART
        )


def join_servers(
    rank: int,
    num_ranks: int,
    rendezvous: Callable[[str, int], list[tuple[str, int]]],
    ordinary: TcpCommunicator,
    options: CommOptions,
) -> TensorflowCommunicator:
    """Join TensorFlow's servers of all ranks; `ordinary` is the ranks' authenticated communicator, closed with this.

    Raises ConfigError without a network to trust, for a process that has used TensorFlow before, and with `nccl` for
    ranks without a GPU each.
    """
    address = require_trust(options.trust_network, options.backend)
    cluster = start(rank, num_ranks, address, rendezvous, ordinary, options.backend)
    return TensorflowCommunicator(cluster, ordinary, range(num_ranks), key_of(0, "world", ordinary.generation))
