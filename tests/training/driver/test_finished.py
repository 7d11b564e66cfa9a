"""Whether a result is the end of what a call asks for, and whether its datasets can be validated on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.storage.documents import seal
from lockstep.storage.errors import ConfigError
from lockstep.storage.fs import filesystem
from lockstep.training.config import TrainConfig
from lockstep.training.driver.preflight import check_validation, finished_result, plan_for
from lockstep.training.run.lineage import claim_next
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import RunResult
from tests.training._tiny import write_images, write_table


def config(tmp_path: Path, **more: Any) -> TrainConfig:
    options: dict[str, Any] = {"num_ranks": 1, "global_batch": 16, "epochs": 4, "model": "logistic"} | more
    return TrainConfig(**{"datasets": (str(tmp_path / "data"),), "run": str(tmp_path / "run"), **options})


@pytest.mark.parametrize(
    ("done", "asked", "finished"),
    [
        ({}, {}, True),
        ({}, {"epochs": 5}, False),
        ({"max_steps": 9}, {"max_steps": 9}, True),
        ({"max_steps": 9}, {"max_steps": 8}, True),  # it has them
        ({"max_steps": 9}, {"max_steps": 10}, False),
        ({"max_steps": 9}, {}, False),
        ({"max_steps": 25}, {}, True),  # 4 epochs of 100 rows in batches of 16
        ({"max_steps": 24}, {}, False),
        ({}, {"max_steps": 9}, True),
        ({"epochs_asked": 2}, {"max_steps": 9}, False),  # a run of other epochs: a schedule may span them
        ({"steps": 11, "stopped_by": "a callback of the model"}, {}, True),
    ],
)
def test_a_result_is_final_for_what_it_was_asked_for(
    tmp_path: Path, done: dict[str, Any], asked: dict[str, Any], finished: bool
) -> None:
    manifest = write_table(tmp_path / "data")
    given, fs, paths = config(tmp_path, **asked), filesystem(str(tmp_path)), RunPaths(str(tmp_path / "run"))
    plan = plan_for(manifest, given)
    assert finished_result(fs, paths, given, plan) is None
    claim_next(fs, paths, None, epochs=4, num_ranks=1)
    values: dict[str, Any] = {
        "run": paths.root, "generation": 1, "steps": 25, "epochs": 4, "epochs_asked": 4, "metrics": {},
        "samples": 9, "seconds": 1.0, "samples_per_s": 9.0, "restarts": 0, "checkpoint": None, "model": None,
        "left_over": [],
    } | done  # fmt: skip
    result = RunResult(**values)
    Path(paths.results).mkdir()
    Path(paths.result(1)).write_bytes(seal(result.to_json()))
    assert finished_result(fs, paths, given, plan) == (result if finished else None)


def test_datasets_that_cannot_be_validated_on_are_refused(tmp_path: Path) -> None:
    write_table(tmp_path / "data")
    write_table(tmp_path / "empty", records={"train": 20, "test": 0}, seed=1)
    write_images(tmp_path / "images")
    check_validation(config(tmp_path), "test")
    for names, split, words in (
        (("data",), "validation", "no such split"),
        (("data", "empty"), "test", "a split without records"),
        (("data", "images"), "test", "another schema"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_validation(config(tmp_path, datasets=tuple(str(tmp_path / name) for name in names)), split)
        assert words in caught.value.got and caught.value.next_step
