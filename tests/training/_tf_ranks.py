"""Ranks as processes that hold TensorFlow's servers: it has one a process, so threads will not do.

A process that imports TensorFlow costs seconds, so one set of ranks serves many calls; fewer ranks are a group of them.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from pyspark import cloudpickle

from lockstep.training.comm import CommOptions, Communicator, connect
from lockstep.training.rank.runtime import ENVIRONMENT
from lockstep.training.world import World
from tests.training._ring import KEY

JOIN_S, REPLY_S = 300.0, 300.0  # only against a hang: three processes that import TensorFlow on a loaded machine
Work = Callable[[Communicator], Any]


class Ranks:
    """`num_ranks` processes joined by the tensorflow backend over the loopback interface."""

    def __init__(self, num_ranks: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        pairs = [spawn.Pipe() for _ in range(num_ranks)]
        self._ends = [mine for mine, _ in pairs]
        self.processes = [
            spawn.Process(target=_rank, args=(theirs, rank, num_ranks), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()
        for _ in range(2):  # rounds of the rendezvous: our own ring, then TensorFlow's servers
            table = [self._reply(rank) for rank in range(num_ranks)]
            for end in self._ends:
                end.send(table)

    def run(self, num_ranks: int, work: Work) -> list[Any]:
        """Results of `work` on the first `num_ranks` ranks; the first exception of a rank is raised."""
        self.post(num_ranks, work)
        results = [self._reply(rank) for rank in range(num_ranks)]
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def post(self, num_ranks: int, work: Work) -> None:
        """Have `work` begin; `reply` waits for a rank's result."""
        for end in self._ends[:num_ranks]:
            end.send_bytes(cloudpickle.dumps((num_ranks, work)))

    def _reply(self, rank: int) -> Any:
        if not self._ends[rank].poll(REPLY_S):
            raise AssertionError(f"rank {rank} gave no answer for {REPLY_S:.0f} s")
        return self._ends[rank].recv()

    def reply(self, rank: int) -> Any:
        """The result of `post` on a rank, or its exception."""
        return self._reply(rank)

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join(10)


class Control:
    """What `connect` needs of the control client."""

    host = "127.0.0.1"

    def __init__(self, end: Connection) -> None:
        self._end = end

    def rendezvous(self, host: str, port: int) -> list[tuple[str, int]]:
        """Asks the test's process."""
        self._end.send((host, port))
        return list(self._end.recv())


def _rank(end: Connection, rank: int, num_ranks: int) -> None:
    os.environ |= ENVIRONMENT | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    os.environ |= {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2"}
    import tensorflow as tf

    tf.config.experimental.enable_op_determinism()
    options = CommOptions(backend="tensorflow", trust_network="lo")
    whole = connect(World.local(rank, num_ranks), Control(end), KEY, JOIN_S, 240.0, options)
    comms = {num_ranks: whole}
    while True:
        try:
            size, work = cloudpickle.loads(end.recv_bytes())
        except EOFError:  # the test's process is gone; TensorFlow's server would keep this one
            os._exit(1)
        try:
            if size not in comms:
                comms[size] = whole.group(range(size))
            end.send(work(comms[size]))
        except BaseException as error:  # told to the test, which raises it
            traceback.print_exc()
            end.send(error)
