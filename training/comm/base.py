"""The communicator's interface: what a rank may ask of the others.

Every rank makes the same calls in the same order with equal sizes and dtypes; a difference is an error, never a
wrong sum. Sums are formed in one fixed order, so results are equal bit for bit on every rank and in every run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from storage.errors import CommunicationError

Op = Literal["sum", "max"]
UFUNCS: dict[str, np.ufunc] = {"sum": np.add, "max": np.maximum}
DTYPES = tuple(np.dtype(name) for name in ("uint8", "int64", "float32", "float64"))
CALL_DEADLINE_S = 600.0  # slow is no failure: tracing, restoring or a slow batch elsewhere can take minutes
MAX_GATHERED_BYTES = 64 << 20  # of one rank in all_gather_bytes: metadata, not tensors


class Communicator(ABC):
    """Collectives over the ranks of one generation. Not for use by two threads at the same time."""

    def __init__(self, rank: int, num_ranks: int, generation: int, deadline_s: float) -> None:
        self.rank, self.num_ranks, self.generation = rank, num_ranks, generation
        self.deadline_s = deadline_s
        """The longest that one call may take; may be changed between calls."""

    @abstractmethod
    def all_reduce(self, buf: NDArray[Any], op: Op = "sum") -> None:
        """Replace flat `buf` (n,) on every rank by the elementwise sum or maximum over ranks, in place.

        dtype uint8, int64 (both wrap), float32 or float64. Raises CommunicationError naming the rank waited for.
        """

    @abstractmethod
    def broadcast(self, buf: NDArray[Any], root: int = 0) -> None:
        """Replace flat `buf` (n,) on every rank by that of rank `root`, in place."""

    @abstractmethod
    def all_gather(self, buf: NDArray[Any]) -> NDArray[Any]:
        """Return (num_ranks, n): row r is the flat `buf` (n,) of rank r. All ranks give the same n and dtype."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End this communicator from any thread: a blocked call and every later one raises CommunicationError."""

    @abstractmethod
    def close(self) -> None:
        """Free the sockets. Safe to call twice."""

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self.all_reduce(np.zeros(1, np.uint8), "max")

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's `data`, in rank order; sizes may differ, at most 64 MiB each."""
        sizes = self.all_gather(np.array([len(data)], np.int64))[:, 0]
        longest = int(sizes.max())
        if longest > MAX_GATHERED_BYTES:
            raise CommunicationError(
                f"rank {int(sizes.argmax())} gathers too much metadata",
                got=f"{longest} bytes",
                allowed=f"{MAX_GATHERED_BYTES} bytes a rank",
                next_step="Send tensors by all_gather or all_reduce.",
            )
        padded = np.zeros(longest, np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        rows = self.all_gather(padded)
        return [rows[rank, : int(size)].tobytes() for rank, size in enumerate(sizes)]


def check_buffer(buf: NDArray[Any], op: str = "sum") -> None:
    """Raise TypeError or ValueError unless `buf` is what collectives work on in place."""
    if buf.ndim != 1 or not buf.flags.c_contiguous or not buf.flags.writeable:
        raise ValueError(
            f"a collective needs a flat, contiguous, writable array, got shape {buf.shape}, "
            f"contiguous={buf.flags.c_contiguous}, writable={buf.flags.writeable}; "
            "pass array.reshape(-1) of a contiguous array"
        )
    if buf.dtype not in DTYPES:
        raise TypeError(f"a collective got dtype {buf.dtype}; allowed are {', '.join(map(str, DTYPES))}; cast first")
    if op not in UFUNCS:
        raise ValueError(f"all_reduce got op {op!r}; allowed are {', '.join(UFUNCS)}")
