"""Rings of threads for tests: the real sockets and frames, without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lockstep.training.comm import Communicator, SoloCommunicator
from lockstep.training.comm.tcp.communicator import connect_tcp

KEY = b"k" * 32
SLACK_S = 15.0  # of a loaded machine, beyond what a deadline promises
PATIENCE_S = 120.0  # only against a hang


class Table:
    """A rendezvous within one process."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks)
        self._addresses: dict[int, tuple[str, int]] = {}

    def of(self, rank: int) -> Callable[[str, int], list[tuple[str, int]]]:
        def rendezvous(host: str, port: int) -> list[tuple[str, int]]:
            self._addresses[rank] = (host, port)
            self._barrier.wait(PATIENCE_S)
            return [self._addresses[r] for r in sorted(self._addresses)]

        return rendezvous


def run_ring(
    num_ranks: int, work: Callable[[Communicator], Any], *, deadline_s: float = PATIENCE_S, generation: int = 1
) -> list[Any]:
    """Results of `work` on each rank; the first exception of a rank is raised."""
    table = Table(num_ranks)

    def one(rank: int) -> Any:
        comm = connect_tcp(rank, num_ranks, generation, table.of(rank), KEY, PATIENCE_S, "127.0.0.1", deadline_s)
        try:
            return work(comm)
        finally:
            comm.close()

    with ThreadPoolExecutor(num_ranks) as pool:
        return [future.result(2 * PATIENCE_S) for future in [pool.submit(one, rank) for rank in range(num_ranks)]]


def run_solo(num_ranks: int, work: Callable[[Communicator], Any]) -> list[Any]:
    """`work` on the communicator of one rank."""
    assert num_ranks == 1
    return [work(SoloCommunicator())]
