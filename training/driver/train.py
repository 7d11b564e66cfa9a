"""The driver of a run: claims a generation, launches its ranks, begins again from the chain's tip when one fails."""

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
from lockstep.storage.progress import Progress
from lockstep.storage.publish import write_file
from lockstep.storage.settings import hadoop_settings
from lockstep.storage.urls import absolute
from training.comm.options import CommOptions
from training.config import TrainConfig
from training.control.failures import LauncherGoneError, MemoryKillError, RankFailedError
from training.control.protocol import is_final
from training.control.task import Limits, RankTask
from training.driver.commit import CommitHandler, RunHandler
from training.driver.ownership import REWRITE_EVERY_S, WATCH_S, Standing
from training.driver.preflight import finished_result, open_dataset, plan_for
from training.driver.retention import drop_stagings, empty_trash, take_over
from training.launch.executors import ExecutorMemory
from training.launch.session import Launch, Launches, ended_in_order
from training.models import may_follow_length
from training.plan.mixture import Plan
from training.run.comm_plans import read_plans
from training.run.lineage import CheckpointRef, Claim, SupersededError, checkpoints, epochs_asked, find_tip, read_claims
from training.run.paths import RunPaths
from training.run.result import RunResult
from training.run.run_json import check_run, open_run
from training.run.weights_source import located, weights_at

PRELOAD = "training.rank.runtime:preload"


def task_of(
    config: TrainConfig, plan: Plan, fs: FileSystem, paths: RunPaths, claim: Claim, entry: str, preload: str
) -> RankTask:
    """The task of the generation that `claim` names; the communication plans that are frozen by now go with it."""
    options = CommOptions(
        backend=config.backend,
        algorithm=config.algorithm,
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
        preload=preload if config.spare else None,
    )


def limits_of(config: TrainConfig, base: Limits) -> Limits:
    """`base` with the deadlines that the configuration names."""
    silent = config.heartbeat_limit_s
    return replace(
        base,
        start_s=config.start_limit_s,
        stall_s=config.stall_limit_s,
        silent_s=base.silent_s if silent is None else silent,
    )


log = logging.getLogger(__name__)
ENTRY = "training.rank.runtime:main"
COMMIT_WAIT_S = 60.0
HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Hooks:
    """What tests and unusual storages change."""

    entry: str = ENTRY
    """The ranks' entry."""
    preload: str = PRELOAD
    """What spare processes import, with `--spare`."""
    before_rename: Callable[[], None] = lambda: None
    """Called between the manifest and the rename of each commit."""
    lease_watch_s: float = WATCH_S
    """Seconds for which an open lease is watched."""
    lease_every_s: float = REWRITE_EVERY_S
    """Seconds between two looks at the lease and the claims."""
    limits: Limits = field(default_factory=Limits)
    """Deadlines other than the configured ones."""


def train(config: TrainConfig, launch: Launch, *, take_over: bool = False, hooks: Hooks | None = None) -> RunResult:
    """Train to the end of `config.epochs`, through restarts; a run that is complete already returns its result.

    `take_over`: a driver that is at work on the run is not waited for; it is replaced, and ends when it notices.
    Raises ConfigError where the call cannot be right or contradicts the run, and where executors were killed twice for
    their memory; DataError for a dataset or run whose bytes are wrong; TrainingFailedError when ranks failed more than
    `max_restarts` times without a new checkpoint or more than `max_restarts_per_hour` times in an hour;
    SupersededError where another driver has taken the run over.
    """
    hooks = hooks or Hooks()
    first_weights = None if config.init_from is None else absolute(config.init_from)
    datasets = tuple(map(absolute, config.datasets))
    config = replace(config, datasets=datasets, run=absolute(config.run), init_from=first_weights)
    manifest, _ = open_dataset(config)
    plan = plan_for(manifest, config)
    steps = plan.steps(config.epochs)
    fs, paths = filesystem(config.run), RunPaths(config.run)
    if check_run(fs, paths, config, plan) and (finished := finished_result(fs, paths, config)):
        return finished
    if first_weights is not None and not fs.exists(paths.run_json):
        weights_at(first_weights)  # what is not there is told before anything is started
    ready = getattr(launch, "ready", None)
    memory = ready(config.num_ranks, config.start_limit_s) if ready is not None else None
    standing = Standing(fs, paths, hooks.lease_watch_s, hooks.lease_every_s, take_over=take_over)
    with ended_in_order(), standing:
        open_run(fs, paths, config, manifest, plan, confirm=standing.confirm)
        limits = limits_of(config, hooks.limits)
        with (
            Progress("training", steps, "steps") as progress,
            Launches(launch, config.num_ranks, limits) as launches,
        ):
            return _Driver(config, plan, fs, paths, hooks, progress, standing, launches, memory).run()


