"""One rank of a contestant of benchmarks.all_reduce that runs in the project's environment.

python all_reduce_worker.py KIND RANK FOLDER PORT PORT        two ranks, which find each other by FOLDER
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from all_reduce_turns import Run, repeatedly, serve

RANKS = 2
KEY = b"b" * 32


def meet(folder: Path, rank: int) -> Callable[[str, int], list[tuple[str, int]]]:
    """A rendezvous by files."""

    def rendezvous(host: str, port: int) -> list[tuple[str, int]]:
        mine = folder / f"rank-{rank}"
        mine.with_suffix(".new").write_text(json.dumps([host, port]))
        mine.with_suffix(".new").rename(mine)
        others = [folder / f"rank-{r}" for r in range(RANKS)]
        while not all(path.exists() for path in others):
            time.sleep(0.01)
        return [(host, port) for host, port in (json.loads(path.read_text()) for path in others)]

    return rendezvous


def ours(kind: str, rank: int, folder: Path) -> None:
    """Our communicators: shared memory in its own buffers or in any array, TCP."""
    from lockstep.training.comm.shm.communicator import connect_shm
    from lockstep.training.comm.tcp.communicator import connect_tcp

    comm = tcp = connect_tcp(rank, RANKS, 1, meet(folder, rank), KEY, 60, "127.0.0.1", 120)
    if kind != "tcp":
        comm = connect_shm(rank, RANKS, 1, KEY, tcp.all_gather_bytes, 60, 120)

    def prepare(size: int) -> Run:
        buf = np.zeros(size // 4, np.float32) if kind == "shm-any" else comm.allocate(size // 4, np.float32)
        return repeatedly(lambda: comm.all_reduce(buf))

    serve("this checkout", prepare, comm.barrier)
    comm.close()
    tcp.close()


def tensorflow(rank: int, ports: list[str]) -> None:
    """TensorFlow's gRPC ring, by the op that MultiWorkerMirroredStrategy uses; the repeats are a loop in the graph."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    workers = [f"127.0.0.1:{port}" for port in ports]
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})
    import tensorflow as tf

    tf.distribute.MultiWorkerMirroredStrategy()  # starts the servers and the collectives' leader
    keys = itertools.count(100)

    def prepare(size: int) -> Run:
        buf, key = tf.zeros([size // 4], tf.float32), next(keys)

        @tf.function(autograph=False, jit_compile=False)
        def many(x: tf.Tensor, repeats: tf.Tensor) -> tf.Tensor:
            def body(i: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                summed = tf.raw_ops.CollectiveReduceV2(
                    input=x,
                    group_size=RANKS,
                    group_key=1,
                    instance_key=key,
                    ordering_token=[],
                    merge_op="Add",
                    final_op="Id",
                    communication_hint="ring",
                )
                return i + 1, tf.ensure_shape(summed, x.shape)

            return tf.while_loop(lambda i, x: i < repeats, body, (0, x), parallel_iterations=1)[1][0]

        return lambda repeats: many(buf, tf.constant(repeats)).numpy()

    tiny = prepare(4)
    serve(f"TensorFlow {tf.__version__}", prepare, lambda: tiny(1))


def alone(kind: str, rank: int, folder: Path) -> None:
    """No exchange: each process moves its own memory, as many bytes as its part of an all_reduce: the memory's bound.

    An all_reduce of S bytes by two ranks reads 2 S and writes 2 S at least. `bound-sum` does the same arithmetic over
    S / 2 in each process, `bound-copy` as many bytes by two copies (memcpy, which goes round the caches from some MiB).
    """
    from numba import njit

    from lockstep.training.comm.tcp.communicator import connect_tcp

    comm = connect_tcp(rank, RANKS, 1, meet(folder, rank), KEY, 60, "127.0.0.1", 120)

    @njit(nogil=True)
    def summed(a: np.ndarray, b: np.ndarray) -> None:
        for at in range(len(a)):
            total = a[at] + b[at]
            a[at] = total
            b[at] = total

    def copied(a: np.ndarray, b: np.ndarray) -> None:
        np.copyto(a, b)
        np.copyto(b, a)

    def prepare(size: int) -> Run:
        a, b = (np.zeros(size // 8, np.float32) for _ in range(2))
        a[:] = b[:] = 0  # pages of its own, not the one page of zeros
        return repeatedly(partial(copied if kind == "bound-copy" else summed, a, b))

    serve(f"NumPy {np.__version__}", prepare, comm.barrier)
    comm.close()


def main() -> None:
    """Serve until stdin ends."""
    kind, rank, folder, *ports = sys.argv[1:]
    if kind == "tensorflow":
        tensorflow(int(rank), ports)
    elif kind.startswith("bound"):
        alone(kind, int(rank), Path(folder))
    else:
        ours(kind, int(rank), Path(folder))


if __name__ == "__main__":
    main()
