"""The driver of a run: claims a generation, launches its ranks, begins again from the chain's tip when one fails."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from storage.errors import LockstepError, TrainingFailedError
from storage.fs import FileSystem, absolute, filesystem, split_url
from storage.manifest import DatasetManifest
from storage.progress import Progress
from storage.publish import write_file
from storage.sealed import seal
from storage.settings import hadoop_settings
from training.chain import find_result, find_tip
from training.claims import CheckpointRef, Claim, SupersededError, epochs_asked, read_claims
from training.comm.options import CommOptions
from training.commit import CommitHandler
from training.config import TrainConfig
from training.control.carry import is_final
from training.control.failures import LauncherGoneError
from training.frozen_plans import read_plans
from training.handler import RunHandler
from training.launch.signals import ended_in_order
from training.launch.task import Handler, Limits, RankTask
from training.lease import REWRITE_EVERY_S, WATCH_S
from training.models import may_follow_length
from training.parts import held_out, open_parts
from training.paths import RunPaths
from training.plan import EpochPlan, split_of
from training.planning import plan_for
from training.reader import load_encoder
from training.retention import drop_stagings, take_over
from training.run_json import check_run, open_run
from training.run_result import RunResult
from training.standing import Standing

log = logging.getLogger(__name__)

ENTRY = "training.fit:main"
COMMIT_WAIT_S = 60.0


class Launch(Protocol):
    """`run_local`, or `OnSpark(spark)`, whose method `ready` is asked before a run is begun."""

    def __call__(
        self,
        task: RankTask,
        num_ranks: int,
        *,
        generation: int = 1,
        limits: Limits | None = None,
        handler: Handler | None = None,
    ) -> list[dict[str, Any]]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Hooks:
    """What tests and unusual storages change."""

    entry: str = ENTRY
    """The ranks' entry."""
    before_rename: Callable[[], None] = lambda: None
    """Called between the manifest and the rename of each commit."""
    lease_watch_s: float = WATCH_S
    """Seconds for which an open lease is watched."""
    lease_every_s: float = REWRITE_EVERY_S
    """Seconds between two looks at the lease and the claims."""
    limits: Limits = field(default_factory=Limits)
    """Deadlines other than the configured ones."""


def check(config: TrainConfig) -> RunResult | None:
    """What `train` would refuse or return at once, as far as local paths tell it: before anything is started.

    Other file systems may need Spark's settings, so there `train` itself tells.
    """
    if all(map(_is_local, config.datasets)):
        plan = plan_for(_opened(config), config)
        plan.steps(config.epochs)
        if _is_local(config.run) and check_run(filesystem(config.run), RunPaths(config.run), config, plan):
            return _finished(filesystem(config.run), RunPaths(config.run), config)
    return None


def train(config: TrainConfig, launch: Launch, *, take_over: bool = False, hooks: Hooks | None = None) -> RunResult:
    """Train to the end of `config.epochs`, through restarts; a run that is complete already returns its result.

    `take_over`: a driver that is at work on the run is not waited for; it is replaced, and ends when it notices.
    Raises ConfigError where the call cannot be right or contradicts the run, DataError for a dataset or run whose
    bytes are wrong, TrainingFailedError when ranks failed `max_restarts` times without a new checkpoint,
    SupersededError where another driver has taken the run over.
    """
    hooks = hooks or Hooks()
    config = replace(config, datasets=tuple(map(absolute, config.datasets)), run=absolute(config.run))
    manifest = _opened(config)
    plan = plan_for(manifest, config)
    steps = plan.steps(config.epochs)
    fs, paths = filesystem(config.run), RunPaths(config.run)
    if check_run(fs, paths, config, plan) and (finished := _finished(fs, paths, config)):
        return finished
    ready = getattr(launch, "ready", None)
    if ready is not None:
        ready(config.num_ranks, config.start_limit_s)
    standing = Standing(fs, paths, hooks.lease_watch_s, hooks.lease_every_s, take_over=take_over)
    with ended_in_order(), standing:
        open_run(fs, paths, config, manifest, plan, confirm=standing.confirm)
        with Progress("training", steps, "steps") as progress:
            return _Driver(config, plan, manifest, fs, paths, hooks, progress, standing).run(launch)


def _opened(config: TrainConfig) -> DatasetManifest:
    """The manifest of what is trained on; what its ranks would refuse in it (one fold of three) is refused here."""
    parts, manifest = open_parts(config.datasets, config.split)
    first = parts[0]
    split_of(manifest, config.split)
    load_encoder(first.url, first.manifest, held_out(first.manifest, config.split, training=True))
    return manifest


def _finished(fs: FileSystem, paths: RunPaths, config: TrainConfig) -> RunResult | None:
    done = find_result(fs, paths)
    if done is None or int(done["epochs"]) < config.epochs:
        return None
    return RunResult(**{name: done[name] for name in RunResult.__dataclass_fields__})


def _is_local(url: str) -> bool:
    return split_url(url)[0] == "file"


