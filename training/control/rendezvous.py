"""Ranks telling each other, through the driver, where they listen."""

from __future__ import annotations

import threading
import time

from lockstep.storage.errors import CommunicationError


class Rendezvous:
    """Rounds of meetings: the n-th call of a rank belongs to the n-th round."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._rounds: list[dict[int, tuple[str, int]]] = []
        self._calls = [0] * num_ranks
        self._changed = threading.Condition()
        self._aborted: str | None = None

    def meet(self, rank: int, host: str, port: int, within_s: float) -> list[tuple[str, int]]:
        """Add one rank's address and wait for all; raises CommunicationError naming the absent ranks."""
        end = time.monotonic() + within_s
        with self._changed:
            number = self._calls[rank]
            self._calls[rank] += 1
            while len(self._rounds) <= number:
                self._rounds.append({})
            table = self._rounds[number]
            table[rank] = (host, port)
            self._changed.notify_all()
            while len(table) < self._num_ranks:
                left = end - time.monotonic()
                if left <= 0 or self._aborted is not None:
                    absent = ", ".join(str(r) for r in range(self._num_ranks) if r not in table)
                    raise CommunicationError(
                        f"rank {rank} waited in vain for rank {absent} at the rendezvous",
                        got=self._aborted or f"{len(table)} of {self._num_ranks} ranks within {within_s:.0f} s",
                        allowed="all ranks",
                        next_step="Look at the absent ranks' logs.",
                    )
                self._changed.wait(left)
            return [table[r] for r in range(self._num_ranks)]

    def abort(self, reason: str) -> None:
        """Wake all who wait, with an error."""
        with self._changed:
            self._aborted = reason
            self._changed.notify_all()
