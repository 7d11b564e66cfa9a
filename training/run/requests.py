"""RUN/control: requests to a run's driver, from any process that can write the run's directory.

A request is a file NONCE.json; the driver looks every few seconds, acts, and writes NONCE.answer.json. The process that
asked removes both. A driver that starts removes requests that were left to an earlier one.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from dataclasses import dataclass
from typing import Any

from lockstep.storage.documents import canonical_bytes
from lockstep.storage.errors import ConfigError, NotFoundError, TrainingFailedError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.publish import is_temporary, read_replaced, write_file
from lockstep.storage.urls import join
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.status import now_utc, read_status

CHECKPOINT, STOP, STACKS = "checkpoint", "stop", "stacks"
KINDS = (CHECKPOINT, STOP, STACKS)
LOOK_S = 0.5
_SUFFIX, _ANSWER = ".json", ".answer.json"
MAX_BYTES = 4096  # of a request


@dataclass(frozen=True, slots=True)
class Request:
    """One request that waits for the driver."""

    nonce: str
    kind: str
    by: str
    """The host that asked."""


def open_requests(fs: FileSystem, paths: RunPaths) -> list[Request]:
    """The requests without an answer, in the order of their names; what is no request is ignored."""
    try:
        entries = {entry.name: entry for entry in fs.list(paths.control) if not entry.is_dir}
    except NotFoundError:
        return []
    found = []
    for name, entry in sorted(entries.items()):
        nonce = name.removesuffix(_SUFFIX)
        if name.endswith(_ANSWER) or not name.endswith(_SUFFIX) or is_temporary(name) or nonce + _ANSWER in entries:
            continue
        if entry.size_bytes > MAX_BYTES:
            continue
        try:
            document = json.loads(read_replaced(fs, entry.url))
            found.append(Request(nonce, str(document["kind"]), str(document["by"])))
        except (NotFoundError, ValueError, KeyError, TypeError, RecursionError):
            continue  # withdrawn meanwhile, or not ours
    return found


def answer(fs: FileSystem, paths: RunPaths, request: Request, text: str, *, done: bool = True) -> None:
    """Answer a request; `done` is False for one that the driver refuses."""
    document = {"kind": request.kind, "done": done, "text": text}
    write_file(fs, join(paths.control, request.nonce + _ANSWER), canonical_bytes(document), exclusive=False)


def clear(fs: FileSystem, paths: RunPaths) -> None:
    """Remove all requests and answers: of drivers and callers that have ended."""
    fs.discard(paths.control)


def ask(fs: FileSystem, paths: RunPaths, kind: str, within_s: float) -> str:
    """Ask the run's driver for something, one of KINDS, and wait for its answer.

    Raises what `read_status` raises, ConfigError for a run that has ended, and TrainingFailedError when no driver
    answers within `within_s` seconds or it refuses. The request is withdrawn in any case.
    """
    now = read_status(fs, paths)
    if now.ended:
        raise ConfigError(
            f"{paths.root} has no driver that could follow `{kind}`",
            got=f"a run that is {now.state}",
            allowed="a run that trains",
            next_step="Start it again with its lockstep train call, if it is to train on.",
        )
    nonce = secrets.token_hex(8)
    document = {"kind": kind, "by": socket.gethostname()}
    request, reply = (join(paths.control, nonce + suffix) for suffix in (_SUFFIX, _ANSWER))
    fs.mkdirs(paths.control)
    try:
        write_file(fs, request, canonical_bytes(document))
        end = time.monotonic() + within_s
        while (found := _read(fs, reply)) is None:
            if time.monotonic() > end:
                silent_s = read_status(fs, paths).silent_s(now_utc())
                silent = "" if silent_s is None else f", and no driver has written its status for {silent_s:.0f} s"
                raise TrainingFailedError(
                    f"the driver of {paths.root} did not answer `{kind}`",
                    got=f"no answer within {within_s:.0f} s{silent}",
                    allowed="a driver that lives and reaches the run's directory; it looks every 5 s",
                    next_step=f"See `lockstep status {paths.root}`: its driver may have ended; the same "
                    "lockstep train call then resumes the run.",
                )
            time.sleep(LOOK_S)
    finally:
        for url in (request, reply):
            fs.discard(url)
    if not found["done"]:
        raise TrainingFailedError(
            f"the driver of {paths.root} refused `{kind}`",
            got=str(found["text"]),
            allowed="a request that the run can follow now",
            next_step=f"See `lockstep status {paths.root}`.",
        )
    return str(found["text"])


def _read(fs: FileSystem, url: str) -> dict[str, Any] | None:
    try:
        document = json.loads(read_replaced(fs, url))
    except (NotFoundError, ValueError):
        return None
    return document if isinstance(document, dict) else None
