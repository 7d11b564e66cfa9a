"""Which ranks share a host, as far as shared memory between them is concerned."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from training.comm.base import Communicator

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
