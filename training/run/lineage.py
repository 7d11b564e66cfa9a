"""Generation claims, which decide what driver may change a run and which checkpoints count (decision 081).

HDFS has no compare-and-swap. A claim is a file that a driver renames to the next free number, which only one driver
can; it names the checkpoint that the generation starts from. Later commits of older generations are outside the chain.
"""

from __future__ import annotations

import datetime
import logging
import os
import secrets
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.storage import documents
from lockstep.storage.dataset.layout import safe_relative
from lockstep.storage.documents import seal, unseal, unseal_as
from lockstep.storage.errors import (
    ConfigError,
    CorruptionError,
    DataError,
    ExistsError,
    LockstepError,
    NotFoundError,
    TrainingFailedError,
)
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.publish import MANIFEST_NAME, file_digest, write_file
from lockstep.storage.urls import join
from lockstep.training.run.checkpoint import base_of
from lockstep.training.run.paths import RunPaths, checkpoint_name, checkpoint_of, claim_of, generation_of

log = logging.getLogger(__name__)
FORMAT_VERSION = 1
MAX_GENERATION = (1 << 32) - 1  # the limit of the frames between driver and ranks


class SupersededError(TrainingFailedError):
    """A newer driver has claimed the run: this one must change nothing more."""


@dataclass(frozen=True, slots=True, order=True)
class CheckpointRef:
    """A checkpoint by step and the generation that wrote it."""

    step: int
    generation: int

    def __str__(self) -> str:
        return checkpoint_name(self.step, self.generation)

    def to_json(self) -> dict[str, int]:
        """The fields as a JSON object."""
        return {"step": self.step, "generation": self.generation}


