"""Which address of this host the other ranks shall use, and which network may carry what cannot be authenticated."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from lockstep.storage.errors import ConfigError
from training.comm.base import Communicator

Addresses = Mapping[str, Sequence[str]]


def route_address(control: tuple[str, int]) -> str:
    """The address of this host from which the driver's control server is reached; nothing is sent.

    Every rank has a way to the driver, so this network is one that all ranks share. It is the loopback address where
    the driver is on this host alone. A host's own name may stand for another network or for 127.0.1.1: it is not asked.
    Raises OSError where there is no way to `control`.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(*control, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # of a datagram socket: only chooses the route
        return str(probe.getsockname()[0])


def trusted_address(trust_network: str, interfaces: Addresses | None = None) -> str:
    """The address of the interface that --trust-network names, or of the one in that network (10.1.0.0/16).

    Loopback comes last and IPv4 before IPv6; link-local addresses do not count. Raises ConfigError listing the
    interfaces there are.
    """
    found = local_addresses() if interfaces is None else interfaces
    try:
        network = ipaddress.ip_network(trust_network) if "/" in trust_network else None
    except ValueError as error:
        raise _refused(trust_network, f"{trust_network!r}: {error}", found) from None
    if network is not None:
        inside = [a for addresses in found.values() for a in addresses if ipaddress.ip_address(a) in network]
    else:
        inside = list(found.get(trust_network, ()))
    if not inside:
        raise _refused(trust_network, "no such interface with an address", found)
    parsed = [ipaddress.ip_address(address) for address in inside]
    return str(min(parsed, key=lambda address: (address.is_loopback, address.version, parsed.index(address))))


def require_trust(trust_network: str | None, backend: str) -> str:
    """The address that an unauthenticated `backend` shall use; raises ConfigError where no network is trusted.

    Who can reach a port of TensorFlow's gRPC or of NCCL can read and change gradients: neither proves who speaks.
    """
    if trust_network is None:
        raise ConfigError(
            f"the {backend} backend cannot tell a rank from a stranger",
            got=f"backend {backend} without --trust-network",
            allowed="a network that only ranks can reach, named by its interface",
            next_step="Give --trust-network IFACE (such as eth1, or 10.1.0.0/16), or leave --backend to auto. "
            f"Here are: {_listed(local_addresses())}.",
        )
    return trusted_address(trust_network)


def local_addresses() -> dict[str, list[str]]:
    """Interface -> its IPv4 and IPv6 addresses, without link-local ones (which mean nothing on another host)."""
    found: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        addresses = [e.address for e in entries if e.family in (socket.AF_INET, socket.AF_INET6)]
        kept = [a for a in addresses if not ipaddress.ip_address(a.partition("%")[0]).is_link_local]
        if kept:
            found[name] = kept
    return found


def _listed(interfaces: Addresses) -> str:
    return ", ".join(f"{name} ({', '.join(addresses)})" for name, addresses in sorted(interfaces.items())) or "none"


def _refused(trust_network: str, got: str, interfaces: Addresses) -> ConfigError:
    return ConfigError(
        f"--trust-network {trust_network} names no network of {socket.gethostname()}",
        got=got,
        allowed=f"one of {_listed(interfaces)}",
        next_step="Name an interface that each rank's host has, or the network that they share as ADDRESS/BITS.",
    )


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_identity() -> str:
    """A text that is equal for two processes only where a Unix socket between them can pass memory.

    The kernel's boot id tells hosts apart whatever their names are; the network namespace tells containers (and tests)
    apart that share a kernel and cannot reach each other's sockets; memory is lent to processes of the same user alone.
    Empty where the system does not tell: such a rank shares its host with nobody. That memory really can be shared is
    tried afterwards; this only says who tries.
    """
    try:
        network = os.stat("/proc/self/ns/net")
        return f"{BOOT_ID.read_text(encoding='ascii').strip()}/{network.st_dev}:{network.st_ino}/{os.geteuid()}"
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each rank is: `host_of[r]` numbers the host of rank r, in order of the hosts' first ranks."""

    host_of: tuple[int, ...]

    @classmethod
    def of(cls, identities: Sequence[str]) -> Layout:
        """From every rank's `host_identity`, in rank order."""
        numbers: dict[str, int] = {}
        return cls(
            tuple(
                numbers.setdefault(identity or f"rank {rank} alone", len(numbers))
                for rank, identity in enumerate(identities)
            )
        )

    @classmethod
    def apart(cls, num_ranks: int) -> Layout:
        """No two ranks share memory."""
        return cls(tuple(range(num_ranks)))

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host, in order; the first one of a host is its leader."""
        return tuple(
            tuple(rank for rank, other in enumerate(self.host_of) if other == host)
            for host in range(max(self.host_of) + 1)
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks of each host."""
        return tuple(len(ranks) for ranks in self.hosts)

    def __str__(self) -> str:
        ranks, hosts = len(self.host_of), len(self.hosts)
        each = ", ".join(map(str, self.sizes[:8])) + (", ..." if hosts > 8 else "")
        return f"{ranks} ranks on {hosts} host{'s' if hosts > 1 else ''}" + (f" ({each})" if hosts > 1 else "")


def agree_on_layout(comm: Communicator, identity: str) -> Layout:
    """Every rank's identity gathered: the same layout on all. A collective."""
    return Layout.of([data.decode() for data in comm.all_gather_bytes(identity.encode())])