class _Driver:
    def __init__(
        self,
        config: TrainConfig,
        plan: EpochPlan,
        manifest: DatasetManifest,
        fs: FileSystem,
        paths: RunPaths,
        hooks: Hooks,
        progress: Progress,
        standing: Standing,
    ) -> None:
        self._config, self._plan, self._manifest = config, plan, manifest
        self._fs, self._paths, self._hooks, self._progress, self._standing = fs, paths, hooks, progress, standing

    def run(self, launch: Launch) -> RunResult:
        failures = restarts = 0  # failures: in a row, without a new checkpoint between
        while True:
            tip = find_tip(self._fs, self._paths)
            began = tip.ref if tip else None
            if began is not None and not restarts:
                # What was asked for after that checkpoint, without a step of its own, no step has followed.
                claims = read_claims(self._fs, self._paths)
                self._tell_longer(epochs_asked({g: claims[g] for g in claims if g <= began.generation}))
            claim = self._standing.claim(began, epochs=self._config.epochs, num_ranks=self._config.num_ranks)
            if claim is None:
                continue  # an overtaken driver claimed in the meantime: its last commit may be a newer tip
            # What an older driver that was stopped has prepared is taken away before it can wake and publish it, and
            # what it has published until now is then put in order.
            self._standing.sweep()
            drop_stagings(self._fs, self._paths, claim.generation)
            take_over(self._fs, self._paths, claim.generation, tip, self._config.keep_checkpoints)
            # The tip may have come back out of the trash.
            tip = find_tip(self._fs, self._paths) if tip and "/.trash/" in tip.url else tip
            if tip is not None:
                print(f"going on from checkpoint {tip.ref}", file=sys.stderr, flush=True)
            commits = self._commits(claim)
            try:
                with RunHandler(self._paths, claim, tip, commits, self._progress, self._standing.overtaken) as handler:
                    results = launch(
                        self._task(claim),
                        self._config.num_ranks,
                        generation=claim.generation,
                        limits=self._limits(),
                        handler=handler,
                    )
                self._progress.set(int(results[0]["steps"]))
                return self._finish(claim, commits.tip, results[0], restarts)
            except LockstepError as error:
                commits.close(COMMIT_WAIT_S)
                if is_final(error) or isinstance(error, SupersededError | LauncherGoneError):
                    raise
                failures = 1 if commits.tip != began else failures + 1
                if failures > self._config.max_restarts:
                    raise self._given_up(error) from error
                restarts += 1
                where = commits.tip or "the start"
                print(f"generation {claim.generation} failed, going on from {where}: {error}", file=sys.stderr)

    def _tell_longer(self, asked: int) -> None:
        """Say so where the steps that are done may have followed a shorter schedule than the rest will."""
        epochs, model = self._config.epochs, self._config.model
        if asked < epochs and may_follow_length(model):
            print(
                f"note: {epochs} epochs, where this run was asked for {asked}. What `{model}` schedules over the run, "
                f"such as its learning rate, spans {epochs} from here on; the steps that are done followed a span of "
                f"{asked}: the result is not that of {epochs} epochs in one go (docs/control.md).",
                file=sys.stderr,
                flush=True,
            )

    def _task(self, claim: Claim) -> RankTask:
        config = self._config
        options = CommOptions(
            backend=config.backend,
            algorithm=config.algorithm,
            trust_network=config.trust_network,
            plans=read_plans(self._fs, self._paths, config.num_ranks),
        )
        payload = {
            "config": config.to_json(),
            "plan": self._plan.identity(),
            "comm": {"options": options.to_json(), "freeze": True},
        }
        settings = hadoop_settings()
        return RankTask(
            self._hooks.entry,
            payload,
            hadoop=settings,
            logs=self._paths.logs(claim.generation),
            tls=self._config.tls == "on",
        )

    def _limits(self) -> Limits:
        base = self._hooks.limits
        return Limits(
            start_s=self._config.start_limit_s,
            stall_s=self._config.stall_limit_s,
            beat_s=base.beat_s,
            silent_s=base.silent_s,
            grace_s=base.grace_s,
            lost_s=base.lost_s,
        )

    def _commits(self, claim: Claim) -> CommitHandler:
        return CommitHandler(
            self._fs,
            self._paths,
            claim,
            self._plan.identity(),
            keep=self._config.keep_checkpoints,
            deadline_s=self._config.stall_limit_s,
            before_rename=self._hooks.before_rename,
        )

    def _finish(self, claim: Claim, tip: CheckpointRef | None, first: dict[str, Any], restarts: int) -> RunResult:
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
            restarts=restarts,
            checkpoint=str(tip) if tip else None,
            model=model if self._fs.exists(model) else None,
            left_over=[str(sample) for sample in first.get("left_over", [])],
        )
        write_file(self._fs, self._paths.result(generation), seal(result.to_json()), confirm=self._standing.confirm)
        drop_stagings(self._fs, self._paths, generation + 1)
        return result

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
