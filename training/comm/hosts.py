"""Hosts: the address that other ranks use for this one, trusted networks, and which ranks share a host."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.storage.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.training.comm.base import Communicator

Addresses = Mapping[str, Sequence[str]]
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def route_address(control: tuple[str, int]) -> str:
    """The address of this host on its route to the driver's control server; nothing is sent.

    Every rank has a route to the driver, so all ranks share this network. It is the loopback address if the driver
    listens on this host only. The host's own name is not used, since it may resolve to another network or to 127.0.1.1.
    Raises OSError if there is no route to `control`.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(*control, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # on a datagram socket this only chooses the route
        return str(probe.getsockname()[0])


def trusted_address(trust_network: str, interfaces: Addresses | None = None) -> str:
    """The address of the interface that --trust-network names, or of the one in that network (10.1.0.0/16).

    It prefers IPv4 and avoids loopback; link-local addresses do not count. Raises ConfigError listing the interfaces.
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
    """The address that an unauthenticated `backend` uses; raises ConfigError if no network is trusted.

    Any host that can reach a port of TensorFlow's gRPC or of NCCL can read and change gradients: neither
    authenticates its peers.
    """
    if trust_network is None:
        raise ConfigError(
            f"the {backend} backend does not authenticate its peers",
            got=f"backend {backend} without --trust-network",
            allowed="a network that only ranks can reach, named by its interface",
            next_step="Give --trust-network IFACE (such as eth1, or 10.1.0.0/16), or leave --backend to auto. "
            f"This host has: {_listed(local_addresses())}.",
        )
    return trusted_address(trust_network)


def local_addresses() -> dict[str, list[str]]:
    """Interface -> its IPv4 and IPv6 addresses, without link-local ones (which mean nothing on another host)."""
    import psutil  # a command line that reads options needs none

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


def host_identity() -> str:
    """A text that is equal for two processes only if a Unix socket between them can pass memory.

    The kernel's boot id distinguishes hosts, whatever their names; the network namespace distinguishes containers (and
    tests) that share a kernel but cannot reach each other's sockets; only processes of one user share memory. Empty if
    the system does not provide these: such a rank then shares memory with no other. Ranks with equal identities still
    try whether they can share memory.
    """
    try:
        network = os.stat("/proc/self/ns/net")
        return f"{BOOT_ID.read_text(encoding='ascii').strip()}/{network.st_dev}:{network.st_ino}/{os.geteuid()}"
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Layout:
    """The host of each rank: `host_of[r]` is the number of rank r's host, in order of the hosts' first ranks."""

    host_of: tuple[int, ...]

    @classmethod
    def of(cls, identities: Sequence[str]) -> Layout:
        """Make the layout from every rank's `host_identity`, in rank order."""
        numbers: dict[str, int] = {}
        return cls(
            tuple(
                numbers.setdefault(identity or f"rank {rank} alone", len(numbers))
                for rank, identity in enumerate(identities)
            )
        )

    @classmethod
    def apart(cls, num_ranks: int) -> Layout:
        """A layout in which no two ranks share memory."""
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
