"""The chain of parents: which checkpoints, model and result count, judged by the claims and by nothing else."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.storage import strict
from lockstep.storage.dataset.layout import MANIFEST_NAME, safe_relative
from lockstep.storage.errors import CorruptionError, DataError, NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.publish import file_digest
from lockstep.storage.sealed import unseal, unseal_as
from lockstep.storage.urls import join
from training.launch.restarts import checked as restart_log
from training.run.lineage import CheckpointRef, Claim, read_claims
from training.run.paths import RunPaths, checkpoint_of, generation_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint: where it lies and its manifest."""

    ref: CheckpointRef
    url: str
    manifest: dict[str, Any]


def lineage(claims: Mapping[int, Claim], refs: Iterable[CheckpointRef]) -> list[CheckpointRef]:
    """The checkpoints of `refs` that are in the newest claim's chain, newest first.

    Those of the newest generation; then its parent and what that one's generation wrote before it; and so back. A
    commit that an older generation made after its successor's claim is later than the claim's parent, so it is out.
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
    """All checkpoint directories and their URLs: committed ones, and those that lie in the trash."""
    found: dict[CheckpointRef, str] = {}
    for name in _directories(fs, paths.trashes):
        if generation_of(name) is not None:
            found |= _checkpoints_in(fs, join(paths.trashes, name))
    return found | _checkpoints_in(fs, paths.checkpoints)


def chain_of(
    fs: FileSystem, paths: RunPaths, before: int | None = None
) -> tuple[list[CheckpointRef], dict[CheckpointRef, str]]:
    """The chain, newest first, and the URLs of all checkpoints; nothing of these is read.

    `before`: as if this generation and later ones had not been claimed. Raises DataError where a claim is gone, and
    where all checkpoints of a run are that had some.
    """
    urls, claims = checkpoints(fs, paths), read_claims(fs, paths)
    _check_claims(paths, claims, urls)
    claims = {generation: claim for generation, claim in claims.items() if before is None or generation < before}
    chain = lineage(claims, urls)
    newest = max(claims, default=None)
    if not chain and newest is not None and (claims[newest].parent or fs.exists(paths.result(newest))):
        raise _none_whole(paths, "none, where the newest claim or result says that there were some")
    return chain, urls


def find_tip(fs: FileSystem, paths: RunPaths, before: int | None = None) -> Checkpoint | None:
    """The newest whole checkpoint of the chain, None before the first one; `before` as in `chain_of`.

    A torn or changed checkpoint is refused aloud and its parent used. Raises DataError when none of several is whole,
    and what `chain_of` does: to begin anew in silence would mix two trainings in one run.
    """
    chain, urls = chain_of(fs, paths, before)
    for ref in chain:
        try:
            return Checkpoint(ref, urls[ref], read_checkpoint(fs, urls[ref], ref))
        except (DataError, NotFoundError) as error:
            log.error("checkpoint %s is refused, its parent is used: %s", ref, error)
    if chain:
        raise _none_whole(paths, ", ".join(map(str, chain)))
    return None


def _none_whole(paths: RunPaths, got: str) -> DataError:
    return DataError(
        f"no checkpoint of {paths.root} is whole",
        got=got,
        allowed="at least one whose digests hold",
        next_step=f"Run `python -m jobs.verify {paths.root}`; restore a checkpoint or begin a new run.",
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
    """The manifest of a checkpoint, all of whose files have been read and match; raises CorruptionError naming one."""
    where = join(url, MANIFEST_NAME)
    manifest = unseal(fs.read_bytes(where), where)
    if (manifest.get("kind"), manifest.get("step"), manifest.get("generation")) != (
        "checkpoint",
        ref.step,
        ref.generation,
    ):
        raise CorruptionError("a manifest that contradicts its directory's name", file=where, got=str(ref))
    for name, value in strict.mapping(manifest.get("files"), where=f"{where}: files").items():
        file = join(url, safe_relative(name, where=where))
        info = strict.obj(value, ("bytes", "sha256"), where=f"{where}: {name}")
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


def find_result(fs: FileSystem, paths: RunPaths) -> dict[str, Any] | None:
    """The result that counts: the newest claim's, else the newest one at whose checkpoint a later generation of the
    chain began. None before the first.

    An older generation's late result names a checkpoint past its successor's parent and is passed over.
    """
    claims = read_claims(fs, paths)
    generation = max(claims, default=None)
    began: CheckpointRef | None = None
    while generation is not None and generation in claims:
        url = paths.result(generation)
        if fs.exists(url):
            result = _checked(unseal_as("result", fs.read_bytes(url), url), generation, url)
            if began is None or result.get("checkpoint") == str(began):
                return result
        began = claims[generation].parent
        generation = began.generation if began else None
    return None


def _checked(result: dict[str, Any], generation: int, where: str) -> dict[str, Any]:
    """A result whose every field is of its type. Raises DataError or CorruptionError naming file and field."""
    for name in ("generation", "steps", "epochs", "samples", "restarts"):
        strict.count(result.get(name), where=f"{where}: {name}")
    if result["generation"] != generation:
        raise CorruptionError("a result that contradicts its name", file=where, got=f"generation {generation}")
    for name in ("seconds", "samples_per_s"):
        strict.number(result.get(name), where=f"{where}: {name}")
    for name in ("checkpoint", "model"):
        if result.get(name) is not None:
            strict.string(result[name], where=f"{where}: {name}")
    strict.string(result.get("run"), where=f"{where}: run")
    strict.mapping(result.get("metrics"), where=f"{where}: metrics")
    for sample in strict.items(result.get("left_over"), where=f"{where}: left_over"):
        strict.string(sample, where=f"{where}: left_over")
    if result.get("class_counts") is not None:
        for rows in strict.items(result["class_counts"], where=f"{where}: class_counts"):
            strict.count(rows, where=f"{where}: class_counts")
    restarts = restart_log(result.get("restart_log", []), where=f"{where}: restart_log")
    return {"checkpoint": None, "model": None, "class_counts": None, **result, "restart_log": restarts}


def find_model(fs: FileSystem, paths: RunPaths) -> str:
    """URL of the model directory that counts, by the same rule as `find_result`.

    Raises NotFoundError while the run has none.
    """
    result = find_result(fs, paths)
    url = None if result is None else paths.model(int(result["generation"]))
    if url is None or not fs.exists(url):
        raise NotFoundError(
            f"{paths.root} has no finished model",
            got="no result of its newest generation" if url is None else f"{url} is missing",
            allowed="a run that ended",
            next_step="Let the run end: `python -m jobs.train --run` with the same flags goes on with it.",
        )
    return url


def _checkpoints_in(fs: FileSystem, directory: str) -> dict[CheckpointRef, str]:
    found = {}
    for name in _directories(fs, directory):
        if (place := checkpoint_of(name)) is not None:
            found[CheckpointRef(*place)] = join(directory, name)
    return found


def _directories(fs: FileSystem, url: str) -> list[str]:
    try:
        return [entry.name for entry in fs.list(url) if entry.is_dir]
    except NotFoundError:
        return []
