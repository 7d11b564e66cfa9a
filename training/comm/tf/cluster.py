"""TensorFlow's own servers, joined for its collective operations: one a process, for as long as the process lives.

The ranks learn each other's addresses through the driver's control server. Traffic between these servers, and between
NCCL's sockets, is not authenticated, so this backend needs a network that `--trust-network` names. TensorFlow addresses
its peers there, but its server listens on every interface of the host: protect them by a firewall.
docs/decisions/045-tensorflow-collectives-and-gpus.md.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.storage.errors import CommunicationError, ConfigError
from lockstep.training import devices
from lockstep.training.comm.base import Communicator
from lockstep.training.comm.hosts import local_addresses
from lockstep.training.comm.tcp.communicator import TcpCommunicator

JOB = "worker"
HEALTH_LIMIT_MS = 1000
ABORTED = 10  # tensorflow.error.Code
LOOK_EVERY_S = 0.1  # each look takes 3 microseconds
WORD_LIMIT_S = 1.0
RESTART = "Start the ranks again: TensorFlow's collectives do not recover within a process. The launcher does so."
_joined = threading.Lock()  # never released: a process can have only one server
MERGE = {"sum": "Add", "mean": "Add", "min": "Min", "max": "Max"}
WORD = np.dtype(np.float32)  # bytes are sent as this dtype, since TensorFlow gathers no uint8; nothing computes with it
NARROW = np.dtype(np.uint8)  # TensorFlow does not reduce it: it is widened, and wraps when it is narrowed again


class Cluster:
    """This process's server among those of all ranks. Watches `ordinary`, their own communicator, until `close`."""

    def __init__(self, ordinary: TcpCommunicator, backend: str) -> None:
        self.rank, self.num_ranks = ordinary.rank, ordinary.num_ranks
        self.hint = "nccl" if backend == "nccl" else "ring"
        self.device = f"/job:{JOB}/replica:0/task:{self.rank}/device:{'GPU' if backend == 'nccl' else 'CPU'}:0"
        self.ended: str | None = None
        """The reason why no call is possible any more."""
        self.ordinary = ordinary
        self._lock = threading.Lock()
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="tensorflow-watch", daemon=True).start()

    def end(self, reason: str) -> None:
        """Abort running and refuse later calls of all groups: one failed collective breaks all in the process."""
        from tensorflow.python.eager import context

        with self._lock:
            if self.ended is not None:
                return
            self.ended = reason
        self._over.set()
        context.context().abort_collective_ops(ABORTED, reason)
        self.ordinary.abort(reason.removeprefix(f"rank {self.rank}: "))  # which adds the rank again

    def close(self) -> None:
        """Stop watching; the ordinary communicator is about to be closed."""
        self._over.set()

    def reason(self) -> str | None:
        """The reason why TensorFlow's call has failed, if a rank has ended it: its word may arrive a little later."""
        self._over.wait(WORD_LIMIT_S)
        return None if self.ended is None else self.ended.removeprefix(f"rank {self.rank}: ")

    def _watch(self) -> None:
        """Abort running calls as soon as another rank has ended.

        A rank that waits within TensorFlow reads no words; it learns of an end late (gRPC) or never (NCCL).
        """
        while not self._over.wait(LOOK_EVERY_S):
            reason = self.ordinary.look("a call of TensorFlow's")
            if reason is not None and not self._over.is_set():
                self.end(reason)

    def silent(self, ranks: Sequence[int]) -> list[int]:
        """Return those of `ranks` whose server does not answer a health check."""
        import tensorflow as tf
        from tensorflow.python.eager import context

        found = []
        for rank in ranks:
            try:
                if rank != self.rank:
                    task = f"/job:{JOB}/replica:0/task:{rank}"
                    context.context().check_collective_ops_peer_health(task, HEALTH_LIMIT_MS)
            except tf.errors.OpError:
                found.append(rank)
        return found


def start(
    rank: int,
    num_ranks: int,
    address: str,
    rendezvous: Callable[[str, int], list[tuple[str, int]]],
    ordinary: TcpCommunicator,
    backend: str,
) -> Cluster:
    """Start this process's server at `address` and join it with the others.

    `ordinary` is the ranks' authenticated communicator. Raises ConfigError if TensorFlow has been used in this process
    before, and with `nccl` if a rank has no GPU of its own.
    """
    from tensorflow.python.eager import context

    if context.context()._initialized or not _joined.acquire(blocking=False):
        raise ConfigError(
            f"the {backend} backend was requested too late in this process",
            got="a process in which TensorFlow already has tensors or a server",
            allowed="one server per process, started before the first tensor",
            next_step="Call context.communicator() first in the entry, before any model is built.",
        )
    if backend == "nccl":
        _check_gpus(ordinary)
        interface = next((name for name, found in local_addresses().items() if address in found), None)
        if interface is not None:  # else NCCL chooses an interface by itself
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    with addresses(rank, num_ranks, address, rendezvous) as table:
        _enable(context.context(), rank, table)
    return Cluster(ordinary, backend)


