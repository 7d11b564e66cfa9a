"""A learner's rank: it takes its actors' trajectories, makes updates with the other learners, and reports.

Actors are outside of the learners' mesh, since a mesh ends with each of its ranks (decision 093). What learners do
together (the end, a report, a checkpoint) is asked for with the sum of the gradients, so all do it after one update.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lockstep.storage.documents import sha256_hex
from lockstep.storage.errors import TrainingFailedError
from lockstep.training.actors.config import AgentConfig, LearnerOrder
from lockstep.training.actors.crew import ACTOR_LIMIT_S, Crew
from lockstep.training.actors.player import PLAYED
from lockstep.training.control.context import RankContext
from lockstep.training.control.messages import CheckpointReport
from lockstep.training.control.protocol import Message
from lockstep.training.rank import runtime
from lockstep.training.run.checkpoint import HostBuffer, file_name, read_manifest, write_bytes
from lockstep.training.run.checkpoint_division import read_whole
from lockstep.training.run.paths import staged_checkpoint, staged_model

if TYPE_CHECKING:
    from lockstep.training.actors.updates import Updates
    from lockstep.training.comm.base import Communicator

ENTRY = "lockstep.training.actors.learner:main"
REPORT_EVERY_S = 5.0
STORE_S = 600.0  # for the driver to publish what was uploaded
LAST = 100
"""Episodes whose mean return is reported."""
KINDS = ("weights", "optimizer")
MODEL_FILE = "model.keras"


@dataclass(frozen=True, kw_only=True)
class Progress(Message):
    """How far a run is, or one learner's part of it since it started."""

    updates: int = 0
    steps: int = 0
    """Steps of environments; resets are none."""
    episodes: int = 0
    returns: list[list[float]] = field(default_factory=list)
    """[update, return] of each of the last episodes, in order."""
    trajectories: int = 0
    lag_sum: int = 0
    """The sum over trajectories of the updates between their weights and the ones that they changed."""
    lag_max: int = 0
    rho_sum: float = 0.0
    """The sum over trajectories of the mean of min(1, pi / mu) over the steps of their update."""
    dropped: int = 0
    """Trajectories that were too old."""
    lost: int = 0
    """Trajectories that ended with their actor or their learner."""
    replaced: int = 0
    """Actors that were replaced."""
    under_way: int = 0
    """Trajectories that were being played or waited in a queue."""

    @property
    def mean_return(self) -> float | None:
        """The mean return of the last LAST episodes; None before the first one has ended."""
        last = [one for _, one in self.returns[-LAST:]]
        return sum(last) / len(last) if last else None

    def words(self) -> str:
        """A line for people."""
        mean = "no episode has ended" if self.mean_return is None else f"mean return {self.mean_return:.4g}"
        return (
            f"{self.steps} steps, {self.episodes} episodes, {mean}; {self.updates} updates, "
            f"lag {self.lag_sum / max(1, self.trajectories):.1f} (at most {self.lag_max}), "
            f"rho {self.rho_sum / max(1, self.trajectories):.3f}; trajectories: "
            f"{self.trajectories} used, {self.dropped} dropped, {self.lost} lost; {self.replaced} actors replaced"
        )

    def resumed(self) -> Progress:
        """The progress of a run that continues from here: what was under way is lost."""
        return replace(self, lost=self.lost + self.under_way, under_way=0)

    def with_parts(self, parts: Sequence[Progress]) -> Progress:
        """Add what learners have done since this; `updates` and `steps` are the sum's own."""
        every = [self, *parts]
        sums: dict[str, Any] = {
            name: sum(getattr(one, name) for one in every)
            for name in ("episodes", "trajectories", "lag_sum", "rho_sum", "dropped", "lost", "replaced")
        }
        sums["under_way"] = sum(part.under_way for part in parts)
        returns = sorted((one for part in every for one in part.returns), key=lambda one: one[0])[-LAST:]
        return replace(self, returns=returns, lag_max=max(one.lag_max for one in every), **sums)

    def row(self, seconds: float, since: int) -> dict[str, Any]:
        """A line of the run's metrics; `since` steps were done before these `seconds`."""
        return {
            "kind": "agent",
            "step": self.updates,
            "env_steps": self.steps,
            "episodes": self.episodes,
            "mean_return": self.mean_return,
            "lag_mean": self.lag_sum / self.trajectories if self.trajectories else None,
            "lag_max": self.lag_max,
            "rho_mean": self.rho_sum / self.trajectories if self.trajectories else None,
            "dropped": self.dropped,
            "lost": self.lost,
            "replaced": self.replaced,
            "env_steps_per_s": (self.steps - since) / max(seconds, 1e-9),
        }


class Tally:
    """One learner's part of the progress since it started."""

    def __init__(self) -> None:
        self._part = Progress()
        self._returns: deque[list[float]] = deque(maxlen=LAST)

    def add(self, batch: Sequence[NDArray[Any]], update: int) -> int:
        """Count the trajectories of an update; returns the steps that they have."""
        lags = [update - int(record["version"][0]) for record in batch]
        ended = [one for record in batch for one in record["returns"][~np.isnan(record["returns"])].tolist()]
        self._returns.extend([update, one] for one in ended)
        part = self._part
        self._part = replace(
            part,
            episodes=part.episodes + len(ended),
            trajectories=part.trajectories + len(batch),
            lag_sum=part.lag_sum + sum(lags),
            lag_max=max(part.lag_max, *lags),
        )
        return sum(int((record["what"] & PLAYED > 0).sum()) for record in batch)

    def add_rho(self, rho: float, trajectories: int) -> None:
        """Count how near the policy these trajectories of an update were (`Updates.rho`)."""
        self._part = replace(self._part, rho_sum=self._part.rho_sum + rho * trajectories)

    def part(self, crew: Crew) -> Progress:
        """The progress so far."""
        counts = crew.counts
        return replace(
            self._part,
            returns=list(self._returns),
            dropped=counts.dropped,
            lost=counts.lost,
            replaced=counts.replaced,
            under_way=crew.under_way,
        )


