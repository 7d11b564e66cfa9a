"""A wall clock that jumps, as by NTP or a paused machine: limits count monotonic seconds, so nothing notices it."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from benchmarks.random_kills import fingerprint
from lockstep.training.config import TrainConfig
from tests.training._threads import run
from tests.training._tiny import write_table

pytestmark = pytest.mark.slow
DAY_S = 86_400.0


def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(tmp_path / "data")
    whole = TrainConfig(
        datasets=(str(tmp_path / "data"),), run=str(tmp_path / "run-0"), model="logistic", num_ranks=2, global_batch=8,
        epochs=2, checkpoint_every=5, launcher="local", cache=str(tmp_path / "cache"),
    )  # fmt: skip
    found, jumps = [], itertools.cycle((-400 * DAY_S, 0.0, 400 * DAY_S))
    real, real_ns = time.time, time.time_ns
    for number in range(2):
        if number:
            monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
            monkeypatch.setattr(time, "time_ns", lambda: real_ns() + int(next(jumps) * 1e9))
        config = whole.but(run=str(tmp_path / f"run-{number}"))
        result = run(config)
        assert (result.steps, result.restarts) == (25, 0)
        found.append(fingerprint(config.run))
    assert found[0] == found[1]
