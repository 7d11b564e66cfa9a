"""A bucket's memory: filled and reduced by the exchange, then read by TensorFlow without a copy."""

from __future__ import annotations

import weakref
from typing import Any

from numpy.typing import NDArray

from training.exchange.buckets import Slot

Array = NDArray[Any]


class LentBuffer:
    """A flat, aligned buffer that knows which views of it are still held."""

    def __init__(self, data: Array) -> None:
        self.data = data
        self._lent: list[weakref.ref[Array]] = []

    def view(self, slot: Slot) -> Array:
        return self.data[slot.start : slot.start + slot.size]

    def lend(self, slot: Slot) -> Array:
        view = self.view(slot).reshape(slot.shape)
        self._lent.append(weakref.ref(view))
        return view

    def is_lent(self) -> bool:
        self._lent = [view for view in self._lent if view() is not None]
        return bool(self._lent)
