"""The short form of benchmarks/random_kills.py: ranks are threads, a rank's death an exception at a random step."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.random_kills import faults, fingerprint, main
from lockstep.storage.errors import TrainingFailedError
from tests.training._threads import run
from tests.training._tiny import write_table
from training.config import TrainConfig

pytestmark = [pytest.mark.slow, pytest.mark.soak]
STEPS = 37  # 400 rows in batches of 32, three epochs
SEED = 3  # one rank dies at step 17, one of two at 25, one goes on to the end


def test_a_run_that_dies_at_random_steps_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    """Each launch at another number of ranks; a driver that allows no restart stands for one that was killed too."""
    from tests.training import _models  # imports TensorFlow

    write_table(tmp_path / "data", records={"train": 400, "test": 30})

    def launch(url: Path, ranks: int) -> None:
        options: dict[str, Any] = {
            "global_batch": 32,
            "epochs": 3,
            "checkpoint_every": 5,
            "seed": 7,
        }
        config = TrainConfig(
            datasets=(str(tmp_path / "data"),),
            run=str(url),
            num_ranks=ranks,
            model="tests.training._models:momentum_that_fails",
            launcher="local",
            canonical=True,
            audit=True,
            max_restarts=0,
            **options,
        )
        assert run(config).steps == STEPS

    launch(tmp_path / "undisturbed", 1)
    expected = fingerprint(str(tmp_path / "undisturbed"))
    rng, url = random.Random(SEED), tmp_path / "run"
    for _ in range(2):
        _models.FAIL_AT.update(step=rng.randrange(2, STEPS))
        with pytest.raises(TrainingFailedError, match="told to fail"):
            launch(url, rng.choice((1, 2)))
    launch(url, rng.choice((1, 2)))
    assert faults(str(url), expected) == []
    assert faults(str(url), "0" * 64) == ["weights, optimizer state or metrics are not those of the undisturbed run"]


def test_a_call_that_cannot_be_right_is_refused() -> None:
    with pytest.raises(SystemExit):
        main(["--runs", "many"])
