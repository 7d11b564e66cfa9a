"""Collectives between ranks: one interface, a backend for one rank and one over authenticated TCP.

No TensorFlow here. `connect` picks the backend; everything else depends on `Communicator` alone.
"""

from __future__ import annotations

from typing import Any, Protocol

from storage.errors import ConfigError
from training.comm.base import CALL_DEADLINE_S, Communicator, Op
from training.comm.options import CommOptions
from training.comm.solo import SoloCommunicator
from training.comm.tcp import TcpCommunicator, connect_ring

__all__ = ["CommOptions", "Communicator", "Op", "SoloCommunicator", "TcpCommunicator", "connect"]


class Rendezvous(Protocol):
    """What `connect` needs of the control client: this host's address, and every rank's, in rank order, for it."""

    @property
    def host(self) -> str: ...
    def rendezvous(self, host: str, port: int) -> list[tuple[str, int]]: ...


class Place(Protocol):
    """What `connect` needs of a `training.world.World`."""

    @property
    def rank(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def generation(self) -> int: ...


def connect(
    world: Place,
    control: Rendezvous,
    key: bytes,
    deadline_s: float,
    call_deadline_s: float = CALL_DEADLINE_S,
    options: CommOptions | None = None,
    tls: Any = None,
) -> Communicator:
    """Join the ranks of `world` in one communicator.

    `control` exchanges the listening addresses, `key` is the generation's secret, `deadline_s` the longest that
    joining may take, `call_deadline_s` the longest for any collective (attribute `deadline_s` of the result).
    Raises CommunicationError naming the rank that did not come or could not prove the key, ConfigError for an option
    that cannot be had here.
    """
    options = options or CommOptions()
    if tls is not None or options.backend not in ("auto", "tcp") or options.algorithm not in ("auto", "ring"):
        raise ConfigError(
            "this version joins ranks by TCP rings alone",
            got=f"{options}, TLS {'asked for' if tls is not None else 'not asked for'}",
            allowed="backend auto or tcp, algorithm auto or ring, no TLS",
            next_step="Leave the option out.",
        )
    if world.num_ranks == 1:
        return SoloCommunicator(world.generation, call_deadline_s)
    return connect_ring(
        world.rank,
        world.num_ranks,
        world.generation,
        control.rendezvous,
        key,
        deadline_s,
        control.host,
        call_deadline_s,
    )
