"""The thread that reduces what is posted, in the order of the posts, while the step goes on."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from numpy.typing import NDArray

from lockstep.storage.errors import CommunicationError
from training.comm.base import Communicator

GRACE_S = 30.0  # beyond the communicator's own deadline, which has the better message
Array = NDArray[Any]
Task = Callable[[], bool]


class Reducer:
    """Posts come from one thread; what they give or raise is handed out by `wait`, in their order."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._posted: queue.SimpleQueue[Array | Task | None] = queue.SimpleQueue()
        self._put_back: list[Task | None] = []  # at most one
        self._reduced: queue.SimpleQueue[BaseException | bool] = queue.SimpleQueue()
        self._busy_s, self._began = 0.0, 0.0
        self._thread = threading.Thread(target=self._work, name="exchange", daemon=True)
        self._thread.start()

    def sum(self, flat: Array) -> None:
        """Post a buffer (n,), to be replaced by its sum over all ranks; gives True. Several may be under way."""
        self._posted.put(flat)
        self._communicator.look_again()

    def run(self, task: Task) -> None:
        """Post something else, which begins when all before it is done."""
        self._posted.put(task)

    def wait(self, posts: int, what: str) -> tuple[bool, float]:
        """Wait for the oldest `posts`: (whether all gave True, seconds that the thread was at work for them).

        Raises what the first that failed raised, or CommunicationError saying that `what` did not end.
        """
        patience_s = self._communicator.deadline_s + GRACE_S
        well = True
        for _ in range(posts):
            try:
                reduced = self._reduced.get(timeout=min(patience_s, threading.TIMEOUT_MAX))
            except queue.Empty:
                raise CommunicationError(
                    f"rank {self._communicator.rank}: {what} did not end",
                    got=f"silence for {patience_s:.0f} s",
                    allowed="an end or an error from the communicator by then",
                    next_step="Look at the other ranks' logs.",
                ) from None
            if isinstance(reduced, BaseException):
                raise reduced
            well = well and reduced
        busy_s, self._busy_s = self._busy_s, 0.0
        return well, busy_s

    def close(self) -> None:
        """End the thread; the communicator stays open."""
        self._posted.put(None)
        self._thread.join(GRACE_S)

    def _work(self) -> None:
        while (posted := self._put_back.pop() if self._put_back else self._posted.get()) is not None:
            self._began = time.perf_counter()
            try:
                if callable(posted):
                    self._done(posted())
                else:
                    self._communicator.all_reduce_each(partial(self._take, [posted]), self._done)
            except BaseException as error:  # raised again where the step waits
                self._done(error)

    def _take(self, first: list[Array]) -> Array | None:
        if first:
            return first.pop()
        if self._put_back:
            return None
        try:
            posted = self._posted.get_nowait()
        except queue.Empty:
            return None
        if posted is None or callable(posted):
            self._put_back.append(posted)
            return None
        return posted

    def _done(self, result: BaseException | bool = True) -> None:
        now = time.perf_counter()
        self._busy_s += now - self._began
        self._began = now
        self._reduced.put(result)
