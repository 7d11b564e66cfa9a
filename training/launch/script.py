"""What a rank does with a user's script: it runs as `__main__`, with its own arguments, as if started by hand."""

from __future__ import annotations

import atexit
import os
import runpy
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from storage.errors import LockstepError, TrainingFailedError
from training.control.protocol import SCRIPT
from training.launch import current
from training.launch.context import RankContext
from training.world import World

# What a library reads before its first import: quiet, and no more threads than the rank's share of the host.
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "ERROR"}


@dataclass(frozen=True, slots=True)
class Script:
    """A user's script as ranks get it."""

    name: str
    """As it was called: `sys.argv[0]`."""
    arguments: tuple[str, ...]
    path: str | None
    """Where the ranks find it; None where only `text` reaches them."""
    text: str | None
    """Its bytes as Latin-1, so that any source encoding survives JSON."""

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Script:
        """The inverse of `to_json`."""
        return cls(**{**document, "arguments": tuple(document["arguments"])})


class ScriptFailedError(TrainingFailedError):
    """A script ended itself with an exit code that is not 0; it has said why, a stack trace would say no more."""

    quiet = True


def main(context: RankContext) -> dict[str, Any]:
    """A rank's entry: run the script of the payload.

    Raises what the script raised, or ScriptFailedError for an exit code that is not 0.
    """
    script = Script.from_json(context.payload["script"])
    control, world = context.control, context.world
    control.beat(0, SCRIPT)
    with _free_port(context.host) as port:
        table = control.rendezvous(context.host, port, context.payload["start_s"])
    os.environ.update(environment(world, table))
    for name, value in {**QUIET, **_threads(world)}.items():
        os.environ.setdefault(name, value)
    current.set_context(context)
    with _script_file(script) as path:
        _run(path, script)
    return {}


def environment(world: World, table: list[tuple[str, int]]) -> dict[str, str]:
    """What a script finds in its environment: our names, and those that scripts of torchrun and Horovod read.

    `table` has rank 0's host and a port that was free there a moment ago, for a library that meets by itself.
    """
    ours = {
        "LOCKSTEP_RANK": world.rank,
        current.NUM_RANKS: world.num_ranks,
        "LOCKSTEP_LOCAL_RANK": world.rank_of_node,
        "LOCKSTEP_LOCAL_NUM_RANKS": world.ranks_per_node,
        "LOCKSTEP_GENERATION": world.generation,
    }
    known = {
        "RANK": world.rank,
        "WORLD_SIZE": world.num_ranks,
        "LOCAL_RANK": world.rank_of_node,
        "LOCAL_WORLD_SIZE": world.ranks_per_node,
        "HOROVOD_RANK": world.rank,
        "HOROVOD_SIZE": world.num_ranks,
        "HOROVOD_LOCAL_RANK": world.rank_of_node,
        "HOROVOD_LOCAL_SIZE": world.ranks_per_node,
        "MASTER_ADDR": table[0][0],
        "MASTER_PORT": table[0][1],
    }
    return {name: str(value) for name, value in {**ours, **known}.items()}


def _threads(world: World) -> dict[str, str]:
    share = max(1, len(os.sched_getaffinity(0)) // world.ranks_per_node)
    # A collective blocks one inter-op thread while it waits; the other goes on with graph and input.
    return {"TF_NUM_INTRAOP_THREADS": str(share), "TF_NUM_INTEROP_THREADS": "2"}


@contextmanager
def _free_port(host: str) -> Iterator[int]:
    """A port that stays ours until all ranks have told theirs, so that no two of a host tell the same."""
    with socket.create_server((host, 0)) as listener:
        yield listener.getsockname()[1]


@contextmanager
def _script_file(script: Script) -> Iterator[str]:
    """The script as a file: stack traces show its lines, and `__file__` says where it is."""
    if script.path is not None:
        yield script.path
        return
    with tempfile.TemporaryDirectory(prefix="lockstep-script-") as folder:
        path = Path(folder, Path(script.name).name)
        path.write_bytes((script.text or "").encode("latin-1"))
        yield str(path)


def _run(path: str, script: Script) -> None:
    sys.argv[:] = [script.name, *script.arguments]
    sys.path.insert(0, str(Path(path).parent))
    if files := os.environ.get("LOCKSTEP_FILES"):
        sys.path.insert(1, files)
    # The pipe from the supervisor is not the script's to read; its end means that the supervisor is gone.
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - open for as long as the process lives
    try:
        try:
            runpy.run_path(path, run_name="__main__")
        finally:
            _end_as_python_does()
    except SystemExit as end:
        if end.code is None or end.code == 0:
            return
        code = end.code if isinstance(end.code, int) else 1
        if code != end.code:
            print(end.code, file=sys.stderr)  # as Python does: sys.exit("why")
        name = Path(script.name).name
        raise ScriptFailedError(f"{name} ended by sys.exit with exit code {code}, where 0 is success") from None
    except Exception as error:
        cause = current.fault()
        if isinstance(cause, LockstepError) and cause is not error:
            raise cause from error
        raise error.with_traceback(_of_script(error.__traceback__, path)) from error.__cause__


def _of_script(trace: TracebackType | None, path: str) -> TracebackType | None:
    """A trace from the script's own first frame on."""
    found = trace
    while found is not None and found.tb_frame.f_code.co_filename != path:
        found = found.tb_next
    return found or trace


def _end_as_python_does() -> None:
    """Wait for the script's threads and call its exit hooks: a rank's process itself ends without either."""
    # Both are what Python calls at its own end; there are no public names for them.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
