"""Ranks that compare what they are about to call, on an ordinary communicator, before a backend that cannot."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.storage.errors import CommunicationError
from training.comm.base import Communicator

Header = NDArray[np.int64]


class Meeting:
    """Meetings of the ranks of `ordinary`; each raises CommunicationError naming a rank absent, lost or differing."""

    def __init__(self, ordinary: Communicator) -> None:
        self._ordinary = ordinary

    def all(self, what: str, size: int, number: int) -> None:
        """All ranks are about to make call `number`, of `size` elements; `what` has operation and dtype."""
        mine = _header(what, size, number)
        self._compare(what, mine, enumerate(self._ordinary.all_gather(mine)))

    def two(self, source: int, to: int, what: str, size: int, number: int) -> None:
        """As `all`, of two ranks; neither goes on before it knows what the other one does."""
        mine, theirs = _header(what, size, number), np.zeros(3, np.int64)
        if self._ordinary.rank == source:
            self._ordinary.send(mine, to)
            self._ordinary.recv(theirs, to)
        else:
            self._ordinary.recv(theirs, source)
            self._ordinary.send(mine, source)
        self._compare(what, mine, [(to if self._ordinary.rank == source else source, theirs)])

    def _compare(self, what: str, mine: Header, others: Iterable[tuple[int, NDArray[Any]]]) -> None:
        for rank, theirs in others:
            if not np.array_equal(theirs, mine):
                raise CommunicationError(
                    f"rank {self._ordinary.rank}: rank {rank} makes another call than {what}",
                    got=f"call {theirs[0]}, of {theirs[1]} elements",
                    allowed=f"call {mine[0]}, of {mine[1]} elements, with the same operation and dtype",
                    next_step="Make the same calls in the same order on every rank.",
                )


def _header(what: str, size: int, number: int) -> Header:
    return np.array([number, size, zlib.crc32(what.encode())], np.int64)
