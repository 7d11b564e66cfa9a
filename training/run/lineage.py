"""Generation claims: which driver may change a run.

HDFS has no compare-and-swap. A claim is a file that a driver renames onto the next free number, which only one can;
it names the checkpoint that the generation starts from. What an older generation does later is then not in the chain.
"""

from __future__ import annotations

import datetime
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.storage.errors import (
    ConfigError,
    CorruptionError,
    DataError,
    ExistsError,
    NotFoundError,
    TrainingFailedError,
)
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.publish import write_file
from lockstep.storage.sealed import seal, unseal_as
from training.run.paths import RunPaths, checkpoint_name, claim_of

FORMAT_VERSION = 1
MAX_GENERATION = (1 << 32) - 1  # what the frames between driver and ranks can say


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
    """One generation: its nonce, its parent checkpoint (None: the start), and what it was asked for."""

    generation: int
    nonce: str
    parent: CheckpointRef | None
    epochs: int
    num_ranks: int

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
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "claimed_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }


def read_claims(fs: FileSystem, paths: RunPaths) -> dict[int, Claim]:
    """All claims by generation; raises CorruptionError for one whose bytes were changed."""
    return {generation: _read(fs, paths, generation) for generation in claimed(fs, paths)}


def epochs_asked(claims: Mapping[int, Claim]) -> int:
    """The most epochs that the newest claim or one of its ancestors asked for; 0 without a claim.

    Others do not count: a call that was wrong and never got to a checkpoint is nobody's ancestor.
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
    after: int | None = None,
) -> Claim:
    """Claim the generation after `after`, which is what this driver knows as the newest (None: look it up now).

    Raises SupersededError when a driver that was begun later has taken it, ConfigError when another one took it in the
    same moment, DataError beyond the last number. A driver that took the next free number instead would take the run
    back from its successor.
    """
    generation = (newest_claimed(fs, paths) if after is None else after) + 1
    if generation > MAX_GENERATION:
        raise DataError(
            f"{paths.root} has no number left for another generation",
            got=paths.claim(generation - 1),
            allowed=f"generations up to {MAX_GENERATION}",
            next_step="Take out the claims that no driver of this run has made, or begin a new run.",
        )
    claim = Claim(generation, secrets.token_hex(8), parent, epochs, num_ranks)
    try:
        write_file(fs, paths.claim(generation), seal(claim.to_json()))
    except ExistsError:
        if after is not None:
            raise superseded(paths.root, f"a claim of generation {generation} by another driver") from None
        raise ConfigError(
            f"another driver claimed generation {generation} of {paths.root} in the same moment",
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
    """The error of a driver of `run` where `got` tells of a newer one."""
    return SupersededError(
        f"this driver of {run} is superseded: another one has taken the run over",
        got=got,
        allowed="this driver's lease and claim as the newest",
        next_step="Nothing: the newer driver goes on with this run from the checkpoint that its claim names.",
    )


def _read(fs: FileSystem, paths: RunPaths, generation: int) -> Claim:
    url = paths.claim(generation)
    document = unseal_as("claim", fs.read_bytes(url), url, version=FORMAT_VERSION)
    try:
        parent = document["parent"]
        claim = Claim(
            int(document["generation"]),
            str(document["nonce"]),
            None if parent is None else CheckpointRef(int(parent["step"]), int(parent["generation"])),
            int(document["epochs"]),
            int(document["num_ranks"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError("not a claim", file=url, got=repr(error), allowed="the fields of a claim") from None
    if claim.generation != generation or (claim.parent and not 0 < claim.parent.generation < generation):
        raise CorruptionError("a claim that contradicts its name", file=url, got=repr(claim))
    return claim
