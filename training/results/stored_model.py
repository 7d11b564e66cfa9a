"""The stored models that a call of a user names: of each run an exported model or a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self, cast

from lockstep.features.schema.signature import Signature
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import ConfigError, DataError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.settings import hadoop_settings
from lockstep.training.batches.augmenting import labels_of
from lockstep.training.config import TrainConfig
from lockstep.training.control.protocol import Message
from lockstep.training.control.task import RankTask
from lockstep.training.run.best import find_best
from lockstep.training.run.lineage import CheckpointRef, checkpoints, lineage, read_claims
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.weights_source import newest_of

if TYPE_CHECKING:
    import keras

Which = int | Literal["last", "best"]


@dataclass(frozen=True, kw_only=True)
class StoredModel(Message):
    """The weights of a run that ranks load: a model, or else a checkpoint."""

    run: str
    config: TrainConfig
    model: str | None = None
    """The URL of an exported model."""
    checkpoint: str | None = None
    """The URL of a checkpoint; None where `model` is one."""
    kept: tuple[float, ...] | None = None
    """The share of each class that counted in training, by --sample; None for all."""

    @classmethod
    def of(cls, run: str, config: TrainConfig, which: Which | str | None) -> Self:
        """The weights that `which` names: `last`, `best`, a step or a checkpoint's URL; without one the newest model,
        else the checkpoint that stands for the run. Raises what `choose_checkpoint` raises.
        """
        url = isinstance(which, str) and which not in ("last", "best")
        model, checkpoint = (None, str(which)) if url else _weights_of(run, config, cast("Which | None", which))
        return cls(run=run, config=config, model=model, checkpoint=checkpoint)

    @property
    def url(self) -> str:
        """The URL of what is loaded."""
        return str(self.model or self.checkpoint)

    def load(self, manifest: DatasetManifest, signature: Signature, *, may_lack_label: bool = False) -> keras.Model:
        """Load the model for a dataset of this signature; with `may_lack_label`, one without a label too. It imports
        TensorFlow.
        """
        from lockstep.training.models.on_disk import load_checkpoint, load_export

        if self.model is not None:
            return load_export(self.model, self.config, manifest, may_lack_label=may_lack_label)
        return load_checkpoint(str(self.checkpoint), self.config, manifest, labels_of(self.config, signature))


def task_of(entry: str, order: Message, members: Sequence[StoredModel]) -> RankTask:
    """The task of ranks that load `members`; they encrypt if one of the runs was trained so."""
    tls = any(one.config.ranks.tls == "on" for one in members)
    return RankTask(entry, order.to_json(), hadoop=hadoop_settings(), tls=tls)


def _weights_of(run: str, config: TrainConfig, which: Which | None) -> tuple[str | None, str | None]:
    """A run's (model, checkpoint), one of them None: the checkpoint that `which` names; without, the newest model, else
    the checkpoint that stands for the run. Raises what `choose_checkpoint` raises.
    """
    if which is None:
        return newest_of(run)
    fs, paths = filesystem(run), RunPaths(run)
    urls = checkpoints(fs, paths)
    return None, urls[choose_checkpoint(fs, paths, config, urls, which)]


def choose_checkpoint(
    fs: FileSystem, paths: RunPaths, config: TrainConfig, urls: dict[CheckpointRef, str], which: Which | None
) -> CheckpointRef:
    """The checkpoint of the run's chain that `which` names; for None the best of a run that keeps it, else the last.

    Raises ConfigError, and DataError if there is none.
    """
    chain = lineage(read_claims(fs, paths), urls)
    if not chain:
        raise DataError(
            f"{paths.root} has no checkpoint",
            got="none",
            allowed="a run that has written one",
            next_step="Resume the run: `lockstep train` with the same flags.",
        )
    if which in ("best", None):
        best = find_best(fs, paths, config.checkpoints.keep)
        if best is not None:
            return best.ref
        if which == "best":
            raise _no_such(
                paths, f"--keep-best {config.checkpoints.keep_best}, and no checkpoint with that metric", chain
            )
    if which in ("last", None):
        return chain[0]
    found = [ref for ref in chain if ref.step == which]
    if not found:
        raise _no_such(paths, f"step {which}", chain, best=find_best(fs, paths, config.checkpoints.keep) is not None)
    return found[0]


def _no_such(paths: RunPaths, got: str, chain: list[CheckpointRef], *, best: bool = False) -> ConfigError:
    steps = ", ".join(str(ref.step) for ref in chain[:20])
    allowed = f"last, {'best, ' if best else ''}or a step: {steps}"
    return ConfigError(f"{paths.root} has no such checkpoint", got=got, allowed=allowed, next_step="Choose one.")
