"""--pipeline-stages: one rank's results from stages of layers, which hold their own weights only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.training.results.audit import check_run_audit
from tests.training._tiny import write_images
from tests.training.rank.test_fit import assert_same, assert_same_result, final_tensors, train

pytestmark = pytest.mark.slow
OWN = "tests.training._models"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data") / "images"
    write_images(folder, records={"train": 400, "test": 30})
    return str(folder)


OPTIONS: dict[str, Any] = {"precision": "float64", "learning_rate": 0.05, "epochs": 3, "lanes": 8, "validate": "test"}


@pytest.fixture(scope="module")
def alone(images: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """50 steps of a ResNet on one rank."""
    run = tmp_path_factory.mktemp("one")
    return str(run), train(images, run, 1, "resnet8", **OPTIONS)


@pytest.mark.parametrize(
    ("ranks", "stages", "schedule"),
    [
        (2, 2, "1f1b"),
        pytest.param(2, 2, "gpipe", marks=pytest.mark.soak),
        pytest.param(3, 3, "1f1b", marks=pytest.mark.soak),
        pytest.param(3, 3, "gpipe", marks=pytest.mark.soak),
        pytest.param(4, 2, "1f1b", marks=pytest.mark.soak),
        pytest.param(6, 3, "gpipe", marks=pytest.mark.soak),
    ],
)
def test_stages_are_one_rank_in_float64(
    images: str, alone: tuple[str, Any], tmp_path: Path, ranks: int, stages: int, schedule: str
) -> None:
    """A ResNet with skip connections and ghost batch statistics, whose micro-batches are lane groups; its momentum is
    the sum of the gradients.
    """
    more: dict[str, Any] = {"pipeline_stages": stages, "schedule": schedule, "micro_batches": 4, "audit": True}
    cut = train(images, tmp_path / "cut", ranks, "resnet8", **OPTIONS, **more)
    assert alone[1].steps == cut.steps == 50
    assert_same(final_tensors(alone[0]), final_tensors(str(tmp_path / "cut")))
    assert_same_result(alone[1], cut)
    assert check_run_audit(str(tmp_path / "cut")).ok
