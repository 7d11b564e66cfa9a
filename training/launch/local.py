"""Ranks as processes of this host."""

from __future__ import annotations

import os
import threading
from typing import Any

from training import devices
from training.comm.tls import issue
from training.control.protocol import new_key
from training.control.server import ControlServer
from training.launch.supervisor import Order, Supervisor
from training.launch.task import Handler, Limits, RankTask
from training.world import World

LOOPBACK = "127.0.0.1"


def run_local(
    task: RankTask,
    num_ranks: int,
    *,
    generation: int = 1,
    limits: Limits | None = None,
    handler: Handler | None = None,
) -> list[dict[str, Any]]:
    """Run `task` on `num_ranks` child processes; returns what each rank's entry returned, in order of rank.

    `handler(rank, kind, fields)` answers the ranks' requests. Raises what `ControlServer.wait` raises; no rank is left
    alive in any case.
    """
    limits = limits or Limits()
    key = new_key()
    threads: list[threading.Thread] = []
    try:
        certificates = issue(generation, num_ranks) if task.tls else [None] * num_ranks
        shares = devices.shares_of_host(os.environ, num_ranks)
        with ControlServer(key, generation, num_ranks, limits, handler, LOOPBACK) as server:
            for rank in range(num_ranks):
                world = World.local(rank, num_ranks, generation)
                supervisor = Supervisor(
                    Order(task, world, LOOPBACK, (LOOPBACK, server.port), key, limits, shares[rank], certificates[rank])
                )
                thread = threading.Thread(
                    target=_supervise, args=(supervisor, server), name=f"supervisor-{rank}", daemon=True
                )
                threads.append(thread)
                thread.start()
            return server.wait()
    finally:
        for thread in threads:
            thread.join(limits.grace_s + 5.0)


def _supervise(supervisor: Supervisor, server: ControlServer) -> None:
    try:
        supervisor.run()
    except Exception as error:  # a supervisor that cannot work is the launch's failure, told where the driver waits
        server.fail(error)
