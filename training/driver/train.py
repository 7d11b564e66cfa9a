"""The driver of a run: it claims a generation, launches ranks, and restarts from the last checkpoint on a failure."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.storage.documents import seal
from lockstep.storage.errors import ConfigError, LockstepError, TrainingFailedError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.settings import hadoop_settings
from training.comm.options import CommOptions
from training.config import TrainConfig
from training.control.failures import LauncherGoneError, MemoryKillError, RankFailedError
from training.control.protocol import is_final
from training.control.task import Limits, RankTask
from training.driver.commit import CommitHandler, RunHandler
from training.driver.live import OnTerminal, RunProgress
from training.driver.ownership import REWRITE_EVERY_S, WATCH_S, Ownership
from training.driver.preflight import CheckedRun, preflight
from training.driver.retention import drop_stagings, empty_trash, take_over
from training.launch.executors import ExecutorMemory
from training.launch.session import Launch, Launches, SessionLauncher, ended_in_order
from training.models import may_follow_length
from training.plan.mixture import Plan, steps_asked
from training.run import notes
from training.run.comm_plans import read_plans
from training.run.lineage import (
    Checkpoint,
    CheckpointRef,
    Claim,
    SupersededError,
    checkpoints,
    epochs_asked,
    find_tip,
    read_claims,
)
from training.run.paths import RunPaths
from training.run.result import RunResult
from training.run.run_json import open_run
from training.run.weights_source import located

log = logging.getLogger(__name__)
ENTRY = "training.rank.runtime:main"
COMMIT_WAIT_S = 60.0
HOUR_S = 3600.0


class EndedByCallerError(LockstepError):
    """`Hooks.ended` has ended a run before its end; the same configuration resumes it from its last checkpoint."""


def task_of(config: TrainConfig, plan: Plan, fs: FileSystem, paths: RunPaths, claim: Claim, entry: str) -> RankTask:
    """The task of the generation of `claim`, with the communication plans that are frozen already."""
    options = CommOptions(
        backend=config.backend,
        trust_network=config.trust_network,
        plans=read_plans(fs, paths, config.num_ranks),
    )
    payload = {
        "config": config.to_json(),
        "plan": plan.identity(),
        "comm": {"options": options.to_json(), "freeze": True},
    }
    return RankTask(
        entry,
        payload,
        hadoop=hadoop_settings(),
        logs=paths.logs(claim.generation),
        tls=config.tls == "on",
    )


def limits_of(config: TrainConfig, base: Limits) -> Limits:
    """`base` with the configured deadlines."""
    silent = config.heartbeat_limit_s
    return replace(
        base,
        start_s=config.start_limit_s,
        stall_s=config.stall_limit_s,
        silent_s=base.silent_s if silent is None else silent,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Hooks:
    """Settings that tests and unusual storages change."""

    entry: str = ENTRY
    """The ranks' entry."""
    before_rename: Callable[[], None] = lambda: None
    """Called between writing the manifest and the rename of each commit."""
    lease_watch_s: float = WATCH_S
    """Seconds for which an open lease is watched."""
    lease_every_s: float = REWRITE_EVERY_S
    """Seconds between two checks of lease and claims."""
    limits: Limits = field(default_factory=Limits)
    """Deadlines other than the configured ones."""
    progress: Callable[[TrainConfig, int], RunProgress] = OnTerminal
    """Shows the run, of so many steps, while it trains."""
    model_function: str | None = None
    """The model's function for ranks that cannot import it (training.launch.model_function)."""
    on_epoch: Callable[[dict[str, Any]], None] = lambda row: None
    """Takes the row of each epoch's metrics when it ends; called by a thread that must not wait."""
    ended: Callable[[], EndedByCallerError | None] = lambda: None
    """The error with which the caller ends the run, None while it may continue; asked every 0.2 s."""


