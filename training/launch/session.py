"""Supervisors that stay while generations of ranks come and go: a restart in place needs only new ranks."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

from training.comm.tls import issue
from training.control.failures import LauncherError, RankState
from training.control.protocol import new_key
from training.control.roster import Roster
from training.control.server import ControlServer
from training.control.task import Handler, Limits, RankTask
from training.launch.order import order_to_json

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

        def stepped(states: Sequence[RankState]) -> None:
            if task.preload is not None and self._roster is not None:
                self._roster.ask_for_spares()
            if on_steps is not None:
                on_steps(states)

        def ended() -> BaseException | None:
            overtaken = getattr(handler, "overtaken", None)
            return self._fault or (overtaken() if overtaken is not None else None)

        if self._roster is None:
            self._check(task, ended)
            self._roster = Roster(self._secret, self.num_ranks, self._bind_host, self._lost)
            self._begin((self._host, self._roster.port), self._secret)
        self.failed_at = None
        key = new_key()
        certificates = issue(generation, self.num_ranks) if task.tls else [None] * self.num_ranks
        with ControlServer(key, generation, self.num_ranks, self.limits, handler, self._bind_host, stepped) as server:
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
        """Start the supervisors: `keep_post` for each rank, with a Place of these. Returns at once."""

    @abstractmethod
    def _end(self) -> None:
        """Wait for the supervisors' end, and see to it. Called once, also where they were never started."""


class SessionLauncher(ABC):
    """A `Launch` whose supervisors can stay: through the generations of one session."""

    @abstractmethod
    def session(self, num_ranks: int, limits: Limits) -> Session:
        """Supervisors that stay; they begin with the first run."""

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

        `handler(rank, kind, fields)` answers the ranks' requests. Raises what `ControlServer.wait` raises; no rank is
        left alive in any case.
        """
        with self.session(num_ranks, limits or Limits()) as session:
            return session.run(task, generation, handler)
