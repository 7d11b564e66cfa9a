"""What a person sees of a search, without a kernel: for that see tests/notebooks/test_live_cell.py."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.training.search.live import best_so_far, curve, table
from lockstep.training.search.study import DONE, FAILED, OPEN, PRUNED, Trial
from tests.training.search._searches import run, search


def test_a_table_has_each_trial_and_marks_the_best(tmp_path: Path) -> None:
    done, pruned, failed, running, waiting = (Trial(n, {"learning_rate": 0.1, "global_batch": 8}) for n in range(5))
    done.state, done.value, done.epochs = DONE, 0.25, 4
    pruned.state, pruned.value, pruned.epochs = PRUNED, 1.5, 1
    failed.state, failed.reason = FAILED, "the loss is not finite"
    running.saw(2, 0.75)
    trials = [done, pruned, failed, running, waiting]
    assert table(search(tmp_path), trials, done, {1: "step 9 of 40", 3: "step 20 of 40"}) == [
        ("trial", "state", "epochs", "loss", "learning_rate", "global_batch"),
        ("0", "done (best)", "4", "0.25", "0.1", "8"),
        ("1", "pruned", "1", "1.5", "0.1", "8"),
        ("2", "failed: the loss is not finite", "0", "", "0.1", "8"),
        ("3", "step 20 of 40", "2", "0.75", "0.1", "8"),
        ("4", "open", "0", "", "0.1", "8"),
    ]
    assert base64.b64decode(curve(search(tmp_path), trials)).startswith(b"\x89PNG")
    assert curve(search(tmp_path), trials[1:]) == ""


@given(st.lists(st.tuples(st.sampled_from((OPEN, DONE, FAILED, PRUNED)), st.floats(-1e9, 1e9))), st.booleans())
def test_the_curve_is_the_best_of_the_trials_done_so_far(found: list[tuple[str, float]], maximize: bool) -> None:
    trials = [Trial(number, {}, state=state, value=value) for number, (state, value) in enumerate(found)]
    expected = []
    for number, (state, _) in enumerate(found):
        if state == DONE:
            values = [value for state, value in found[: number + 1] if state == DONE]
            expected.append((number, max(values) if maximize else min(values)))
    assert best_so_far(trials, maximize=maximize) == expected


def test_elsewhere_a_trial_that_ends_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = run(search(tmp_path, trials=2))
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("trial 0: loss 0.375004; learning_rate 0.0443038, global_batch 8; 1 of 2, best 0.375004")
    assert second.endswith(f"; 2 of 2, best {best['value']:.6g} (trial {best['trial']})")
