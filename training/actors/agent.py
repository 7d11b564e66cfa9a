"""The driver of an agent's run: it claims the run, launches learners, publishes their checkpoints, and starts again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.storage.documents import seal, unseal_as
from lockstep.storage.errors import CommunicationError, ConfigError, LockstepError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.settings import hadoop_settings
from lockstep.training.actors.config import AgentConfig, LearnerOrder
from lockstep.training.actors.environment import Shape, shape_of
from lockstep.training.actors.learner import ENTRY, Progress
from lockstep.training.control.messages import CheckpointReport
from lockstep.training.control.protocol import is_final
from lockstep.training.control.server import Handler
from lockstep.training.control.task import RankTask
from lockstep.training.driver.commit import CommitHandler
from lockstep.training.driver.ownership import WATCH_S, Ownership
from lockstep.training.driver.retention import drop_stagings, tidy_up
from lockstep.training.driver.stop import StopRequest, write_stopped
from lockstep.training.launch.session import Launch
from lockstep.training.rules import Keep
from lockstep.training.run.lineage import Checkpoint, Claim, find_tip
from lockstep.training.run.metrics import PartWriter
from lockstep.training.run.paths import RunPaths

FORMAT_VERSION = 1
MOST_RESTARTS = 3  # in a row without a new checkpoint
GRACE_S = 30.0
COMMIT_WAIT_S = 60.0
KEEP = Keep(last=2)


@dataclass(frozen=True, slots=True)
class Played:
    """A run that has ended."""

    run: str
    progress: Progress
    model: str | None
    """The URL of the Keras model's folder; None if the run was stopped before its end."""

    def words(self) -> str:
        """A line for people."""
        return f"{self.run}: {self.progress.words()}"

    def to_json(self) -> dict[str, Any]:
        """The result as JSON."""
        return {
            "run": self.run,
            "model": self.model,
            "mean_return": self.progress.mean_return,
        } | self.progress.to_json()


def play(
    config: AgentConfig,
    launch: Launch,
    *,
    report: Callable[[str], None] = print,
    lease_watch_s: float = WATCH_S,
) -> Played:
    """Play and learn to the last step; a run that has made it already returns its result, one that was stopped resumes.

    What was in flight at an end is lost, and counted: experience is no dataset, so a resumed run does not repeat the
    one that was cut. Raises ConfigError for options, an environment that cannot be opened, and a run that another
    driver works on; DataError for a run that was begun with other options; TrainingFailedError if learners failed
    MOST_RESTARTS times without a new checkpoint. After SIGTERM or Ctrl-C learners write a checkpoint, and this raises
    SystemExit or StoppedRun (lockstep.training.driver.stop).
    """
    shape = shape_of(config.env)
    fs, paths = filesystem(config.run), RunPaths(config.run)
    _open_run(fs, paths, config)
    failures = 0
    with StopRequest(GRACE_S).taken() as stop, Ownership(fs, paths, lease_watch_s) as owner:
        while True:
            tip = find_tip(fs, paths)
            began = Progress() if tip is None else Progress.from_json(tip.manifest["state"]["agent"])
            if tip is not None and began.steps >= config.steps and fs.exists(model := paths.model(tip.ref.generation)):
                return Played(config.run, began, model)
            claim = owner.claim(tip.ref if tip else None, epochs=0, num_ranks=1)  # rank 0 alone writes checkpoints
            if claim is None:
                continue
            owner.sweep()
            fs.discard(paths.stopped)
            drop_stagings(fs, paths, claim.generation)
            tip = tidy_up(fs, paths, claim.generation, tip, KEEP)
            handler = AgentHandler(fs, paths, claim, config, stop, owner, report)
            task = _task(config, paths, claim, tip, shape)
            try:
                with stop.waits():
                    found = launch(task, config.learners, generation=claim.generation, handler=handler)[0]
            except LockstepError as error:
                failures = failures + 1 if handler.tip == claim.parent else 1
                if is_final(error) or failures > MOST_RESTARTS or stop.by is not None or owner.overtaken():
                    raise
                report(f"learners start again from {handler.tip or 'the beginning'}: {error.what}")
                continue
            finally:
                handler.close()
            played = Played(config.run, Progress.from_json(found["progress"]), handler.model)
            if found["left"]:
                write_stopped(
                    fs, paths, generation=claim.generation, by=str(stop.by), tip=handler.tip, steps=config.steps,
                    saved=True,
                )  # fmt: skip
                stop.last_line = f"{played.words()}\nstopped; the same call resumes it"
                stop.leave()
            return played


