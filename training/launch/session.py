"""A session of supervisors that outlive generations of ranks: a restart in place needs only new ranks."""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from lockstep.storage.errors import ConfigError
from lockstep.training.comm.tls import issue
from lockstep.training.control.failures import LauncherError, RankState
from lockstep.training.control.protocol import new_key
from lockstep.training.control.roster import Roster
from lockstep.training.control.server import ControlServer, Handler, not_begun
from lockstep.training.control.task import Limits, RankTask
from lockstep.training.launch.executors import FAILURES, ExecutorMemory, HostFailures, failed_host
from lockstep.training.launch.process import order_to_json
from lockstep.training.run.result import IN_PLACE, NEW_SUPERVISORS, restart_words

LOOK_S = 0.2  # between two looks for a reason to end a wait
IDLE_S = 10.0  # for a supervisor to report that its rank has ended; it writes the last part of the log first


class Launch(Protocol):
    """Runs a task on ranks once, such as `run_local` and `OnSpark(spark)`, which are SessionLaunchers."""

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

    Each generation has its own key, certificates and control server; ranks of an earlier one are refused.
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
        self.avoid: frozenset[str] = frozenset()
        """Hosts whose slots are used last, by supervisors that are started from now on."""
        self.spares = 0
        """How many executors are kept ready for ranks that lose theirs (lockstep.training.launch.spares); set before
        `run`.
        """
        self._heard_out = True  # whether every supervisor has reported the end of its last rank
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
        """Whether all supervisors wait for the next generation; allows busy ones up to IDLE_S."""
        wait_s = IDLE_S if self._heard_out else 0.0  # the others had their time to report when the run ended
        return self._fault is None and self._roster is not None and self._roster.whole(wait_s)

    def run(
        self,
        task: RankTask,
        generation: int,
        handler: Handler | None = None,
        on_steps: Callable[[Sequence[RankState]], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Run `task` on new ranks; returns what each entry returned, in order of rank. One run at a time.

        `on_steps(states)` is called once all ranks have made a step. Raises what `ControlServer.wait` raises. All ranks
        have ended in any case, and supervisors that can be reached wait for the next run.
        """

        handler = handler or Handler()

        def ended() -> BaseException | None:
            return self._fault or handler.overtaken() or not_begun(handler)

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
        """End the current run and every later one with `error`, which they raise. Thread-safe."""
        with self._lock:
            self._fault = self._fault or error
            if self._server is not None:
                self._server.fail(error)

    def _lost(self, rank: int) -> None:
        """A supervisor cannot be reached any more: it ends after its rank, and starts no other."""
        with self._lock:
            server = self._server
        if server is not None and not server.started(rank):
            server.fail(
                LauncherError(
                    f"the supervisor of rank {rank} is lost",
                    got="the end of its connection before it has started its rank",
                    allowed="supervisors that stay connected",
                    next_step="Look at the executors' logs for why it ended.",
                )
            )

    @abstractmethod
    def _check(self, task: RankTask, ended: Callable[[], BaseException | None]) -> None:
        """Raise ConfigError if supervisors cannot be started for such a task; called before anything is started.

        While it waits, it calls `ended` and raises the error that it returns.
        """

    @abstractmethod
    def _begin(self, control: tuple[str, int], secret: bytes) -> None:
        """Start the supervisors: `supervise` for each rank, with a SupervisorSpec of these. Returns at once."""

    @abstractmethod
    def _end(self) -> None:
        """End the supervisors and wait for their end. Called once, also if they were never started."""


class SessionLauncher(ABC):
    """A `Launch` whose supervisors can outlive a generation."""

    @abstractmethod
    def session(self, num_ranks: int, limits: Limits) -> Session:
        """Supervisors for several generations; they start with the first run."""

    def ready(self, num_ranks: int, wait_s: float, most: int | None = None) -> ExecutorMemory | None:
        """Raise ConfigError unless all ranks fit at once; a driver asks before it writes anything.

        Waits up to `wait_s` seconds for executors that are still starting. Returns the memory that an executor has for
        its share of `most` ranks (None: of `num_ranks`), None where nothing enforces it.
        """
        return None

    def application(self) -> str | None:
        """The ID of the cluster's application that runs the ranks; None for ranks on this host."""
        return None

    def slots(self) -> int:
        """How many ranks there is room for now, those that run included."""
        raise NotImplementedError("ranks on this host: --slots-file says it")

    def room_outside(self, hosts: frozenset[str]) -> int:
        """Slots on hosts other than these; 0 where ranks cannot be kept off a host."""
        return 0

    def replaces(self) -> bool:
        """Whether ranks that leave after a SIGTERM lose their place only: the cluster starts another executor."""
        return False

    def signals(self) -> AbstractContextManager[None]:
        """While this is open, signals to this process's Java do not end Java: this process decides."""
        return nullcontext()

    def divided(self, runs: int, num_ranks: int) -> Sequence[SessionLauncher]:
        """Launchers for `runs` runs at once, of `num_ranks` ranks each, with GPUs of their own.

        Raises ConfigError if ranks are processes of this host, and it has GPUs but too few
        (lockstep.training.devices.of_runs).
        """
        return [self] * runs

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

        `handler` answers requests of ranks. Raises what `ControlServer.wait` raises; all ranks have ended in any case.
        """
        with self.session(num_ranks, limits or Limits()) as session:
            return session.run(task, generation, handler)


@dataclass(slots=True)
class Restart:
    """One restart. Times are monotonic seconds of the driver."""

    generation: int
    """The generation that was started."""
    level: int
    """1: the supervisors stayed, only ranks are new; 2: supervisors are new too, in Spark by a new barrier job."""
    failed_at: float
    """When the failure was detected."""
    ended_at: float
    """When all ranks of the older generation had ended."""
    waited_s: float
    """How long the driver waited then, on purpose."""
    called_at: float
    """When the driver had claimed the generation and requested its ranks."""
    given_at: float
    """When the remaining supervisors were idle, or the older ones had ended."""
    seconds: float | None = None
    """Seconds from the failure to the first step of all ranks; None if they never made one."""
    parts: dict[str, float] = field(default_factory=dict)
    """What `seconds` consists of, in order: phase to seconds, of the slowest rank."""

    def stepped(self, states: Sequence[RankState]) -> None:
        """Record the first step of all ranks, which ends the restart."""
        last = max(states, key=lambda state: state.marks.first_step_at or 0.0)
        marks, joined_at = last.marks, last.joined_at
        assert marks.first_step_at is not None and joined_at is not None
        points = [("end the other ranks", self.failed_at), ("wait", self.ended_at)]
        points += [("claim", self.ended_at + self.waited_s), ("supervisors", self.called_at)]
        points.append(("start the process", self.given_at))
        # A spare may join before its supervisor has reported it.
        points.append(("start Python", min(marks.started_at or joined_at, joined_at)))
        points.append(("import", joined_at))
        points += [("first step" if phase == "train" else phase, at) for phase, at in marks.phases]
        self.seconds = marks.first_step_at - self.failed_at
        ends = [at for _, at in points[1:]] + [marks.first_step_at]
        for (word, at), end in zip(points, ends, strict=True):
            self.parts[word] = self.parts.get(word, 0.0) + end - at

    def to_json(self) -> dict[str, Any]:
        """The entry in the run's result: {generation, level, seconds, parts}."""
        parts = {word: round(seconds, 3) for word, seconds in self.parts.items()}
        seconds = None if self.seconds is None else round(self.seconds, 3)
        return {"generation": self.generation, "level": self.level, "seconds": seconds, "parts": parts}

    def __str__(self) -> str:
        return f"generation {self.generation} was started {restart_words(self.to_json())}"


def _not_again(error: ConfigError) -> LauncherError:
    """Return an error that may be retried for `error`, which refuses supervisors like those that started before: so the
    configuration is right.
    """
    return LauncherError(
        f"supervisors cannot be started again: {error.what}",
        got=error.got,
        allowed=error.allowed,
        next_step="Find out why executors were lost, and start again when they are back: the run resumes.",
    )


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Launches(AbstractContextManager["Launches"]):
    """Runs generation after generation in sessions of `launch`, and records restarts; a context manager.

    A `launch` that is no SessionLauncher (a function of a test) is called once a generation: every restart is level 2.
    """

    def __init__(
        self,
        launch: Launch,
        num_ranks: int,
        limits: Limits,
        *,
        spares: int = 0,
        report: Callable[[str], None] = _print,
    ) -> None:
        self.restarts: list[Restart] = []
        """Every run after the first, in order."""
        self._launch, self._num_ranks, self._limits, self._report = launch, num_ranks, limits, report
        self._spares = spares
        self._session: Session | None = None
        self._failed: tuple[float, float] | None = None  # when the last generation failed, and when it had ended
        self._waited_s = 0.0  # since then
        self._fault: BaseException | None = None
        self._hosts = HostFailures()
        self._moves = False  # whether the next run needs new supervisors, on other hosts
        self._lock = threading.Lock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error)

    def replaces(self) -> bool:
        """Return what `SessionLauncher.replaces` does; False for a launcher without sessions."""
        return isinstance(self._launch, SessionLauncher) and self._launch.replaces()

    def wait(self, seconds: float, ended: Callable[[], BaseException | None]) -> BaseException | None:
        """Let `seconds` pass before the next `run`; supervisors stay. Returns an error of `ended` at once."""
        began, error = time.monotonic(), ended()
        while error is None and (left_s := began + seconds - time.monotonic()) > 0:
            time.sleep(min(LOOK_S, left_s))
            error = ended()
        self._waited_s += time.monotonic() - began
        return error

    def fail(self, error: BaseException) -> None:
        """End the current generation with `error`, which this `run` and every later one raises. Returns at once.

        For a thread that learns that this driver must stop.
        """
        with self._lock:
            self._fault = self._fault or error
            session = self._session
        if session is not None:
            session.fail(error)

    def run(
        self, task: RankTask, generation: int, handler: Handler | None = None, num_ranks: int | None = None
    ) -> list[dict[str, Any]]:
        """Run `task` on new ranks; returns and raises what `Session.run` does. `num_ranks`: from now on."""
        self._num_ranks = self._num_ranks if num_ranks is None else num_ranks
        called_at = time.monotonic()
        restart: Restart | None = None
        session = self._usable()
        if self._failed is not None:
            level = IN_PLACE if session is not None and session.began else NEW_SUPERVISORS
            restart = Restart(generation, level, *self._failed, self._waited_s, called_at, time.monotonic())
            self.restarts.append(restart)
            self._waited_s = 0.0
        failed_at: float | None = None

        def stepped(states: Sequence[RankState]) -> None:
            if restart is not None:
                restart.stepped(states)
                self._report(str(restart))

        try:
            if session is not None:
                return session.run(task, generation, handler, stepped)
            return self._launch(task, self._num_ranks, generation=generation, limits=self._limits, handler=handler)
        except Exception as error:
            failed_at = session.failed_at if session is not None else None
            self._blame(failed_host(error))
            if restart is not None and isinstance(error, ConfigError) and session is not None and not session.began:
                raise _not_again(error) from error
            raise
        finally:
            now = time.monotonic()
            self._failed = (now if failed_at is None else failed_at, now)

    def _blame(self, host: str | None) -> None:
        """Count a failure of `host`; if it is left out from now on and others have room, supervisors start there."""
        if host is None or not isinstance(self._launch, SessionLauncher):
            return
        if (seconds := self._hosts.failed(host)) is None:
            return
        self._moves = self._launch.room_outside(self._hosts.left_out()) >= self._num_ranks
        if self._moves:
            self._report(f"{host} is left out for {seconds / 60:.0f} minutes: it failed {FAILURES} times")

    def _avoided(self, launch: SessionLauncher) -> frozenset[str]:
        """The hosts that new supervisors avoid; says so if some must be used."""
        hosts = self._hosts.left_out()
        if hosts and 0 < (room := launch.room_outside(hosts)) < self._num_ranks:
            names, ranks = ", ".join(sorted(hosts)), self._num_ranks
            self._report(f"{names}: used though left out, as other hosts have slots for {room} of {ranks} ranks")
        return hosts

    def _usable(self) -> Session | None:
        """The current session if it is usable, else a new one; None for a launcher without sessions."""
        with self._lock:
            fault, session = self._fault, self._session
        if fault is not None:
            raise fault
        if not isinstance(self._launch, SessionLauncher):
            return None
        if session is not None and (self._moves or session.num_ranks != self._num_ranks or not session.usable()):
            self._close(None)
            session = None
        if session is None:
            session = self._launch.session(self._num_ranks, self._limits)
            session.avoid, self._moves = self._avoided(self._launch), False
            session.spares = self._spares
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
