"""No deadlock whatever order TensorFlow's executor takes: real processes with one inter-op thread and with eight."""

from __future__ import annotations

import pytest

from tests.training._ranks import rank_path
from training.control.task import Limits, RankTask
from training.launch.local import run_local

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("inter_op", [1, 8])
def test_two_branches_and_two_optimizers(inter_op: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rank_path(monkeypatch)
    task = RankTask("_two_branches:train", {"inter_op": inter_op})
    first, second = run_local(task, 2, limits=Limits(stall_s=240.0, silent_s=60.0))
    assert first == second
    assert first["steps"] == 6
    assert first["buckets"] > 10
