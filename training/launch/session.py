"""Supervisors that stay while generations of ranks come and go: a restart in place needs only new ranks."""

from __future__ import annotations

import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, Protocol

from lockstep.storage.errors import ConfigError
from training.comm.tls import issue
from training.control.failures import LauncherError, RankState
from training.control.protocol import new_key
from training.control.roster import Roster
from training.control.server import ControlServer, Handler
from training.control.task import Limits, RankTask
from training.launch.executors import ExecutorMemory
from training.launch.process import order_to_json
from training.run.result import ANEW, IN_PLACE, told

IDLE_S = 10.0  # for a supervisor to say that nothing is left of its rank: the last part of its log is written before


class Launch(Protocol):
    """Runs a task on ranks once, as `run_local` and `OnSpark(spark)` do, which are SessionLaunchers."""

    def __call__(
        self,
        task: RankTask,
        num_ranks: int,
        *,
        generation: int = 1,
        limits: Limits | None = None,
        handler: Handler | None = None,
    ) -> list[dict[str, Any]]: ...


class Session(ABC):
    """A launcher's supervisors, from the first `run` to the end of `with`; each run is a generation of new ranks.

    Each generation has a key, certificates and a control server of its own; ranks of an earlier one are refused.
    """

    def __init__(self, num_ranks: int, limits: Limits, bind_host: str, host: str) -> None:
        self.num_ranks, self.limits = num_ranks, limits
        self._bind_host, self._host = bind_host, host
        self._secret = new_key()
        self._roster: Roster | None = None
        self._server: ControlServer | None = None
        self._fault: BaseException | None = None
        self.failed_at: float | None = None
        """When the failure that ended the last run was first seen (monotonic seconds)."""
        self._heard_out = True  # whether every supervisor has told the end of its last rank
        self._lock = threading.Lock()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._roster is not None:
            self._roster.close()
        self._end()

    @property
    def began(self) -> bool:
        """Whether the supervisors have been started."""
        return self._roster is not None

    def usable(self) -> bool:
        """Whether all supervisors are there and wait for the next generation; waits up to IDLE_S for those at work."""
        wait_s = IDLE_S if self._heard_out else 0.0  # the others had their time to say so when the run was ended
        return self._fault is None and self._roster is not None and self._roster.whole(wait_s)

    def run(
        self,
        task: RankTask,
        generation: int,
        handler: Handler | None = None,
        on_steps: Callable[[Sequence[RankState]], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Run `task` on new ranks; returns what each entry returned, in order of rank. One run at a time.

        `on_steps(states)` is called once all ranks have made a step. Raises what `ControlServer.wait` raises; no rank
        is left alive in any case, and supervisors that can be reached wait for the next run.
        """

        handler = handler or Handler()

        def ended() -> BaseException | None:
            return self._fault or handler.overtaken()

        if self._roster is None:
            self._check(task, ended)
            self._roster = Roster(self._secret, self.num_ranks, self._bind_host, self._lost)
            self._begin((self._host, self._roster.port), self._secret)
        self.failed_at = None
        key = new_key()
        certificates = issue(generation, self.num_ranks) if task.tls else [None] * self.num_ranks
        with ControlServer(key, generation, self.num_ranks, self.limits, handler, self._bind_host, on_steps) as server:
            with self._lock:
                self._server = server
                if self._fault is not None:
                    server.fail(self._fault)
            try:
                if self._fault is None:
                    self._roster.give([order_to_json(task, generation, server.port, key, tls) for tls in certificates])
                return server.wait()
            finally:
                with self._lock:
                    self._server, self.failed_at, self._heard_out = None, server.failed_at, server.all_ended()

    def fail(self, error: BaseException) -> None:
        """End the run that is under way with `error`, which it raises, and every later one. From any thread."""
        with self._lock:
            self._fault = self._fault or error
            if self._server is not None:
                self._server.fail(error)

    def _lost(self, rank: int) -> None:
        """A supervisor cannot be told anything any more: it ends with the rank that it has, and starts no other."""
        with self._lock:
            server = self._server
        if server is not None and not server.started(rank):
            server.fail(
                LauncherError(
                    f"the supervisor of rank {rank} is lost",
                    got="the end of its connection before it has started its rank",
                    allowed="supervisors that stay",
                    next_step="Look at the executors' logs for why it ended.",
                )
            )

    @abstractmethod
    def _check(self, task: RankTask, ended: Callable[[], BaseException | None]) -> None:
        """Raise ConfigError where the supervisors cannot be started for such a task; called before anything is.

        Who waits here asks `ended` and raises the error that it gives.
        """

    @abstractmethod
    def _begin(self, control: tuple[str, int], secret: bytes) -> None:
        """Start the supervisors: `supervise` for each rank, with a SupervisorSpec of these. Returns at once."""

    @abstractmethod
    def _end(self) -> None:
        """Wait for the supervisors' end, and see to it. Called once, also where they were never started."""


class SessionLauncher(ABC):
    """A `Launch` whose supervisors can stay: through the generations of one session."""

    @abstractmethod
    def session(self, num_ranks: int, limits: Limits) -> Session:
        """Supervisors that stay; they begin with the first run."""

    def ready(self, num_ranks: int, wait_s: float) -> ExecutorMemory | None:
        """Raise ConfigError unless all ranks fit at once; a driver asks before it writes anything.

        Waits up to `wait_s` seconds for executors that are still starting. Returns the memory that an executor has for
        its ranks, None where nothing enforces it.
        """
        return None

    def __call__(
        self,
        task: RankTask,
        num_ranks: int,
        *,
        generation: int = 1,
        limits: Limits | None = None,
        handler: Handler | None = None,
    ) -> list[dict[str, Any]]:
        """Run `task` on `num_ranks` new ranks, once; returns what each rank's entry returned, in order of rank.

        `handler` answers the ranks' requests. Raises what `ControlServer.wait` raises; no rank is
        left alive in any case.
        """
        with self.session(num_ranks, limits or Limits()) as session:
            return session.run(task, generation, handler)


@dataclass(slots=True)
class Restart:
    """One restart. Times are monotonic seconds of the driver."""

    generation: int
    """The one that was started."""
    level: int
    """1: the supervisors stayed, only ranks are new; 2: all is new, in Spark a new barrier job."""
    failed_at: float
    """The failure was seen."""
    ended_at: float
    """All ranks of the older generation had ended."""
    called_at: float
    """The driver had claimed the generation and asked for its ranks."""
    given_at: float
    """Supervisors that stay were there and idle; or those before them had been ended."""
    seconds: float | None = None
    """From the failure to the first step of all ranks; None where they never came to one."""
    parts: dict[str, float] = field(default_factory=dict)
    """Where `seconds` went, in order: words to seconds, of the rank that came last."""

    def stepped(self, states: Sequence[RankState]) -> None:
        """All ranks have made a step: the restart is over."""
        last = max(states, key=lambda state: state.marks.first_step_at or 0.0)
        marks, joined_at = last.marks, last.joined_at
        assert marks.first_step_at is not None and joined_at is not None
        points = [("end the other ranks", self.failed_at), ("claim", self.ended_at), ("supervisors", self.called_at)]
        points.append(("start the process", self.given_at))
        points.append(("start Python", marks.started_at or joined_at))
        points.append(("import", joined_at))
        points += [("first step" if phase == "train" else phase, at) for phase, at in marks.phases]
        self.seconds = marks.first_step_at - self.failed_at
        ends = [at for _, at in points[1:]] + [marks.first_step_at]
        for (word, at), end in zip(points, ends, strict=True):
            self.parts[word] = self.parts.get(word, 0.0) + end - at

    def to_json(self) -> dict[str, Any]:
        """What the run's result keeps: {generation, level, seconds, parts}."""
        parts = {word: round(seconds, 3) for word, seconds in self.parts.items()}
        seconds = None if self.seconds is None else round(self.seconds, 3)
        return {"generation": self.generation, "level": self.level, "seconds": seconds, "parts": parts}

    def __str__(self) -> str:
        return f"generation {self.generation} was started {told(self.to_json())}"


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


ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP (the terminal was closed) raise SystemExit with the code that a shell reports.

    A signal that the caller's caller ignores (nohup) stays ignored. Python takes signals in the main thread alone;
    in another one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = {number: signal.getsignal(number) for number in ENDING}
    taken = [number for number in ENDING if previous[number] not in (signal.SIG_IGN, None)]
    for number in taken:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, previous[number])