def _task(config: AgentConfig, paths: RunPaths, claim: Claim, tip: Checkpoint | None, shape: Shape) -> RankTask:
    staging = paths.staging(claim.generation, claim.nonce)
    checkpoint = None if tip is None else tip.url
    order = LearnerOrder(config=config, staging=staging, checkpoint=checkpoint, shape=shape)
    logs = paths.logs(claim.generation)
    return RankTask(ENTRY, order.to_json(), hadoop=hadoop_settings(), logs=logs, leaves=True)


def _open_run(fs: FileSystem, paths: RunPaths, config: AgentConfig) -> None:
    """Write the run's configuration, or check that this call continues it."""
    if fs.exists(paths.run_json):
        raise ConfigError(
            f"{paths.root} is a run of lockstep train",
            got=paths.run_json,
            allowed="a new folder, or a run of lockstep agent",
            next_step="Name another --run.",
        )
    where = paths.agent_json
    if fs.exists(where):
        document = unseal_as("agent", fs.read_bytes(where), where, version=FORMAT_VERSION)
        config.check_resumes(AgentConfig.from_json(document["config"]))
        return
    fs.mkdirs(paths.root)
    document = {"format_version": FORMAT_VERSION, "kind": "agent", "config": config.to_json()}
    write_file(fs, where, seal(document))


class AgentHandler(Handler):
    """The driver's side of one generation of learners."""

    def __init__(
        self,
        fs: FileSystem,
        paths: RunPaths,
        claim: Claim,
        config: AgentConfig,
        stop: StopRequest,
        owner: Ownership,
        report: Callable[[str], None],
    ) -> None:
        super().__init__()
        plan = {"env": config.env, "seed": config.seed}
        self._commits = CommitHandler(
            fs, paths, claim, plan, keep=KEEP, deadline_s=COMMIT_WAIT_S, confirm=owner.confirm
        )
        self._metrics = PartWriter(paths.metrics(claim.generation), "jsonl", confirm=owner.confirm)
        self._stop, self._owner, self._report = stop, owner, report
        self.model: str | None = None

    @property
    def tip(self) -> Any:
        """The newest checkpoint."""
        return self._commits.newest()

    def answer(self, rank: int, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        if kind == "agent":
            self._metrics.add(json.dumps(fields["row"], sort_keys=True))
            self._metrics.flush_if_due()
            self._report(line_of(fields["row"]))
            return {}
        if kind == "checkpoint":
            return self._commits.checkpoint(rank, CheckpointReport.from_json(fields))
        if kind == "model":
            reply = self._commits.model(rank, fields)
            self.model = reply["model"]
            return reply
        raise CommunicationError(
            f"learner {rank} asks for `{kind}`",
            got=kind,
            allowed="agent, checkpoint, model",
            next_step="Ship one version to ranks and driver.",
        )

    def overtaken(self) -> BaseException | None:
        return self._owner.overtaken()

    def leave(self) -> float | None:
        return self._stop.grace_s if self._stop.by is not None else None

    def close(self) -> None:
        """Write the last metrics."""
        self._commits.close(COMMIT_WAIT_S)
        self._metrics.try_flush()


def line_of(row: dict[str, Any]) -> str:
    """A row of the metrics for people."""
    mean = "-" if row["mean_return"] is None else f"{row['mean_return']:.1f}"
    return (
        f"{row['env_steps']} steps, {row['env_steps_per_s']:.0f} a second; mean return {mean}; "
        f"lag {row['lag_mean'] or 0:.1f} (at most {row['lag_max']}), rho {row['rho_mean'] or 1:.3f}, "
        f"{row['dropped']} dropped, {row['lost']} lost"
    )
