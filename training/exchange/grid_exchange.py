"""The exchange of a grid of ranks: those that divide the rows add their gradients, and all agree on flags."""

from __future__ import annotations

from typing import Any

from lockstep.training.comm.base import Communicator
from lockstep.training.exchange.compare_ranks import everyones
from lockstep.training.exchange.exchange import Array, Exchange
from lockstep.training.world import Grid


class GridExchange(Exchange):
    """An exchange whose gradients and statistics are summed over this rank's data group.

    Loss and flags are summed over the data group too, then over the ranks that compute on the same rows: so all ranks
    agree. `scale` is n_r / G of the rows.
    """

    takes_rows = False

    def __init__(
        self,
        communicator: Communicator,
        scale: float | None = None,
        *,
        grid: Grid,
        loss_weight: float | None = None,
        **options: Any,
    ) -> None:
        """`loss_weight`: the part of its rows' loss that this rank reports (None: equal parts of all mates; those of a
        data rank's mates add up to 1). `options` are those of `Exchange`. A collective.
        """
        rank = communicator.rank
        data = communicator.group(grid.data_group(rank))
        self.mates = communicator.group(grid.mates_of(rank))
        """The ranks that compute on the same rows."""
        data.deadline_s = self.mates.deadline_s = communicator.deadline_s
        self._loss_weight = 1 / grid.mates if loss_weight is None else loss_weight
        super().__init__(communicator, scale, data=data, **options)

    @property
    def alone(self) -> bool:
        """Whether gradients stay in the graph: never, since mates agree in each step."""
        return False

    def _of_all(self, words: Array) -> Array:
        found = words.copy()
        # A rank without a loss has 0, and not 0 times what may not be finite.
        found[0] = found[0] * self._loss_weight if self._loss_weight else 0.0
        self.mates.all_reduce(found)
        return found

    def _names_of_wrong(self) -> list[str]:
        """The names of all sums that are not finite on some rank. A collective, which all ranks call together."""
        found = everyones(self.communicator.on_host, super()._names_of_wrong())
        return list(dict.fromkeys(name for names in found for name in names))
