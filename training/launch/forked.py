"""Ranks that a zygote forks: the first one of this Python process waits for TensorFlow's import, the others do not.

Trials of a search, folds, restarts and evaluations start in milliseconds. Where ranks see GPUs, where their entry is
the user's and where a container counts memory, each rank is a process of its own (`lockstep.training.launch.process`).
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import IO

from lockstep.training.control.task import MARK

START_S = 120.0  # for the import of TensorFlow from a slow disk
END_S = 5.0
IN_CONTAINER = ("CONTAINER_ID", "KUBERNETES_SERVICE_HOST")  # of YARN and of Kubernetes: a zygote's memory would count
_OF_ONE_RANK = (MARK, "LOCKSTEP_FILES")


class ForkedRank:
    """A rank that a zygote has forked, with the part of `subprocess.Popen` that supervisors use."""

    def __init__(self, pid: int, handle: int, report: socket.socket, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid = pid
        self.stdin: IO[bytes] | None = stdin
        self.stdout: IO[bytes] | None = stdout
        self._handle, self._report = handle, report
        self._code: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._look(0.0)

    def wait(self) -> int:
        """Wait for its end; returns the exit code."""
        code = self._look(None)
        assert code is not None
        return code

    def kill(self) -> None:
        """Kill the process; does nothing after its end."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send it a SIGTERM; does nothing after its end."""
        self.send_signal(signal.SIGTERM)

    def send_signal(self, number: int) -> None:
        """Send it a signal; does nothing after its end."""
        with self._lock:
            if self._code is None:
                try:
                    signal.pidfd_send_signal(self._handle, number)
                except ProcessLookupError:  # it has ended, and the zygote is about to say so
                    return

    def _look(self, timeout_s: float | None) -> int | None:
        with self._lock:
            if self._code is None and select.select([self._report], [], [], timeout_s)[0]:
                text = self._report.recv(64)
                self._code = int(text) if text else -signal.SIGKILL  # its zygote has died, and it with that
                self._report.close()
                os.close(self._handle)
            return self._code


@dataclass(frozen=True, slots=True)
class _Circumstances:
    """What a zygote has for good from its start, and its ranks from it."""

    environment: tuple[tuple[str, str], ...]
    path: tuple[str, ...]
    folder: str
    cores: frozenset[int]

    @classmethod
    def now(cls, environment: Mapping[str, str]) -> _Circumstances:
        common = tuple(sorted((name, value) for name, value in environment.items() if name not in _OF_ONE_RANK))
        return cls(common, tuple(sys.path), os.getcwd(), frozenset(os.sched_getaffinity(0)))


class _Zygote:
    """A zygote of this Python process."""

    def __init__(self, circumstances: _Circumstances) -> None:
        self.circumstances = circumstances
        self.owner = os.getpid()
        self.served = False
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lockstep.training.rank.zygote", str(its.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a rank of its own says why TensorFlow cannot be imported
                env=dict(circumstances.environment),
                process_group=0,
                pass_fds=(its.fileno(),),
            )
        self._line = ours

    @property
    def lives(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None

    def fork(self, environment: Mapping[str, str], page: int, stacks: int) -> ForkedRank | None:
        """A new rank, which waits for its order; None if the zygote has ended."""
        with ExitStack() as given, ExitStack() as ours:
            report, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            given.callback(its.close)
            ours.callback(report.close)
            (its_in, our_in), (our_out, its_out) = os.pipe(), os.pipe()
            stdin, stdout = ours.enter_context(os.fdopen(our_in, "wb")), ours.enter_context(os.fdopen(our_out, "rb"))
            variables = os.memfd_create("lockstep-environment", os.MFD_CLOEXEC)
            for fd in (its_in, its_out, variables):
                given.callback(os.close, fd)
            os.write(variables, json.dumps(dict(environment)).encode())
            os.lseek(variables, 0, os.SEEK_SET)
            try:
                socket.send_fds(self._line, [b"+"], [its_in, its_out, page, stacks, its.fileno(), variables])
                given.close()  # else its end would not be seen on them
                report.settimeout(START_S)
                text, handles, _, _ = socket.recv_fds(report, 64, 1)
            except OSError:  # it has ended, or does not answer in time
                return None
            if not text:
                return None
            report.settimeout(None)
            self.served = True
            ours.pop_all()
            return ForkedRank(int(text), handles[0], report, stdin, stdout)

    def end(self) -> None:
        """Let the zygote end once its ranks have ended."""
        self._line.close()
        if self.owner == os.getpid():
            threading.Thread(target=self.process.wait, name="zygote-end", daemon=True).start()


_zygotes: list[_Zygote] = []  # none or one
_asking = threading.Lock()


def fork_rank(environment: Mapping[str, str], page: int, stacks: int) -> ForkedRank | None:
    """A rank with this environment, the page of its last words and the file for its stacks; it waits for its order.

    None where no zygote can serve it: the caller starts a process.
    """
    if any(name in environment for name in IN_CONTAINER):
        return None
    zygote = _zygote_for(_Circumstances.now(environment))
    rank = zygote.fork(environment, page, stacks)
    if rank is None and zygote.served:  # it was killed just now; one that never served cannot import TensorFlow
        with suppress(subprocess.TimeoutExpired):
            zygote.process.wait(END_S)
            rank = _zygote_for(zygote.circumstances).fork(environment, page, stacks)
    return rank


def _zygote_for(wanted: _Circumstances) -> _Zygote:
    with _asking:
        if _zygotes and not (_zygotes[0].lives and _zygotes[0].circumstances == wanted):
            _zygotes.pop().end()
        if not _zygotes:
            _zygotes.append(_Zygote(wanted))
        return _zygotes[0]


def _end() -> None:
    while _zygotes:
        zygote = _zygotes.pop()
        zygote.end()
        with suppress(subprocess.TimeoutExpired):  # it has ranks yet, which end with this process
            zygote.process.wait(END_S)


atexit.register(_end)