class _Driver:
    def __init__(
        self,
        config: TrainConfig,
        plan: Plan,
        fs: FileSystem,
        paths: RunPaths,
        hooks: Hooks,
        progress: Progress,
        standing: Standing,
        launches: Launches,
        memory: ExecutorMemory | None,
    ) -> None:
        self._config, self._plan, self._fs, self._paths = config, plan, fs, paths
        self._hooks, self._progress, self._standing, self._launches = hooks, progress, standing, launches
        self._memory = memory
        self._first_weights: str | None = None  # where they lie: the same for all ranks, and after a restart

    def run(self) -> RunResult:
        failures = 0  # in a row, without a new checkpoint between
        recent: deque[float] = deque()  # when generations failed within the last hour
        killed_before = False
        void: int | None = None  # a claim of this driver whose parent is gone
        while True:
            tip = find_tip(self._fs, self._paths, void)
            began = tip.ref if tip else None
            if began is not None and not failures:
                # What was asked for after that checkpoint, without a step of its own, no step has followed.
                claims = read_claims(self._fs, self._paths)
                self._tell_longer(epochs_asked({g: claims[g] for g in claims if g <= began.generation}))
            claim = self._standing.claim(began, epochs=self._config.epochs, num_ranks=self._config.num_ranks)
            if claim is None:
                continue  # an overtaken driver claimed in the meantime: its last commit may be a newer tip
            if began is not None and began not in checkpoints(self._fs, self._paths):
                # An older driver went on between the look-up and the claim, until its retention deleted that one.
                void = claim.generation
                continue
            void = None
            # What an older driver that was stopped has prepared is taken away before it can wake and publish it, and
            # what it has published until now is then put in order.
            self._standing.sweep()
            drop_stagings(self._fs, self._paths, claim.generation)
            tip = take_over(self._fs, self._paths, claim.generation, tip, self._config.keep)
            if tip is not None:
                print(f"going on from checkpoint {tip.ref}", file=sys.stderr, flush=True)
            commits = self._commits(claim)
            try:
                overtaken = self._standing.overtaken
                with RunHandler(self._paths, claim, tip, commits, self._progress, overtaken, self._memory) as handler:
                    results = self._launches.run(self._task(claim), claim.generation, handler)
                self._progress.set(int(results[0]["steps"]))
                return self._finish(claim, commits.tip, results[0])
            except (KeyboardInterrupt, SystemExit):  # Ctrl-C, SIGTERM, a closed terminal
                commits.close(COMMIT_WAIT_S)
                self._tell_saved(commits.tip)
                raise
            except LockstepError as error:
                commits.close(COMMIT_WAIT_S)
                if is_final(error) or isinstance(error, SupersededError | LauncherGoneError):
                    raise
                if isinstance(error, RankFailedError) and error.alike:
                    raise
                if isinstance(error, MemoryKillError):
                    if killed_before:
                        raise self._too_small(error, commits.tip) from error
                    killed_before = True
                failures = 1 if commits.tip != began else failures + 1
                if failures > self._config.max_restarts:
                    raise self._given_up(error) from error
                recent.append(time.monotonic())
                while recent[0] < recent[-1] - HOUR_S:
                    recent.popleft()
                if len(recent) > self._config.max_restarts_per_hour:
                    raise self._creeps(error) from error
                where = commits.tip or "the start"
                print(f"generation {claim.generation} failed, going on from {where}: {error}", file=sys.stderr)

    def _tell_longer(self, asked: int) -> None:
        """Say so where the steps that are done may have followed a shorter schedule than the rest will."""
        epochs, model = self._config.epochs, self._config.model
        if asked < epochs and may_follow_length(model):
            print(
                f"note: {epochs} epochs, where this run was asked for {asked}. What `{model}` schedules over the run, "
                f"such as its learning rate, spans {epochs} from here on; the steps that are done followed a span of "
                f"{asked}: the result is not that of {epochs} epochs in one go (docs/operations.md).",
                file=sys.stderr,
                flush=True,
            )

    def _tell_saved(self, tip: CheckpointRef | None) -> None:
        steps = self._plan.steps(self._config.epochs)
        saved = f"the newest checkpoint is {tip}, step {tip.step} of {steps}" if tip else "there is no checkpoint yet"
        then = "resumes from there" if tip else "starts from the beginning"
        print(f"{self._paths.root}: {saved}; the same command {then}", file=sys.stderr, flush=True)

    def _task(self, claim: Claim) -> RankTask:
        hooks, source = self._hooks, self._config.init_from
        if claim.parent is None and source is not None and self._first_weights is None:
            self._first_weights = located(source)
            print(f"first weights: {self._first_weights}", file=sys.stderr, flush=True)
        task = task_of(self._config, self._plan, self._fs, self._paths, claim, hooks.entry, hooks.preload)
        return replace(task, payload={**task.payload, "first_weights": self._first_weights})

    def _commits(self, claim: Claim) -> CommitHandler:
        return CommitHandler(
            self._fs,
            self._paths,
            claim,
            self._plan.identity(),
            keep=self._config.keep,
            deadline_s=self._config.stall_limit_s,
            before_rename=self._hooks.before_rename,
            confirm=self._standing.confirm,
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
        )
        write_file(self._fs, self._paths.result(generation), seal(result.to_json()), confirm=self._standing.confirm)
        drop_stagings(self._fs, self._paths, generation + 1)
        empty_trash(self._fs, self._paths, generation, self._standing.confirm)
        return result

    def _too_small(self, error: MemoryKillError, tip: CheckpointRef | None) -> ConfigError:
        where = f"checkpoint {tip}" if tip else "the start"
        return ConfigError(
            f"executors of {self._paths.root} were killed for their memory a second time",
            got=error.got,
            allowed=error.allowed,
            next_step=f"{error.next_step} The same call then resumes from {where}.",
        )

    def _creeps(self, error: LockstepError) -> TrainingFailedError:
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
            f"{self._paths.root} failed {limit + 1} times without a new checkpoint between",
            got=str(error),
            allowed=f"up to {limit} restarts in a row",
            next_step="Mend the cause and start again with the same flags: the run goes on from its last checkpoint.",
        )
