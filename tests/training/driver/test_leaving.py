"""Drivers, ranks and supervisors that get a signal: all ranks write a checkpoint of one step, and end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.storage.documents import unseal
from lockstep.storage.fs import filesystem
from lockstep.storage.verify import verify
from lockstep.training.config import TrainConfig
from lockstep.training.driver.stop import EXIT_STOPPED
from lockstep.training.run.lineage import find_tip, read_claims
from lockstep.training.run.paths import RunPaths
from tests.training._ranks import HERE, lives, living_ranks
from tests.training._tiny import write_table
from tests.waiting import until

pytestmark = pytest.mark.slow

DRIVER = """
import json, sys
sys.path.insert(0, sys.argv[2])
from lockstep.jobs._cli import run_job
from lockstep.training.config import TrainConfig
from lockstep.training.control.task import Limits
from lockstep.training.driver.train import Hooks, train
from lockstep.training.launch.local import run_local

hooks = Hooks(entry=f"_ranks:{sys.argv[3]}", limits=Limits(grace_s=1.0, silent_s=60.0))
run_job(lambda _: print(train(TrainConfig.from_json(json.loads(sys.argv[1])), run_local, hooks=hooks).steps) or 0)
"""


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    write_table(tmp_path / "data")
    return TrainConfig(
        datasets=(str(tmp_path / "data"),),
        run=str(tmp_path / "run"),
        model="tiny",
        num_ranks=2,
        global_batch=8,
        epochs=4,  # 50 steps
        checkpoint_every=1000,
        launcher="local",
    )


@contextmanager
def driver(config: TrainConfig, entry: str) -> Iterator[subprocess.Popen[str]]:
    call = [sys.executable, "-c", DRIVER, json.dumps(config.to_json()), HERE, entry]
    started = subprocess.Popen(call, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def steps_made(config: TrainConfig) -> int:
    """By the rows of the metrics, which a driver writes at its end."""
    parts = Path(config.run, "metrics").glob("g*/part-*")
    return max((json.loads(line)["step"] for part in parts for line in part.read_text().splitlines()), default=0)


def under_way(config: TrainConfig, process: subprocess.Popen[str]) -> list[int]:
    """The ranks of a driver that has made steps."""
    until(lambda: process.poll() is not None or Path(config.run).with_name("stepped").exists())
    return living_ranks(process.pid)


def hanging(config: TrainConfig, process: subprocess.Popen[str]) -> list[int]:
    """The ranks of a driver, of which one hangs after the checkpoint of step 5."""
    until(lambda: process.poll() is not None or find_tip(filesystem(config.run), RunPaths(config.run)) is not None)
    return living_ranks(process.pid)


def marker(config: TrainConfig) -> dict[str, Any]:
    url = RunPaths(config.run).stopped
    return unseal(filesystem(url).read_bytes(url), url)


@pytest.mark.parametrize(
    ("by", "whom", "named"),
    [
        (signal.SIGTERM, "driver", "SIGTERM"),
        pytest.param(signal.SIGINT, "driver", "SIGINT", marks=pytest.mark.soak),
        (signal.SIGTERM, "rank", "SIGTERM to a rank"),
    ],
)
def test_all_ranks_leave_with_a_checkpoint(config: TrainConfig, by: signal.Signals, whom: str, named: str) -> None:
    with driver(config, "train_and_leave") as first:
        pids = under_way(config, first)
        assert len(pids) == 2
        os.kill(first.pid if whom == "driver" else pids[1], by)
        _, told = first.communicate(timeout=240)
    assert first.returncode == EXIT_STOPPED == 75, told
    tip = find_tip(filesystem(config.run), RunPaths(config.run))
    assert tip is not None and 0 < tip.ref.step < 50
    assert tip.ref.step == steps_made(config), "no step is made again"
    words = f"stopped by {named} at step {tip.ref.step} of 50, saved as {tip.ref}; the same call resumes from there"
    assert told.splitlines()[-1] == f"{config.run}: {words}"
    found = marker(config)
    assert (found["step"], found["saved"], found["by"], found["generation"]) == (tip.ref.step, True, named, 1)
    assert not any(map(lives, pids))
    assert not list(Path(tempfile.gettempdir()).glob(f"lockstep-rank-{first.pid}-*"))
    assert not list(Path(config.run, ".staging").iterdir()) and verify(config.run) == []
    assert json.loads(Path(config.run, "lease.json").read_text())["closed"] is True
    with driver(config, "train") as again:
        assert again.communicate(timeout=240)[0] == "50\n"
    assert str(read_claims(filesystem(config.run), RunPaths(config.run))[2].parent) == str(tip.ref)
    assert not Path(config.run, "stopped.json").exists()


def test_ranks_that_do_not_leave_are_ended_after_the_grace(config: TrainConfig) -> None:
    config = config.but(stop_grace_s=1.0, checkpoint_every=5)
    with driver(config, "train_and_never_leave") as first:
        pids = hanging(config, first)
        first.send_signal(signal.SIGTERM)
        _, told = first.communicate(timeout=240)
    assert first.returncode == EXIT_STOPPED and "wrote no checkpoint within 1 s (rank" in told, told
    assert told.splitlines()[-1].endswith("step-0000000005.g0001, step 5 of 50; the same call resumes from there")
    assert marker(config)["saved"] is False and marker(config)["step"] == 5
    assert not any(map(lives, pids)) and not list(Path(config.run, ".staging").iterdir())


def test_ranks_grow_and_shrink_with_the_slots(config: TrainConfig, tmp_path: Path) -> None:
    """From two ranks to one, and to three; then a signal to a rank costs nothing but a restart."""
    slots = tmp_path / "slots"
    slots.write_text("2")
    config = config.but(min_ranks=1, max_ranks=3, slots_file=str(slots))

    def ranks() -> list[int]:
        return [claim.num_ranks for claim in read_claims(filesystem(config.run), RunPaths(config.run)).values()]

    def next_is(count: int) -> None:
        """Wait for a generation of so many ranks that has made steps."""
        stepped = Path(config.run).with_name("stepped")
        until(lambda: process.poll() is not None or (ranks()[-1:] == [count] and stepped.exists()))
        stepped.unlink()

    with driver(config, "train_and_leave") as process:
        for count in (2, 1, 3):
            slots.write_text(str(count))
            next_is(count)
        os.kill(living_ranks(process.pid)[0], signal.SIGTERM)
        until(lambda: process.poll() is not None or len(ranks()) == 4)
        Path(config.run).with_name("go").touch()
        done, told = process.communicate(timeout=240)
    assert done == "50\n" and ranks() == [2, 1, 3, 3], told
    assert "with 1 ranks after 2" in told and "with 3 ranks after 1" in told
    assert steps_made(config) == 50 and verify(config.run) == []


def test_before_the_first_step_nothing_is_waited_for(config: TrainConfig) -> None:
    with driver(config, "tells_pid_and_waits") as first:
        until(lambda: len(living_ranks(first.pid)) == 2)
        first.send_signal(signal.SIGINT)
        _, told = first.communicate(timeout=240)
    assert first.returncode == EXIT_STOPPED and "ended before their first step" in told, told
    assert told.splitlines()[-1] == f"{config.run}: there is no checkpoint yet; the same call starts from the beginning"


def test_a_second_signal_ends_at_once(config: TrainConfig) -> None:
    config = config.but(checkpoint_every=5)
    with driver(config, "train_and_never_leave") as first:
        pids = hanging(config, first)
        first.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            first.wait(1.5)  # the first one waits for the grace of 30 s, and signals within a second count as one
        first.send_signal(signal.SIGTERM)
        _, told = first.communicate(timeout=240)
    assert first.returncode == 128 + signal.SIGTERM, told
    assert not any(map(lives, pids)) and not Path(config.run, "stopped.json").exists()
