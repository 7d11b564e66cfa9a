"""Which rank failed first, and the error that reports it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from lockstep.storage.errors import CommunicationError, LockstepError, StorageError, TrainingFailedError
from lockstep.training.control.protocol import HOROVOD, OPENING, SCRIPT, SERVER, STARTING, is_final
from lockstep.training.control.task import Limits

# How native code ends a process. Arrow aborts on some Parquet footers that were forged together with their digests.
_CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT, 128 + signal.SIGTERM}
_LOOK_AT_DATA = (
    " Native code ended it, which forged bytes can cause: `lockstep verify DATASET` names a shard that is at fault."
)
_LOOK_AT_SLOTS = " Under Spark, a stage starts when all its slots are free: look whether other jobs' tasks hold them."
_WAIT_LONGER = " If hosts pause or swap for that long, raise lockstep train --heartbeat-limit."


class Weight(IntEnum):
    """How likely a failure caused the others; the smallest one is reported."""

    FINAL = 0  # the configuration or the data is at fault: a restart would fail again
    ENDED = 1  # killed, or ended without a report
    RAISED = 2
    LOST = 3  # its connection broke, for a reason not known yet
    SILENT = 4
    CONSEQUENCE = 5  # it lost another rank


@dataclass
class Marks:
    """When a rank reached each phase up to its first step, in monotonic seconds: where a restart's time went."""

    started_at: float | None = None
    """When the rank's process was started."""
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
    """The parts so far of a result that has not arrived completely."""
    tail: list[str] = field(default_factory=list)
    marks: Marks = field(default_factory=Marks)
    stacks: str = ""
    """The stacks of the rank's threads, when they were last asked for."""
    reading: str | range = ""
    """The records that it was reading, or the batches that it was decoding, when its process ended."""

    def moves_to(self, step: int, phase: str, now: float) -> bool:
        """Record the progress that the rank reports; True at its first step, which is a step within a phase."""
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
        """Whether all that it sent has been read: its supervisor's EXIT may arrive before its own last frame."""
        return self.joined_at is None or self.lost_at is not None


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of one rank: the reason in words, and its weight."""

    state: RankState
    reason: str
    weight: Weight
    advice: str = ""
    """What to do about it in a training run, if known."""


class LauncherError(TrainingFailedError):
    """A Spark stage or a supervisor failed; the failure of a rank, if there is one, says more."""

    host: str | None = None
    """Where an executor was lost with its supervisors, if that is the cause."""


class LauncherGoneError(LauncherError):
    """Spark's Java process has ended, so this process cannot launch ranks again."""


class ApplicationEndedError(LauncherGoneError):
    """The cluster has ended Spark's application, and all its executors with it."""


class MemoryKillError(LauncherError):
    """An executor was killed for its memory, and its ranks with it."""


class PreemptedError(LauncherError):
    """The cluster manager took executors away for others: no failure of the run."""


class NotLeftError(TrainingFailedError):
    """Ranks that were to write a checkpoint and leave were ended without one."""


class RankFailedError(TrainingFailedError):
    """A rank ended without its result; the text names rank, host, step and phase, then its last log lines."""

    def __init__(self, failure: Failure, num_ranks: int, *, alike: bool = False) -> None:
        """`alike`: every rank raised this before its first step (see `all_alike`)."""
        state = failure.state
        of_script = state.phase in (SCRIPT, HOROVOD)
        then = f"; a run resumes from its last checkpoint.{failure.advice}"
        if alike:
            then = ": every rank raised this before its first step, and would raise it again."
        super().__init__(
            f"rank {state.rank} of {num_ranks} on {state.host} failed {_where(state)}",
            got=failure.reason,
            allowed="every rank running until its entry returns",
            next_step=(
                "Read its last log lines below" if state.tail else "Check whether its host is overloaded or gone"
            )
            + ("." if of_script else then),
        )
        self.alike = alike
        if alike:
            self.exit_code = 2
        self.executor_host: str | None = None
        """Spark's name of its host, which may be another one than `host`."""
        self.rank, self.host, self.step, self.phase = state.rank, state.host, state.step, state.phase
        self.tail, self.reading, self.weight = list(state.tail), state.reading, failure.weight
        self.process_code = state.exit_code
        self.stepped = state.marks.first_step_at is not None

    @property
    def from_outside(self) -> bool:
        """Whether a signal from outside ended the rank, as from the kernel when memory ends: it says nothing about what
        the rank was doing.
        """
        return self.process_code in _FROM_OUTSIDE

    @property
    def of_its_own(self) -> bool:
        """Whether the rank raised an error or ended by itself, so that a restart may meet this failure again.

        False for a signal from outside, for silence, and for errors of a storage or a connection.
        """
        return (
            self.weight in (Weight.FINAL, Weight.ENDED, Weight.RAISED)
            and not self.from_outside
            and not isinstance(self.__cause__, StorageError | CommunicationError)
        )

    def __str__(self) -> str:
        lines = "\n".join(f"  | {line}" for line in self.tail) or "  | (none arrived)"
        return f"{super().__str__()}\n  last {len(self.tail)} log lines of rank {self.rank}:\n{lines}"


def _where(state: RankState) -> str:
    """When a rank failed; a script counts no steps, only its calls to other ranks."""
    if state.phase == SCRIPT:
        return "in its script"
    if state.phase == HOROVOD:
        return f"after {state.step} call{'' if state.step == 1 else 's'} to other ranks"
    return f"at step {state.step}, phase {state.phase}"


def all_alike(states: Sequence[RankState]) -> bool:
    """Whether every rank raised the same error, by class and message, before its first step.

    Errors of a storage or a connection do not count: a restart may succeed.
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
    # Also before it has joined: its supervisor sees it, and the start limit may be far off.
    if state.lost_at is None and state.stopped_at is not None and now - state.stopped_at > limits.stopped_s:
        return Failure(state, f"its process has been stopped by a signal for {limits.stopped_s:.0f} s", Weight.SILENT)
    if state.joined_at is None:
        if now - started > limits.start_s:
            reason = f"it did not connect within {limits.start_s:.0f} s of the start"
            return Failure(state, reason, Weight.SILENT, _LOOK_AT_SLOTS)
        return None
    if state.lost_at is not None:
        return Failure(state, "its control connection broke", Weight.LOST)
    # Importing TensorFlow and loading kernels block the interpreter for tens of seconds on a busy machine: the start
    # limit applies then, since the rank last moved: one that joined late, or is slow, still has all of it.
    starting = state.phase in (STARTING, OPENING) and now - max(started, state.moved_at) <= limits.start_s
    if now - state.beat_at > limits.silent_s and not starting:
        return Failure(state, f"no heartbeat for {limits.silent_s:.0f} s", Weight.SILENT, _WAIT_LONGER)
    # A script's own output is progress; a script that never calls other ranks blocks none of them.
    if (
        state.phase != SCRIPT
        and not state.phase.startswith(SERVER)
        and now - max(state.moved_at, state.spoke_at) > limits.stall_s
    ):
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
