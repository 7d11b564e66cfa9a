"""Copies the rows of a large table as they are at one moment, while the steps that follow change some of them.

A thread copies the table in chunks; a step copies the rows that it is about to change, unless they are copied. So a
checkpoint of gigabytes stops no step for longer than a chunk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK_BYTES = 4 << 20  # of all columns: about a millisecond
YIELD_S = 0.0002  # for a step that waits: a thread that releases a lock may take it again before the other wakes


class LateCopy:
    """One copy of `columns`, arrays (n, ...), into `targets` of the same names and shapes.

    One thread calls `run`; the thread that changes rows calls `before` ahead of each change, from now on.
    """

    def __init__(self, columns: Mapping[str, NDArray[Any]], targets: Mapping[str, NDArray[Any]]) -> None:
        self._pairs = [(column, targets[name].reshape(column.shape)) for name, column in columns.items()]
        self._rows = len(self._pairs[0][0])
        each = sum(column[:1].nbytes for column, _ in self._pairs)
        self._chunk = max(1, CHUNK_BYTES // max(1, each))
        self._early = np.zeros(self._rows, np.bool_)
        self._copied = 0  # all rows below are
        self._waits = False
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether all rows are copied."""
        return self._copied >= self._rows

    def before(self, rows: NDArray[np.int64]) -> None:
        """Copy those of `rows` (k,), each once, that are not copied: they are about to change."""
        if self.done:
            return
        self._waits = True
        with self._lock:
            self._waits = False
            late = rows[rows >= self._copied]
            late = late[~self._early[late]]
            for column, target in self._pairs:
                target[late] = column[late]
            self._early[late] = True

    def run(self) -> None:
        """Copy the rest."""
        while not self.done:
            with self._lock:
                start, stop = self._copied, min(self._rows, self._copied + self._chunk)
                rest = ~self._early[start:stop]
                for column, target in self._pairs:
                    if rest.all():
                        np.copyto(target[start:stop], column[start:stop])
                    else:
                        target[start:stop][rest] = column[start:stop][rest]
                self._copied = stop
            if self._waits:
                time.sleep(YIELD_S)
