"""When a run ends early, and what a configuration says of validation."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.storage.errors import ConfigError
from lockstep.training.config import TrainConfig
from lockstep.training.rules import StopRule, check_metric
from lockstep.training.run import notes


def config(**more: Any) -> TrainConfig:
    options: dict[str, Any] = {"num_ranks": 1, "global_batch": 8, "epochs": 2, "split": "fold-1,fold-2"} | more
    return TrainConfig(datasets=("data",), run="run", model="logistic", **options)


@given(st.sampled_from(["loss", "val_auc", "f1:macro"]), st.sampled_from(["min", "max"]), st.integers(1, 2**31 - 1))
def test_a_rule_is_read_back(metric: str, way: Any, patience: int) -> None:
    rule = StopRule(metric, way, patience)
    assert StopRule.parse(f"{rule.best}:{patience}") == rule


@given(st.lists(st.floats(allow_nan=True), min_size=1, max_size=20), st.sampled_from(["min", "max"]))
def test_the_best_is_the_first_of_the_best(values: list[float], way: Any) -> None:
    rule, best, at = StopRule("loss", way, 1), None, None
    for number, value in enumerate(values):
        if rule.improves(value, best):
            best, at = value, number
    finite = [value for value in values if not math.isnan(value)]
    assert best == ((min if way == "min" else max)(finite) if finite else None)
    assert at == (None if best is None else values.index(best))


@pytest.mark.parametrize(
    "text", ["", "loss", "loss:min", "loss:least:3", "loss:min:0", "loss:min:-1", ":min:3", "a:max:1.5"]
)
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="from 1 up"):
        StopRule.parse(text)
    with pytest.raises(ConfigError, match="early_stop"):
        config(early_stop=text)


@pytest.mark.parametrize(
    ("name", "value", "more"),
    [
        ("validate", "fold-1", {}),  # it is trained on
        ("validate", "", {}),
        ("validate", "fold-3,fold-4", {}),
        ("validate_every", 0, {"validate": "test"}),
        ("max_steps", 0, {}),
        ("early_stop", "val_auc:max:3", {}),  # there is no validation
        ("keep_best", "val_auc:max", {}),
    ],
)
def test_what_cannot_be_validated_is_refused(name: str, value: Any, more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"`{name}`"):
        config(**{name: value}, **more)


def test_old_configurations_are_read() -> None:
    new = config(validate="test", validate_every=2, early_stop="val_auc:max:3", keep_best="val_auc:max", max_steps=9)
    assert TrainConfig.from_json(new.to_json()) == new
    old = TrainConfig.from_json({name: part for name, part in config().to_json().items() if name != "validation"})
    assert old == config()


def test_an_epoch_without_a_validation_lacks_its_metrics() -> None:
    check_metric("val_auc:max", {"loss": 0.1, "auc": 0.9})
    with pytest.raises(ConfigError, match="val_auc") as caught:
        check_metric("val_auc:max", {"loss": 0.1, "val_loss": 0.9}, "--early-stop")
    assert "--early-stop val_auc:max" in caught.value.got and "val_loss:min" in caught.value.allowed


def test_a_best_checkpoint_by_the_training_rows_is_noted() -> None:
    (note,) = notes.of_keep_best("auc:max")
    assert "--validate SPLIT --keep-best val_auc:max" in note
    assert notes.of_keep_best("val_auc:max") == notes.of_keep_best(None) == []
