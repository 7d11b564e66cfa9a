"""Runs with one slow rank: it is named, by its real times."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.training.config import TrainConfig
from lockstep.training.control.failures import Failure, RankState, failure_of
from lockstep.training.driver.stop import EndedByCallerError
from lockstep.training.driver.stragglers import Straggler, Stragglers
from lockstep.training.driver.train import Hooks, train
from lockstep.training.launch.local import run_local
from lockstep.training.results.resources import straggler_rows, usage_rows
from lockstep.training.run.metrics import read_history
from tests.training._threads import run
from tests.training._tiny import write_images, write_table

pytestmark = pytest.mark.slow
CPU = Path("/sys/fs/cgroup/cpu")
LIMIT_S = 300.0


def test_a_rank_with_a_callback_that_sleeps_is_named_once_within_50_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_table(tmp_path / "data", records={"train": 400, "test": 8})
    config = TrainConfig(
        datasets=(str(tmp_path / "data"),), run=str(tmp_path / "run"), model="tests.training._models:sleepy",
        num_ranks=2, global_batch=8, epochs=1, checkpoint_every=50, launcher="local",
    )  # fmt: skip
    run(config)
    [note] = [line for line in capsys.readouterr().err.splitlines() if "is slow" in line]
    assert re.match(r"note: rank 1 on .* is slow: .* most of it between steps; next: ", note)
    [(step, text)] = straggler_rows(read_history(config.run))
    assert int(step.removeprefix("from step ")) <= 50 and "most of it between steps" in text


@contextmanager
def half_by_control_group(pid: int) -> Iterator[None]:
    """Half of the processor time that a process has used in three seconds (cgroup v1)."""
    process, group = psutil.Process(pid), CPU / f"lockstep-test-{pid}"
    before = sum(process.cpu_times()[:2])
    time.sleep(3.0)
    cores = (sum(process.cpu_times()[:2]) - before) / 3.0
    group.mkdir()
    try:
        (group / "cpu.cfs_quota_us").write_text(str(max(1000, int(cores / 2 * 100_000))))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            (CPU / "cgroup.procs").write_text(str(pid))
        group.rmdir()


@contextmanager
def half_by_signals(pid: int) -> Iterator[None]:
    """Half of the time for a process: stopped for 50 of each 100 ms."""
    ended = threading.Event()

    def work() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not ended.wait(0.05):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.05)
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.soak
def test_a_process_held_to_half_of_its_time_is_named_within_50_steps_of_a_few_ms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path / "data", records={"train": 50_000, "test": 8}, block_records=256)
    config = TrainConfig(
        datasets=(str(tmp_path / "data"),), run=str(tmp_path / "run"), model="mlp", num_ranks=2, global_batch=256,
        epochs=1000, checkpoint_every=100_000, launcher="local", extra={"width": 1024},  # 6 ms a step or more
    )  # fmt: skip
    pids: dict[int, int] = {}
    named: list[tuple[int, int]] = []  # (step, rank)
    at, until, held = {"step": 0, "held": 0}, time.monotonic() + LIMIT_S, contextlib.ExitStack()
    add = Stragglers.add

    def look(state: RankState, *rest: Any) -> Failure | None:
        if state.pid is not None:
            pids[state.rank] = state.pid
        return failure_of(state, *rest)

    def watch(self: Stragglers, row: dict[str, Any]) -> Straggler | None:
        found, at["step"] = add(self, row), row["step"]
        named.extend([(row["step"], found.rank)] if found is not None else [])
        return found

    def ended() -> EndedByCallerError | None:
        if at["step"] > 300 and not at["held"]:
            at["held"] = at["step"]
            held.enter_context(half_by_signals(pids[1]))
        done = at["held"] and any(rank == 1 and step > at["held"] for step, rank in named)
        return EndedByCallerError("named, or not in time") if done or time.monotonic() > until else None

    monkeypatch.setattr("lockstep.training.control.server.failure_of", look)
    monkeypatch.setattr(Stragglers, "add", watch)
    monkeypatch.setattr(
        "lockstep.training.driver.stragglers.REST_S", 0.0
    )  # other work here may have slowed it down before
    with held, pytest.raises(EndedByCallerError):
        train(config, run_local, hooks=Hooks(ended=ended))
    print(at, named)
    assert 0 < next(step for step, rank in named if rank == 1 and step > at["held"]) - at["held"] <= 50


@pytest.mark.soak
def test_a_process_held_to_half_of_its_time_by_a_control_group_or_by_signals_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hold = half_by_control_group if os.access(CPU / "cgroup.procs", os.W_OK) else half_by_signals
    write_images(tmp_path / "data", records={"train": 12_800, "test": 8})
    config = TrainConfig(
        datasets=(str(tmp_path / "data"),), run=str(tmp_path / "run"), model="resnet8", num_ranks=2, global_batch=32,
        epochs=1000, checkpoint_every=100_000, launcher="local",
    )  # fmt: skip
    pids: dict[int, int] = {}
    said, until, held = [], time.monotonic() + LIMIT_S, contextlib.ExitStack()

    def look(state: RankState, *rest: Any) -> Failure | None:
        if state.pid is not None and state.step > 20:
            pids[state.rank] = state.pid
        return failure_of(state, *rest)

    monkeypatch.setattr("lockstep.training.control.server.failure_of", look)

    def ended() -> EndedByCallerError | None:
        if 1 in pids:
            monkeypatch.setattr("lockstep.training.control.server.failure_of", failure_of)
            held.enter_context(hold(pids.pop(1)))
        said.append(capsys.readouterr().err)
        done = "is slow" in "".join(said) or time.monotonic() > until
        return EndedByCallerError("named, or not in time") if done else None

    with held, pytest.raises(EndedByCallerError):
        train(config, run_local, hooks=Hooks(ended=ended))
    history = read_history(config.run)
    print("".join(said)[-2000:], usage_rows(history), history.stragglers, sep="\n")
    assert [(row["rank"], row["what"]) for row in history.stragglers] == [(1, "compute")]
    assert len(usage_rows(history)) == 3
