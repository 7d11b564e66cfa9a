"""A staying supervisor's end of its line to the driver: orders come, one at a time."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from lockstep.storage.errors import LockstepError
from training.control.client import open_channel
from training.control.protocol import SESSION, Role, Tag
from training.control.sealed_orders import open_order


class Line:
    """Open from its making to `close`. `on_spare()` is called, by the thread that reads, when a spare is asked for.

    Raises CommunicationError when the driver cannot be reached within `deadline_s`.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        rank: int,
        *,
        deadline_s: float,
        lost_s: float,
        on_spare: Callable[[], None],
    ) -> None:
        self._secret, self._rank, self._lost_s, self._on_spare = secret, rank, lost_s, on_spare
        self._orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._channel = open_channel(address, secret, SESSION, Role.SUPERVISOR, rank, deadline_s)
        self._heard_at = time.monotonic()
        threading.Thread(target=self._read, name="orders-read", daemon=True).start()

    def next_order(self) -> dict[str, Any] | None:
        """Wait for the next order; None when none follows: the driver says so, or is gone, or silent for `lost_s`."""
        while True:
            left = self._heard_at + self._lost_s - time.monotonic()
            try:
                return self._orders.get(timeout=max(0.0, left))
            except queue.Empty:
                if time.monotonic() - self._heard_at >= self._lost_s:
                    return None

    def say_idle(self) -> None:
        """Say that the order is carried out and nothing is left of its rank."""
        with contextlib.suppress(LockstepError):  # the reading thread sees the same end, and no order follows
            self._channel.send(Tag.IDLE, {})

    def close(self) -> None:
        """End the line."""
        self._channel.close()

    def _read(self) -> None:
        try:
            while True:
                tag, document = self._channel.receive()
                self._heard_at = time.monotonic()
                if tag is Tag.ORDER:
                    self._orders.put(open_order(self._secret, self._rank, str(document["order"])))
                elif tag is Tag.SPARE:
                    self._on_spare()
                elif tag is Tag.END:
                    return
        except LockstepError:
            pass  # the driver is gone: as if it had said that nothing follows
        finally:
            self._orders.put(None)
