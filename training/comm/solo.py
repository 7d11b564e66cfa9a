"""The communicator of a run with one rank: every collective is the identity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from lockstep.storage.errors import CommunicationError
from training.comm.base import CALL_DEADLINE_S, Communicator, Op, check_buffer, check_group, check_peer, check_rank


class SoloCommunicator(Communicator):
    """One rank alone; the same checks and the same behaviour after `abort` and `close` as the others."""

    def __init__(self, generation: int = 1, deadline_s: float = CALL_DEADLINE_S) -> None:
        super().__init__(0, 1, generation, deadline_s)
        self._ended: str | None = None
        self._groups: list[SoloCommunicator] = []

    def all_reduce(self, buf: NDArray[Any], op: Op = "sum") -> None:
        check_buffer(buf, op)
        self._check_open()

    def all_gather_parts(self, buf: NDArray[Any]) -> None:
        check_buffer(buf)
        self._check_open()

    def broadcast(self, buf: NDArray[Any], root: int = 0) -> None:
        check_buffer(buf)
        check_rank("broadcast", root, 1)
        self._check_open()

    def send(self, buf: NDArray[Any], to: int) -> None:
        check_buffer(buf, writable=False)
        check_peer("send", to, 0, 1)

    def recv(self, buf: NDArray[Any], source: int) -> None:
        check_buffer(buf)
        check_peer("recv", source, 0, 1)

    def group(self, ranks: Sequence[int]) -> Communicator:
        check_group(ranks, 0, 1)
        self._check_open()
        made = SoloCommunicator(self.generation, self.deadline_s)
        self._groups = [group for group in self._groups if not group.has_ended] + [made]
        return made

    @property
    def has_ended(self) -> bool:
        """Whether it was closed or aborted."""
        return self._ended is not None

    def abort(self, reason: str) -> None:
        self._ended = self._ended or reason
        for group in self._groups:
            group.abort(self._ended)

    def close(self) -> None:
        self.abort("it was closed")

    def _check_open(self) -> None:
        if self._ended is not None:
            raise CommunicationError(
                f"rank 0: the communicator has ended: {self._ended}", next_step="Start the rank again."
            )
