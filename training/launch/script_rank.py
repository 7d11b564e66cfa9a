"""A rank that runs a user's script: as `__main__`, with the script's arguments, as if started by hand."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from lockstep.storage.errors import CommunicationError, LockstepError, TrainingFailedError
from lockstep.training.comm.hosts import local_addresses
from lockstep.training.control import context
from lockstep.training.control import context as current
from lockstep.training.control.client import ControlClient
from lockstep.training.control.context import RankContext
from lockstep.training.control.protocol import SCRIPT, Message, Tag, error_to_json
from lockstep.training.control.task import CommOrder
from lockstep.training.launch.keras_fit import mend_keras_when_imported
from lockstep.training.world import World

# Libraries read these at their first import: little output, and no more threads than the rank's share of the host.
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "ERROR"}


class ScriptFailedError(TrainingFailedError):
    """A script ended with an exit code that is not 0; it has printed why, a stack trace would add nothing."""

    quiet = True


@dataclass(frozen=True, slots=True)
class Begun:
    """The process and its output before the script runs."""

    process: int
    output: tuple[int, int]
    """Device and inode of the pipe to the supervisor, on file descriptors 1 and 2."""

    @classmethod
    def now(cls) -> Begun:
        """Return what this process is now."""
        return cls(os.getpid(), _file_of(2))


def end_script(
    begun: Begun, error: BaseException | None, path: str, name: str, report: Callable[[BaseException], None]
) -> None:
    """Do what Python does at the end of the script `name`, which ran from `path` and raised `error`.

    `report` sends a failure to the driver before this waits for threads and exit hooks: other ranks wait for this one,
    and some hooks never end. They then have the supervisor's grace (Limits.grace_s).
    Raises the reason of the failure: the error itself, the error of another library that caused it, or
    ScriptFailedError for an exit code that is not 0. Does not return in a process that the script has forked.
    """
    _open_streams(begun)
    code = _exit_code(error)
    if code and error is not None:
        if (lost := _of_another_rank(error)) is None:
            _print(error, path)
        else:
            print(f"{type(lost).__name__}: {lost.what}", file=sys.stderr)
    if os.getpid() != begun.process:
        _end_fork(code)
    failure = _failure(error, code, name) if error is not None and code else None
    if failure is not None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the driver ends all ranks, this one after the grace period
        report(failure)
    _last_calls()
    _open_streams(begun)
    if failure is not None:
        raise failure


def _exit_code(error: BaseException | None) -> int:
    if error is None:
        return 0
    if not isinstance(error, SystemExit):
        return 1
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def _print(error: BaseException, path: str) -> None:
    """Print what Python prints: the text of `sys.exit("why")`, or a trace that starts at the script's first frame."""
    if isinstance(error, SystemExit):
        if not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        return
    error.__traceback__ = _of_script(error.__traceback__, path)
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception:  # the script's own hook failed: print its error and the original one
        traceback.print_exc()
        traceback.print_exception(error)


def _of_script(trace: TracebackType | None, path: str) -> TracebackType | None:
    found = trace
    while found is not None and found.tb_frame.f_code.co_filename != path:
        found = found.tb_next
    return found or trace


def _failure(error: BaseException, code: int, name: str) -> BaseException:
    """The error for the driver; the trace has been printed."""
    if isinstance(error, SystemExit):
        return ScriptFailedError(f"{name} ended by sys.exit with exit code {code}, where 0 is success")
    if not isinstance(error, Exception):
        return ScriptFailedError(f"{name} ended by {error!r}")
    cause = context.fault()
    if isinstance(cause, LockstepError) and cause is not error:
        if _of_another_rank(cause) is None:
            print(f"{type(cause).__name__}: {cause}", file=sys.stderr)
        error = cause
    if isinstance(error, ModuleNotFoundError) and (ours := _in_place_of(error)):
        error = ScriptFailedError(
            f"{name} imports {error.name}, which is not installed",
            got=f"ModuleNotFoundError: {error}",
            allowed=f"{ours}, which has Horovod's names under lockstep launch",
            next_step=f"Replace its import by `import {ours} as hvd`; docs/moving.md has the other changes.",
        )
    vars(error)["quiet"] = True  # what lockstep.training.rank asks before it prints a trace
    return error


def _of_another_rank(error: BaseException) -> CommunicationError | None:
    """The error of a call that another rank's end has ended, behind the script's error: it needs no trace, and the
    lines of the other rank should be seen.
    """
    for found in (error, context.fault()):
        if isinstance(found, CommunicationError) and found.of_another and found.what in str(error):
            return found  # TensorFlow repeats the text of our error in one of its own
    return None


def _in_place_of(error: ModuleNotFoundError) -> str:
    """Our module with the names of Horovod's that was not found; "" for any other module."""
    if (error.name or "").partition(".")[0] != "horovod":
        return ""
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""  # the error only names `horovod`
    return "lockstep.horovod" + (".torch" if "horovod.torch" in line else "")


def _last_calls() -> None:
    # Python calls both at its end; they have no public names.
    threading._shutdown()  # type: ignore[attr-defined]  # private, see above
    atexit._run_exitfuncs()


