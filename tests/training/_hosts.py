"""Ranks as threads that say they are on several hosts: the real choice of backend and algorithm, without processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lockstep.training.comm import CommOptions, Joined, join
from lockstep.training.world import World
from tests.training._ring import KEY, PATIENCE_S, Table


class Control:
    """The control client's part in joining."""

    host = "127.0.0.1"

    def __init__(self, rank: int, table: Table) -> None:
        self.rendezvous = table.of(rank)


def run_hosts(
    identities: Sequence[str],
    work: Callable[[Joined], Any],
    options: CommOptions | None = None,
    *,
    deadline_s: float = PATIENCE_S,
) -> list[Any]:
    """Results of `work` on each rank, rank r on host `identities[r]`; the first exception of a rank is raised."""
    num_ranks = len(identities)
    table = Table(num_ranks)

    def one(rank: int) -> Any:
        world = World.local(rank, num_ranks)
        joined = join(world, Control(rank, table), KEY, PATIENCE_S, deadline_s, options, identity=identities[rank])
        try:
            return work(joined)
        finally:
            joined.communicator.close()

    with ThreadPoolExecutor(num_ranks) as pool:
        return [future.result(2 * PATIENCE_S) for future in [pool.submit(one, rank) for rank in range(num_ranks)]]
