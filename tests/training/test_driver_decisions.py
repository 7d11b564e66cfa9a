"""What the driver decides between generations, with launches that are made up: no ranks, no processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage.errors import ConfigError, LockstepError
from tests.training.test_audit_run import TinyRun
from training.claims import CheckpointRef
from training.config import TrainConfig
from training.driver import Hooks, train
from training.launch.task import RankTask


def launches(*generations: Callable[[RankTask], None]) -> Any:
    """A launcher that does one of these things a generation; each ends by an error."""
    left = list(generations)

    def launch(task: RankTask, num_ranks: int, **options: Any) -> list[dict[str, Any]]:
        left.pop(0)(task)
        raise LockstepError("a rank died") if left else ConfigError("that is all")

    return launch


def config_of(run: TinyRun, folder: Path, **more: Any) -> TrainConfig:
    options: dict[str, Any] = {"num_ranks": 2, "global_batch": 20, "epochs": 2, "batchnorm": "local"}
    options |= {"launcher": "local", "datasets": (run.dataset,), "run": str(folder), "model": "logistic"}
    return TrainConfig(**{**options, **more})


def test_first_weights_of_a_run_that_still_trains_are_the_same_for_all_ranks_and_after_a_restart(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, given = TinyRun(tmp_path), []
    first = source.generation(None, 1, [2, 4])
    at_4, at_6 = (source.paths.checkpoint(step, generation) for step, generation in ((4, first), (6, first + 1)))

    def goes_on(task: RankTask) -> None:
        given.append(task.payload["first_weights"])
        source.generation(CheckpointRef(4, first), 1, [6])

    def ends(task: RankTask) -> None:
        given.append(task.payload["first_weights"])

    config = config_of(source, tmp_path / "mine", init_from=source.paths.root)
    with pytest.raises(ConfigError, match="that is all"):
        train(config, launches(goes_on, ends), hooks=Hooks(lease_watch_s=0.1))
    assert given == [at_4, at_4]
    with pytest.raises(ConfigError, match="that is all"):
        train(config, launches(ends), hooks=Hooks(lease_watch_s=0.1))  # another call: nothing rests on the first yet
    assert given[2:] == [at_6]
    assert [line for line in capfd.readouterr().err.splitlines() if "first weights" in line] == [
        f"first weights: {url}" for url in (at_4, at_6)
    ]
