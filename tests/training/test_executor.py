"""No deadlock whatever order TensorFlow's executor takes: real processes, one inter-op thread on a rank and eight."""

from __future__ import annotations

import pytest

from lockstep.training.control.task import Limits, RankTask
from lockstep.training.launch.local import run_local
from tests.training._ranks import rank_path

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "inter_op", [(1, 8), pytest.param((1, 1), marks=pytest.mark.soak), pytest.param((8, 8), marks=pytest.mark.soak)]
)
def test_two_branches_and_two_optimizers(inter_op: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """`inter_op` threads of rank 0 and of rank 1."""
    rank_path(monkeypatch)
    task = RankTask("_two_branches:train", {"inter_op": inter_op})
    first, second = run_local(task, 2, limits=Limits(stall_s=240.0, silent_s=60.0))
    assert first == second
    assert first["steps"] == 6
    assert first["buckets"] > 10
