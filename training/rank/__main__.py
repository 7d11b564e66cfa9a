"""One rank's process: `python -m lockstep.training.rank`, started by a supervisor.

Its order (one line of JSON: task, place, key) comes on standard input, which then stays open: its end means that the
supervisor is gone. With an argument, the GPUs that it may see, it is a spare: it imports TensorFlow before its order.
Exit codes: 0 the entry returned, 2 a ConfigError or DataError that a restart would meet again, 1 anything else.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from lockstep.storage import tokens
from lockstep.storage.errors import ConfigError, LockstepError, TrainingFailedError
from lockstep.training import devices
from lockstep.training.comm.hosts import route_address
from lockstep.training.comm.tls import Credentials
from lockstep.training.control.client import ControlClient, open_channel
from lockstep.training.control.context import RankContext
from lockstep.training.control.last_words import LastWords
from lockstep.training.control.protocol import Role, Tag, error_to_json, is_final
from lockstep.training.control.stacks import answer_with_stacks
from lockstep.training.control.task import RankTask, is_stopped
from lockstep.training.world import World

PARENT_LOOK_S = 1.0
EXIT_CRASHED, EXIT_FINAL = 1, 2
PR_SET_PDEATHSIG = 1
CONNECT_DEADLINE_S = 30.0


def end_with_stopped_parent(parent: int, limit_s: float) -> None:
    """End this process once `parent` has been stopped for `limit_s` seconds; never returns."""
    stopped_s = 0.0  # counted by this process: a rank that was stopped too starts to count when it resumes
    while stopped_s < limit_s:
        time.sleep(min(PARENT_LOOK_S, limit_s))
        stopped_s = stopped_s + min(PARENT_LOOK_S, limit_s) if is_stopped(parent) else 0.0
    if select.select([], [sys.stderr], [], 0.0)[1]:  # a pipe that no process reads may be full
        print(f"[rank: its parent process {parent} has been stopped for {limit_s:.0f} s]", file=sys.stderr, flush=True)
    os._exit(1)


def leave_on_sigterm(leaving: threading.Event) -> None:
    """Set `leaving` at the first SIGTERM, and end this process at the second, whatever the main thread is doing.

    The supervisor ends its rank by closing its standard input. Call this in the main thread.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.siginterrupt(signal.SIGTERM, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        signals = (byte for byte in iter(partial(os.read, reader, 1), b"") if byte[0] == signal.SIGTERM)
        next(signals)
        leaving.set()
        print("[rank: SIGTERM: all ranks leave after their next step; a second signal ends this one]", flush=True)
        next(signals)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="sigterm-watch", daemon=True).start()


def main(files: Mapping[str, int]) -> int:
    """Run the entry named in the order; returns the exit code. `files` are those of the order, if this is a fork."""
    faulthandler.enable()  # a crash in native code leaves a trace in the rank's log
    _die_with_parent()
    # Ctrl-C reaches the whole process group of a terminal; only the driver decides what it means for ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if len(sys.argv) > 1 and not files:
        _import_early(sys.argv[1])
    order = _order()
    # The parent may have died before the death signal was set; that of a fork is a zygote.
    if order is None or (not files and os.getppid() != order["parent"]):
        return EXIT_CRASHED
    order |= files
    answer_with_stacks(order["stacks"])
    if order["tokens_file"]:
        os.environ[tokens.VARIABLE] = order["tokens_file"]
    threading.Thread(target=_watch_stdin, name="stdin-watch", daemon=True).start()
    leaving = threading.Event()
    if RankTask.from_json(order["task"]).leaves:
        leave_on_sigterm(leaving)
    watch = (order["parent"], order["lost_s"])
    threading.Thread(target=end_with_stopped_parent, args=watch, name="parent-watch", daemon=True).start()
    world, task, key = World.from_json(order["world"]), RankTask.from_json(order["task"]), bytes.fromhex(order["key"])
    show_in_ps(world)
    channel = open_channel(tuple(order["control"]), key, world.generation, Role.RANK, world.rank, CONNECT_DEADLINE_S)
    host = route_address(tuple(order["control"]))
    control = ControlClient(channel, host, order["beat_s"], leaving, LastWords(order["last_words"]))
    tls = Credentials.from_json(order["tls"]) if order["tls"] else None
    try:
        devices.expose(order["devices"], os.environ, order["host"])
        result = _call(task, RankContext(world, control, task.payload, key, host, order["stall_s"], tls))
        control.give_result(result)
    except (Exception, SystemExit) as error:  # every failure is reported to the driver and sets the exit code
        if not getattr(error, "quiet", False):
            traceback.print_exc()
        try:
            control.send(Tag.ERROR, {"error": error_to_json(_left(error) if isinstance(error, SystemExit) else error)})
        except LockstepError as lost:
            print(f"the error was not reported to the driver: {lost}", file=sys.stderr)
        return EXIT_FINAL if is_final(error) else EXIT_CRASHED
    return 0


