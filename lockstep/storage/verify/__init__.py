"""Verification of a dataset, checkpoint or run: every listed byte by its digest, and no unlisted file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.documents import unseal
from lockstep.storage.errors import ConfigError, DataError, NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import MANIFEST_NAME
from lockstep.storage.run_layout import AGENT_JSON, CHECKPOINTS, CLAIMS, RUN_JSON
from lockstep.storage.urls import basename, join
from lockstep.storage.verify.check import Check, Finding
from lockstep.storage.verify.dataset import check_dataset, check_indexed
from lockstep.storage.verify.run import check_checkpoint, check_model, check_predictions, check_run

__all__ = ["Finding", "kind_of", "total_bytes", "verify"]

KINDS = ("dataset", "indexed", "checkpoint", "model", "predictions", "run")
CHECKS: dict[str, Callable[[Check], None]] = {
    "dataset": check_dataset,
    "indexed": check_indexed,
    "checkpoint": check_checkpoint,
    "model": check_model,
    "predictions": check_predictions,
    "run": check_run,
}
_ALLOWED = "a directory with _manifest.json (dataset, checkpoint, model, predictions, indexed files) or run.json (run)"


def verify(
    url: str,
    *,
    on_ok: Callable[[str, str], None] = lambda path, text: None,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> list[Finding]:
    """Read everything that belongs to the dataset, checkpoint, exported model or run at `url`.

    Returns one finding for each fault, in the order found; none if all is intact. Calls `on_ok(path, text)` for each
    intact file and `on_bytes(n)` after reading n bytes. Raises NotFoundError if nothing is at `url`, ConfigError if it
    is none of the kinds, StorageError if the storage fails.
    """
    fs = filesystem(url)
    check = Check(fs, url, on_ok, on_bytes)
    kind = kind_of(fs, url)
    if check.special_files():
        return check.findings  # a link may lead out of the directory
    try:
        CHECKS[kind](check)
    except DataError as error:  # without a manifest there is nothing to compare with
        check.caught(RUN_JSON if kind == "run" else MANIFEST_NAME, error)
    except NotFoundError as error:
        check.caught(RUN_JSON if kind == "run" else MANIFEST_NAME, error)
    return check.findings


def kind_of(fs: FileSystem, url: str) -> str:
    """Which of KINDS is at `url`, decided by its files if the manifest is damaged or missing."""
    status = fs.stat(url)
    if not status.is_dir:
        raise ConfigError(f"{url} is a file", got="a file", allowed=_ALLOWED, next_step="Give the directory.")
    names = {entry.name for entry in fs.list(url)}
    if AGENT_JSON in names:
        raise ConfigError(
            f"{url} is a run of lockstep agent",
            got=AGENT_JSON,
            allowed=_ALLOWED,
            next_step="Verify one of its checkpoints/ or models/; `lockstep status` shows the run.",
        )
    if RUN_JSON in names or {CLAIMS, CHECKPOINTS} <= names:
        return "run"
    if MANIFEST_NAME in names:
        return _kind_of_manifest(fs, url)
    if any(name.startswith("split=") for name in names):
        return "dataset"
    if basename(url).startswith("step-") and any(name.startswith("rank-") for name in names):
        return "checkpoint"
    raise ConfigError(
        f"{url} is neither a dataset, a checkpoint nor a run",
        got=f"a directory with {', '.join(sorted(names)[:5]) or 'nothing in it'}",
        allowed=_ALLOWED,
        next_step="Check the path.",
    )


def total_bytes(url: str) -> int | None:
    """About how many bytes `verify` will read, for a progress display; None if the manifest does not say."""
    fs = filesystem(url)
    try:
        data = fs.read_bytes(join(url, MANIFEST_NAME))
        if kind_of(fs, url) != "dataset":
            return None
        manifest = DatasetManifest.from_bytes(data, url)
    except (NotFoundError, DataError):
        return None
    shards = sum(shard.bytes for split in manifest.splits.values() for shard in split.shards)
    return shards + sum(info.bytes for info in manifest.files.values())


def _kind_of_manifest(fs: FileSystem, url: str) -> str:
    guess = "checkpoint" if basename(url).startswith("step-") else "dataset"
    try:
        doc: dict[str, Any] = unseal(fs.read_bytes(join(url, MANIFEST_NAME)), url)
    except DataError:
        return guess  # damaged: verification will report how
    kind = doc.get("kind", "dataset")
    return kind if kind in KINDS else guess
