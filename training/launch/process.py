"""A rank's process: its order, its start, and the end of all that it started."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.storage.tokens import VARIABLE, held
from lockstep.training.comm.tls import Credentials
from lockstep.training.control.task import MARK, SCRATCH_LOCK, Limits, RankTask, scratch_folder
from lockstep.training.launch.forked import ForkedRank, fork_rank
from lockstep.training.world import World

# Entries that import TensorFlow, and set no variable which it and Keras read when they are imported.
OURS = ("lockstep.training.rank.", "lockstep.training.results.", "lockstep.training.profiling.profile:")
_PASSES = 5  # a process may start another one during the search
_BETWEEN_S = 0.02


def new_mark() -> str:
    """A value of `MARK` that is unique on this host."""
    return f"{os.getpid()}-{secrets.token_hex(8)}"


def end_left(group: int, mark: str) -> None:
    """Kill the remaining processes of a rank, by its process group and its mark; remove its temporary files."""
    _kill_left(group, mark)
    shutil.rmtree(scratch_folder(mark), ignore_errors=True)


def remove_abandoned_folders() -> None:
    """Remove the scratch folders of this user's ranks that have died together with their supervisors."""
    for folder in Path(scratch_folder("")).parent.glob(Path(scratch_folder("*")).name):
        with contextlib.suppress(OSError):  # no lock yet, another process removes it too, or the rank lives
            lock = os.open(folder / SCRATCH_LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
            finally:
                os.close(lock)


def _kill_left(group: int, mark: str) -> None:
    with contextlib.suppress(ProcessLookupError):  # usually all have ended
        os.killpg(group, signal.SIGKILL)
    end_marked(MARK, mark)


def end_marked(name: str, value: str) -> None:
    """Kill every process of this user whose environment has the variable `name` with this value."""
    for _ in range(_PASSES):
        if not (found := _marked(f"{name}={value}".encode())):
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_BETWEEN_S)


def _marked(wanted: bytes) -> list[int]:
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if wanted in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
    return found


@dataclass(frozen=True, slots=True)
class Order:
    """All that a supervisor needs to run a rank; `host` is the launcher's name of this host, for messages."""

    task: RankTask
    world: World
    host: str
    control: tuple[str, int]
    key: bytes = field(repr=False)
    limits: Limits
    devices: tuple[str, ...] = ()
    """The only GPUs that the rank sees (lockstep.training.devices)."""
    tls: Credentials | None = None
    """The rank's certificate for ranks on other hosts; None: without encryption."""
    mark: str = field(default_factory=new_mark)
    """A variable in the environment of the rank and of all processes that it starts."""


@dataclass(frozen=True, slots=True)
class SupervisorSpec:
    """What one supervisor knows throughout its session; orders bring the rest."""

    rank: int
    hosts: tuple[str, ...]
    """The hosts of all ranks, by the launcher's names."""
    control: tuple[str, int]
    """The address of the driver's roster; control servers of generations have the same host."""
    secret: bytes = field(repr=False)
    """The session's secret, which decrypts orders; no rank gets it."""
    limits: Limits
    devices: tuple[str, ...] = ()
    """The GPUs that the rank may use, as in Order."""

    def order(self, document: Mapping[str, Any]) -> Order:
        """The order of one generation, from the document of `order_to_json`."""
        world = World.from_hosts(self.rank, self.hosts, int(document["generation"]))
        tls = Credentials.from_json(document["tls"]) if document["tls"] else None
        return Order(
            RankTask.from_json(document["task"]),
            world,
            self.hosts[self.rank],
            (self.control[0], int(document["port"])),
            bytes.fromhex(document["key"]),
            self.limits,
            self.devices,
            tls,
        )


def order_to_json(task: RankTask, generation: int, port: int, key: bytes, tls: Credentials | None) -> dict[str, Any]:
    """The part of an order that differs between generations; holds secrets."""
    return {
        "task": task.to_json(),
        "tokens": held(),
        "generation": generation,
        "port": port,
        "key": key.hex(),
        "tls": tls.to_json() if tls else None,
    }


RankProcess = subprocess.Popen[bytes] | ForkedRank


def start_rank(order: Order, last_words: int, stacks: int) -> RankProcess:
    """Start a rank's process, and hand it its order, the page of its last words, and the file for its stacks."""
    process: RankProcess | None = None
    if order.task.entry.startswith(OURS) and not order.devices:
        remove_abandoned_folders()
        process = fork_rank(environment_of(order.mark, order.world.ranks_per_node), last_words, stacks)
    if process is None:
        process = start_process([], order.mark, order.world.ranks_per_node, last_words, stacks)
    give_order(process, order, last_words, stacks)
    return process


def start_process(
    arguments: Sequence[str], mark: str, ranks_per_node: int, last_words: int, stacks: int
) -> subprocess.Popen[bytes]:
    """Start `lockstep.training.rank` with this process' import path; it waits for its order (`give_order`)."""
    remove_abandoned_folders()
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "lockstep.training.rank", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment_of(mark, ranks_per_node),
        process_group=0,
        pass_fds=(last_words, stacks),
    )


def environment_of(mark: str, ranks_per_node: int) -> dict[str, str]:
    """The environment of a rank's process."""
    paths = [os.path.abspath(path or os.getcwd()) for path in sys.path]
    # A rank needs none of the secrets that Spark gave to this worker.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON_WORKER_FACTORY")}
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", MARK: mark}
    # Unless the user says otherwise, the ranks of one host share its cores instead of each taking all of them.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks_per_node)))
    # TensorFlow starts new threads each epoch. glibc gives each a heap, up to eight a core, and never returns it:
    # memory grew by 150 MB over the first 12 epochs. With two heaps it stays within 1 %.
    environment.setdefault("MALLOC_ARENA_MAX", "2")
    return environment


def give_order(process: RankProcess, order: Order, last_words: int, stacks: int) -> None:
    """Hand a rank its order; through the pipe, since arguments and environment are readable by others on the host, and
    it holds the rank's key and certificate.
    """
    assert process.stdin is not None
    files = {"last_words": last_words, "stacks": stacks}
    try:
        process.stdin.write(json.dumps(_order_for_rank(order) | files).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:  # it died at its start: its exit code and log say why
        with contextlib.suppress(BrokenPipeError):  # `close` writes the rest again: better here
            process.stdin.close()


def _order_for_rank(order: Order) -> dict[str, Any]:
    return {
        "parent": os.getpid(),
        "task": order.task.to_json(),
        "world": order.world.to_json(),
        "host": order.host,
        "control": list(order.control),
        "key": order.key.hex(),
        "tls": order.tls.to_json() if order.tls else None,
        "beat_s": order.limits.beat_s,
        "stall_s": order.limits.stall_s,
        "lost_s": order.limits.lost_s,
        "devices": list(order.devices),
        "tokens_file": os.environ.get(VARIABLE, ""),  # a spare may have started before the first tokens came
    }
