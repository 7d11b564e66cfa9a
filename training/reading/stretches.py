"""The parts of a file that a reader needs, laid end to end: offsets among them, and the ranges of the file to read."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator
from typing import Self

import numpy as np
import numpy.typing as npt


class Stretches:
    """Parts of a file in rising order. A *packed* offset counts only their bytes.

    `edges` (n, 2) int64 are the first byte of each part and the byte after its last, in any order; they may overlap.
    Parts with up to `gap_bytes` between them become one, with the bytes between.
    """

    def __init__(self, edges: npt.NDArray[np.int64], gap_bytes: int) -> None:
        self.is_whole = False
        """Whether these are all bytes of the file, so that packed offsets are its own."""
        edges = edges[np.argsort(edges[:, 0], kind="stable")]
        reached = np.maximum.accumulate(edges[:, 1])  # the end of all parts so far
        first = np.flatnonzero(np.append(True, edges[1:, 0] > reached[:-1] + gap_bytes))
        stretches = np.stack([edges[first, 0], np.maximum.reduceat(edges[:, 1], first)], axis=1)
        sizes = stretches[:, 1] - stretches[:, 0]
        # Of each stretch its first byte in the file, and its packed offset; at last the number of all packed bytes.
        self._starts: list[int] = stretches[:, 0].tolist()
        self._packed: list[int] = [0, *np.cumsum(sizes).tolist()]

    @classmethod
    def whole(cls, size_bytes: int) -> Self:
        """All bytes of a file: packed offsets are its own."""
        whole = cls(np.array([[0, size_bytes]], np.int64), 0)
        whole.is_whole = True
        return whole

    @property
    def bytes(self) -> int:
        """The bytes of all stretches."""
        return self._packed[-1]

    @property
    def name(self) -> str:
        """A name for these stretches, the same in each process: 16 hex digits."""
        return hashlib.sha256(repr((self._starts, self._packed)).encode()).hexdigest()[:16]

    def pack(self, offset: int, stop: int) -> int | None:
        """The packed offset of byte `offset` of the file; None unless one stretch has the bytes from it to stop-1."""
        stretch = bisect_right(self._starts, offset) - 1
        if stretch < 0:
            return None
        packed = offset - self._starts[stretch] + self._packed[stretch]
        return packed if packed + stop - offset <= self._packed[stretch + 1] else None

    def in_one(self, start: int, stop: int) -> bool:
        """Whether one range of the file has the packed bytes start..stop-1, and follows the byte before them."""
        stretch = bisect_right(self._packed, start)
        return stop <= self._packed[stretch] and (start == 0 or start > self._packed[stretch - 1])

    def place(self, packed: int) -> int:
        """The offset in the file of a packed offset below `bytes`."""
        stretch = bisect_right(self._packed, packed) - 1
        return packed - self._packed[stretch] + self._starts[stretch]

    def ranges(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The first byte and the length of each range of the file that holds packed bytes start..stop-1, in order."""
        while start < stop:
            end = min(stop, self._packed[bisect_right(self._packed, start)])
            yield self.place(start), end - start
            start = end
