"""The line of progress and the curves of a run, without a kernel: where ranks and a kernel run, see tests/notebooks."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.storage import progress
from lockstep.training.driver.live import POINTS, TRAINING, Curves, OnTerminal, progress_here, progress_line


def step(number: int, loss: float | str = 1.0) -> dict[str, Any]:
    return {"kind": "step", "step": number, "epoch": 0, "loss": loss, "seconds": 0.0}


def epoch(last: int, number: int | None = None, **metrics: float | str) -> dict[str, Any]:
    number = last if number is None else number
    return {"kind": "epoch", "step": last, "epoch": number, "metrics": metrics, "seconds": 0.0}


@pytest.mark.parametrize(
    ("state", "rate", "line"),
    [
        (TRAINING, 0.0, "training: step 20 of 100, loss 0.5"),  # ranks have just started
        (TRAINING, 2.0, "training: step 20 of 100, loss 0.5, 64 samples/s, about 0:00:40 left"),
        ("done", 100.0, "done: step 20 of 100, loss 0.5, 3,200 samples/s"),
    ],
)
def test_the_line_has_steps_loss_rate_and_what_is_left(state: str, rate: float, line: str) -> None:
    assert progress_line(state, 20, 100, "loss 0.5", rate, 32) == line


def test_a_log_has_epoch_rate_and_time_left_of_a_resumed_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("lockstep.storage.progress.time.monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    config: Any = SimpleNamespace(data=SimpleNamespace(global_batch=32, epochs=5))
    shown = OnTerminal(config, 1000)
    for now[0], done in ((0.0, 400), (60.0, 410), (70.0, 430), (80.0, 420), (90.0, 430), (95.0, 440)):
        if now[0]:
            shown.add({**step(done), "epoch": 2})
        shown.set(done, "loss 0.5")
    assert capsys.readouterr().err.splitlines() == [
        "training: 400/1000 steps (40%), 0 s, loss 0.5",
        "training: 410/1000 steps (41%), epoch 3 of 5, 60 s, loss 0.5",
        "training: 430/1000 steps (43%), epoch 3 of 5, 64 samples/s, 70 s, 0:04:45 left, loss 0.5",
        "training: 420/1000 steps (42%), epoch 3 of 5, 80 s, loss 0.5",  # a restart repeats steps
        "training: 430/1000 steps (43%), epoch 3 of 5, 90 s, loss 0.5",
        "training: 440/1000 steps (44%), epoch 3 of 5, 64 samples/s, 95 s, 0:04:40 left, loss 0.5",
    ]


def test_metrics_of_training_and_validation_share_a_panel() -> None:
    curves = Curves(8, 2)
    for number in range(1, 9):
        curves.add(step(number, 9.0 - number))
    curves.add(step(9, "nan"))
    curves.add({"kind": "time", "step": 4, "rank": 0})
    curves.add(epoch(4, loss=2.0, accuracy=0.5, val_loss=3.0, val_auc="nan"))
    curves.add(epoch(8, loss=1.0, accuracy=0.75, val_loss=2.0, val_auc=0.9))
    each = [(number / 4, 9.0 - number) for number in range(1, 9)]
    assert curves.panels() == {
        "loss": {"each step": each, "training": [(1, 2.0), (2, 1.0)], "validation": [(1, 3.0), (2, 2.0)]},
        "accuracy": {"training": [(1, 0.5), (2, 0.75)]},
        "auc": {"validation": [(2, 0.9)]},
    }
    assert base64.b64decode(curves.png()).startswith(b"\x89PNG")


def test_the_end_of_an_epoch_replaces_where_max_steps_had_cut_it() -> None:
    curves = Curves(8, 2)
    curves.add(epoch(3, 0, auc=0.5, val_auc=0.5))
    curves.add(epoch(4, 0, auc=0.75))
    assert curves.panels() == {"auc": {"training": [(1, 0.75)]}}
    curves.cut(3)
    assert curves.panels() == {}


def test_without_a_step_there_is_no_picture() -> None:
    assert Curves(8, 2).png() == ""


def test_a_long_run_has_few_points_each_the_mean_of_its_steps() -> None:
    curves = Curves(100 * POINTS, 5)
    for number in range(1, 50 * POINTS + 1):
        curves.add(step(number, float(number)))
    line = curves.panels()["loss"]["each step"]
    assert len(line) == POINTS / 2 and line[0][1] == 50.5 and line[-1] == (2.5, 50 * POINTS - 49.5)


@given(steps=st.integers(1, 2000), data=st.data())
def test_after_a_restart_each_step_counts_once(steps: int, data: st.DataObject) -> None:
    reached = data.draw(st.integers(1, steps))
    back = data.draw(st.integers(0, reached))
    once, twice = Curves(steps, 3), Curves(steps, 3)
    for number in range(1, reached + 1):
        twice.add(step(number, -1.0))  # what is repeated must leave no trace
        twice.add(epoch(number, accuracy=-1.0))
    twice.cut(back)
    for number in range(1, steps + 1):
        once.add(step(number))
        if number > back:
            twice.add(step(number))
    repeated = [value for x, value in twice.panels()["loss"]["each step"] if x > back * 3 / steps + 1e-9]
    assert all(value == 1.0 for value in repeated)
    assert [x for x, _ in once.panels()["loss"]["each step"]] == [x for x, _ in twice.panels()["loss"]["each step"]]
    assert len(twice.panels().get("accuracy", {}).get("training", [])) == back


def test_only_a_kernel_gets_curves(tmp_path: Path) -> None:
    assert progress_here() is OnTerminal
    code = (
        "from IPython.core.interactiveshell import InteractiveShell; InteractiveShell.instance()\n"  # as in a terminal
        "from lockstep.training.driver.live import progress_here; print(progress_here().__name__)"
    )
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines()[-1:] == ["OnTerminal"], done.stderr