@contextmanager
def addresses(
    rank: int, num_ranks: int, address: str, rendezvous: Callable[[str, int], list[tuple[str, int]]]
) -> Iterator[list[tuple[str, int]]]:
    """Each rank's address and port for a server of TensorFlow, which this process starts within the context."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as kept:
        # Bound until TensorFlow listens there too, so that no other process gets the port in between.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind((address, 0))
        table = rendezvous(address, kept.getsockname()[1])
        if len(table) != num_ranks:
            raise CommunicationError(
                f"rank {rank}: the rendezvous returned a wrong table",
                got=f"{len(table)} addresses",
                allowed=f"{num_ranks}",
                next_step="Start the run again.",
            )
        os.environ["TF_GRPC_REUSE_PORT"] = "1"
        # Peers are reached directly, not through a proxy of the environment.
        os.environ["no_grpc_proxy"] = ",".join(host for host, _ in table)  # noqa: SIM112 (gRPC's own, in lower case)
        yield table


def written(host: str, port: int) -> str:
    """An address as TensorFlow reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _enable(context: Any, rank: int, table: Sequence[tuple[str, int]]) -> None:
    import tensorflow as tf
    from tensorflow.core.protobuf import tensorflow_server_pb2

    context.configure_collective_ops(collective_leader=f"/job:{JOB}/replica:0/task:0")
    server = tensorflow_server_pb2.ServerDef(
        cluster=tf.train.ClusterSpec({JOB: [written(*one) for one in table]}).as_cluster_def(),
        job_name=JOB,
        task_index=rank,
        protocol="grpc",
        port=table[rank][1],
    )
    server.default_session_config.CopyFrom(context.config)
    context.enable_collective_ops(server)
    context.ensure_initialized()


def _check_gpus(ordinary: Communicator) -> None:
    """Raise ConfigError on every rank unless each has a GPU that no other rank has."""
    import tensorflow as tf

    seen = tf.config.list_physical_devices("GPU")
    mine = devices.identity(os.environ, socket.gethostname()) if seen else ""
    everyone = [name.decode() for name in ordinary.all_gather_bytes(mine.encode())]
    for rank, name in enumerate(everyone):
        if not name:
            raise _refused(f"TensorFlow sees no GPU on rank {rank}", "Give each rank a GPU: see docs/gpu.md.")
        if (other := everyone.index(name)) != rank:
            raise _refused(f"ranks {other} and {rank} share the GPU {name}", "Lower --num-ranks to the number of GPUs.")


def _refused(got: str, next_step: str) -> ConfigError:
    return ConfigError(
        "the nccl backend cannot serve these ranks",
        got=got,
        allowed="one GPU for each rank: NCCL supports no two ranks on one GPU, nor on two slices of one",
        next_step=f"{next_step} Or use --backend auto, which sends gradients through the hosts' memory.",
    )


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments in which the members of a group must agree."""

    key: int
    """TensorFlow's number of the group."""
    size: int
    """The number of members."""
    instance: int
    """The number of the call within the group."""
    hint: str
    """What TensorFlow sums with: `ring` or `nccl`."""
    timeout_s: float


Operation = Callable[[Call], Any]
"""A function that makes TensorFlow's call and returns its tensor."""


def summing(values: NDArray[Any], op: str) -> Operation:
    """The reduction of `values` (n,) over the group."""
    given = values.astype(np.int32) if values.dtype == NARROW else values

    def make(call: Call) -> Any:
        import tensorflow as tf
        from tensorflow.python.ops import collective_ops

        return collective_ops.all_reduce_v2(
            tf.constant(given),
            call.size,
            call.key,
            call.instance,
            MERGE[op],
            communication_hint=call.hint,
            timeout=call.timeout_s,
        )

    return make


def gathering(words: NDArray[Any]) -> Operation:
    """The `words` (n,) of every member, one after the other in TensorFlow's order of them."""

    def make(call: Call) -> Any:
        from tensorflow.python.ops import collective_ops

        return collective_ops.all_gather_v2(words, call.size, call.key, call.instance, call.hint, call.timeout_s)

    return make


def giving(words: NDArray[Any]) -> Operation:
    """Hand `words` (n,) to the other members."""

    def make(call: Call) -> Any:
        from tensorflow.python.ops import collective_ops

        return collective_ops.broadcast_send_v2(words, call.size, call.key, call.instance, call.hint, call.timeout_s)

    return make


def taking(words: NDArray[Any]) -> Operation:
    """The words of the one member that gives, as many as `words`."""

    def make(call: Call) -> Any:
        from tensorflow.python.ops import collective_ops

        options = (call.size, call.key, call.instance, call.hint, call.timeout_s)
        return collective_ops.broadcast_recv_v2([words.size], WORD.name, *options)

    return make


def words_of(buf: NDArray[Any]) -> NDArray[Any]:
    """The bytes of `buf` (n,) as 32-bit words, padded with zeros."""
    words = np.zeros(-(-buf.nbytes // WORD.itemsize), WORD)
    words.view(np.uint8)[: buf.nbytes] = buf.view(np.uint8)
    return words


def from_words(words: NDArray[Any], like: NDArray[Any]) -> NDArray[Any]:
    """The inverse: (..., words) -> (..., n) of the size and dtype of `like` (n,)."""
    return words.view(np.uint8)[..., : like.nbytes].view(like.dtype)


def key_of(parent: int, *parts: object) -> int:
    """A group's key, from its parent's and the group's own parts: equal on all members without communication."""
    digest = sha256(repr((parent, *parts)).encode()).digest()
    return int.from_bytes(digest[:4], "little") & 0x7FFF_FFFF or 1
