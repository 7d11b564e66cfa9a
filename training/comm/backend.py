"""The backend of a generation: joins its ranks over TCP, then by shared memory where they share a host, and plans the
algorithms.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from lockstep.storage.errors import CommunicationError, ConfigError
from lockstep.training.comm.base import CALL_DEADLINE_S, Communicator, SoloCommunicator
from lockstep.training.comm.calibrate import INNER_BUDGET_S, calibrate, calibrate_tcp, slowest
from lockstep.training.comm.comm_plan import HIERARCHICAL, CommPlan, key_of, make_plan
from lockstep.training.comm.cost import COUNTS, AlgorithmCosts
from lockstep.training.comm.hierarchical import HierarchicalCommunicator
from lockstep.training.comm.hosts import Layout, agree_on_layout, host_identity, trusted_address
from lockstep.training.comm.options import CommOptions
from lockstep.training.comm.tcp.communicator import TcpCommunicator, connect_tcp
from lockstep.training.comm.tls import Credentials, Tls
from lockstep.training.world import World

Share = Callable[[Communicator, Sequence[int], float], Communicator]
"""(ranks of one host, their ranks among all, seconds to join) -> their shared memory.
Raises CommunicationError if memory cannot be shared."""
SHARE_S = 20.0  # for the ranks of a host, which have all connected before


class Joined(NamedTuple):
    """What `join` returns on each rank."""

    communicator: Communicator
    plan: CommPlan | None
    """The algorithms in use; None for one rank, and for a backend whose algorithms we do not choose."""
    calibrated: bool
    """Whether the plan was made now, because none of `options.plans` fits."""


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
    several; None: `host_identity()`. `arena_bytes`: the most shared memory that a rank will allocate, the same
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


def join_ranks(flat: TcpCommunicator, share: Share | None, identity: str, options: CommOptions, until: float) -> Joined:
    """Replace a TCP communicator of all ranks by the one that fits their hosts. A collective.

    Takes over `flat`, and closes it if it is no longer needed. `until` is a monotonic time. Raises ConfigError on every
    rank if `options` force a backend that is not available here.
    """
    found = agree_on_layout(flat, identity)
    backend, why = _wanted(options, found)
    layout, inner = Layout.apart(flat.num_ranks), None
    if backend != "tcp":
        inner, failure = _shared(flat, found, share, until)
        if failure is None:
            layout = found
        elif options.backend == "shm":
            raise ConfigError(
                "these ranks cannot share memory",
                got=failure,
                allowed="memfd and Unix sockets between all ranks of a host",
                next_step="Use --backend auto, which then takes TCP, or remove the cause named above.",
            )
        elif backend == HIERARCHICAL and HIERARCHICAL in (options.backend, options.algorithm):
            layout, why = found, f"requested; TCP within hosts, since shared memory is not available: {failure}"
            mates = _mates(found, flat.rank)
            inner = flat.group(mates) if len(mates) > 1 else None
        else:
            backend, why = "tcp", f"shared memory is not available: {failure}"
    outer: Communicator | None = None
    if backend == HIERARCHICAL:
        leaders = [ranks[0] for ranks in layout.hosts]
        outer = flat.group(leaders) if flat.rank in leaders else None
    try:
        for level in (inner, outer):
            if isinstance(level, TcpCommunicator):  # now: before its first call a rank would not notice another's end
                level.connect_neighbours(max(1.0, until - time.monotonic()))
        plan, calibrated = _plan(flat, inner, outer, layout, backend, options)
    except BaseException:
        if inner is not None:
            inner.close()  # the others are groups of `flat`, and end with it
        raise
    if flat.rank == 0:
        origin = "calibrated now" if calibrated else "as frozen before" if options.plans else "nothing to measure"
        print(
            f"ranks talk by {plan.describe()} ({origin}): backend {backend}, {found}; {why}",
            file=sys.stderr,
            flush=True,
        )
    comm: Communicator = flat
    if backend == "shm":
        assert inner is not None
        comm = inner
        flat.close()
    elif backend == HIERARCHICAL:
        comm = HierarchicalCommunicator(flat, inner, outer, layout, plan.choose)
        # The flat one serves sizes for which the plan names another algorithm, and groups of ranks across hosts.
        flat.choose = plan.choose_flat
        if isinstance(outer, TcpCommunicator):
            outer.choose = plan.choose_between_leaders
    else:
        flat.choose = plan.choose
    return Joined(comm, plan, calibrated)


def _wanted(options: CommOptions, found: Layout) -> tuple[str, str]:
    """Return (backend, reason) before shared memory has been tried."""
    shared = max(found.sizes) > 1
    several = len(found.sizes) > 1
    if options.backend == "tcp":
        return "tcp", "requested"
    if options.algorithm not in ("auto", HIERARCHICAL):
        return "tcp", f"{options.algorithm} is an algorithm between TCP connections"
    if HIERARCHICAL in (options.backend, options.algorithm):
        if shared and several:
            return HIERARCHICAL, "requested"
        raise _impossible(HIERARCHICAL, found, "several hosts, one of them with several ranks")
    if options.backend == "shm":
        if not several:
            return "shm", "requested"
        raise _impossible("shm", found, "all ranks on one host")
    if not several:
        return "shm", "all ranks share a host"
    if shared:
        return HIERARCHICAL, "some ranks share a host"
    return "tcp", "no two ranks share a host"


def _impossible(name: str, found: Layout, allowed: str) -> ConfigError:
    return ConfigError(
        f"`{name}` does not fit the ranks' hosts",
        got=f"{found}",
        allowed=f"{allowed}, in one network namespace a host",
        next_step="Set backend and algorithm to `auto`, or start the ranks on other hosts.",
    )


def _shared(
    flat: Communicator, found: Layout, share: Share | None, until: float
) -> tuple[Communicator | None, str | None]:
    """Return (this host's shared memory or None, the reason why there is none or None); every rank gets the same
    reason.
    """
    mates, inner, reason = _mates(found, flat.rank), None, ""
    if len(mates) > 1:
        if share is None:
            reason = "this system has no shared memory"
        else:
            group = flat.group(mates)
            try:
                inner = share(group, mates, max(1.0, min(SHARE_S, until - time.monotonic())))
            except CommunicationError as error:
                reason = error.got or error.what
            finally:
                group.close()
    try:
        reasons = [data.decode() for data in flat.all_gather_bytes(reason.encode())]
    except BaseException:
        if inner is not None:
            inner.close()
        raise
    failed = next(((rank, reason) for rank, reason in enumerate(reasons) if reason), None)
    if failed is None:
        return inner, None
    if inner is not None:
        inner.close()
    return None, f"rank {failed[0]}: {failed[1]}"


def _plan(
    flat: TcpCommunicator,
    inner: Communicator | None,
    outer: Communicator | None,
    layout: Layout,
    backend: str,
    options: CommOptions,
) -> tuple[CommPlan, bool]:
    key = key_of(layout, backend, options.algorithm)
    for document in options.plans:
        plan = CommPlan.from_json(document, where="the run's communication plan")
        if plan.key == key:
            return plan, False
    if backend == "shm" or options.algorithm != "auto":
        return make_plan(layout, backend, options.algorithm), False
    through_all = calibrate_tcp(flat)
    if backend == "tcp":
        return make_plan(layout, backend, "auto", through_all), True
    within = slowest(flat, calibrate(inner, INNER_BUDGET_S) if inner is not None else None)
    measured = calibrate_tcp(outer).costs if isinstance(outer, TcpCommunicator) else {}
    between = AlgorithmCosts({name: slowest(flat, measured.get(name)) for name in COUNTS})
    return make_plan(layout, backend, "auto", through_all, between, within), True


def _mates(layout: Layout, rank: int) -> tuple[int, ...]:
    return layout.hosts[layout.host_of[rank]]
