"""Checkpoints of a rank: what is in them, how they are handed to the driver, and the way back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import keras

from storage.errors import LockstepError
from training import callback_state, state
from training.audit import AuditLog
from training.checkpoint import Tensors, read_rank_file, read_resumable, write_bytes, write_rank_file
from training.comm.base import Communicator
from training.config import TrainConfig
from training.control.carry import json_safe
from training.launch.context import RankContext
from training.paths import RunPaths, staged_checkpoint


@dataclass(slots=True)
class Progress:
    """How far a run is."""

    step: int
    """Optimizer steps done."""
    stopped: bool
    """Whether a callback has ended the training."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Of the last whole epoch, over all ranks."""


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint to go on from."""

    url: str
    manifest: dict[str, Any]
    tensors: Tensors
    """Rank 0's file."""


class Saver:
    """Writes and restores checkpoints of one rank; every rank calls `save` at the same steps."""

    def __init__(
        self,
        context: RankContext,
        config: TrainConfig,
        model: keras.Model,
        communicator: Communicator,
        callbacks: list[Any],
        audit: AuditLog | None,
    ) -> None:
        self._context, self._config, self._model = context, config, model
        self._comm, self._callbacks, self._audit = communicator, callbacks, audit
        self._metrics: tuple[list[Tensors], str] = ([], "")
        self.staging = ""
        self.last_step: int | None = None
        """Of the last checkpoint that was committed or restored."""

    def find(self) -> Found | None:
        """Ask the driver where to go on, and read it; None at the start of a run."""
        reply = self._context.control.request("restore", self._config.start_limit_s)
        self.staging = str(reply["staging"])
        url = reply["checkpoint"]
        if url is None:
            return None
        manifest = read_resumable(url, self._context.payload["plan"])
        return Found(url, manifest, read_rank_file(url, 0, manifest))

    def restore(self, found: Found) -> Progress:
        """Put the checkpoint into model, optimizer, seed generators and callbacks, which have begun their training.

        Raises ConfigError for another model, DataError for tensors that do not fit.
        """
        world, saved = self._context.world, found.manifest["state"]
        state.load(self._model, found.tensors, (state.WEIGHTS, state.OPTIMIZER), found.url)
        callback_state.load(self._callbacks, saved["callbacks"], found.tensors, found.url)
        same_ranks = found.manifest["num_ranks"] == world.num_ranks
        if same_ranks:
            own = found.tensors if world.is_leader else read_rank_file(found.url, world.rank, found.manifest)
            state.load(self._model, own, (state.SEEDS,), found.url)
            parts = [own]
        else:
            state.derive_seeds(self._model, self._config.seed, int(found.manifest["step"]), world.rank)
            ranks = range(found.manifest["num_ranks"]) if world.is_leader else ()
            parts = [read_rank_file(found.url, rank, found.manifest) for rank in ranks]
        if saved["in_epoch"]:
            self._metrics = (
                [{k: v for k, v in part.items() if k.startswith(state.METRICS)} for part in parts],
                found.url,
            )
        self.last_step = int(found.manifest["step"])
        stopped = bool(saved["stopped"]) and self._config.epochs <= int(saved["epochs"])
        return Progress(self.last_step, stopped, dict(saved["metrics"]))

    def restore_metrics(self) -> None:
        """Put the metrics of the epoch that goes on into the model, which Keras has just reset."""
        parts, where = self._metrics
        state.load_metrics(self._model, parts, where)

    def save(self, progress: Progress, *, in_epoch: bool = False) -> None:
        """Write this rank's part and have it committed; returns when the driver has renamed the whole.

        Raises LockstepError where the ranks' weights are not equal bit for bit.
        """
        control, rank, step = self._context.control, self._context.world.rank, progress.step
        control.beat(step, "checkpoint")
        self._check_equal(step)
        kinds = [state.SEEDS, state.METRICS] if in_epoch else [state.SEEDS]
        tensors = state.tensors_of(self._model, *kinds)
        document: dict[str, Any] = {}
        if self._context.world.is_leader:
            tensors |= state.tensors_of(self._model, state.WEIGHTS, state.OPTIMIZER)
            callbacks, arrays = callback_state.save(self._callbacks)
            tensors |= arrays
            document = {
                "in_epoch": in_epoch,
                "stopped": progress.stopped,
                "epochs": self._config.epochs,
                "metrics": json_safe(progress.metrics),
                "callbacks": callbacks,
            }
        file = write_rank_file(staged_checkpoint(self.staging, step), rank, tensors)
        audit = self._write_audit(step)
        control.request("checkpoint", self._config.stall_limit_s, step=step, files=[file], audit=audit, state=document)
        self.last_step = step
        control.beat(step, "train")

    def _write_audit(self, step: int) -> list[dict[str, Any]]:
        if self._audit is None:
            return []
        paths, world = RunPaths(self._config.run), self._context.world
        url = paths.audit(world.generation, world.rank, step)
        directory, _, name = url.rpartition("/")
        report = write_bytes(directory, name, self._audit.take(step))
        return [{"path": paths.relative(url), "bytes": report["bytes"], "sha256": report["sha256"]}]

    def _check_equal(self, step: int) -> None:
        digests = self._comm.all_gather_bytes(state.weights_digest(self._model).encode())
        if len(set(digests)) > 1:
            differing = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
            raise LockstepError(
                f"the weights of rank {differing} are not those of rank 0 at step {step}",
                got=f"sha256 {digests[differing].decode()}",
                allowed=f"sha256 {digests[0].decode()}, bit for bit",
                next_step="Look for a layer or callback that changes weights by what one rank alone sees.",
            )