def _end_fork(code: int) -> NoReturn:
    _last_calls()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def _open_streams(begun: Begun) -> None:
    """Open streams again that the script has closed or replaced, for the last lines of the rank.

    They write to the pipe to the supervisor if one of its file descriptors is still open, else to /dev/null.
    """
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except (AttributeError, OSError, ValueError):
            left = next((number for number in (2, 1) if _file_of(number) == begun.output), None)
            where = os.devnull if left is None else left
            stream = open(where, "w", buffering=1, encoding="utf-8", errors="replace", closefd=left is None)  # noqa: SIM115 - open to the end
            setattr(sys, name, stream)


def _file_of(number: int) -> tuple[int, int]:
    try:
        found = os.fstat(number)
    except OSError:
        return -1, -1
    return found.st_dev, found.st_ino


@dataclass(frozen=True, kw_only=True)
class ScriptOrder(Message):
    """The user's script that a rank is asked to run."""

    name: str
    """The script's name, which is `sys.argv[0]`."""
    arguments: tuple[str, ...] = ()
    path: str | None
    """The script's path on the ranks' hosts; None if only `text` is sent."""
    text: str | None
    """The script's bytes as Latin-1, so that JSON keeps any source encoding."""
    start_s: float
    """The seconds that ranks wait for each other at the start."""
    comm: CommOrder = field(default_factory=CommOrder)


def main(context: RankContext) -> dict[str, Any]:
    """A rank's entry: run the script of a ScriptOrder.

    Raises the script's error, or ScriptFailedError for an exit code that is not 0.
    """
    script = ScriptOrder.from_json(context.payload)
    control, world = context.control, context.world
    control.beat(0, SCRIPT)
    with _free_port(context.host) as port:
        table = control.rendezvous(context.host, port, script.start_s)
    os.environ.update(environment(world, table))
    for name, value in {**QUIET, **_threads(world), **_interface(context.host)}.items():
        os.environ.setdefault(name, value)
    current.set_context(context)
    mend_keras_when_imported()
    with _script_file(script) as path:
        _run(path, script, control)
    return {}


def environment(world: World, table: list[tuple[str, int]]) -> dict[str, str]:
    """Variables for the script: our names, and those that scripts for torchrun, Horovod and tf.distribute read.

    `table` has each rank's host and a port that was free a moment ago, for a library with its own rendezvous.
    """
    hosts = list(dict.fromkeys(host for host, _ in table))
    cluster = {"worker": [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in table]}
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
        "GROUP_RANK": hosts.index(table[world.rank][0]),
        "GROUP_WORLD_SIZE": len(hosts),
        "ROLE_NAME": "default",
        "ROLE_RANK": world.rank,
        "ROLE_WORLD_SIZE": world.num_ranks,
        "TORCHELASTIC_RESTART_COUNT": world.generation - 1,
        "TORCHELASTIC_RUN_ID": "lockstep",
        "HOROVOD_RANK": world.rank,
        "HOROVOD_SIZE": world.num_ranks,
        "HOROVOD_LOCAL_RANK": world.rank_of_node,
        "HOROVOD_LOCAL_SIZE": world.ranks_per_node,
        "MASTER_ADDR": table[0][0],
        "MASTER_PORT": table[0][1],
        # Worker 0 is the chief where the cluster names none.
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": world.rank}}),
    }
    return {name: str(value) for name, value in {**ours, **known}.items()}


def _threads(world: World) -> dict[str, str]:
    share = max(1, len(os.sched_getaffinity(0)) // world.ranks_per_node)
    # A collective blocks one inter-op thread while it waits; the other continues with graph and input.
    return {"TF_NUM_INTRAOP_THREADS": str(share), "TF_NUM_INTEROP_THREADS": "2"}


def _interface(host: str) -> dict[str, str]:
    """The interface with this rank's address, for Gloo, which else takes what the host's name resolves to."""
    found = [name for name, addresses in local_addresses().items() if host in addresses]
    return {"GLOO_SOCKET_IFNAME": found[0]} if found else {}


@contextlib.contextmanager
def _free_port(host: str) -> Iterator[int]:
    """A port that stays reserved until all ranks have reported theirs, so that those of a host differ."""
    with socket.create_server((host, 0)) as listener:
        yield listener.getsockname()[1]


@contextlib.contextmanager
def _script_file(script: ScriptOrder) -> Iterator[str]:
    """The path of the script as a file, so that stack traces show its lines and `__file__` exists."""
    if script.path is not None:
        yield script.path
        return
    with tempfile.TemporaryDirectory(prefix="lockstep-script-") as folder:
        path = Path(folder, Path(script.name).name)
        path.write_bytes((script.text or "").encode("latin-1"))
        yield str(path)


def _run(path: str, script: ScriptOrder, control: ControlClient) -> None:
    sys.argv[:] = [script.name, *script.arguments]
    sys.path.insert(0, str(Path(path).parent))
    if files := os.environ.get("LOCKSTEP_FILES"):
        sys.path.insert(1, files)
    # The script must not read the pipe from the supervisor, whose end means that the supervisor has ended.
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - open for as long as the process lives
    begun = Begun.now()
    raised: BaseException | None = None
    try:
        runpy.run_path(path, run_name="__main__")
    except BaseException as error:  # also KeyboardInterrupt: the script has ended in any case
        raised = error

    def report(error: BaseException) -> None:
        with contextlib.suppress(
            CommunicationError
        ):  # lockstep.training.rank reports the loss of the driver at the end
            control.send(Tag.ERROR, {"error": error_to_json(error)})

    end_script(begun, raised, path, Path(script.name).name, report)
