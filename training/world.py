"""The position of one rank among all ranks of a generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from lockstep.storage.errors import ConfigError


@dataclass(frozen=True, slots=True)
class World:
    """One rank's number, its number among the ranks of its host, and the generation."""

    rank: int
    num_ranks: int
    rank_of_node: int
    ranks_per_node: int
    generation: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_ranks or not 0 <= self.rank_of_node < self.ranks_per_node:
            raise ConfigError(
                "an invalid World",
                got=repr(self),
                allowed="0 <= rank < num_ranks and 0 <= rank_of_node < ranks_per_node",
                next_step="Build it with World.local or World.from_hosts.",
            )

    @property
    def is_leader(self) -> bool:
        """True on the rank that reports for all (rank 0)."""
        return self.rank == 0

    @classmethod
    def local(cls, rank: int, num_ranks: int, generation: int = 1) -> World:
        """All ranks on this host."""
        return cls(rank, num_ranks, rank, num_ranks, generation)

    @classmethod
    def from_hosts(cls, rank: int, hosts: Sequence[str], generation: int) -> World:
        """`hosts[i]` is the host of rank i, as a barrier stage lists its tasks."""
        mine = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        return cls(rank, len(hosts), mine.index(rank), len(mine), generation)

    def to_json(self) -> dict[str, int]:
        """The fields as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, int]) -> World:
        """The inverse of `to_json`."""
        return cls(**{name: int(value) for name, value in document.items()})
