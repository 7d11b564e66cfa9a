"""What a rank does with a user's script: it runs as `__main__`, with its own arguments, as if started by hand."""

from __future__ import annotations

import contextlib
import os
import runpy
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.storage.errors import CommunicationError
from training.control import current
from training.control.carry import error_to_json
from training.control.client import ControlClient
from training.control.context import RankContext
from training.control.protocol import SCRIPT, Tag
from training.launch.script_end import Begun, end_script
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
        _run(path, script, control)
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


@contextlib.contextmanager
def _free_port(host: str) -> Iterator[int]:
    """A port that stays ours until all ranks have told theirs, so that no two of a host tell the same."""
    with socket.create_server((host, 0)) as listener:
        yield listener.getsockname()[1]


@contextlib.contextmanager
def _script_file(script: Script) -> Iterator[str]:
    """The script as a file: stack traces show its lines, and `__file__` says where it is."""
    if script.path is not None:
        yield script.path
        return
    with tempfile.TemporaryDirectory(prefix="lockstep-script-") as folder:
        path = Path(folder, Path(script.name).name)
        path.write_bytes((script.text or "").encode("latin-1"))
        yield str(path)


def _run(path: str, script: Script, control: ControlClient) -> None:
    sys.argv[:] = [script.name, *script.arguments]
    sys.path.insert(0, str(Path(path).parent))
    if files := os.environ.get("LOCKSTEP_FILES"):
        sys.path.insert(1, files)
    # The pipe from the supervisor is not the script's to read; its end means that the supervisor is gone.
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - open for as long as the process lives
    begun = Begun.now()
    raised: BaseException | None = None
    try:
        runpy.run_path(path, run_name="__main__")
    except BaseException as error:  # KeyboardInterrupt too: whatever it is, the script has ended
        raised = error

    def tell(error: BaseException) -> None:
        with contextlib.suppress(
            CommunicationError
        ):  # a driver that is gone is told of by training.rank.__main__, at the end
            control.send(Tag.ERROR, {"error": error_to_json(error)})

    end_script(begun, raised, path, Path(script.name).name, tell)
