"""Collectives between ranks: one interface over one rank, shared memory, TCP and TensorFlow.

No TensorFlow here. `connect` picks the backend; everything else depends on `Communicator` only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from lockstep.training.comm.base import CALL_DEADLINE_S, Communicator, Op, SoloCommunicator
from lockstep.training.comm.hosts import host_identity, trusted_address
from lockstep.training.comm.join import Joined, join_ranks
from lockstep.training.comm.options import CommOptions
from lockstep.training.comm.tcp.communicator import TcpCommunicator, connect_tcp
from lockstep.training.comm.tls import Credentials, Tls
from lockstep.training.world import World

__all__ = ["CommOptions", "Communicator", "Joined", "Op", "SoloCommunicator", "TcpCommunicator", "connect", "join"]


class Rendezvous(Protocol):
    """The part of the control client that `connect` uses: this host's address, and every rank's in rank order."""

    @property
    def host(self) -> str: ...
    def rendezvous(self, host: str, port: int) -> list[tuple[str, int]]: ...


def connect(
    world: World,
    control: Rendezvous,
    key: bytes,
    deadline_s: float,
    call_deadline_s: float = CALL_DEADLINE_S,
    options: CommOptions | None = None,
    tls: Credentials | None = None,
) -> Communicator:
    """Join the ranks of `world` in one communicator; see `join`."""
    return join(world, control, key, deadline_s, call_deadline_s, options, tls).communicator


def join(
    world: World,
    control: Rendezvous,
    key: bytes,
    deadline_s: float,
    call_deadline_s: float = CALL_DEADLINE_S,
    options: CommOptions | None = None,
    tls: Credentials | None = None,
    identity: str | None = None,
    arena_bytes: int | None = None,
) -> Joined:
    """Join the ranks of `world` in one communicator; also returns the plan that chooses its algorithms.

    `control` exchanges the listening addresses, `key` is the generation's secret, `deadline_s` the longest that
    joining may take, `call_deadline_s` the longest for any collective (attribute `deadline_s` of the result).
    `tls`, if given, encrypts the traffic between hosts. `identity` names this host, so that a test can simulate
    several; None: `hosts.host_identity()`. `arena_bytes`: the most shared memory that a rank will allocate, the same
    on all ranks; None: its share of the machine's memory.
    Raises CommunicationError naming the rank that did not connect or could not prove the key, ConfigError for an
    option that is not available here.
    """
    options = options or CommOptions()
    if world.num_ranks == 1:
        return Joined(SoloCommunicator(world.generation, call_deadline_s), None, False)
    until = time.monotonic() + deadline_s
    host = control.host if options.trust_network is None else trusted_address(options.trust_network)
    flat = connect_tcp(
        world.rank,
        world.num_ranks,
        world.generation,
        control.rendezvous,
        key,
        deadline_s,
        host,
        call_deadline_s,
        None if tls is None else Tls(tls, world.generation),
    )

    def share(group: Communicator, mates: Sequence[int], within_s: float) -> Communicator:
        from lockstep.training.comm.shm.communicator import connect_shm  # its kernels load only where hosts are shared

        place, exchange = (group.rank, group.num_ranks, world.generation), group.all_gather_bytes
        return connect_shm(*place, key, exchange, within_s, call_deadline_s, labels=mates, arena_bytes=arena_bytes)

    try:
        if options.backend in ("tensorflow", "nccl"):
            from lockstep.training.comm.tf.communicator import join_servers

            servers = join_servers(world.rank, world.num_ranks, control.rendezvous, flat, options)
            return Joined(servers, None, False)
        return join_ranks(flat, share, host_identity() if identity is None else identity, options, until)
    except BaseException as error:
        flat.abort(str(error))
        flat.close()
        raise
