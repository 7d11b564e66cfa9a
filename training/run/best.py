"""The best checkpoint of a run, by its --keep-best: whose weights the run's model has."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.storage.errors import DataError, NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.training.rules import Keep, metric_in
from lockstep.training.run.checkpoint import read_manifest
from lockstep.training.run.lineage import CheckpointRef, base_ref, checkpoints, lineage, read_checkpoint, read_claims
from lockstep.training.run.paths import RunPaths

log = logging.getLogger(__name__)


def metric_of(state: dict[str, Any], metric: str) -> float | None:
    """A metric of the epoch that a checkpoint ends; None within an epoch, and for a value that is not finite."""
    value = None if state.get("in_epoch", True) else state.get("metrics", {}).get(metric)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


class MetricValues:
    """The metric of `Keep.best` and the base of checkpoints; each manifest is read once."""

    def __init__(self, keep: Keep) -> None:
        self._metric = None if keep.best is None else metric_in(keep.best)
        self._known: dict[CheckpointRef, tuple[float | None, CheckpointRef | None]] = {}

    def know(self, ref: CheckpointRef, manifest: Mapping[str, Any]) -> None:
        """Keep what is needed of a manifest that need not be read then."""
        value = None if self._metric is None else metric_of(manifest["state"], self._metric)
        self._known[ref] = value, base_ref(manifest, str(ref))

    def with_bases(self, kept: set[CheckpointRef], urls: Mapping[CheckpointRef, str]) -> set[CheckpointRef]:
        """Return `kept`, and the checkpoints of which some of them hold the difference."""
        bases = (self._look(ref, urls[ref])[1] for ref in kept)
        return kept | {base for base in bases if base is not None}

    def of(self, ref: CheckpointRef, url: str) -> float | None:
        """The metric of the checkpoint at `url`; None for one within an epoch, and for one that cannot be read."""
        return None if self._metric is None else self._look(ref, url)[0]

    def _look(self, ref: CheckpointRef, url: str) -> tuple[float | None, CheckpointRef | None]:
        if ref not in self._known:
            try:
                self.know(ref, read_manifest(url))
            except (DataError, NotFoundError) as error:
                log.warning("checkpoint %s cannot be read: %s", ref, error.what)
                return None, None
        return self._known[ref]


@dataclass(frozen=True, slots=True)
class Best:
    """The best checkpoint of a run's chain."""

    ref: CheckpointRef
    url: str
    value: float
    """The checkpoint's value of the metric that --keep-best names."""
    metrics: Mapping[str, Any]
    """All metrics of the epoch that it ends."""

    def to_json(self) -> dict[str, Any]:
        """Return {checkpoint, step, value, metrics}."""
        return {"checkpoint": str(self.ref), "step": self.ref.step, "value": self.value, "metrics": dict(self.metrics)}


def find_best(fs: FileSystem, paths: RunPaths, keep: Keep, values: MetricValues | None = None) -> Best | None:
    """The best complete checkpoint of the chain by `keep.best`; None without that rule or a checkpoint of its metric.

    A torn or changed checkpoint is logged, and the next best used. `values` are those that are known already.
    """
    if keep.best is None:
        return None
    values, urls = values or MetricValues(keep), checkpoints(fs, paths)
    chain = lineage(read_claims(fs, paths), urls)
    while (ref := keep.best_of(chain, lambda ref: values.of(ref, urls[ref]))) is not None:
        try:
            state = read_checkpoint(fs, urls[ref], ref)["state"]
        except (DataError, NotFoundError) as error:
            log.error("checkpoint %s, the best by %s, is refused, the next best is used: %s", ref, keep.best, error)
            chain.remove(ref)
            continue
        value = values.of(ref, urls[ref])
        assert value is not None, "it was chosen by it"
        return Best(ref, urls[ref], value, state["metrics"])
    return None
