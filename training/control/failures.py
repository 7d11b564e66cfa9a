"""Which rank failed first, and the error that tells it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from lockstep.storage.errors import CommunicationError, LockstepError, StorageError, TrainingFailedError
from training.control.protocol import HOROVOD, OPENING, SCRIPT, STARTING, is_final
from training.control.task import Limits

# How native code ends a process. Arrow aborts over some Parquet footers that were forged together with their digests.
_CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_LOOK_AT_DATA = (
    " Native code ended it, as it may over forged bytes: `python -m jobs.verify DATASET` tells whether a shard is at"
    " fault, and which."
)
_WAIT_LONGER = " Where hosts pause or swap for so long, jobs.train --heartbeat-limit gives them more."


class Weight(IntEnum):
    """How likely a failure is the cause of the others around it; the smallest one is told."""

    FINAL = 0  # the call or the data is at fault: a restart would meet it again
    ENDED = 1  # killed, or ended without a word
    RAISED = 2
    LOST = 3  # its connection broke, and nobody has said why yet
    SILENT = 4
    CONSEQUENCE = 5  # it lost another rank


@dataclass
class Marks:
    """When a rank came to what (monotonic seconds), from its start to its first step: what a restart's time went to."""

    started_at: float | None = None
    """Its process was there."""
    phases: list[tuple[str, float]] = field(default_factory=list)
    first_step_at: float | None = None


@dataclass
class RankState:
    """What the driver knows of one rank."""

    rank: int
    host: str = "an unknown host"
    pid: int | None = None
    step: int = 0
    phase: str = "not started"
    joined_at: float | None = None
    beat_at: float = 0.0
    moved_at: float = 0.0
    spoke_at: float = 0.0
    stopped_at: float | None = None
    lost_at: float | None = None
    error: LockstepError | None = None
    exit_code: int | None = None
    result: dict[str, object] | None = None
    result_parts: list[str] = field(default_factory=list)
    """Of a result that has not come whole."""
    tail: list[str] = field(default_factory=list)
    marks: Marks = field(default_factory=Marks)

    def moves_to(self, step: int, phase: str, now: float) -> bool:
        """Take down where the rank says that it is; True at its first step, which is a step within a phase."""
        if step == self.step and phase == self.phase:
            return False
        first = False
        if self.marks.first_step_at is None:
            if phase != self.phase:
                self.marks.phases.append((phase, now))
            elif step != self.step:
                self.marks.first_step_at, first = now, True
        self.step, self.phase, self.moved_at = step, phase, now
        return first

    @property
    def ended(self) -> bool:
        """True when its process is known to have ended."""
        return self.exit_code is not None

    @property
    def heard_out(self) -> bool:
        """Whether all that it sent has been read: its supervisor's word of its end may be read before its own."""
        return self.joined_at is None or self.lost_at is not None


@dataclass(frozen=True, slots=True)
class Failure:
    """One thing that went wrong: the rank, the reason in words, how it weighs."""

    state: RankState
    reason: str
    weight: Weight
    advice: str = ""
    """What to do about it in training, where that can be told."""


class LauncherError(TrainingFailedError):
    """What holds the ranks (a Spark stage, a supervisor) failed; each rank's own failure says more, if there is one."""


class LauncherGoneError(LauncherError):
    """Nothing is left that could hold ranks: to launch again in this process is of no use."""


class MemoryKillError(LauncherError):
    """An executor was killed, and its ranks with it, for the memory that it held."""


class RankFailedError(TrainingFailedError):
    """A rank ended without its result; the text names rank, host, step, phase and ends with its last log lines."""

    def __init__(self, failure: Failure, num_ranks: int, *, alike: bool = False) -> None:
        """`alike`: every rank has raised this before its first step (see `all_alike`)."""
        state = failure.state
        of_script = state.phase in (SCRIPT, HOROVOD)
        then = f"; a run resumes from its last checkpoint.{failure.advice}"
        if alike:
            then = ": every rank raised this before its first step, and would raise it again."
        super().__init__(
            f"rank {state.rank} of {num_ranks} on {state.host} failed at step {state.step}, phase {state.phase}",
            got=failure.reason,
            allowed="every rank running until its entry returns",
            next_step=("Read its last log lines below" if state.tail else "See whether its host is overloaded or gone")
            + ("." if of_script else then),
        )
        self.alike = alike
        self.rank, self.host, self.step, self.phase = state.rank, state.host, state.step, state.phase
        self.tail = list(state.tail)

    def __str__(self) -> str:
        lines = "\n".join(f"  | {line}" for line in self.tail) or "  | (none has arrived)"
        return f"{super().__str__()}\n  last {len(self.tail)} log lines of rank {self.rank}:\n{lines}"


def all_alike(states: Sequence[RankState]) -> bool:
    """Whether every rank has raised the same, class and message, before its first step.

    Not of a storage or a connection: these may be well again when ranks are started again.
    """
    errors = [state.error for state in states if state.marks.first_step_at is None]
    return len(errors) == len(states) and all(
        error is not None
        and not isinstance(error, StorageError | CommunicationError)
        and (type(error), str(error)) == (type(errors[0]), str(errors[0]))
        for error in errors
    )


def failure_of(state: RankState, now: float, started: float, limits: Limits) -> Failure | None:
    """The failure of one rank at `now` (monotonic seconds), or None while it is well."""
    if state.error is not None:
        if is_final(state.error):
            return Failure(state, str(state.error), Weight.FINAL)
        consequence = isinstance(state.error, CommunicationError)
        return Failure(state, str(state.error), Weight.CONSEQUENCE if consequence else Weight.RAISED)
    if state.exit_code is not None and (state.exit_code != 0 or state.result is None):
        advice = _LOOK_AT_DATA if -state.exit_code in _CRASHES else ""
        return Failure(state, exit_words(state.exit_code), Weight.ENDED, advice)
    if state.result is not None:
        return None
    # Before it has joined too: its supervisor looks at it, and the start limit may be far.
    if state.lost_at is None and state.stopped_at is not None and now - state.stopped_at > limits.stopped_s:
        return Failure(state, f"its process has been stopped by a signal for {limits.stopped_s:.0f} s", Weight.SILENT)
    if state.joined_at is None:
        if now - started > limits.start_s:
            return Failure(state, f"it did not come within {limits.start_s:.0f} s of the start", Weight.SILENT)
        return None
    if state.lost_at is not None:
        return Failure(state, "its control connection broke", Weight.LOST)
    # Importing TensorFlow and loading kernels hold the interpreter for tens of seconds on a busy machine: the limit
    # is then that of the start.
    starting = state.phase in (STARTING, OPENING) and now - started <= limits.start_s
    if now - state.beat_at > limits.silent_s and not starting:
        return Failure(state, f"no heartbeat for {limits.silent_s:.0f} s", Weight.SILENT, _WAIT_LONGER)
    # A script's own output is progress; one that never calls other ranks keeps nobody waiting.
    if state.phase != SCRIPT and now - max(state.moved_at, state.spoke_at) > limits.stall_s:
        return Failure(state, f"alive, but no progress for {limits.stall_s:.0f} s", Weight.SILENT)
    return None


def exit_words(code: int) -> str:
    """An exit code as words: a signal's name or the number."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        return f"its process was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"its process was killed by signal {-code}"
