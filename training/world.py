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


@dataclass(frozen=True, slots=True)
class Grid:
    """The division of a run's work over its ranks: rows of a batch, stages of layers, parts of a layer.

    A rank's number is (data_rank * stages + stage) * tensor + tensor_rank: those that meet most often are neighbours,
    so they share a host.
    """

    data: int
    """Parts of each global batch."""
    stages: int = 1
    """Parts of the model, one after another."""
    tensor: int = 1
    """Parts of each divided layer."""

    def __post_init__(self) -> None:
        if min(self.data, self.stages, self.tensor) < 1:
            raise ConfigError(
                "an invalid Grid",
                got=repr(self),
                allowed="data, stages and tensor from 1 up",
                next_step="Make it by the way of a configuration: config.way.grid(num_ranks).",
            )

    @property
    def mates(self) -> int:
        """The ranks that compute on the same rows."""
        return self.stages * self.tensor

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return self.data * self.mates

    def place(self, rank: int) -> tuple[int, int, int]:
        """The data rank, the stage and the tensor rank of `rank`."""
        rest, tensor_rank = divmod(rank, self.tensor)
        data_rank, stage = divmod(rest, self.stages)
        return data_rank, stage, tensor_rank

    def rank_at(self, data_rank: int, stage: int, tensor_rank: int) -> int:
        """The inverse of `place`."""
        return (data_rank * self.stages + stage) * self.tensor + tensor_rank

    def data_group(self, rank: int) -> list[int]:
        """The ranks that have the same layers and parts of them as `rank`, in order of their data ranks."""
        _, stage, tensor_rank = self.place(rank)
        return [self.rank_at(other, stage, tensor_rank) for other in range(self.data)]

    def stage_group(self, rank: int) -> list[int]:
        """The ranks with the same rows and parts as `rank`, in order of their stages."""
        data_rank, _, tensor_rank = self.place(rank)
        return [self.rank_at(data_rank, other, tensor_rank) for other in range(self.stages)]

    def tensor_group(self, rank: int) -> list[int]:
        """The ranks with the same rows and layers as `rank`, in order of their tensor ranks."""
        data_rank, stage, _ = self.place(rank)
        return [self.rank_at(data_rank, stage, other) for other in range(self.tensor)]

    def mates_of(self, rank: int) -> list[int]:
        """The ranks with the same rows as `rank`, of all stages and parts."""
        data_rank, _, _ = self.place(rank)
        return list(range(data_rank * self.mates, (data_rank + 1) * self.mates))

    def counts(self, rank: int) -> bool:
        """Whether `rank` counts its rows for its mates, in audits and metrics: one in the last stage, which has the
        loss.
        """
        return self.place(rank)[1:] == (self.stages - 1, 0)

    @property
    def counting(self) -> list[int]:
        """The ranks that count, in order of their data ranks."""
        return [self.rank_at(data_rank, self.stages - 1, 0) for data_rank in range(self.data)]

    def data_world(self, world: World) -> World:
        """The position of a rank among those that divide the rows: its rank is the data rank."""
        per_node = -(-world.ranks_per_node // self.mates)
        return World(self.place(world.rank)[0], self.data, world.rank_of_node // self.mates, per_node, world.generation)

    def to_json(self) -> list[int]:
        """The numbers of data ranks, stages and tensor ranks."""
        return [self.data, self.stages, self.tensor]
