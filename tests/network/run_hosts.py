"""`run_local` over several hosts of this machine; `partial(run_hosts, hosts)` launches for
`lockstep.training.driver.train.train`.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

from lockstep.training.comm.tls import issue
from lockstep.training.control.protocol import new_key
from lockstep.training.control.server import ControlServer, Handler
from lockstep.training.control.task import Limits, RankTask
from lockstep.training.launch.process import Order
from lockstep.training.launch.supervisor import Supervisor
from lockstep.training.world import World
from tests.network.hosts import DRIVER, Hosts


def run_hosts(
    hosts: Hosts,
    task: RankTask,
    num_ranks: int,
    *,
    generation: int = 1,
    limits: Limits | None = None,
    handler: Handler | None = None,
    bind: str | None = None,
    driver: str | None = None,
) -> list[dict[str, Any]]:
    """Run `task` on `num_ranks` processes, neighbouring ranks on one host where there are more ranks than hosts.

    The control server listens on the switch (or at `bind`), each supervisor and its rank are on their host, and call
    the driver at `driver` (by default there). Returns and raises what `run_local` does.
    """
    limits, key = limits or Limits(silent_s=60.0), new_key()  # a loaded machine may keep a rank silent for 10 s
    places = [rank * len(hosts.addresses) // num_ranks for rank in range(num_ranks)]
    names = [f"host-{place}" for place in places]  # as Spark may call them: no address, and no name that resolves
    certificates = issue(generation, num_ranks) if task.tls else [None] * num_ranks
    threads: list[threading.Thread] = []

    def supervise(order: Order, place: int, server: ControlServer) -> None:
        try:
            with hosts.inside(place):
                Supervisor(order).run()
        except Exception as error:  # told where the driver waits, as the launchers do
            server.fail(error)

    try:
        with ExitStack() as stack:
            with hosts.inside(DRIVER):
                server = stack.enter_context(
                    ControlServer(key, generation, num_ranks, limits, handler, bind or hosts.driver_address)
                )
            for rank, place in enumerate(places):
                world, address = (
                    World.from_hosts(rank, names, generation),
                    (driver or hosts.driver_address, server.port),
                )
                order = Order(task, world, names[rank], address, key, limits, tls=certificates[rank])
                threads.append(threading.Thread(target=supervise, args=(order, place, server), daemon=True))
                threads[-1].start()
            return server.wait()
    finally:
        for thread in threads:
            thread.join(limits.grace_s + 5.0)
