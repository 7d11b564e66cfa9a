"""What a supervisor is told to do for one generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from training.comm.tls import Credentials
from training.control.task import Limits, RankTask
from training.launch.leftovers import new_mark
from training.world import World


@dataclass(frozen=True, slots=True)
class Order:
    """All that a supervisor needs; `host` is what the launcher calls this host, for messages."""

    task: RankTask
    world: World
    host: str
    control: tuple[str, int]
    key: bytes = field(repr=False)
    limits: Limits
    devices: tuple[str, ...] = ()
    """The GPUs that the rank sees (training.devices); it sees no others, and none where this is empty."""
    tls: Credentials | None = None
    """What the rank shows to ranks on other hosts; None: they talk in the clear."""
    mark: str = field(default_factory=new_mark)
    """In the rank's environment, and so in that of all that it starts (training.launch.leftovers)."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one supervisor of a session stands; what stays the same through its generations."""

    rank: int
    hosts: tuple[str, ...]
    """Of all ranks, as the launcher calls them."""
    control: tuple[str, int]
    """Where the driver's roster listens; its servers of generations have the same host."""
    secret: bytes = field(repr=False)
    """Of the session: it opens orders, and no rank gets it."""
    limits: Limits
    devices: tuple[str, ...] = ()
    """As in Order."""

    def order(self, document: Mapping[str, Any], mark: str) -> Order:
        """The order of one generation, from what `order_to_json` has made."""
        world = World.from_hosts(self.rank, self.hosts, int(document["generation"]))
        tls = Credentials.from_json(document["tls"]) if document["tls"] else None
        return Order(
            RankTask.from_json(document["task"]),
            world,
            self.hosts[self.rank],
            (self.control[0], int(document["port"])),
            bytes.fromhex(document["key"]),
            self.limits,
            self.devices,
            tls,
            mark,
        )


def order_to_json(task: RankTask, generation: int, port: int, key: bytes, tls: Credentials | None) -> dict[str, Any]:
    """What differs from generation to generation; holds secrets."""
    return {
        "task": task.to_json(),
        "generation": generation,
        "port": port,
        "key": key.hex(),
        "tls": tls.to_json() if tls else None,
    }
