"""One piece of work at a time beside the training: who looks after it sees its result, its error or its deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from lockstep.storage.errors import LockstepError, StorageTimeoutError

T = TypeVar("T")
Tell = Callable[[str], None]


class InFlight(Generic[T]):
    """Work in a thread of its own, which ends with the process. All calls come from one thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._what, self._stage = "", ""
        self._result: T | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether work is under way."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, what: str, work: Callable[[Tell], T]) -> None:
        """Start `work`, which tells by its argument how far it is; `what` names it in errors. Not while it is busy."""
        if self._thread is not None:
            raise LockstepError(
                f"{what} cannot begin",
                got="earlier work whose end was not looked at",
                allowed="look() or wait() before the next begin()",
                next_step="Resume the run; what is incomplete is not used.",
            )

        def run() -> None:
            try:
                self._result = work(self._tell)
            except BaseException as error:  # raised where the training sees it, by look() or wait()
                self._error = error

        self._what = what
        self._tell("beginning")
        self._thread = threading.Thread(target=run, name=what, daemon=True)
        self._thread.start()

    def look(self) -> T | None:
        """The result of work that has ended since it was begun, once; None before and after. Raises its error."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread = None
        result, error, self._result, self._error = self._result, self._error, None, None
        if error is not None:
            raise error
        return result

    def wait(self, deadline_s: float) -> T | None:
        """Wait for what is under way, then as `look`. Raises StorageTimeoutError naming the work and how far it is."""
        if self._thread is not None:
            self._thread.join(deadline_s)
            if self._thread.is_alive():
                raise StorageTimeoutError(
                    f"{self._what} did not end",
                    got=f"{self._stage}, for {time.monotonic() - self._since:.0f} s",
                    allowed=f"its end within {deadline_s:.0f} s",
                    next_step="Look at the storage that it writes to, and at the driver's log.",
                )
        return self.look()

    def _tell(self, stage: str) -> None:
        self._stage, self._since = stage, time.monotonic()
