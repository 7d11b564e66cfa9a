"""Decides after which failures a run is started again, and when: limits on their number, a wait, and what no restart
cures."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.storage.errors import (
    CommunicationError,
    ConfigError,
    DataError,
    DeniedError,
    DiskFullError,
    LockstepError,
    StorageError,
    TrainingFailedError,
)
from lockstep.storage.urls import join
from lockstep.training.batches.decode import batch_row, record_words
from lockstep.training.config import TrainConfig
from lockstep.training.control.failures import ApplicationEndedError, LauncherGoneError, RankFailedError, Weight
from lockstep.training.driver.stop import EndedByCallerError
from lockstep.training.plan.client_plan import RunPlan
from lockstep.training.plan.datasets import groups_of, open_parts
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.plan.mixture import MixedPlan, Plan
from lockstep.training.run.lineage import SupersededError

log = logging.getLogger(__name__)
HOUR_S = 3600.0
WAIT_S, MOST_WAIT_S = 1.0, 30.0  # before the second restart without progress, twice as long before each later one
SHOWN_RECORDS = 8
_AGAIN = "start again with the same flags: the run resumes from its last checkpoint."


INCURABLE: tuple[tuple[type[LockstepError], str], ...] = (
    (SupersededError, "another driver has taken the run over"),
    (EndedByCallerError, "the caller has ended the run"),
    (ApplicationEndedError, "no executor comes back in an application that has ended"),
    (LauncherGoneError, "nothing is launched without Spark's Java process"),
    (ConfigError, "flags, paths and models stay as they are: a missing file, a model that cannot be imported"),
    (DataError, "bytes that are wrong stay wrong"),
    (DiskFullError, "a full disk and a quota that is used up stay so; steps since the checkpoint would be lost again"),
    (DeniedError, "permissions stay as they are"),
)
"""Errors that no restart cures, each with its reason. A rank's error counts as the driver's own."""
RESUMED_LATER = (ApplicationEndedError, DiskFullError, DeniedError)
"""Errors after which the same call resumes the run once their cause is removed: the error says from where."""


def incurable(error: LockstepError) -> LockstepError | None:
    """The error with which a run must end at once, since no restart cures it; None if one may.

    What no restart cures because it has happened before, RestartPolicy knows.
    """
    cause = error.__cause__ if isinstance(error, RankFailedError) else None
    for found in (error, cause):
        if isinstance(found, LockstepError) and any(isinstance(found, kind) for kind, _ in INCURABLE):
            return found
    return error if isinstance(error, RankFailedError) and error.alike else None


@dataclass(frozen=True, slots=True)
class Repeat:
    """An error of ranks outside of a batch; equal to another one if a restart would meet it again."""

    what: str
    """The error's first line, or how the ranks' weights differ."""
    phase: str
    step: int

    @property
    def where(self) -> str:
        """When the error came, in words."""
        return f"in phase {self.phase} at step {self.step}"


def repeat_of(error: LockstepError, num_ranks: int) -> Repeat | None:
    """What may come again of the failure of `num_ranks` ranks: an error before the first step, in a validation or an
    export, or weights that part. None for an error in a batch (`deaths_of`), and for a failure of the machine.
    """
    if not isinstance(error, RankFailedError) or error.rank >= num_ranks or error.from_outside:
        return None
    if (step := getattr(error.__cause__, "diverged_at", None)) is not None:
        return Repeat("the weights of ranks differ", "train", int(step))
    if (
        error.phase == "train"
        or error.weight not in (Weight.ENDED, Weight.RAISED)
        or isinstance(error.__cause__, StorageError | CommunicationError)
    ):
        return None
    return Repeat(error.got.splitlines()[0], error.phase, error.step)


@dataclass(frozen=True, slots=True)
class Death:
    """A rank that ended by itself in its part of a batch; equal to another one if a restart would repeat it."""

    rank: int
    lanes: range
    batches: range
    """The batches (from 0) that it computed or decoded; empty while it read records."""
    reading: str
    """The records that it read; empty for a death in a batch."""
    reason: str

    @property
    def where(self) -> str:
        """The batch in words."""
        if self.reading:
            return f"while it read {self.reading}"
        first, last = self.batches.start + 1, self.batches.stop
        return f"in step {first}" if first == last else f"while it decoded the batches of steps {first} to {last}"


def deaths_of(
    error: LockstepError, plan: RunPlan, groups: int | None, num_ranks: int, shares: Sequence[int] | None = None
) -> list[Death]:
    """What the failure of a generation of `num_ranks` may have been: death in a batch, or in reading or decoding later
    ones.

    Empty for a failure of the machine: a kill from outside, a storage, a connection, silence. `shares` are the lanes of
    each rank (None: even).
    """
    if (
        not isinstance(error, RankFailedError)
        or not isinstance(plan, EpochPlan | MixedPlan)
        or error.phase != "train"
        or error.weight not in (Weight.ENDED, Weight.RAISED)
        or error.from_outside
        or isinstance(error.__cause__, StorageError)
        or getattr(error.__cause__, "diverged_at", None) is not None  # see repeat_of
        or error.rank >= num_ranks  # a parameter server
    ):
        return []
    lanes = plan.rank_lanes(error.rank, num_ranks, groups, shares)
    found = [Death(error.rank, lanes, range(error.step, error.step + 1), "", error.got)]
    if isinstance(error.reading, range):
        found.append(Death(error.rank, lanes, error.reading, "", error.got))
    elif error.reading:
        found.append(Death(error.rank, lanes, range(0), error.reading, error.got))
    return found


class RestartPolicy:
    """Counts the failures of a run, and says how long to wait before the next restart."""

    def __init__(self, config: TrainConfig, plan: RunPlan) -> None:
        self._config, self._plan = config, plan
        self._in_a_row = 0  # without a new checkpoint
        self._recent: deque[float] = deque()  # when generations failed within the last hour
        self._before: list[Death] = []
        self._repeat: Repeat | None = None  # of the last failure

    @property
    def suspect(self) -> int | None:
        """The batch (from 0) in which the last generation died: ranks report its samples before they compute it."""
        return self._before[0].batches.start if self._before else None

    def failed(
        self,
        error: LockstepError,
        *,
        num_ranks: int,
        progress: bool,
        samples: Mapping[int, Sequence[str]],
        shares: Sequence[int] | None = None,
    ) -> float:
        """Count the failure of a generation of `num_ranks`; returns the seconds to wait before the restart.

        `progress`: its generation made a checkpoint. `samples` are the sample ids (hex) of each rank's part of
        `suspect`. Raises TrainingFailedError, or `error` itself, if there is to be no restart.
        """
        config = self._config
        deaths = deaths_of(error, self._plan, config.step.lane_groups, num_ranks, shares)
        again = next((death for death in deaths if death in self._before), None)
        self._before = deaths
        last, self._repeat = self._repeat, repeat_of(error, num_ranks)
        if self._repeat is not None and self._repeat == last:
            error.exit_code = 2
            error.what += f", twice {self._repeat.where} with the same error, which no restart cures"
            then = getattr(error.__cause__, "next_step", "") or "Read its last log lines below."
            error.next_step = f"{then} Mend the cause and {_AGAIN}"
            raise error
        if again is not None:
            assert isinstance(error, RankFailedError)
            self._name(again, error, samples.get(again.rank, ()))
            raise error
        self._in_a_row = 1 if progress else self._in_a_row + 1
        if self._in_a_row > config.limits.max_restarts:
            raise self._given_up(error) from error
        self._recent.append(time.monotonic())
        while self._recent[0] < self._recent[-1] - HOUR_S:
            self._recent.popleft()
        if len(self._recent) > config.limits.max_restarts_per_hour:
            limit = config.limits.max_restarts_per_hour
            raise TrainingFailedError(
                f"{config.run} failed more often than {limit} times in an hour",
                got=str(error),
                allowed=f"up to {limit} restarts in an hour (--max-restarts-per-hour)",
                next_step=f"Remove the cause and {_AGAIN}",
            ) from error
        return 0.0 if self._in_a_row == 1 else min(MOST_WAIT_S, WAIT_S * 2.0 ** (self._in_a_row - 2))

    def _name(self, death: Death, error: RankFailedError, samples: Sequence[str]) -> None:
        """Add to the error that this death has happened before, and which records it may come from."""
        names = [death.reading] if death.reading else self._names(death, samples)
        if len(names) > SHOWN_RECORDS:
            log.error("all %d records of that batch: %s", len(names), "; ".join(names))
            names = [*names[:SHOWN_RECORDS], f"and {len(names) - SHOWN_RECORDS} more, which the driver's log lists"]
        error.exit_code = 2
        error.what += f", twice {death.where}, which no restart cures"
        error.got += f"; both times with {'; '.join(names)}"
        error.next_step = (
            "Look at its last log lines below and at these records; `lockstep verify DATASET` finds changed"
            f" bytes. Mend the model, or build the dataset without the record, and {_AGAIN}"
        )

    def _names(self, death: Death, samples: Sequence[str]) -> list[str]:
        """Sample id, file and record of each row of the rank's batches; no byte of a shard is read for it."""
        assert isinstance(self._plan, EpochPlan | MixedPlan)
        places = batch_places(self._config, self._plan, death.lanes, death.batches)
        if len(samples) != len(places):
            return places
        return [f"sample {sample}: {place}" for sample, place in zip(samples, places, strict=True)]

    def _given_up(self, error: LockstepError) -> LockstepError:
        limit = self._config.limits.max_restarts
        log.error("failures in a row without a new checkpoint: %d, --max-restarts %d", limit + 1, limit)
        if isinstance(error, TrainingFailedError):
            return error
        return TrainingFailedError(
            f"{self._config.run} failed {limit + 1} times in a row without a new checkpoint",
            got=str(error),
            allowed=f"up to {limit} restarts in a row (--max-restarts)",
            next_step=f"Remove the cause and {_AGAIN}",
        )


def batch_places(config: TrainConfig, plan: Plan, lanes: range, batches: range) -> list[str]:
    """File and record of each row of some lanes' part of some batches, in the order of a rank's rows."""
    if isinstance(plan, MixedPlan):
        groups = groups_of(config.data.datasets, config.data.mix or ())
        plans, datasets = plan.parts, [list(open_parts(group, config.data.split)[0]) for group in groups]
    else:
        plans, datasets = (plan,), [list(open_parts(config.data.datasets, config.data.split)[0])]
    urls = [
        [join(part.url, shard.path) for part in parts for shard in part.manifest.splits[part.split].shards]
        for parts in datasets
    ]
    found = []
    for batch in batches:
        for lane in lanes:
            for one, files in zip(plans, urls, strict=True):
                for row in range(one.global_batch // one.lanes):
                    run = batch_row(one, range(lane, lane + 1), batch, row)
                    found.append(record_words(files[run.shard], run.first_record, one.block_records))
    return found
