"""TensorFlow's collective operations as a communicator: gRPC's ring (the slow cross-check) and NCCL on GPUs.

The sums, gathers and broadcasts are TensorFlow's (CollectiveReduceV2, CollectiveGatherV2, CollectiveBcast*V2). Before
each of them the ranks meet on their ordinary communicator and compare what they are about to call: so a rank that is
absent or makes another call is named within the deadline, where TensorFlow alone would wait or name nobody.

After an error only the death of the process cures: TensorFlow refuses every later collective of the process, of other
groups too. The launcher starts ranks anew, which is that death.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.errors import CommunicationError
from training.comm.base import (
    FLOATS,
    UFUNCS,
    Communicator,
    Op,
    check_buffer,
    check_group,
    check_peer,
    check_rank,
    divide_by_ranks,
    part_bounds,
)
from training.comm.interfaces import require_trust
from training.comm.meeting import Meeting
from training.comm.options import CommOptions
from training.comm.solo import SoloCommunicator
from training.comm.tf_cluster import RESTART, Cluster, start

MERGE = {"sum": "Add", "mean": "Add", "min": "Min", "max": "Max"}
WORD = np.dtype(np.float32)  # as which bytes travel: TensorFlow gathers no uint8; nothing is computed with them
NARROW = np.dtype(np.uint8)  # TensorFlow reduces none: it is widened, and wraps when it is narrowed again
FIRST_INSTANCE = 1


class TensorflowCommunicator(Communicator):
    """A rank among TensorFlow's servers. Made by `join_servers`; `abort` of a group ends all groups of the process.

    Sums of float16 and bfloat16 are rounded after each addition, in the order of TensorFlow's ring.
    """

    def __init__(self, cluster: Cluster, ordinary: Communicator, tasks: Sequence[int], key: int) -> None:
        super().__init__(ordinary.rank, ordinary.num_ranks, ordinary.generation, ordinary.deadline_s)
        self.cluster, self.ordinary = cluster, ordinary
        """`ordinary` is the ranks' authenticated communicator, for what is no tensor."""
        self.gathers_extremes = cluster.hint == "nccl"
        """Whether minima and maxima of floats are formed here, since the backend's may lose a NaN."""
        self._tasks, self._key = tuple(tasks), key
        self._instances: dict[int, int] = {}  # group key -> the next instance's, counted alike on each of its ranks
        self._groups: list[Communicator] = []
        self._made: dict[tuple[int, ...], int] = {}
        self._lock = threading.RLock()
        self._closed = False
        self._meeting = Meeting(ordinary)
        cluster.ordinary.append(ordinary)
        # TensorFlow orders the members of a group by itself.
        self._places = np.argsort(self._gather(np.array([self.rank], WORD), "join")[:, 0], kind="stable")

    def all_reduce(self, buf: NDArray[Any], op: Op = "sum") -> None:
        check_buffer(buf, op)
        if op in ("min", "max") and self.gathers_extremes and buf.dtype in FLOATS:
            UFUNCS[op].reduce(self.all_gather(buf), axis=0, out=buf)
            return
        given = buf.astype(np.int32) if buf.dtype == NARROW else buf

        def reduce(instance: int) -> Any:
            return self._reduce(given, op, instance)

        buf[:] = self._run(f"all_reduce {op} of {buf.dtype}", buf.size, reduce).astype(buf.dtype, copy=False)
        if op == "mean":
            divide_by_ranks(buf, self.num_ranks)

    def all_gather(self, buf: NDArray[Any]) -> NDArray[Any]:
        check_buffer(buf, writable=False)
        rows = self.allocate(self.num_ranks * buf.size, buf.dtype).reshape(self.num_ranks, buf.size)
        words = self._gather(_words(buf), f"all_gather of {buf.nbytes} bytes of {buf.dtype}")  # (num_ranks, words)
        rows[:] = words[self._places].view(np.uint8)[:, : buf.nbytes].view(buf.dtype)
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
        what = f"broadcast from {root} of {buf.dtype}"
        self._copy(buf, self.rank == root, lambda call: self._run(what, buf.size, call), self._key, self.num_ranks)

    def send(self, buf: NDArray[Any], to: int) -> None:
        check_buffer(buf, writable=False)
        check_peer("send", to, self.rank, self.num_ranks)
        self._pass(buf, self.rank, to)

    def recv(self, buf: NDArray[Any], source: int) -> None:
        check_buffer(buf)
        check_peer("recv", source, self.rank, self.num_ranks)
        self._pass(buf, source, self.rank)

    def group(self, ranks: Sequence[int]) -> Communicator:
        members = check_group(ranks, self.rank, self.num_ranks)
        self._check_open()
        made = self._made[members] = self._made.get(members, 0) + 1
        group: Communicator
        if len(members) == 1:
            group = SoloCommunicator(self.generation, self.deadline_s)
            self.cluster.ordinary.append(group)
        else:
            tasks = [self._tasks[member] for member in members]
            key = key_of(self._key, "group", *members, made)
            group = TensorflowCommunicator(self.cluster, self.ordinary.group(members), tasks, key)
            group.deadline_s = self.deadline_s
        self._groups.append(group)
        return group

    @property
    def on_host(self) -> Communicator:
        return self.ordinary

    def abort(self, reason: str) -> None:
        self.cluster.end(reason)

    def close(self) -> None:
        self._closed = True
        self.ordinary.close()
        for group in self._groups:
            group.close()

    def graph_key(self) -> int:
        """The group key for operations in a graph, whose instances this communicator does not count."""
        return key_of(self._key, "graph")

    def _gather(self, words: NDArray[Any], what: str) -> NDArray[Any]:
        """(num_ranks, n): the `words` (n,) of every rank, in TensorFlow's order of them."""
        from tensorflow.python.ops import collective_ops

        def gather(instance: int) -> Any:
            return collective_ops.all_gather_v2(
                words, self.num_ranks, self._key, instance, self.cluster.hint, self.deadline_s
            )

        return self._run(what, words.size, gather).reshape(self.num_ranks, words.size)

    def _reduce(self, values: NDArray[Any], op: str, instance: int) -> Any:
        import tensorflow as tf
        from tensorflow.python.ops import collective_ops

        return collective_ops.all_reduce_v2(
            tf.constant(values),
            self.num_ranks,
            self._key,
            instance,
            MERGE[op],
            communication_hint=self.cluster.hint,
            timeout=self.deadline_s,
        )

    def _copy(
        self, buf: NDArray[Any], gives: bool, run: Callable[[Callable[[int], Any]], NDArray[Any]], key: int, size: int
    ) -> None:
        """Hand `buf` from the one of a group's `size` ranks that `gives` to the others."""
        from tensorflow.python.ops import collective_ops

        words = _words(buf)
        options = (self.cluster.hint, self.deadline_s)

        def call(instance: int) -> Any:
            if gives:
                return collective_ops.broadcast_send_v2(words, size, key, instance, *options)
            return collective_ops.broadcast_recv_v2([words.size], WORD.name, size, key, instance, *options)

        copied = run(call)
        if not gives:
            buf[:] = copied.view(np.uint8)[: buf.nbytes].view(buf.dtype)

    def _pass(self, buf: NDArray[Any], source: int, to: int) -> None:
        key = key_of(self._key, "pair", source, to)  # TensorFlow knows groups alone: two ranks are one
        what = f"send of {buf.dtype} from {source} to {to}"

        def meet(number: int) -> None:
            self._meeting.two(source, to, what, buf.size, number)

        self._copy(buf, self.rank == source, lambda call: self._run(what, buf.size, call, key, meet), key, 2)

    def _run(
        self,
        what: str,
        size: int,
        call: Callable[[int], Any],
        key: int | None = None,
        meet: Callable[[int], None] | None = None,
    ) -> NDArray[Any]:
        """Meet the others, then make TensorFlow's `call`, which is given its instance; nothing for a `size` of 0."""
        import tensorflow as tf

        key = self._key if key is None else key
        with self._lock:
            self._check_open()
            instance = self._instances.get(key, FIRST_INSTANCE)
            self._instances[key] = instance + 1
            self.ordinary.deadline_s = self.deadline_s
            try:
                meet(instance) if meet else self._meeting.all(what, size, instance)
                # At once, also where a graph is being traced, whose ranks compare their shapes.
                with tf.init_scope(), tf.device(self.cluster.device):
                    found: NDArray[Any] = call(instance).numpy() if size else np.zeros(0, WORD)
                return found
            except CommunicationError as error:
                self.abort(error.what)
                raise
            except tf.errors.OpError as error:
                lost = self._lost(f"{what}, {size} elements", error)
                self.abort(lost.what)
                raise lost from error

    def _lost(self, what: str, error: Exception) -> CommunicationError:
        if self.cluster.ended is not None:
            return self._has_ended()
        silent = [self._tasks.index(task) for task in self.cluster.silent(self._tasks)]
        who = f"rank {', '.join(map(str, silent))}" if silent else "the other ranks, which all answer"
        return CommunicationError(
            f"rank {self.rank}: {what} failed while waiting for {who}",
            got=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:500]}",
            allowed=f"an end within {self.deadline_s:.0f} s",
            next_step=f"{RESTART} Look at the log of the rank that is named, else at all.",
        )

    def _check_open(self) -> None:
        if self._closed or self.cluster.ended is not None:
            raise self._has_ended()

    def _has_ended(self) -> CommunicationError:
        return CommunicationError(
            f"rank {self.rank}: the communicator has ended: {self.cluster.ended or 'it was closed'}", next_step=RESTART
        )


