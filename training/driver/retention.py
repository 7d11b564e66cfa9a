"""Deletion of checkpoints that are no longer needed (decision 081).

A paused driver may resume in the middle of a deletion and delete what its successor starts from. So a checkpoint is
deleted in three steps: retention moves it into the trash of the driver's generation; at a later commit, the driver
reads lease and claims again and gives it a name that is not a checkpoint's; then it deletes that. A later claimant does
the same with checkpoints outside its own chain.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lockstep.storage.errors import DataError, ExistsError, NotFoundError, StorageError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.urls import basename, join, parent
from training.config import BEST, Keep
from training.run.checkpoint import read_manifest
from training.run.lineage import Checkpoint, CheckpointRef, check_newest, checkpoints, lineage, read_claims
from training.run.paths import RunPaths, checkpoint_of, generation_of

log = logging.getLogger(__name__)
_SWEPT = "swept-"


def metric_of(state: dict[str, Any], metric: str) -> float | None:
    """A metric of the epoch that a checkpoint ends; None within an epoch, and for a value that is not finite."""
    value = None if state.get("in_epoch", True) else state.get("metrics", {}).get(metric)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


class MetricValues:
    """The metric of `Keep.best`, by checkpoint; each manifest is read once."""

    def __init__(self, keep: Keep) -> None:
        found = BEST.fullmatch(keep.best) if keep.best is not None else None
        self._metric = found["metric"] if found else None
        self._known: dict[CheckpointRef, float | None] = {}

    def of(self, ref: CheckpointRef, url: str) -> float | None:
        """The metric of the checkpoint at `url`; None for one within an epoch, and for one that cannot be read."""
        if self._metric is None:
            return None
        if ref not in self._known:
            try:
                self._known[ref] = metric_of(read_manifest(url)["state"], self._metric)
            except (DataError, NotFoundError) as error:
                log.warning("checkpoint %s is not compared by %s: %s", ref, self._metric, error.what)
                return None
        return self._known[ref]


def retire(fs: FileSystem, paths: RunPaths, generation: int, keep: Keep, values: MetricValues | None = None) -> None:
    """Move checkpoints of the chain that `keep` does not select into this generation's trash.

    `values` keeps metrics from earlier calls. Raises SupersededError if a newer generation is claimed, which then
    decides what is deleted.
    """
    urls = _committed(fs, paths)
    chain = lineage(read_claims(fs, paths), urls)
    judged = values or MetricValues(keep)
    kept = keep.chosen(chain, lambda ref: judged.of(ref, urls[ref]))
    for ref in (ref for ref in chain if ref not in kept):
        check_newest(fs, paths, generation)
        _trash(fs, paths, generation, urls[ref])


def empty_trash(fs: FileSystem, paths: RunPaths, generation: int, confirm: Callable[[], None]) -> None:
    """Delete the trash of this generation, which retention does not keep.

    `confirm` is called before each checkpoint; it raises SupersededError if lease or claims belong to a newer driver. A
    driver that takes over holds the lease before it looks up its tip, so the tip that it finds is not deleted later.
    """
    for name in _names(fs, paths.trash(generation)):
        confirm()
        _remove_trash(fs, join(paths.trash(generation), name))


def take_over(
    fs: FileSystem, paths: RunPaths, generation: int, tip: Checkpoint | None, keep: Keep
) -> Checkpoint | None:
    """Tidy up after a new claim; returns the tip with its URL.

    The tip is moved back out of the trash, into which an older driver's retention may have moved it since the look-up.
    Older trash outside the chain is deleted. Orphans (late commits of older generations) are moved into the trash, as
    are checkpoints that a paused older driver's retention would still move there: when it resumes, nothing is left to
    move.
    """
    everything = checkpoints(fs, paths)
    if tip is not None:
        home = paths.checkpoint(tip.ref.step, tip.ref.generation)
        if (current := everything.get(tip.ref, home)) != home:
            fs.mkdirs(paths.checkpoints)
            fs.rename_new(current, home)
            everything[tip.ref] = home
        tip = replace(tip, url=home)
    chain = lineage(read_claims(fs, paths), everything)
    judged = MetricValues(keep)
    needed = keep.chosen(chain, lambda ref: judged.of(ref, everything[ref]))
    for name in _names(fs, paths.trashes):
        owner = generation_of(name)
        if owner is None or owner >= generation:
            continue
        for entry in _names(fs, join(paths.trashes, name)):
            found = checkpoint_of(entry)
            if entry.startswith(_SWEPT) or (found is not None and CheckpointRef(*found) not in needed):
                _remove_trash(fs, join(paths.trashes, name, entry))
    for ref, url in _committed(fs, paths).items():
        # A newer generation may have claimed and committed since the chain was read.
        if ref not in chain and ref.generation < generation:
            _trash(fs, paths, generation, url)
    retire(fs, paths, generation, keep)
    return tip


def drop_stagings(fs: FileSystem, paths: RunPaths, before: int) -> None:
    """Delete the staging directories of generations below `before`.

    Each is renamed first: an older driver that was paused just before its commit finds nothing to rename when it
    resumes.
    """
    for name in _names(fs, paths.stagings):
        owner = generation_of(name)
        if name.startswith(_SWEPT) or (owner is not None and owner < before):
            _remove(fs, join(paths.stagings, name))


def _committed(fs: FileSystem, paths: RunPaths) -> dict[CheckpointRef, str]:
    return {
        CheckpointRef(*ref): join(paths.checkpoints, name)
        for name in _names(fs, paths.checkpoints)
        if (ref := checkpoint_of(name)) is not None
    }


def _trash(fs: FileSystem, paths: RunPaths, generation: int, url: str) -> None:
    fs.mkdirs(paths.trash(generation))
    try:
        fs.rename_new(url, join(paths.trash(generation), basename(url)))
    except (StorageError, NotFoundError, ExistsError) as error:
        log.warning("%s stays where it is: %s", url, error.what)  # this only wastes space


def _remove_trash(fs: FileSystem, url: str) -> None:
    try:
        _remove(fs, url)
    except StorageError as error:
        log.warning("%s was not deleted: %s", url, error.what)  # this only wastes space


def _remove(fs: FileSystem, url: str) -> None:
    """Delete a directory after a rename that hides it from every other driver. Raises if the rename fails.

    If a newer driver was faster (it has restored the checkpoint, or swept the staging directory), there is nothing to
    rename. No driver uses the renamed directory, however late its deletion ends.
    """
    gone = url
    if not basename(url).startswith(_SWEPT):
        gone = join(parent(url), f"{_SWEPT}{basename(url)}-{secrets.token_hex(4)}")
        try:
            fs.rename_new(url, gone)
        except NotFoundError:
            return
    try:
        fs.delete(gone, recursive=True)
    except StorageError as error:
        log.warning("%s was not deleted: %s", gone, error.what)  # this only wastes space


def _names(fs: FileSystem, url: str) -> list[str]:
    try:
        return [entry.name for entry in fs.list(url) if entry.is_dir]
    except NotFoundError:
        return []