def train(
    config: TrainConfig,
    launch: Launch,
    *,
    take_over: bool = False,
    hooks: Hooks | None = None,
    checked: CheckedRun | None = None,
) -> RunResult:
    """Train to the end of `config.epochs`, through restarts; a run that is complete already returns its result.

    `take_over` replaces another driver of the run, which ends when it notices. `checked` is `preflight(config)` where
    the caller has it already.
    Raises ConfigError for an invalid configuration, for one that contradicts the run, and if executors were killed
    twice for their memory; DataError for a dataset or run whose bytes are wrong; TrainingFailedError when ranks failed
    more than `max_restarts` times without a new checkpoint or more than `max_restarts_per_hour` times in an hour;
    SupersededError if another driver has taken the run over; what `hooks.ended` returns.
    """
    hooks = hooks or Hooks()
    checked = checked or preflight(config)
    if checked.finished is not None:
        return checked.finished
    config, plan = checked.config, checked.plan
    fs, paths = filesystem(config.run), RunPaths(config.run)
    notes.show(notes.of_keep_best(config.keep_best))
    memory = None
    if isinstance(launch, SessionLauncher):
        memory = launch.ready(config.num_ranks, config.start_limit_s)
    ownership = Ownership(fs, paths, hooks.lease_watch_s, hooks.lease_every_s, take_over=take_over)
    with ended_in_order(), ownership:
        open_run(fs, paths, config, checked.manifest, plan, confirm=ownership.confirm)
        limits = limits_of(config, hooks.limits)
        with (
            hooks.progress(config, steps_asked(plan, config.epochs, config.max_steps)) as progress,
            Launches(launch, config.num_ranks, limits) as launches,
        ):
            return _Driver(config, plan, fs, paths, hooks, progress, ownership, launches, memory).run()


