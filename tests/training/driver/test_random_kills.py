"""The short form of benchmarks/random_kills.py: ranks are threads, a rank's death an exception at a random step."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import OF_THE_RUN, flip, left, unclear
from benchmarks.random_kills import BEFORE_A_DRIVER, WHILE_ETL, WHILE_TRAINING, faults, fingerprint, main
from lockstep.storage.errors import TrainingFailedError
from lockstep.training.config import TrainConfig
from tests.training._threads import run
from tests.training._tiny import write_table

STEPS = 37  # 400 rows in batches of 32, three epochs
SEED = 3  # one rank dies at step 17, one of two at 25, one goes on to the end


def launch(data: Path, url: Path, ranks: int, **more: Any) -> None:
    """A driver that allows no restart stands for one that was killed too."""
    options: dict[str, Any] = {"global_batch": 32, "epochs": 3, "checkpoint_every": 5, "seed": 7, **more}
    config = TrainConfig(
        datasets=(str(data),), run=str(url), num_ranks=ranks, launcher="local", audit=True, max_restarts=0, **options
    )
    assert run(config).steps == (config.validation.max_steps or STEPS)


@pytest.mark.slow
@pytest.mark.soak
def test_a_run_that_dies_at_random_steps_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    """Each launch at another number of ranks."""
    from tests.training import _models  # imports TensorFlow

    data, url = tmp_path / "data", tmp_path / "run"
    write_table(data, records={"train": 400, "test": 30})
    model = {"model": "tests.training._models:momentum_that_fails", "canonical": True}
    launch(data, tmp_path / "undisturbed", 1, **model)
    expected = fingerprint(str(tmp_path / "undisturbed"))
    rng = random.Random(SEED)
    for _ in range(2):
        _models.FAIL_AT.update(step=rng.randrange(2, STEPS))
        with pytest.raises(TrainingFailedError, match="told to fail"):
            launch(data, url, rng.choice((1, 2)), **model)
    launch(data, url, rng.choice((1, 2)), **model)
    assert faults(str(url), expected) == []
    assert faults(str(url), "0" * 64) == ["weights, optimizer state or metrics are not those of the undisturbed run"]


@pytest.mark.slow
def test_a_run_whose_files_are_damaged_between_drivers_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    """Each fault of a run's files, after a driver that ended at a step of its own."""
    data, url, rng = tmp_path / "data", tmp_path / "run", random.Random(SEED)
    write_table(data, records={"train": 400, "test": 30})
    launch(data, tmp_path / "undisturbed", 2, model="logistic")
    for number, name in enumerate(("leave staging", "scramble lease", "flip checkpoint", "cut checkpoint")):
        launch(data, url, 2, model="logistic", max_steps=6 * (number + 1))
        assert OF_THE_RUN[name](str(url), rng), f"{name} found nothing"
    launch(data, url, 2, model="logistic")
    assert faults(str(url), fingerprint(str(tmp_path / "undisturbed"))) == []
    assert not any((url / ".staging").glob("*"))


def test_what_is_left_and_what_is_unclear_is_told(tmp_path: Path) -> None:
    assert left("nobody", tmp_path, set(), 0.0) == []
    (tmp_path / "shard").write_bytes(b"x")
    assert left("nobody", tmp_path, set(), 0.0) == ["left: temporary file shard"]
    flip(tmp_path / "shard", random.Random(0))
    assert (tmp_path / "shard").read_bytes() != b"x"
    log = tmp_path / "log"
    log.write_text("step 1\nerror: no\n  got: 1\n  allowed: 2\n  next: Do.\n")
    assert unclear(log, 2) == []
    log.write_text("Traceback\nerror: no\n  got: 1\n")
    assert unclear(log, 0) == unclear(log, -9) == []
    (told,) = unclear(log, 1)
    assert told.startswith("exit 1 without allowed:, next:")


def test_kinds_are_many() -> None:
    assert len({*WHILE_TRAINING, *BEFORE_A_DRIVER, *WHILE_ETL, "flip published"}) >= 20


def test_a_call_that_cannot_be_right_is_refused() -> None:
    with pytest.raises(SystemExit):
        main(["--runs", "many"])
