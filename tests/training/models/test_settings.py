"""`--set` and `extra`: what a setting is read as, what a model takes, what a configuration keeps. Loads no Keras."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import ArgumentTypeError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.jobs import models
from lockstep.jobs._train import setting
from lockstep.storage.errors import ConfigError
from lockstep.training.config import TrainConfig
from lockstep.training.models import check_name, may_follow_length, scales_learning_rate
from lockstep.training.models.ready import READY, settings_of

PLAIN = TrainConfig(datasets=("data",), run="run", model="mlp", num_ranks=1, global_batch=8, epochs=1)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("width=64", 64),
        ("decay=1e-4", 1e-4),
        ("on=true", True),
        ("user=user_id", "user_id"),
        ('user="7"', "7"),  # as TOML writes a text
        ("name=a=b c", "a=b c"),
        ("empty=", ""),
        ("day=2026-11-23", "2026-11-23"),  # dates and lists of TOML stay text
        ("layers=[64, 32]", "[64, 32]"),
        ("two=1\nthree=3", "1\nthree=3"),
    ],
)
def test_a_value_is_what_toml_reads(text: str, value: Any) -> None:
    found = setting(text)[1]
    assert (found, type(found)) == (value, type(value))


@given(st.one_of(st.integers(-(2**63), 2**63), st.booleans(), st.floats(allow_nan=False, allow_infinity=False)))
def test_each_number_comes_back(value: Any) -> None:
    assert setting(f"name={json.dumps(value)}") == ("name", value)


@pytest.mark.parametrize("text", ["width", "=3", "two words=3", "a-b=3"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="NAME=VALUE"):
        setting(text)


def test_a_configuration_keeps_a_copy_in_one_order() -> None:
    mine: dict[str, Any] = {"width": 64, "decay": 1e-4}
    config = PLAIN.but(extra=mine)
    mine["width"] = 1
    assert list(config.model.extra.items()) == [("decay", 1e-4), ("width", 64)]
    assert TrainConfig.from_json(json.loads(json.dumps(config.to_json()))) == config != PLAIN
    assert isinstance(hash(config), int)


@pytest.mark.parametrize("extra", [{"a b": 1}, {"a": None}, {"a": [1]}, {"a": float("nan")}, {"a": float("inf")}])
def test_what_json_cannot_hold_is_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="`extra`") as caught:
        PLAIN.but(extra=extra)
    assert caught.value.next_step == "Correct --set."


@pytest.mark.parametrize(
    ("model", "extra", "words"),
    [
        ("mlp", {"widht": 64}, "perhaps `width`"),
        ("mlp", {"depth": 3}, "perhaps `layers`"),
        ("wide-deep", {"embedding_dim": 3}, "perhaps `embedding`"),
        ("linear", {"weight_decay": 0.1}, "perhaps `decay`"),
        ("mlp", {"width": 0}, "an integer from 1 up"),
        ("mlp", {"width": 2.5}, "an integer from 1 up"),
        ("mlp", {"width": True}, "an integer from 1 up"),
        ("mlp", {"dropout": 1}, "a number from 0 up, below 1"),
        ("resnet32", {"decay": "1."}, "a number from 0 up"),
        ("two-tower", {"user": 3}, "a text"),
    ],
)
def test_what_a_ready_model_does_not_take_is_refused_by_name(model: str, extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_name(model, extra)
    assert words in str(caught.value) and "--set" in caught.value.got
    check_name("mine:model", extra)  # judges by itself


def test_settings_are_complete_and_typed() -> None:
    for name, model in READY.items():
        name = name.replace("{6n+2}", "20")
        defaults = settings_of(name, {})
        assert defaults == {setting: one.default for setting, one in model.settings.items()}
        check_name(name, defaults)
    assert settings_of("mlp", {"decay": 1, "width": 3})["decay"].is_integer()  # a float


def test_which_models_follow_the_length_of_a_run() -> None:
    names = ("resnet8", "resnet110", "mine:model", "mlp", "logistic", "resnet{6n+2}")
    assert [name for name in names if may_follow_length(name)] == ["resnet8", "resnet110", "mine:model", "resnet{6n+2}"]
    assert [name for name in names if scales_learning_rate(name)] == ["resnet8", "resnet110"]


def test_the_list_names_each_model_and_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert models.main([]) == 0
    text = capsys.readouterr().out
    for name, model in READY.items():
        assert f"{name}: " in text and all(f"--set {setting}=" in text for setting in model.settings)


def test_a_check_loads_no_keras() -> None:
    call = "from lockstep.training.models import check_name; check_name('gru', {'width': 3})"
    code = f"import sys; {call}; assert 'keras' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0
