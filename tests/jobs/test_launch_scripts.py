"""Scripts on real ranks of this host by lockstep launch: output, arguments, and ends of every kind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.training.control.failures import RankFailedError
from lockstep.training.control.task import Limits, RankTask
from lockstep.training.launch.local import run_local
from lockstep.training.launch.script_rank import ScriptOrder
from tests.training._ranks import lives, living_ranks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PLAIN = str(ROOT / "tests" / "scripts" / "plain.py")


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "jobs" / "launch.py"), "--launcher", "local", "--num-ranks", "2"]
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, *arguments], cwd=cwd, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def launch(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    process = start(*arguments, cwd=cwd)
    out, err = process.communicate("the driver's terminal is not the script's", timeout=300)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def said(done: subprocess.CompletedProcess[str], rank: int) -> list[str]:
    """The lines of one rank, in order."""
    start = f"[rank {rank}] "
    return [line.removeprefix(start) for line in done.stdout.splitlines() if line.startswith(start)]


def test_a_script_runs_on_every_rank(tmp_path: Path) -> None:
    for name, text in (("beside.py", "WORD = 'imported'\n"), ("words.txt", "read\n")):
        (tmp_path / name).write_text(text)
    (tmp_path / "folder").mkdir()
    flags = ["--files", "beside.py,words.txt", "--logs", str(tmp_path / "logs")]
    done = launch(*flags, PLAIN, "--num-ranks", "7", "--", "a b", "", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        lines = said(done, rank)
        name, *environment = lines[0].split()
        share = str(max(1, (os.cpu_count() or 1) // 2))
        share = os.environ.get("OMP_NUM_THREADS", share)
        assert (name, environment) == ("environment", [str(rank), "2", str(rank), "2", "127.0.0.1", share])
        assert lines[1:] == [
            "arguments --num-ranks 7 -- a b ",
            "at the terminal: nothing",
            "files imported read True",
            "half a line and \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}",
            " 50 %",
            "100 %",
            "a thread's end",
            "at exit",
        ]
        log = (tmp_path / f"logs/g0001/rank-0000{rank}/part-00000.log").read_text().splitlines()
        assert log == lines


@pytest.mark.parametrize(
    ("how", "reason", "last"),
    [
        ("exit 3", "plain.py ended by sys.exit with exit code 3, where 0 is success", "at exit"),
        ("raises", "ValueError: out of luck", "ValueError: out of luck"),
    ],
)
def test_a_script_that_fails_is_told_with_its_lines(tmp_path: Path, how: str, reason: str, last: str) -> None:
    done = launch("--output", "leader", PLAIN, how, cwd=tmp_path)
    assert done.returncode == 1
    assert said(done, 1) == [] and said(done, 0)
    error = done.stderr.splitlines()
    assert error[0] == "error: rank 1 of 2 on 127.0.0.1 failed in its script"
    assert error[1] == f"  got: {reason}"
    assert f"  | {last}" in error
    trace = [line for line in error if "Traceback" in line or ", line " in line]
    assert len(trace) == (0 if how == "exit 3" else 3)  # `main` and its call: frames of ours are left out
    assert all("Traceback" in line or "plain.py" in line for line in trace)


def test_threads_of_a_failed_script_have_the_grace_and_no_more() -> None:
    order = ScriptOrder(name=PLAIN, arguments=("interrupts",), path=PLAIN, text=None, start_s=300.0)
    began = time.monotonic()
    with pytest.raises(RankFailedError) as caught:
        run_local(RankTask("lockstep.training.launch.script_rank:main", order.to_json()), 2, limits=Limits(grace_s=1.0))
    assert time.monotonic() - began < 300.0  # its thread would go on for ten minutes
    assert caught.value.got == "plain.py ended by KeyboardInterrupt()" and "KeyboardInterrupt" in caught.value.tail


def test_a_script_that_leaves_processes_and_closes_its_output(tmp_path: Path) -> None:
    done = launch(PLAIN, "rude", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        lines = said(done, rank)
        (daemon,) = (line for line in lines if line.startswith("daemon "))
        assert not lives(int(daemon.split()[1]))
        assert "the fork goes its way" in lines


@pytest.mark.parametrize(
    ("how", "reason"), [("killed", "was killed by SIGKILL"), ("stopped", "has been stopped by a signal for 5 s")]
)
def test_a_dead_and_a_frozen_rank_are_named_soon(tmp_path: Path, how: str, reason: str) -> None:
    process, ranks = waiting(how, tmp_path)
    began = time.monotonic()
    _, error = process.communicate(timeout=300)
    # A second, and ten, are what users are promised; the rest is for a loaded machine. Rank 0 would go on for longer.
    assert time.monotonic() - began < 60.0
    assert process.returncode == 1
    assert "error: rank 1 of 2" in error and reason in error and error.rstrip().endswith("| 100 %")
    assert not [pid for pid in ranks if lives(pid)]


@pytest.mark.parametrize(
    ("number", "code", "text"), [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 128 + 15, "")]
)
def test_ctrl_c_and_sigterm_end_all(tmp_path: Path, number: int, code: int, text: str) -> None:
    process, ranks = waiting("ctrl-c", tmp_path)
    assert len(ranks) == 2
    process.send_signal(number)
    _, error = process.communicate(timeout=300)
    assert (process.returncode, error) == (code, text)
    assert not [pid for pid in ranks if lives(pid)]


def waiting(how: str, folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A launch whose rank 1 has said its last line, and the ranks that live then."""
    process = start(PLAIN, how, cwd=folder)
    assert process.stdout is not None
    while process.stdout.readline() not in ("[rank 1] 100 %\n", ""):
        continue
    return process, living_ranks(process.pid)


def test_all_ranks_start_again_where_that_is_asked_for(tmp_path: Path) -> None:
    done = launch("--max-restarts", "1", "--logs", str(tmp_path), PLAIN, "generations", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "start 2 of 2 follows: rank" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g0001", "g0002"]
    assert said(done, 0)[-1] == said(done, 1)[-1] == "at exit"


def test_the_same_error_twice_in_a_row_ends_the_launch(tmp_path: Path) -> None:
    done = launch("--max-restarts", "3", PLAIN, "raises", cwd=tmp_path)
    assert done.returncode == 1
    restarts = [line for line in done.stderr.splitlines() if " follows: rank" in line]
    assert len(restarts) == 1 and "start 2 of 4 follows: rank 1 of 2 on 127.0.0.1 failed in its script" in restarts[0]
    assert "failed in its script, with the same error twice in a row, which no restart cures" in done.stderr
    assert "made its first step" not in done.stderr


def test_kills_from_outside_use_up_the_restarts(tmp_path: Path) -> None:
    done = launch("--max-restarts", "2", PLAIN, "killed", cwd=tmp_path)
    assert done.returncode == 1
    assert [f"start {n} of 3 follows" in done.stderr for n in (2, 3)] == [True, True]
    assert "which no restart cures" not in done.stderr


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("import horovod.tensorflow.keras as hvd", "lockstep.horovod"),
        ("import horovod.torch as hvd", "lockstep.horovod.torch"),
    ],
)
def test_a_script_that_imports_horovod_is_shown_our_name(tmp_path: Path, line: str, ours: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{line}\n")
    done = launch(str(script), cwd=tmp_path)
    assert done.returncode == 2  # every rank, before its first call: repeating does not help
    assert "train.py imports horovod, which is not installed" in done.stderr
    assert f"`import {ours} as hvd`" in done.stderr
