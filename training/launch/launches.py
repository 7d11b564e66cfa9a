"""The generations of one run, each on new ranks: in place while all supervisors stay, else by new supervisors."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from lockstep.storage.errors import ConfigError
from training.control.failures import LauncherError, RankState
from training.control.task import Handler, Limits, RankTask
from training.launch.restarts import ANEW, IN_PLACE, Restart
from training.launch.session import Launch, Session, SessionLauncher


def _not_again(error: ConfigError) -> LauncherError:
    """What refused new supervisors took the first ones: the call is right, so that whoever repeats it may go on."""
    return LauncherError(
        f"supervisors cannot be started again: {error.what}",
        got=error.got,
        allowed=error.allowed,
        next_step="Find out why executors were lost, and call again when they are back: the run goes on.",
    )


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Launches(AbstractContextManager["Launches"]):
    """Used as a context manager, at whose end the supervisors end.

    A `launch` that is no SessionLauncher (a function of a test) is called once a generation: every restart is level 2.
    """

    def __init__(self, launch: Launch, num_ranks: int, limits: Limits, *, tell: Callable[[str], None] = _print) -> None:
        self.restarts: list[Restart] = []
        """Every run after the first, in order."""
        self._launch, self._num_ranks, self._limits, self._tell = launch, num_ranks, limits, tell
        self._session: Session | None = None
        self._failed: tuple[float, float] | None = None  # when the last generation failed, and had ended
        self._fault: BaseException | None = None
        self._lock = threading.Lock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error)

    def fail(self, error: BaseException) -> None:
        """End the generation that runs with `error`, which its `run` raises; every later `run` raises it too.

        For a thread that learns that this driver must do nothing more. Returns at once.
        """
        with self._lock:
            self._fault = self._fault or error
            session = self._session
        if session is not None:
            session.fail(error)

    def run(self, task: RankTask, generation: int, handler: Handler | None = None) -> list[dict[str, Any]]:
        """Run `task` on new ranks; returns and raises what `Session.run` does."""
        called_at = time.monotonic()
        restart: Restart | None = None
        session = self._usable()
        if self._failed is not None:
            level = IN_PLACE if session is not None and session.began else ANEW
            restart = Restart(generation, level, *self._failed, called_at, time.monotonic())
            self.restarts.append(restart)
        failed_at: float | None = None

        def stepped(states: Sequence[RankState]) -> None:
            if restart is not None:
                restart.stepped(states)
                self._tell(str(restart))

        try:
            if session is not None:
                return session.run(task, generation, handler, stepped)
            return self._launch(task, self._num_ranks, generation=generation, limits=self._limits, handler=handler)
        except Exception as error:
            failed_at = session.failed_at if session is not None else None
            if restart is not None and isinstance(error, ConfigError) and session is not None and not session.began:
                raise _not_again(error) from error
            raise
        finally:
            now = time.monotonic()
            self._failed = (now if failed_at is None else failed_at, now)

    def _usable(self) -> Session | None:
        """The session to run in: the one that is there, or a new one; None where the launcher has none."""
        with self._lock:
            fault, session = self._fault, self._session
        if fault is not None:
            raise fault
        if not isinstance(self._launch, SessionLauncher):
            return None
        if session is not None and not session.usable():
            self._close(None)
            session = None
        if session is None:
            session = self._launch.session(self._num_ranks, self._limits)
            with self._lock:
                self._session = session
                if self._fault is not None:
                    session.fail(self._fault)
        return session

    def _close(self, error: BaseException | None) -> None:
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            session.__exit__(type(error) if error else None, error, None)
