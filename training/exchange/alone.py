"""The exchange of a run with one rank: nothing to sum or copy, but what is not finite stops the step all the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.exchange.exchange import Exchange
from training.exchange.scaled_copy import all_finite

Array = NDArray[Any]


class Alone:
    """Functions of arrays for the graph of one rank; `names` of the gradients, then of the statistics."""

    def __init__(self, exchange: Exchange, gradients: Sequence[str], statistics: Sequence[str]) -> None:
        self._exchange, self._gradients, self._statistics = exchange, tuple(gradients), tuple(statistics)
        self._wrong: set[str] = set()

    def look_at(self, numbers: Sequence[int]) -> Callable[..., np.int32]:
        """Notes which of the gradients with these numbers are not finite."""
        names = [self._gradients[number] for number in numbers]

        def look(*gradients: Array) -> np.int32:
            self._note(names, gradients)
            return np.int32(0)

        return look

    def finish(self, loss: Array, *statistics: Array) -> np.int32:
        """End the step: 1 where it is skipped; raises NonFiniteError."""
        self._note(self._statistics, statistics)
        wrong = [name for name in (*self._gradients, *self._statistics) if name in self._wrong]
        self._wrong.clear()
        self._exchange.agree_alone(loss, wrong, self._gradients)
        agreement = self._exchange.agreement
        return np.int32(agreement is not None and agreement.skipped)

    def _note(self, names: Sequence[str], values: Sequence[Array]) -> None:
        self._wrong.update(name for name, value in zip(names, values, strict=True) if not all_finite(value.reshape(-1)))
