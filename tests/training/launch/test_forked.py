"""Ranks forked by a zygote: their pipes, signals and ends, and what a zygote is not used for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import lockstep
from lockstep.training.control.last_words import new_page
from lockstep.training.control.stacks import new_stacks
from lockstep.training.control.task import MARK
from lockstep.training.launch import forked
from lockstep.training.launch.forked import ForkedRank, fork_rank
from lockstep.training.launch.process import environment_of
from tests.training._tiny import write_table

pytestmark = pytest.mark.slow
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def no_zygote_is_left() -> Iterator[None]:
    yield
    forked._end()


def fork(**more: str) -> ForkedRank:
    page, stacks = new_page(), new_stacks()
    try:
        rank = fork_rank(environment_of("a mark", 1) | more, page, stacks)
    finally:
        os.close(page)
        os.close(stacks)
    assert rank is not None
    return rank


def status(pid: int, name: str) -> str:
    """A line of /proc/PID/status; "" after its end."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return next(line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:"))


def until_gone(*pids: int) -> None:
    end = time.monotonic() + PATIENCE_S
    while any(status(pid, "State")[:1] not in ("", "Z") for pid in pids):
        assert time.monotonic() < end, pids
        time.sleep(0.02)


def close(rank: ForkedRank) -> None:
    assert rank.stdin is not None and rank.stdout is not None
    rank.stdin.close()
    rank.stdout.close()


def test_ranks_of_one_zygote_have_imported_tensorflow_and_end_each_for_itself() -> None:
    first, second, third = fork(), fork(**{MARK: "another"}), fork()
    zygote = {status(rank.pid, "PPid") for rank in (first, second, third)}
    assert len(zygote) == 1 and zygote != {str(os.getpid())}
    assert all("libtensorflow" in Path(f"/proc/{rank.pid}/maps").read_text() for rank in (first, second, third))
    assert [os.getpgid(rank.pid) for rank in (first, second)] == [first.pid, second.pid], "killed by its group"

    assert first.stdin is not None and first.stdout is not None
    first.stdin.write(b"no order\n")
    first.stdin.flush()
    assert first.wait() == 1 and "JSONDecodeError" in first.stdout.read().decode()
    assert (second.poll(), third.poll()) == (None, None)
    second.kill()
    assert second.wait() == -signal.SIGKILL
    second.kill()  # nothing, after its end
    assert third.stdin is not None
    third.stdin.close()  # its supervisor is gone
    assert third.wait() == 1
    for rank in (first, second, third):
        close(rank)


def test_a_killed_zygote_takes_its_ranks_along_and_the_next_rank_gets_another() -> None:
    rank = fork()
    zygote = int(status(rank.pid, "PPid"))
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # as batch systems send to all: ranks may leave yet
        os.kill(zygote, number)
    second = fork()
    assert int(status(second.pid, "PPid")) == zygote and rank.poll() is None
    second.kill()
    assert second.wait() == -signal.SIGKILL
    os.kill(zygote, signal.SIGKILL)
    assert rank.wait() == -signal.SIGKILL
    until_gone(rank.pid)
    another = fork()
    assert int(status(another.pid, "PPid")) != zygote

    other_variables = fork(TF_SOMETHING="1")  # which TensorFlow may read when it is imported
    assert status(other_variables.pid, "PPid") != status(another.pid, "PPid")
    assert another.poll() is None, "a zygote that is not used any more ends after its ranks"
    for one in (another, other_variables):
        one.terminate()
        assert one.wait() == -signal.SIGTERM
    for one in (rank, second, another, other_variables):
        close(one)


COUNTS_IMPORTS = """
import os, sys
def count(event, arguments):
    if event == "import" and arguments[0] == "tensorflow":
        with open({file!r}, "a") as file:
            print(os.getpid(), file=file)
sys.addaudithook(count)
"""


def test_a_training_and_its_evaluations_import_tensorflow_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(tmp_path / "data")
    imports = tmp_path / "imports"
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text(COUNTS_IMPORTS.format(file=f"{imports}"))
    monkeypatch.syspath_prepend(f"{tmp_path / 'own'}")  # ranks have this process' import path
    run = lockstep.train(tmp_path / "data", tmp_path / "run", "logistic", global_batch=16, epochs=1)
    found = [lockstep.evaluate(tmp_path / "run", tmp_path / "data", "test") for _ in range(2)]
    assert found[0]["metrics"] == found[1]["metrics"] and run.steps == 6
    assert len(imports.read_text().split()) == 1


FORKS_AND_WAITS = """
import os, sys, time
from tests.training.launch.test_forked import fork, status
rank = fork()
print(rank.pid, status(rank.pid, "PPid"), flush=True)
time.sleep(600)
"""


def test_a_killed_supervisor_takes_zygote_and_ranks_along() -> None:
    with subprocess.Popen([sys.executable, "-c", FORKS_AND_WAITS], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2 and all(status(pid, "State")[:1] in ("R", "S") for pid in pids)
        process.kill()
    until_gone(*pids)


@pytest.mark.parametrize("name", forked.IN_CONTAINER)
def test_a_container_that_counts_memory_gets_no_zygote(name: str) -> None:
    assert fork_rank({**os.environ, name: "x"}, -1, -1) is None and not forked._zygotes