@dataclass(frozen=True, slots=True)
class Claim:
    """One generation: its nonce, its parent checkpoint (None: the start), and the requested epochs and ranks."""

    generation: int
    nonce: str
    parent: CheckpointRef | None
    epochs: int
    num_ranks: int
    shares: tuple[int, ...] | None = None
    """The lanes of each rank, if they are not as even as possible."""
    data_ranks: int | None = None
    """The parts of a step's rows; None: each rank has its own."""

    def to_json(self) -> dict[str, Any]:
        """The claim's file, unsealed."""
        return {
            "format_version": FORMAT_VERSION,
            "kind": "claim",
            "generation": self.generation,
            "nonce": self.nonce,
            "parent": self.parent.to_json() if self.parent else None,
            "epochs": self.epochs,
            "num_ranks": self.num_ranks,
            "shares": None if self.shares is None else list(self.shares),
            "data_ranks": self.data_ranks,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "claimed_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }


def read_claims(fs: FileSystem, paths: RunPaths) -> dict[int, Claim]:
    """All claims by generation. Raises CorruptionError for a changed one."""
    return {generation: _read(fs, paths, generation) for generation in claimed(fs, paths)}


def epochs_asked(claims: Mapping[int, Claim]) -> int:
    """The most epochs that the newest claim or one of its ancestors requested; 0 without a claim.

    Others do not count: a wrong call that never made a checkpoint has no descendants.
    """
    generation, most = max(claims, default=None), 0
    while generation is not None and generation in claims:
        claim = claims[generation]
        most = max(most, claim.epochs)
        generation = claim.parent.generation if claim.parent else None
    return most


def claimed(fs: FileSystem, paths: RunPaths) -> list[int]:
    """The claimed generations in order."""
    try:
        names = [entry.name for entry in fs.list(paths.claims)]
    except NotFoundError:
        return []
    return sorted(generation for name in names if (generation := claim_of(name)) is not None)


def newest_claimed(fs: FileSystem, paths: RunPaths) -> int:
    """The newest claimed generation, 0 before the first."""
    return max(claimed(fs, paths), default=0)


def claim_next(
    fs: FileSystem,
    paths: RunPaths,
    parent: CheckpointRef | None,
    *,
    epochs: int,
    num_ranks: int,
    shares: tuple[int, ...] | None = None,
    data_ranks: int | None = None,
    after: int | None = None,
) -> Claim:
    """Claim the generation after `after`, the newest that this driver knows (None: look it up now).

    Raises SupersededError if a later driver has taken it, ConfigError if another one took it at the same moment,
    DataError after the last number. A driver that took the next free number instead would take the run back from its
    successor.
    """
    generation = (newest_claimed(fs, paths) if after is None else after) + 1
    if generation > MAX_GENERATION:
        raise DataError(
            f"{paths.root} has no number left for another generation",
            got=paths.claim(generation - 1),
            allowed=f"generations up to {MAX_GENERATION}",
            next_step="Remove the claims that no driver of this run has made, or begin a new run.",
        )
    claim = Claim(generation, secrets.token_hex(8), parent, epochs, num_ranks, shares, data_ranks)
    try:
        write_file(fs, paths.claim(generation), seal(claim.to_json()))
    except ExistsError:
        if after is not None:
            raise superseded(paths.root, f"a claim of generation {generation} by another driver") from None
        raise ConfigError(
            f"another driver claimed generation {generation} of {paths.root} at the same moment",
            got=paths.claim(generation),
            allowed="one driver at a time",
            next_step="Let that one work, or stop it and start again.",
        ) from None
    return claim


def check_newest(fs: FileSystem, paths: RunPaths, generation: int) -> None:
    """Raise SupersededError when a newer generation than `generation` is claimed."""
    newest = newest_claimed(fs, paths)
    if newest > generation:
        raise superseded(paths.root, f"a claim of generation {newest}, where this driver has {generation}")


def superseded(run: str, got: str) -> SupersededError:
    """The error for a driver of `run` that has a newer one, as `got` shows."""
    return SupersededError(
        f"this driver of {run} is superseded: another one has taken the run over",
        got=got,
        allowed="this driver's lease and claim as the newest",
        next_step="Nothing: the newer driver continues this run from the checkpoint that its claim names.",
    )


def _read(fs: FileSystem, paths: RunPaths, generation: int) -> Claim:
    url = paths.claim(generation)
    document = unseal_as("claim", fs.read_bytes(url), url, version=FORMAT_VERSION)
    try:
        parent, shares = document["parent"], document.get("shares")  # absent before shares could be uneven
        data_ranks = document.get("data_ranks")  # absent before ranks could have the same rows
        claim = Claim(
            int(document["generation"]),
            str(document["nonce"]),
            None if parent is None else CheckpointRef(int(parent["step"]), int(parent["generation"])),
            int(document["epochs"]),
            int(document["num_ranks"]),
            None if shares is None else tuple(map(int, shares)),
            None if data_ranks is None else int(data_ranks),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError("not a claim", file=url, got=repr(error), allowed="the fields of a claim") from None
    if claim.generation != generation or (claim.parent and not 0 < claim.parent.generation < generation):
        raise CorruptionError("a claim that contradicts its name", file=url, got=repr(claim))
    return claim


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint: its URL and its manifest."""

    ref: CheckpointRef
    url: str
    manifest: dict[str, Any]

    @property
    def base(self) -> CheckpointRef | None:
        """The checkpoint of which it holds the difference; None if it is whole."""
        return base_ref(self.manifest, self.url)


def base_ref(manifest: Mapping[str, Any], where: str) -> CheckpointRef | None:
    """Return `base_of` as a reference."""
    name = base_of(manifest, where)
    found = None if name is None else checkpoint_of(name)
    return None if found is None else CheckpointRef(*found)


def lineage(claims: Mapping[int, Claim], refs: Iterable[CheckpointRef]) -> list[CheckpointRef]:
    """The checkpoints of `refs` that are in the newest claim's chain, newest first.

    Those of the newest generation; then its parent and earlier checkpoints of the parent's generation; and so on. A
    commit that an older generation made after its successor's claim is later than the claim's parent, so it is outside.
    """
    by_generation: dict[int, list[int]] = {}
    for ref in refs:
        by_generation.setdefault(ref.generation, []).append(ref.step)
    chain: list[CheckpointRef] = []
    generation = max(claims, default=None)
    last: int | None = None
    while generation is not None:
        steps = sorted(by_generation.get(generation, []), reverse=True)
        chain += [CheckpointRef(step, generation) for step in steps if last is None or step <= last]
        parent = claims[generation].parent if generation in claims else None
        generation, last = (parent.generation, parent.step) if parent else (None, None)
    return chain


def checkpoints(fs: FileSystem, paths: RunPaths) -> dict[CheckpointRef, str]:
    """All checkpoint directories and their URLs: committed ones, and those in the trash."""
    found: dict[CheckpointRef, str] = {}
    for name in _directories(fs, paths.trashes):
        if generation_of(name) is not None:
            found |= _checkpoints_in(fs, join(paths.trashes, name))
    return found | _checkpoints_in(fs, paths.checkpoints)


def chain_of(
    fs: FileSystem, paths: RunPaths, before: int | None = None
) -> tuple[list[CheckpointRef], dict[CheckpointRef, str]]:
    """The chain, newest first, and the URLs of all checkpoints, which are not read.

    `before`: ignore the claims of this generation and later ones. Raises DataError if a claim is missing, or all
    checkpoints of a run that had some.
    """
    urls, claims = checkpoints(fs, paths), read_claims(fs, paths)
    _check_claims(paths, claims, urls)
    claims = {generation: claim for generation, claim in claims.items() if before is None or generation < before}
    chain = lineage(claims, urls)
    newest = max(claims, default=None)
    if not chain and newest is not None and (claims[newest].parent or fs.exists(paths.result(newest))):
        raise _none_complete(paths, "none, though the newest claim or result shows that there were some")
    return chain, urls


def find_tip(fs: FileSystem, paths: RunPaths, before: int | None = None) -> Checkpoint | None:
    """The newest complete checkpoint of the chain, None before the first one; `before` as in `chain_of`.

    A torn or changed checkpoint is logged, and its parent used. Raises DataError if none of several is complete, and
    what `chain_of` does: starting over silently would mix two trainings in one run.
    """
    chain, urls = chain_of(fs, paths, before)
    refused: dict[CheckpointRef, LockstepError] = {}
    for ref in chain:
        try:
            found = Checkpoint(ref, urls[ref], read_checkpoint(fs, urls[ref], ref))
            if found.base is not None:
                if found.base not in urls:
                    raise CorruptionError("a checkpoint of which it is the difference is missing", file=str(found.base))
                read_checkpoint(fs, urls[found.base], found.base)
        except (DataError, NotFoundError) as error:
            refused[ref] = error
        else:
            _say_refused(refused, ref)
            return found
    _say_refused(refused, None)
    if chain:
        raise _none_complete(paths, ", ".join(map(str, chain)))
    return None


def _say_refused(refused: Mapping[CheckpointRef, LockstepError], used: CheckpointRef | None) -> None:
    """Log each checkpoint that is damaged or lacks a file, and what that costs if `used` takes its place."""
    for ref, error in refused.items():
        if used is not None:
            steps = f"computes steps {used.step + 1} to {ref.step} again"
            error.next_step = f"There is nothing to do: a run that resumes begins at {used} and {steps}."
        log.error("checkpoint %s is refused, its parent is used: %s", ref, error)


def _none_complete(paths: RunPaths, got: str) -> DataError:
    return DataError(
        f"no checkpoint of {paths.root} is complete",
        got=got,
        allowed="at least one that matches its digests",
        next_step=f"Run `lockstep verify {paths.root}`; restore a checkpoint or begin a new run.",
    )


def _check_claims(paths: RunPaths, claims: Mapping[int, Claim], urls: Mapping[CheckpointRef, str]) -> None:
    newest = max(claims, default=0)
    if unclaimed := sorted(ref for ref in urls if ref.generation > newest):
        raise DataError(
            f"{paths.root} lacks claims",
            got=f"checkpoint {unclaimed[-1]}, and {newest or 'none'} as the newest claim",
            allowed=f"a claim in {paths.claims} for each generation that wrote a checkpoint",
            next_step="Restore the claims from a copy, or begin a new run.",
        )


def read_checkpoint(fs: FileSystem, url: str, ref: CheckpointRef) -> dict[str, Any]:
    """The manifest of a checkpoint, after all its files were read and match; raises CorruptionError naming one."""
    where = join(url, MANIFEST_NAME)
    manifest = unseal(fs.read_bytes(where), where)
    if (manifest.get("kind"), manifest.get("step"), manifest.get("generation")) != (
        "checkpoint",
        ref.step,
        ref.generation,
    ):
        raise CorruptionError("a manifest that contradicts its directory's name", file=where, got=str(ref))
    for name, value in documents.mapping(manifest.get("files"), where=f"{where}: files").items():
        file = join(url, safe_relative(name, where=where))
        info = documents.obj(value, ("bytes", "sha256"), where=f"{where}: {name}")
        try:
            size, digest = file_digest(fs, file)
        except NotFoundError:
            raise CorruptionError("a file of a checkpoint is missing", file=file) from None
        if (size, digest) != (info["bytes"], info["sha256"]):
            raise CorruptionError(
                "a file of a checkpoint was changed",
                file=file,
                got=f"{size} bytes, sha256 {digest}",
                allowed=f"{info['bytes']} bytes, sha256 {info['sha256']}",
            )
    return manifest


def _checkpoints_in(fs: FileSystem, directory: str) -> dict[CheckpointRef, str]:
    found = {}
    for name in _directories(fs, directory):
        url = join(directory, name)
        # Where directories are copied, one without its manifest is not complete yet, or not complete any more.
        whole = fs.promises.atomic_rename or fs.exists(join(url, MANIFEST_NAME))
        if whole and (ref := checkpoint_of(name)) is not None:
            found[CheckpointRef(*ref)] = url
    return found


def _directories(fs: FileSystem, url: str) -> list[str]:
    try:
        return [entry.name for entry in fs.list(url) if entry.is_dir]
    except NotFoundError:
        return []
