"""A process that has imported TensorFlow and forks ranks: `python -m lockstep.training.rank.zygote FD`, started by a
supervisor.

FD is a socket on which the files of each new rank come (lockstep.training.launch.forked). No session of TensorFlow, no
communicator and no code of the user's is here before a fork, so a forked rank begins as any other does. It ends when
the socket is closed and its ranks have ended, or when no rank has come for KEPT_S.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import sys
from dataclasses import dataclass
from typing import NoReturn

from lockstep.training.plan.permutation import shuffled_each
from lockstep.training.rank import __main__ as rank

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
KEPT_S = 600.0  # a notebook, whose next run may be an hour away, gets its memory back


@dataclass(frozen=True, slots=True)
class Child:
    """A rank that lives, and the socket on which its supervisor hears of its end."""

    pid: int
    report: socket.socket


def main() -> None:
    """Fork ranks until no supervisor asks for one."""
    line = socket.socket(fileno=int(sys.argv[1]))
    # Batch systems send these to every process of a job. It ends with its supervisor: ranks that leave need it so long.
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    importlib.import_module("lockstep.training.rank.runtime").import_tensorflow()
    importlib.import_module("lockstep.training.rank.fit")
    shuffled_each([bytes(8)], 1)  # the first kernel of a process loads all of Numba, in 0.3 s of CPU
    children: dict[int, Child] = {}
    opened = True
    while opened or children:
        waited = [*children, *([line.fileno()] if opened else [])]
        ready, _, _ = select.select(waited, [], [], None if children else KEPT_S)
        if not ready:
            return
        for ended in [one for one in ready if one in children]:
            child = children.pop(ended)
            _, status = os.waitpid(child.pid, 0)
            _send(child.report, str(os.waitstatus_to_exitcode(status)).encode(), [])
            child.report.close()
            os.close(ended)
        if line.fileno() in ready:
            _, files, _, _ = socket.recv_fds(line, 1, 6)
            opened = bool(files)
            if opened:
                _fork(files, line, children)


def _fork(files: list[int], line: socket.socket, children: dict[int, Child]) -> None:
    stdin, stdout, page, stacks, report_fd, variables = files
    report = socket.socket(fileno=report_fd)
    with open(variables, "rb") as file:
        environment = json.load(file)
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        line.close()
        report.close()
        for other, child in children.items():
            os.close(other)
            child.report.close()
        _become(stdin, stdout, environment, page, stacks)
    for fd in (stdin, stdout, page, stacks):
        os.close(fd)
    handle = os.pidfd_open(pid)
    children[handle] = Child(pid, report)
    _send(report, str(pid).encode(), [handle])


def _become(stdin: int, stdout: int, environment: dict[str, str], page: int, stacks: int) -> NoReturn:
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
    for fd, standard in ((stdin, 0), (stdout, 1), (stdout, 2)):
        os.dup2(fd, standard)
    os.close(stdin)
    os.close(stdout)
    os.environ.clear()
    os.environ.update(environment)
    rank.run({"last_words": page, "stacks": stacks})


def _send(report: socket.socket, text: bytes, files: list[int]) -> None:
    try:
        socket.send_fds(report, [text], files)
    except OSError:  # the supervisor has gone, and its rank ends by its standard input
        return


if __name__ == "__main__":
    main()
    os._exit(0)  # at once: TensorFlow's own end takes half a second