def show_in_ps(world: World) -> None:
    """Write the rank's number into this process' command line, where `ps` and `pgrep -f` find it; on Linux only.

    The number is not known when a spare or a zygote's fork starts, so it cannot be an argument. The kernel shows the
    memory in which it has put the arguments; the new ones take the same bytes.
    """
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        shown = Path("/proc/self/cmdline").read_bytes()
    except OSError:  # no /proc, as on macOS: the title stays
        return
    begin, end = (int(field) for field in fields[45:47])  # arg_start and arg_end of proc(5), counted from the state
    words = [b"python", b"-P", b"-m", b"lockstep.training.rank", f"rank {world.rank} of {world.num_ranks}".encode()]
    title = b"\0".join(words).ljust(end - begin - 1) + b"\0"
    if len(shown) == len(title) == end - begin:
        ctypes.memmove(begin, title, len(title))


def _import_early(gpus: str) -> None:
    with contextlib.suppress(ConfigError):  # of GPUs that cannot be used: it comes again with the order
        devices.expose(devices.listed({devices.VISIBLE: gpus}) or (), os.environ, socket.gethostname())
        importlib.import_module("lockstep.training.rank.runtime").import_tensorflow()
        importlib.import_module("lockstep.training.rank.fit")


def _order() -> dict[str, Any] | None:
    """The order; None when the supervisor has ended."""
    line = sys.stdin.buffer.readline()
    if not line:
        return None
    order: dict[str, Any] = json.loads(line)
    return order


def _call(task: RankTask, context: RankContext) -> dict[str, Any]:
    if task.hadoop:
        from lockstep.storage.settings import set_hadoop_settings

        set_hadoop_settings(task.hadoop)
    module, function = task.entry.split(":")
    try:
        entry = getattr(importlib.import_module(module), function)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ConfigError(
            f"the ranks' entry {task.entry} cannot be imported",
            got=str(error),
            allowed="module:function, importable on the executors",
            next_step="Ship the module with --py-files or put it on PYTHONPATH.",
        ) from error
    with context:
        result = entry(context)
    if not isinstance(result, dict):
        raise ConfigError(
            f"the ranks' entry {task.entry} returned no result",
            got=type(result).__name__,
            allowed="a dict of JSON values",
            next_step="Return a dict.",
        )
    return result


def _left(end: SystemExit) -> TrainingFailedError:
    """The error for a `sys.exit` in a model or callback: the other ranks wait, so this one may not end silently."""
    return TrainingFailedError(
        "code that a rank runs called sys.exit",
        got=f"SystemExit({end.code!r})",
        allowed="a return, or an exception",
        next_step="Raise an error instead; to end a training early set model.stop_training in a callback.",
    )


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch_stdin() -> None:
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(EXIT_CRASHED)


def run(files: Mapping[str, int]) -> NoReturn:
    """Run `main`, and end this process with its exit code."""
    try:
        code = main(files)
    except BaseException:  # the driver is not connected: the log has it (Python's own exit waits for our threads)
        traceback.print_exc()
        code = EXIT_CRASHED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not sys.exit: a library's thread or exit hook could keep a finished rank alive


if __name__ == "__main__":
    run({})
