"""Faults of processes, connections and files by name, drawn by a seeded generator, for benchmarks.random_kills."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil

MARK = "LOCKSTEP_RANDOM_KILLS"
"""A variable in the environment of each process of one run, by whose value remaining ones are found."""
PAUSES_S = (0.5, 2.0, 12.0)
NOISE_BYTES, CALLERS = 200, 8
RANK, TASK, EXECUTOR = "lockstep.training.rank", "pyspark.daemon", "CoarseGrainedExecutorBackend"

# On one process below the driver: (word of its command line, signal).
OF_A_PROCESS = {
    "kill rank": (RANK, signal.SIGKILL),
    "end rank": (RANK, signal.SIGTERM),
    "crash rank": (RANK, signal.SIGSEGV),
    "stop rank": (RANK, signal.SIGSTOP),
    "kill task": (TASK, signal.SIGKILL),
    "stop task": (TASK, signal.SIGSTOP),
    "kill executor": (EXECUTOR, signal.SIGKILL),
}
OF_THE_DRIVER = {
    "kill driver": signal.SIGKILL,
    "end driver": signal.SIGTERM,
    "interrupt driver": signal.SIGINT,
    "stop driver": signal.SIGSTOP,
}


def below(pid: int, word: str) -> list[int]:
    """The descendants of a process whose command line has this word."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    found = []
    for child in children:
        with contextlib.suppress(psutil.Error):
            if word in " ".join(child.cmdline()):
                found.append(child.pid)
    return sorted(found)


def strike(kind: str, driver: int, rng: random.Random) -> None:
    """Do what OF_A_PROCESS says of `kind` to one process below the driver, if there is any."""
    (word, number), drawn = OF_A_PROCESS[kind], rng.randrange(1 << 16)  # the same draws whatever is there
    pids = below(driver, word)
    if not pids:
        return
    pid = pids[drawn % len(pids)]
    with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
        os.kill(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(PAUSES_S[drawn % len(PAUSES_S)])
            os.kill(pid, signal.SIGCONT)


def strangers(driver: int, rng: random.Random) -> int:
    """Send noise to each port on which the driver or a process below it listens; returns how many there were."""
    ports, noise = set(), rng.randbytes(NOISE_BYTES)
    for pid in (driver, *below(driver, "")):
        with contextlib.suppress(psutil.Error):
            found = psutil.Process(pid).net_connections("tcp")
            ports |= {one.laddr[:2] for one in found if one.status == psutil.CONN_LISTEN}
    for address in sorted(ports):
        for number in range(CALLERS):
            with contextlib.suppress(OSError), socket.create_connection(address, 5.0) as caller:
                caller.sendall(noise[: number * NOISE_BYTES // CALLERS])
    return len(ports)


def flip(path: Path, rng: random.Random) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut(path: Path, rng: random.Random) -> None:
    """Shorten a file."""
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data))])


def damage_checkpoint(run: str, rng: random.Random, change: Callable[[Path, random.Random], None]) -> bool:
    """Change one file of the newest checkpoint if another one is whole; whether it was done."""
    there = sorted(Path(run, "checkpoints").glob("step-*"))
    drawn = rng.randrange(1 << 16)
    if len(there) < 2:
        return False
    files = sorted(path for path in there[-1].iterdir() if path.stat().st_size)
    change(files[drawn % len(files)], rng)
    return True


def scramble_lease(run: str, rng: random.Random) -> bool:
    """Write noise over a run's lease."""
    path = Path(run, "lease.json")
    if path.exists():
        path.write_bytes(rng.randbytes(NOISE_BYTES))
    return path.exists()


def leave_staging(run: str, rng: random.Random) -> bool:
    """Leave what a killed writer of an older generation leaves."""
    if not any(Path(run, "generations").glob("*.json")):
        return False
    folder = Path(run, ".staging", f"g0001-{rng.randbytes(4).hex()}")
    folder.mkdir(parents=True)
    (folder / "rank-00000.safetensors").write_bytes(rng.randbytes(NOISE_BYTES))
    return True


# On the files of a run, between two drivers.
OF_THE_RUN: dict[str, Callable[[str, random.Random], bool]] = {
    "flip checkpoint": lambda run, rng: damage_checkpoint(run, rng, flip),
    "cut checkpoint": lambda run, rng: damage_checkpoint(run, rng, cut),
    "scramble lease": scramble_lease,
    "leave staging": leave_staging,
}


def lose_shuffle(temporary: Path) -> int:
    """Delete each shuffle file below Spark's scratch folders; returns how many there were."""
    found = [path for path in temporary.rglob("shuffle_*") if path.is_file()]
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)


def living(mark: str) -> list[str]:
    """`PID COMMAND` of each process with this mark in its environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(f"{entry.name} {command[:100]}")
    return found


def left(mark: str, temporary: Path, before: set[str], wait_s: float = 30.0, *, killed: bool = False) -> list[str]:
    """Remains of a run that has ended: processes, their sockets, segments in /dev/shm, temporary files.

    Sockets and memfd segments end with their processes. `before`: the names in /dev/shm at the start.
    """
    end = time.monotonic() + wait_s
    while (processes := living(mark)) and time.monotonic() < end:
        time.sleep(0.2)
    # A driver of an ETL job that a signal ended cannot remove the folder with the code for its executors.
    own = re.compile(r"lockstep-[a-z0-9_]{8}" if killed else "(?!)")
    files = [path.name for path in temporary.iterdir() if not own.fullmatch(path.name)]
    segments = [name for name in set(os.listdir("/dev/shm")) - before if "lockstep" in name]
    named = {"process": processes, "temporary file": files, "segment": segments}
    return [f"left: {kind} {one}" for kind, found in named.items() for one in found]


def unclear(log: Path, code: int) -> list[str]:
    """What is missing at the end of a process' output if it ended with an error of its own: one error of four parts."""
    if code not in (1, 2):  # done, ended by a signal, or stopped in good order
        return []
    text = "\n" + log.read_text(errors="replace")
    _, mark, error = text.rpartition("\nerror: ")
    parts = {"error:": mark, **{part: part in error for part in ("got:", "allowed:", "next:")}}
    missing = [part for part, there in parts.items() if not there]
    return [f"exit {code} without {', '.join(missing)}: {text[-300:]!r}"] if missing else []
