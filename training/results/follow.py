"""Evaluates each checkpoint of a run that still trains, next to it: it reads the run, and writes only its own files."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lockstep.storage.documents import canonical_bytes, seal, sha256_hex, unseal_as
from lockstep.storage.errors import (
    CorruptionError,
    ExistsError,
    LockstepError,
    NotFoundError,
    TrainingFailedError,
    require,
)
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import read_replaced, write_file
from lockstep.storage.urls import basename, join
from lockstep.training.launch.session import Launch
from lockstep.training.results.evaluate import EvaluateRequest, evaluate, number
from lockstep.training.run.lineage import CheckpointRef, chain_of, newest_claimed
from lockstep.training.run.paths import RunPaths, checkpoint_of

LOOK_S = 5.0  # between two looks at the run; its lease is rewritten as often
MAX_WAIT_S = 366 * 86400.0
IDLE_S = 600.0  # without a sign of the run's driver: it has ended without a result


def follow(
    request: EvaluateRequest,
    launch: Launch,
    *,
    start_delay_s: float = 0.0,
    throttle_s: float = 0.0,
    look_s: float = LOOK_S,
    idle_s: float = IDLE_S,
    show: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Evaluate each checkpoint of the request's one run as it is committed, until the run has ended and its last one is
    scored.

    The first look is after `start_delay_s`, and while the run trains an evaluation
    begins `throttle_s` or more after the one before it. Each result is published in RUN/evaluations, in a directory of
    this dataset, split, condition, baseline, slices and clusters: another call continues there. A checkpoint that
    retention removed first is left out, which `show` reports. Returns {step, generation, result} of each checkpoint,
    by step; `result` is that of `evaluate`. Raises what `evaluate` does, TrainingFailedError if the run's driver shows
    no sign of life for `idle_s`.
    """
    for name, seconds in (("--start-delay", start_delay_s), ("--throttle", throttle_s)):
        require(0 <= seconds <= MAX_WAIT_S, name, f"{seconds} s", f"0 to {MAX_WAIT_S:.0f} s")
    (run,) = request.runs
    fs, paths = filesystem(run), RunPaths(run)
    folder = paths.evaluations(_name_of(request))
    skipped: set[CheckpointRef] = set()
    driver, begun = _Driver(fs, paths, idle_s), -math.inf
    time.sleep(start_delay_s)
    while True:
        ended = _ended(fs, paths)  # before the checkpoints are listed, so that none is missed
        done = _done(fs, folder)
        waiting = [ref for ref in reversed(chain_of(fs, paths)[0]) if ref not in done and ref not in skipped]
        if not waiting and ended:
            return [_read(fs, folder, ref) for ref in sorted(done)]
        if not waiting:
            driver.check()
            time.sleep(look_s)
            continue
        if not ended:
            time.sleep(max(0.0, begun + throttle_s - time.monotonic()))
        begun, ref = time.monotonic(), waiting[0]
        url = paths.checkpoint(ref.step, ref.generation)
        try:
            result = evaluate(replace(request, checkpoint=url), launch)
        except LockstepError:
            if fs.exists(url):
                raise
            skipped.add(ref)
            show(f"{ref}: left out, since the run's retention has removed it")
            continue
        _write(fs, folder, ref, result)
        numbers = ", ".join(f"{name} {number(value)}" for name, value in sorted(result["metrics"].items()))
        show(f"{ref}: {result['samples']} samples, {numbers}")


def _name_of(request: EvaluateRequest) -> str:
    """The name of what the request asks of each checkpoint."""
    names = ("split", "baseline", "slices", "clusters")
    key = {"dataset": request.checked_dataset().digest} | {name: getattr(request, name) for name in names}
    key |= {} if request.where is None else {"where": request.where}
    return f"{request.split}-{sha256_hex(canonical_bytes(key))[:12]}"


class _Driver:
    """Looks for signs of life of a run's driver: a lease that changes."""

    def __init__(self, fs: FileSystem, paths: RunPaths, idle_s: float) -> None:
        self._fs, self._paths, self._idle_s = fs, paths, idle_s
        self._lease, self._since = b"", time.monotonic()

    def check(self) -> None:
        """Raise TrainingFailedError if the lease has not changed for too long."""
        try:
            lease = read_replaced(self._fs, self._paths.lease)
        except NotFoundError:
            lease = b""
        if lease != self._lease:
            self._lease, self._since = lease, time.monotonic()
        if time.monotonic() - self._since > self._idle_s:
            raise TrainingFailedError(
                f"{self._paths.root} has neither a result nor a driver",
                got=f"no change of {self._paths.lease} for {self._idle_s:.0f} s",
                allowed="a run that trains, or has ended",
                next_step="Resume the run, then repeat this call: it evaluates only what it has not evaluated yet.",
            )


def followed(fs: FileSystem, paths: RunPaths) -> dict[str, dict[int, dict[str, Any]]]:
    """Read the metrics of each checkpoint that `follow` has stored in the run, by `SPLIT of DATASET` and step.

    Of a step that two generations have committed, the newer one's count. Raises DataError or CorruptionError for a
    damaged file.
    """
    found: dict[str, dict[int, dict[str, Any]]] = {}
    try:
        folders = sorted(entry.url for entry in fs.list(paths.evaluations("").rstrip("/")))
    except NotFoundError:
        return found
    for folder in folders:
        for ref in sorted(_done(fs, folder)):
            result = _read(fs, folder, ref)["result"]
            by_step = found.setdefault(f"{result['split']} of {basename(result['dataset'])}", {})
            by_step[ref.step] = result["metrics"]
    return {name: dict(sorted(by_step.items())) for name, by_step in found.items()}


def _ended(fs: FileSystem, paths: RunPaths) -> bool:
    newest = newest_claimed(fs, paths)
    return newest > 0 and fs.exists(paths.result(newest))


def _done(fs: FileSystem, folder: str) -> set[CheckpointRef]:
    try:
        names = [entry.name.removesuffix(".json") for entry in fs.list(folder)]
    except NotFoundError:
        return set()
    return {CheckpointRef(*found) for name in names if (found := checkpoint_of(name)) is not None}


def _write(fs: FileSystem, folder: str, ref: CheckpointRef, result: dict[str, Any]) -> None:
    fs.mkdirs(folder)
    document = {"format_version": 1, "kind": "evaluation", **ref.to_json(), "result": result}
    with suppress(ExistsError):  # by another call, which found the same
        write_file(fs, join(folder, f"{ref}.json"), seal(document))


def _read(fs: FileSystem, folder: str, ref: CheckpointRef) -> dict[str, Any]:
    url = join(folder, f"{ref}.json")
    try:
        document = unseal_as("evaluation", fs.read_bytes(url), url)
    except CorruptionError as error:
        error.next_step = "Delete this file: `lockstep evaluate --follow` evaluates the checkpoint again."
        raise
    return {name: document[name] for name in ("step", "generation", "result")}
