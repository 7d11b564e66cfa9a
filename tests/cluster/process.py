"""Daemons as processes: started, found again by pid and start time, ended, and the last words of each."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)


def started_at(pid: int) -> int | None:
    """The start time of a live process in clock ticks since boot (proc(5), stat field 22), None where it is gone.

    A pid and its start time name one process for good; a pid alone may have been given to another since.
    """
    fields = _stat_fields(pid)
    return int(fields[19]) if fields and fields[0] != "Z" else None


def _stat_fields(pid: int) -> list[str]:
    """Field 3 (the state) and those after it; empty where the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return stat[stat.rindex(")") + 2 :].split()  # the name before may hold spaces and brackets


@dataclass(frozen=True)
class Process:
    """A process that this code started, now or in an earlier call."""

    name: str
    pid: int
    start_time: int

    @property
    def alive(self) -> bool:
        return started_at(self.pid) == self.start_time

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to just this process; False where it has ended."""
        if not self.alive:
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def pause(self, within_s: float = 60.0) -> bool:
        """SIGSTOP, and wait until the kernel has stopped it; False where it has ended or does not stop in time."""
        deadline = time.monotonic() + within_s
        while self.signal(signal.SIGSTOP) and time.monotonic() < deadline:
            if _stat_fields(self.pid)[:1] == ["T"]:
                return True
            time.sleep(0.01)
        return False

    def end(self, grace_s: float = 0.0) -> None:
        """End the process, with SIGTERM first where a grace is given. Raises TimeoutError if it survives SIGKILL."""
        if grace_s and self.signal(signal.SIGTERM):
            self.signal(signal.SIGCONT)  # a stopped process would not see the SIGTERM
            self._gone_within(grace_s)
        if self.signal(signal.SIGKILL) and not self._gone_within(60.0):
            raise TimeoutError(f"{self.name} (pid {self.pid}) is still there 60 s after SIGKILL")

    def _gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.alive:
            if time.monotonic() > deadline:
                return False
            self._reap()
            time.sleep(0.02)
        self._reap()
        return True

    def _reap(self) -> None:
        try:
            os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            return  # not our child: `down` ends what an earlier `up` started


def spawn(name: str, command: Sequence[str], environment: dict[str, str], log: Path, *, keep: bool) -> Process:
    """Start `command` with its output appended to `log`.

    keep=True: it outlives this process (`make cluster`). keep=False: the kernel kills it when the thread that called
    this ends, so that even a test run ended by kill -9 leaves no daemon.
    """

    def die_with_parent() -> None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    with log.open("ab") as output:
        child = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=None if keep else die_with_parent,
        )
    start_time = started_at(child.pid)
    child.returncode = 0  # reaped by Process.end; Popen must not warn that it was not
    return Process(name, child.pid, start_time if start_time is not None else -1)


def last_lines(log: Path, count: int = 25) -> str:
    """The end of a log, for an error message; long lines are cut."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return "(no log)"
    return "\n".join(line[:300] for line in lines[-count:]) or "(an empty log)"


def read_state(file: Path) -> tuple[dict[str, int], dict[str, Process]]:
    """Ports and processes that an earlier call started; both empty where there is no such file."""
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, {}
    return state["ports"], {entry["name"]: Process(**entry) for entry in state["processes"]}


def write_state(file: Path, ports: dict[str, int], processes: Iterable[Process]) -> None:
    """Keep them for later calls."""
    temporary = file.with_name(f"_{file.name}")
    entries = [vars(process) for process in processes]
    temporary.write_text(json.dumps({"ports": ports, "processes": entries}, indent=2), encoding="utf-8")
    temporary.replace(file)


def end_all(file: Path, none: str) -> None:
    """End just the processes of the file, and tell of each; `none` is told where there are none."""
    _, processes = read_state(file)
    for process in reversed(list(processes.values())):
        if process.alive:
            process.end(grace_s=5.0)
            print(f"{process.name} (pid {process.pid}) ended")
        else:
            print(f"{process.name} (pid {process.pid}) was gone already")
    file.unlink(missing_ok=True)
    if not processes:
        print(none)
