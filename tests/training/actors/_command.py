"""`lockstep agent` as a process, and the processes that it has started."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lockstep.storage.fs import filesystem
from lockstep.training.actors.learner import Progress
from lockstep.training.run.lineage import find_tip
from lockstep.training.run.paths import RunPaths
from tests.training._ranks import lives
from tests.waiting import until

WAIT_S = 300.0
CALL = ["--env", "CartPole-v1", "--widths", "8", "--save-every", "0.5", "--actors", "1"]
MANY = 100_000_000
"""Steps that nobody waits for."""


@contextmanager
def agent(
    run: str, *more: str, steps: int = MANY, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """The command, which is killed at the end."""
    words = [sys.executable, "-m", "lockstep.jobs.agent", *CALL, "--run", run, "--steps", str(steps), *more]
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=dict(environment) if environment else None,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def progress(run: str) -> Progress | None:
    """That of the newest checkpoint; None before the first one."""
    tip = find_tip(filesystem(run), RunPaths(run))
    return None if tip is None else Progress.from_json(tip.manifest["state"]["agent"])


def saved(run: str, process: subprocess.Popen[str]) -> Progress:
    """Wait for a checkpoint; returns its progress."""
    until(lambda: process.poll() is not None or progress(run) is not None, WAIT_S)
    found = progress(run)
    assert found is not None, process.communicate()[0]
    return found


def learners_and_actors(driver: int) -> tuple[list[int], list[int]]:
    """The processes that play for a driver's learners, and these: whoever has such a child."""
    parents, lines = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and lives(pid := int(entry.name)):
            try:
                lines[pid] = (entry / "cmdline").read_bytes()
                parents[pid] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended meanwhile
                continue

    def below(pid: int) -> bool:
        while pid in parents:
            pid = parents[pid]
            if pid == driver:
                return True
        return False

    actors = [pid for pid, line in lines.items() if b"lockstep.training.actors.actor" in line and below(pid)]
    return sorted({parents[pid] for pid in actors}), actors
