"""--strategy layers: blocks of layers that ranks train side by side; with a meeting after each step, one rank's run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.storage.errors import ConfigError
from lockstep.training.config import TrainConfig
from lockstep.training.results.audit import check_run_audit
from tests.training import _threads  # sets TensorFlow's threads before it makes them
from tests.training.rank.test_fit import assert_no_bit_differs, assert_same, train

pytestmark = pytest.mark.slow
OWN = "tests.training._models"


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_with_a_meeting_in_each_step_it_is_one_rank(table: str, tmp_path: Path, num_ranks: int) -> None:
    """With dropout, 50 steps; every row is read once by all together."""
    options: dict[str, Any] = {"precision": "float64", "epochs": 6, "audit": True, "validate": "test"}
    found = train(table, tmp_path / "one", 1, f"{OWN}:with_dropout", **options)
    several = train(table, tmp_path / "layers", num_ranks, f"{OWN}:with_dropout", strategy="layers", **options)
    assert found.steps == several.steps == 50
    assert several.metrics == pytest.approx(found.metrics, rel=1e-9)
    assert_same(*(_threads.final_tensors(str(tmp_path / name)) for name in ("one", "layers")))
    assert check_run_audit(str(tmp_path / "layers")).ok


def test_between_meetings_a_rank_trains_its_block_only(table: str, tmp_path: Path) -> None:
    """Two steps of one rank whose other layers are frozen give the same block."""
    import keras

    from lockstep.training.strategies.layers import owners_of
    from tests.training import _models

    made = _models.with_dropout
    seen: list[Any] = []

    def noted(*args: Any) -> Any:
        seen.append(made(*args))
        return seen[-1]

    def frozen(rank: int) -> Any:
        def build(*args: Any) -> Any:
            model = made(*args)
            for one, owner in owners_of(model, 2):
                one.trainable = one.trainable and owner == rank  # of a whole layer it would change its statistics
            fresh = type(model.optimizer).from_config(model.optimizer.get_config())
            model.compile(fresh, model.loss, jit_compile=False)
            return model

        return build

    options: dict[str, Any] = {"precision": "float64", "epochs": 1, "max_steps": 2}
    results = {}
    for name, ranks, build in (("both", 2, noted), ("0", 1, frozen(0)), ("1", 1, frozen(1))):
        _models.with_dropout = build  # type: ignore[assignment] # the name that ranks import
        try:
            extra: dict[str, Any] = {"strategy": "layers", "sync_every": 2} if ranks == 2 else {}
            train(table, tmp_path / name, ranks, f"{OWN}:with_dropout", **options, **extra)
        finally:
            _models.with_dropout = made
        tensors = _threads.final_tensors(str(tmp_path / name))
        results[name] = [value for key, value in sorted(tensors.items()) if key.startswith("weights/")]
    assert isinstance(seen[0], keras.Model)
    owners = [owner for _, owner in owners_of(seen[0], 2)]
    assert sorted(set(owners)) == [0, 1] and owners == sorted(owners), "blocks are consecutive"
    for number, owner in enumerate(owners):
        np.testing.assert_allclose(results["both"][number], results[str(owner)][number], rtol=1e-9, atol=1e-12)
    assert any(not np.allclose(mine, other) for mine, other in zip(results["0"], results["1"], strict=True))


def test_a_restart_changes_no_bit(table: str, tmp_path: Path) -> None:
    from tests.training import _models  # imports TensorFlow

    options: dict[str, Any] = {"checkpoint_every": 4, "audit": True, "epochs": 3, "sync_every": 5, "validate": "test"}
    whole = train(table, tmp_path / "whole", 2, f"{OWN}:with_callbacks", strategy="layers", **options)
    _models.FAIL_AT.update(step=13)
    broken = train(table, tmp_path / "broken", 2, f"{OWN}:with_callbacks", strategy="layers", **options)
    assert not _models.FAIL_AT and (whole.restarts, broken.restarts) == (0, 1)
    assert_no_bit_differs((tmp_path / "whole", whole), (tmp_path / "broken", broken))
    assert check_run_audit(str(tmp_path / "broken")).ok


@pytest.mark.parametrize(
    "more", [{"sync_every": 0}, {"max_steps": 3, "sync_every": 2}, {"compression": "bf16"}, {"micro_batches": 2}]
)
def test_what_does_not_fit_is_refused(more: dict[str, Any]) -> None:
    options: dict[str, Any] = {"model": "logistic", "num_ranks": 2, "global_batch": 8, "epochs": 2}
    with pytest.raises(ConfigError):
        TrainConfig(datasets=("data",), run="run", strategy="layers", **options, **more)