def key_of(parent: int, *parts: object) -> int:
    """A group's key from its parent's and what makes it: equal on its members, who cannot ask anybody else."""
    digest = sha256(repr((parent, *parts)).encode()).digest()
    return int.from_bytes(digest[:4], "little") & 0x7FFF_FFFF or 1


def join_servers(
    rank: int,
    num_ranks: int,
    rendezvous: Callable[[str, int], list[tuple[str, int]]],
    ordinary: Communicator,
    options: CommOptions,
) -> TensorflowCommunicator:
    """Join TensorFlow's servers of all ranks; `ordinary` is the ranks' authenticated communicator, closed with this.

    Raises ConfigError without a network to trust, for a process that has used TensorFlow before, and with `nccl` for
    ranks without a GPU each.
    """
    address = require_trust(options.trust_network, options.backend)
    cluster = start(rank, num_ranks, address, rendezvous, ordinary, options.backend)
    return TensorflowCommunicator(cluster, ordinary, range(num_ranks), key_of(0, "world", ordinary.generation))


def _words(buf: NDArray[Any]) -> NDArray[Any]:
    """The bytes of `buf` as 32-bit words, zeros behind them."""
    raw = np.zeros(-(-buf.nbytes // WORD.itemsize), WORD)
    raw.view(np.uint8)[: buf.nbytes] = buf.view(np.uint8)
    return raw
