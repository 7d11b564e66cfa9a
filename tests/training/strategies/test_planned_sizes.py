"""What the planner says of memory and bytes, against what ranks hold and send, and against a model that is built."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lockstep.jobs.plan_memory import main
from lockstep.training.comm import Communicator
from lockstep.training.driver.memory_plan import Mode, Size, held, sent
from tests.training._ring import run_ring
from tests.training._tiny import write_table
from tests.training.strategies.test_zero import applied, exchanging, model_of

pytestmark = pytest.mark.slow
SHAPES = ((500, 700), (300, 900), (1000,))
STEPS = 3


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_hold_and_send_what_the_planner_says(ranks: int) -> None:
    import keras

    models = [[model_of(keras.optimizers.Adam, SHAPES) for _ in range(ranks)] for _ in range(3)]

    def work(comm: Communicator) -> list[tuple[int, float]]:
        found = []
        for stage in range(3):
            model, group = models[stage][comm.rank], comm.group(range(ranks))
            with exchanging(group, model, stage, bucket_bytes=1 << 18) as exchange:
                applied(model, group, 1)
                began = exchange.sent_bytes
                applied(model, group, STEPS)
                state = sum(variable.value.numpy().nbytes for variable in model.optimizer.variables)
                found.append((state, (exchange.sent_bytes - began) / STEPS))
        return found

    size = Size.of(sum(int(np.prod(shape)) for shape in SHAPES), "adam")
    for found in run_ring(ranks, work):
        for stage, (state, out) in enumerate(found):
            mode = Mode(ranks=ranks, zero=stage)
            assert state == pytest.approx(held(size, mode)["state"], rel=0.01)
            assert out == pytest.approx(sent(size, mode), rel=0.02)
    keras.utils.clear_session()


WEIGHTS = 4 * (300 + 10_100 + 101)
TRAINED = 4 * 4 * (2 + 100 + 100 + 100 + 100 + 1)
"""Bytes of two layers of 100 units and an output over two numbers, and of matrices of rank 4 for these."""


@pytest.mark.parametrize("lora", [0, pytest.param(4, marks=pytest.mark.soak)])
def test_a_model_that_is_built_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str], lora: int) -> None:
    write_table(tmp_path / "data", records={"train": 60, "test": 8})
    flags = f"--model mlp --dataset {tmp_path}/data --set width=100 --num-ranks 1 2 --bandwidth 1G --json"
    assert main([*flags.split(), "--lora-rank", str(lora)]) == 0
    alone, together, *_ = json.loads(capsys.readouterr().out)
    trained = TRAINED if lora else WEIGHTS
    assert (alone["weights"], alone["gradients"]) == (WEIGHTS + (TRAINED if lora else 0), trained)
    assert alone["state"] == pytest.approx(2 * trained, rel=0.01) and alone["kept"] > 0
    assert 0 < alone["step_s"] < together["step_s"]
