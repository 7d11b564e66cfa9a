"""Deletion of checkpoints that are no longer needed (decision 081).

A paused driver may resume in the middle of a deletion and delete what its successor starts from. So a checkpoint is
deleted in three steps: retention moves it into the trash of the driver's generation; at a later commit, the driver
reads lease and claims again and gives it a name that is not a checkpoint's; then it deletes that. A later claimant does
the same with checkpoints outside its own chain.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace

from lockstep.storage.errors import ExistsError, NotFoundError, StorageError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.publish import MANIFEST_NAME
from lockstep.storage.urls import basename, join, parent
from lockstep.training.rules import Keep
from lockstep.training.run.best import MetricValues
from lockstep.training.run.lineage import Checkpoint, CheckpointRef, check_newest, checkpoints, lineage, read_claims
from lockstep.training.run.paths import RunPaths, checkpoint_of, generation_of

log = logging.getLogger(__name__)
_SWEPT = "swept-"


def retire(fs: FileSystem, paths: RunPaths, generation: int, keep: Keep, values: MetricValues | None = None) -> None:
    """Move checkpoints of the chain that `keep` does not select into this generation's trash.

    `values` keeps metrics from earlier calls. Raises SupersededError if a newer generation is claimed, which then
    decides what is deleted.
    """
    urls = _committed(fs, paths)
    chain = lineage(read_claims(fs, paths), urls)
    judged = values or MetricValues(keep)
    kept = judged.with_bases(keep.chosen(chain, lambda ref: judged.of(ref, urls[ref])), urls)
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


def end_trash(fs: FileSystem, paths: RunPaths, generation: int, keep: Keep, confirm: Callable[[], None]) -> None:
    """Delete, at the end of a run, the trash of this generation, and what retention does not keep in that of older
    ones; `confirm` as in `empty_trash`.
    """
    empty_trash(fs, paths, generation, confirm)
    _empty_older(fs, paths, generation, keep, checkpoints(fs, paths), confirm)


def _empty_older(
    fs: FileSystem,
    paths: RunPaths,
    generation: int,
    keep: Keep,
    everything: Mapping[CheckpointRef, str],
    confirm: Callable[[], None],
) -> None:
    """Delete the trash of older generations that `keep` does not select."""
    chain, judged = lineage(read_claims(fs, paths), everything), MetricValues(keep)
    needed = judged.with_bases(keep.chosen(chain, lambda ref: judged.of(ref, everything[ref])), everything)
    for name in _names(fs, paths.trashes):
        owner = generation_of(name)
        if owner is None or owner >= generation:
            continue
        for entry in _names(fs, join(paths.trashes, name)):
            found = checkpoint_of(entry)
            if entry.startswith(_SWEPT) or (found is not None and CheckpointRef(*found) not in needed):
                confirm()
                _remove_trash(fs, join(paths.trashes, name, entry))


def tidy_up(fs: FileSystem, paths: RunPaths, generation: int, tip: Checkpoint | None, keep: Keep) -> Checkpoint | None:
    """Tidy up after a new claim; returns the tip with its URL.

    The tip and its base are moved back out of the trash, into which an older driver's retention may have moved them
    since the look-up.
    Older trash outside the chain is deleted. Orphans (late commits of older generations) are moved into the trash, as
    are checkpoints that a paused older driver's retention would still move there: when it resumes, nothing is left to
    move.
    """
    _remove_unfinished(fs, paths, generation)
    everything = checkpoints(fs, paths)
    for ref in () if tip is None else (tip.base, tip.ref):
        home = "" if ref is None else paths.checkpoint(ref.step, ref.generation)
        if ref is not None and (current := everything.get(ref, home)) != home:
            fs.mkdirs(paths.checkpoints)
            fs.rename_new(current, home)
            everything[ref] = home
    if tip is not None:
        tip = replace(tip, url=paths.checkpoint(tip.ref.step, tip.ref.generation))
    chain = lineage(read_claims(fs, paths), everything)
    _empty_older(fs, paths, generation, keep, everything, lambda: None)
    for ref, url in _committed(fs, paths).items():
        # A newer generation may have claimed and committed since the chain was read.
        if ref not in chain and ref.generation < generation:
            _trash(fs, paths, generation, url)
    retire(fs, paths, generation, keep)
    return tip


def _remove_unfinished(fs: FileSystem, paths: RunPaths, generation: int) -> None:
    """Delete what older drivers had copied of a checkpoint or model, on an object store, when they ended."""
    if fs.promises.atomic_rename:
        return
    for folder in (paths.checkpoints, paths.models):
        for name in _names(fs, folder):
            ref = checkpoint_of(name)
            owner = generation_of(name) if ref is None else ref[1]
            if owner is not None and owner < generation and not fs.exists(join(folder, name, MANIFEST_NAME)):
                _remove_trash(fs, join(folder, name))


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
    rename. No driver uses the renamed directory, however late its deletion ends. An object store deletes the manifest
    first instead, without which a directory is neither a checkpoint nor published.
    """
    gone = url
    if fs.promises.atomic_rename and not basename(url).startswith(_SWEPT):
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