def main(context: RankContext) -> dict[str, Any]:
    """Learn until the run's last step, or until the driver asks to leave; returns {progress, left, seconds}."""
    order = LearnerOrder.from_json(context.payload)
    runtime.configure(context.world, precision="float32", seed=order.config.seed)
    return opened(context, order, context.communicator()).run()


def opened(context: RankContext, order: LearnerOrder, comm: Communicator) -> Learner:
    """A learner that continues from the order's checkpoint; TensorFlow has been set up."""
    from lockstep.training.actors.updates import Updates  # here, since it imports TensorFlow

    updates = Updates(order.config, order.shape, comm)
    began = Progress()
    if order.checkpoint is not None:
        manifest = read_manifest(order.checkpoint)
        updates.load(read_whole(order.checkpoint, manifest, KINDS))
        began = Progress.from_json(manifest["state"]["agent"]).resumed()
    return Learner(context, order, comm, updates, began)


class Learner:
    """One learner's loop."""

    def __init__(
        self, context: RankContext, order: LearnerOrder, comm: Communicator, updates: Updates, began: Progress
    ) -> None:
        self._context, self._order, self.comm, self._updates = context, order, comm, updates
        self._config: AgentConfig = order.config
        self._began, self._tally = began, Tally()
        self._version, self._steps = began.updates, began.steps
        self._leads = comm.rank == 0
        self._buffer = HostBuffer()

    def run(self) -> dict[str, Any]:
        """Make updates to the end; returns {progress, left, seconds}."""
        config, rank = self._config, self.comm.rank
        first = reported = saved = time.monotonic()
        leaving, since = self._context.control.leaving, self._steps
        left = False
        crew = Crew(config, self._order.shape.inputs, rank, self._context.world.generation, self._updates.weights())
        crew.publish(self._version, self._updates.weights())
        with crew:
            while self._steps < config.steps and not left:
                batch = [crew.take(self._version, ACTOR_LIMIT_S) for _ in range(config.batch)]
                steps, now = self._tally.add(batch, self._version), time.monotonic()
                asks = (
                    self._leads and now - reported > REPORT_EVERY_S,
                    self._leads and now - saved > config.save_every_s,
                )
                sums = self._updates.update(batch, self._steps / config.steps, [steps, leaving.is_set(), *asks])
                self._tally.add_rho(self._updates.rho, len(batch))
                self._version, self._steps, left = self._version + 1, self._steps + int(sums[0]), bool(sums[1])
                crew.publish(self._version, self._updates.weights())
                self._context.control.beat(self._version, "play")
                if sums[2] or sums[3]:
                    progress = self._gathered(crew)
                    if self._leads and sums[2]:
                        self._context.control.notify("agent", row=progress.row(now - reported, since))
                        reported, since = now, self._steps
                    if self._leads and sums[3]:
                        self._save(progress)
                        saved = time.monotonic()
        progress = self._gathered(crew)
        if self._leads:
            self._save(progress)
            if not left:
                self._export()
        return {"progress": progress.to_json(), "left": left, "seconds": time.monotonic() - first}

    def _gathered(self, crew: Crew) -> Progress:
        """The run's progress, from all learners. A collective; raises TrainingFailedError if their weights differ."""
        digest = sha256_hex(self._updates.weights().tobytes())
        said = json.dumps({"part": self._tally.part(crew).to_json(), "weights": digest}).encode()
        every = [json.loads(one) for one in self.comm.all_gather_bytes(said)]
        digests = [one["weights"] for one in every]
        if differing := [rank for rank, one in enumerate(digests) if one != digests[0]]:
            raise TrainingFailedError(
                f"the weights of learners differ after update {self._version}",
                got=f"learner {differing[0]}: {digests[differing[0]][:16]}, learner 0: {digests[0][:16]}",
                allowed="the same bits on all learners",
                next_step="Start again, from the last checkpoint; if it happens again, test the hosts' memory.",
            )
        began = replace(self._began, updates=self._version, steps=self._steps)
        return began.with_parts([Progress.from_json(one["part"]) for one in every])

    def _save(self, progress: Progress) -> None:
        tensors = self._updates.tensors()
        folder = staged_checkpoint(self._order.staging, self._version)
        file = write_bytes(folder, file_name(0), self._buffer.fill(tensors).tobytes())
        report = CheckpointReport(
            step=self._version,
            files=[file],
            tensors={name: [one.dtype.name, list(one.shape), 0, int(one.size)] for name, one in tensors.items()},
            state={"agent": progress.to_json()},
        )
        self._context.control.request("checkpoint", STORE_S, **report.to_json())

    def _export(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, MODEL_FILE)
            self._updates.model.save(path)
            file = write_bytes(staged_model(self._order.staging), MODEL_FILE, path.read_bytes())
        self._context.control.request("model", STORE_S, files=[file])
