"""The communicator of a run with one rank: every collective is the identity."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from storage.errors import CommunicationError
from training.comm.base import CALL_DEADLINE_S, Communicator, Op, check_buffer


class SoloCommunicator(Communicator):
    """One rank alone; the same checks and the same behaviour after `abort` and `close` as the others."""

    def __init__(self, generation: int = 1, deadline_s: float = CALL_DEADLINE_S) -> None:
        super().__init__(0, 1, generation, deadline_s)
        self._ended: str | None = None

    def all_reduce(self, buf: NDArray[Any], op: Op = "sum") -> None:
        self._check(buf, op)

    def broadcast(self, buf: NDArray[Any], root: int = 0) -> None:
        self._check(buf)
        if root != 0:
            raise ValueError(f"broadcast got root {root}; this communicator has rank 0 alone")

    def all_gather(self, buf: NDArray[Any]) -> NDArray[Any]:
        self._check(buf)
        return buf.reshape(1, -1).copy()  # (1, n)

    def abort(self, reason: str) -> None:
        self._ended = self._ended or reason

    def close(self) -> None:
        self._ended = self._ended or "it was closed"

    def _check(self, buf: NDArray[Any], op: str = "sum") -> None:
        check_buffer(buf, op)
        if self._ended is not None:
            raise CommunicationError(
                f"rank 0: the communicator has ended: {self._ended}", next_step="Start the rank again."
            )
