"""The options of --strategy parameter-server, with its bound of staleness, and what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from lockstep.training.ways.way import COMPRESSION, MEETING_BATCHNORM, SUM_IN_EACH_STEP, Refused, Strategy, Way

if TYPE_CHECKING:
    from lockstep.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterServer(Way):
    """The options of --strategy parameter-server."""

    flag: ClassVar[str] = "--strategy parameter-server"
    strategy: ClassVar[Strategy] = "parameter-server"
    module: ClassVar[str] = "parameter_server"
    refuses: ClassVar[tuple[Refused, ...]] = (*SUM_IN_EACH_STEP, COMPRESSION, MEETING_BATCHNORM)

    staleness: Annotated[int | None, "S"] = None
    """With --strategy async or parameter-server, the most steps that ranks are apart; 0 is sync."""
    servers: Annotated[int | None, "K"] = None
    """With --strategy parameter-server, the number of servers: processes next to the ranks, each with a part of all
    weights."""

    def __post_init__(self) -> None:
        given = self.staleness is not None and 0 <= self.staleness < 2**31
        self.check("staleness", given, "steps from 0 up with --strategy parameter-server")
        several = self.servers is not None and 1 <= self.servers < 2**31
        self.check("servers", several, "an integer from 1 up with --strategy parameter-server")

    def runs(self, num_ranks: int) -> bool:
        return self.num_servers(num_ranks) > 0

    def num_servers(self, num_ranks: int) -> int:
        """All servers; none with one rank, nor with staleness 0, which are sync."""
        return (self.servers or 0) if self.staleness and num_ranks > 1 else 0

    def own_faults(self, config: TrainConfig) -> Iterator[tuple[str, str]]:
        if config.ranks.backend not in ("auto", "tcp"):
            yield "backend", "auto or tcp with --strategy parameter-server, whose links are TCP"
        if config.ranks.elastic:
            yield "servers", "none with --min-ranks or --max-ranks"
