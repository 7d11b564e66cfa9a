"""Ranks as threads over a real shared segment: sockets, descriptors and kernels as between processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lockstep.training.comm.shm.communicator import ShmCommunicator, connect_shm
from tests.training._ring import KEY, PATIENCE_S

ARENA_BYTES = 32 << 20


class Bytes:
    """What `connect_shm` wants of a communicator that is there already, within one process."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks)
        self._data = [b""] * num_ranks

    def of(self, rank: int) -> Callable[[bytes], list[bytes]]:
        def exchange(data: bytes) -> list[bytes]:
            self._data[rank] = data
            self._barrier.wait(PATIENCE_S)
            found = list(self._data)
            self._barrier.wait(PATIENCE_S)
            return found

        return exchange


def run_shared(
    num_ranks: int, work: Callable[[ShmCommunicator], Any], *, deadline_s: float = PATIENCE_S, **options: Any
) -> list[Any]:
    """Results of `work` on each rank; the first exception of a rank is raised."""
    table = Bytes(num_ranks)
    options = {"arena_bytes": ARENA_BYTES, **options}

    def one(rank: int) -> Any:
        comm = connect_shm(rank, num_ranks, 1, KEY, table.of(rank), PATIENCE_S, deadline_s, **options)
        try:
            return work(comm)
        finally:
            comm.close()

    with ThreadPoolExecutor(num_ranks) as pool:
        return [future.result(2 * PATIENCE_S) for future in [pool.submit(one, rank) for rank in range(num_ranks)]]
