"""Waiting between attempts: short at first, and never longer in all than the storage may take."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from lockstep.storage.errors import RetryableStorageError, StorageError, StorageTimeoutError
from lockstep.storage.settings import give_up_s as default_give_up_s

T = TypeVar("T")

log = logging.getLogger(__name__)

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 2.0


class Backoff:
    """Counts attempts of one operation against a total of `give_up_s` seconds (default: the setting)."""

    def __init__(self, give_up_s: float | None = None) -> None:
        self._limit = default_give_up_s() if give_up_s is None else give_up_s
        self._start = time.monotonic()
        self._wait = FIRST_WAIT_S
        self.attempts = 0
        self._cause: StorageError | None = None

    @property
    def left_s(self) -> float:
        """Seconds until the total is used up; not below 0."""
        return max(0.0, self._start + self._limit - time.monotonic())

    def wait_or_raise(self, error: StorageError, *, what: str, whom: str = "the storage") -> None:
        """Sleep before the next attempt, or raise StorageError from `error` where no time is left for one."""
        self.attempts += 1
        # The last attempt is often cut short by the total; what stopped the one before tells more.
        if self._cause is None or not isinstance(error, StorageTimeoutError):
            self._cause = error
        if self.left_s <= self._wait:
            raise StorageError(
                f"{whom} did not serve {what} within {time.monotonic() - self._start:.3g} s ({self.attempts} attempts)",
                got=self._cause.what + (f" ({self._cause.got})" if self._cause.got else ""),
                allowed=f"success within {self._limit:.3g} s",
                next_step=error.next_step or f"Check {whom}, then run again.",
            ) from error
        if self.attempts == 1:
            log.warning("%s: %s; trying again for %.0f s", what, error.what, self._limit)
        # Many tasks see the same failure at the same moment; without jitter they come back at the same moment too.
        time.sleep(self._wait * random.uniform(0.5, 1.0))
        self._wait = min(2 * self._wait, LONGEST_WAIT_S)


def with_retries(call: Callable[[float], T], *, what: str, whom: str, give_up_s: float | None = None) -> T:
    """Call `call(seconds_left)` until it succeeds, fails for good, or the total time is over (StorageError)."""
    backoff = Backoff(give_up_s)
    while True:
        try:
            return call(backoff.left_s)
        except (RetryableStorageError, StorageTimeoutError) as error:
            backoff.wait_or_raise(error, what=what, whom=whom)