class _Driver:
    """The loop over generations."""

    def __init__(
        self,
        config: TrainConfig,
        plan: Plan,
        fs: FileSystem,
        paths: RunPaths,
        hooks: Hooks,
        progress: RunProgress,
        ownership: Ownership,
        launches: Launches,
        memory: ExecutorMemory | None,
    ) -> None:
        self._config, self._plan, self._fs, self._paths = config, plan, fs, paths
        self._hooks, self._progress, self._ownership, self._launches = hooks, progress, ownership, launches
        self._memory = memory
        self._first_weights: str | None = None  # their URL, the same for all ranks and after a restart

    def run(self) -> RunResult:
        failures = 0  # in a row, without a new checkpoint
        recent: deque[float] = deque()  # when generations failed within the last hour
        killed_before = False
        void: int | None = None  # a claim of this driver whose parent is deleted
        while True:
            tip = find_tip(self._fs, self._paths, void)
            began = tip.ref if tip else None
            if began is not None and not failures:
                # Later claims asked for epochs too, but no step followed them.
                claims = read_claims(self._fs, self._paths)
                self._note_longer(epochs_asked({g: claims[g] for g in claims if g <= began.generation}))
            claim = self._ownership.claim(began, epochs=self._config.epochs, num_ranks=self._config.num_ranks)
            if claim is None:
                continue  # an overtaken driver has claimed in the meantime: its last commit may be a newer tip
            if began is not None and began not in checkpoints(self._fs, self._paths):
                # Between the look-up and the claim, an older driver's retention deleted that checkpoint.
                void = claim.generation
                continue
            void = None
            # Remove what a paused older driver has staged, so that it cannot publish it when it resumes; then tidy up
            # what it has published until now.
            self._ownership.sweep()
            drop_stagings(self._fs, self._paths, claim.generation)
            tip = take_over(self._fs, self._paths, claim.generation, tip, self._config.keep)
            if tip is not None:
                print(f"resuming from checkpoint {tip.ref}", file=sys.stderr, flush=True)
            commits = self._commits(claim)
            try:
                with self._handler(claim, tip, commits) as handler:
                    results = self._launches.run(self._task(claim), claim.generation, handler)
                self._progress.set(int(results[0]["steps"]))
                return self._finish(claim, commits.tip, results[0])
            except (KeyboardInterrupt, SystemExit):  # Ctrl-C, SIGTERM, a closed terminal
                commits.close(COMMIT_WAIT_S)
                self._print_saved(commits.tip)
                raise
            except LockstepError as error:
                commits.close(COMMIT_WAIT_S)
                if is_final(error) or isinstance(error, SupersededError | LauncherGoneError | EndedByCallerError):
                    raise
                if isinstance(error, RankFailedError) and error.alike:
                    raise
                if isinstance(error, MemoryKillError):
                    if killed_before:
                        raise self._memory_too_small(error, commits.tip) from error
                    killed_before = True
                failures = 1 if commits.tip != began else failures + 1
                if failures > self._config.max_restarts:
                    raise self._given_up(error) from error
                recent.append(time.monotonic())
                while recent[0] < recent[-1] - HOUR_S:
                    recent.popleft()
                if len(recent) > self._config.max_restarts_per_hour:
                    raise self._too_many_failures(error) from error
                where = commits.tip or "the start"
                print(f"generation {claim.generation} failed, resuming from {where}: {error}", file=sys.stderr)

    def _note_longer(self, asked: int) -> None:
        """Print a note if the steps done so far may have followed a shorter schedule than the rest will."""
        epochs, model = self._config.epochs, self._config.model
        if asked < epochs and may_follow_length(model):
            print(
                f"note: {epochs} epochs, but this run was started with {asked}. A schedule of `{model}` over the run, "
                f"such as its learning rate, spans {epochs} epochs from now on; the steps so far followed a span of "
                f"{asked}: the result differs from that of {epochs} epochs in one call (docs/operations.md).",
                file=sys.stderr,
                flush=True,
            )

    def _print_saved(self, tip: CheckpointRef | None) -> None:
        steps = steps_asked(self._plan, self._config.epochs, self._config.max_steps)
        saved = f"the newest checkpoint is {tip}, step {tip.step} of {steps}" if tip else "there is no checkpoint yet"
        then = "resumes from there" if tip else "starts from the beginning"
        print(f"{self._paths.root}: {saved}; the same call {then}", file=sys.stderr, flush=True)

    def _task(self, claim: Claim) -> RankTask:
        hooks, source = self._hooks, self._config.init_from
        if claim.parent is None and source is not None and self._first_weights is None:
            self._first_weights = located(source)
            print(f"first weights: {self._first_weights}", file=sys.stderr, flush=True)
        task = task_of(self._config, self._plan, self._fs, self._paths, claim, hooks.entry)
        more = {"first_weights": self._first_weights, "model_function": hooks.model_function}
        return replace(task, payload={**task.payload, **more})

    def _handler(self, claim: Claim, tip: Checkpoint | None, commits: CommitHandler) -> RunHandler:
        def ended() -> LockstepError | None:
            return self._ownership.overtaken() or self._hooks.ended()

        return RunHandler(
            self._paths, claim, tip, commits, self._progress, ended, self._memory, on_epoch=self._hooks.on_epoch
        )

    def _commits(self, claim: Claim) -> CommitHandler:
        return CommitHandler(
            self._fs,
            self._paths,
            claim,
            self._plan.identity(),
            keep=self._config.keep,
            deadline_s=self._config.stall_limit_s,
            before_rename=self._hooks.before_rename,
            confirm=self._ownership.confirm,
        )

    def _finish(self, claim: Claim, tip: CheckpointRef | None, first: dict[str, Any]) -> RunResult:
        generation, seconds = claim.generation, float(first["seconds"])
        model = self._paths.model(generation)
        result = RunResult(
            run=self._paths.root,
            generation=generation,
            steps=int(first["steps"]),
            epochs=self._config.epochs,
            metrics=dict(first["metrics"]),
            samples=int(first["samples"]),
            seconds=seconds,
            samples_per_s=round(int(first["samples"]) / seconds, 3) if seconds > 0 else 0.0,
            restarts=len(self._launches.restarts),
            restart_log=[restart.to_json() for restart in self._launches.restarts],
            checkpoint=str(tip) if tip else None,
            model=model if self._fs.exists(model) else None,
            class_counts=first.get("class_counts"),
            left_over=[str(sample) for sample in first.get("left_over", [])],
            max_steps=self._config.max_steps,
            stopped_by=first.get("stopped_by"),
            validation_s=float(first.get("validation_s", 0.0)),
        )
        write_file(self._fs, self._paths.result(generation), seal(result.to_json()), confirm=self._ownership.confirm)
        drop_stagings(self._fs, self._paths, generation + 1)
        empty_trash(self._fs, self._paths, generation, self._ownership.confirm)
        return result

    def _memory_too_small(self, error: MemoryKillError, tip: CheckpointRef | None) -> ConfigError:
        where = f"checkpoint {tip}" if tip else "the start"
        return ConfigError(
            f"executors of {self._paths.root} were killed for their memory a second time",
            got=error.got,
            allowed=error.allowed,
            next_step=f"{error.next_step} The same call then resumes from {where}.",
        )

    def _too_many_failures(self, error: LockstepError) -> TrainingFailedError:
        limit = self._config.max_restarts_per_hour
        return TrainingFailedError(
            f"{self._paths.root} failed more often than {limit} times in an hour",
            got=str(error),
            allowed=f"up to {limit} restarts in an hour (--max-restarts-per-hour)",
            next_step="Remove the cause and start again with the same flags: the run resumes from its last checkpoint.",
        )

    def _given_up(self, error: LockstepError) -> LockstepError:
        limit = self._config.max_restarts
        log.error("failures in a row without a new checkpoint: %d, --max-restarts %d", limit + 1, limit)
        if isinstance(error, TrainingFailedError):
            return error
        return TrainingFailedError(
            f"{self._paths.root} failed {limit + 1} times in a row without a new checkpoint",
            got=str(error),
            allowed=f"up to {limit} restarts in a row (--max-restarts)",
            next_step="Remove the cause and start again with the same flags: the run resumes from its last checkpoint.",
        )
