"""The space of a search: what a TOML file may declare, and the configurations that it gives."""

from __future__ import annotations

import dataclasses
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.jobs._train import setting
from lockstep.storage.errors import ConfigError
from lockstep.training.search.space import Parameter, config_of_trial, corners, flags_of, space_of
from tests.training.search._searches import search

TOML = """
learning_rate = {low = 1e-3, high = 1, log = true}
global_batch = {choices = [64, 128]}
batchnorm = {choices = ["ghost", "local"]}
warm_up_epochs = {low = 0.0, high = 1.0, step = 0.25}
lanes = {low = 2, high = 8, step = 2}
set.width = {low = 8, high = 64, step = 8}
set.name = {choices = ["relu", 2, true]}
set.skip = {low = 0, high = 0.5}
"""


def test_a_file_gives_parameters_in_its_order_with_the_types_of_the_fields() -> None:
    rate, batch, norm, warm_up, lanes, width, name, skip = space_of(tomllib.loads(TOML), "space.toml")
    assert rate == Parameter(name="learning_rate", low=0.001, high=1.0, log=True) and type(rate.high) is float
    assert (batch.choices, norm.choices) == ((64, 128), ("ghost", "local"))
    assert warm_up.grid() == [0.0, 0.25, 0.5, 0.75, 1.0] and lanes.grid() == [2, 4, 6, 8]
    assert width == Parameter(name="set.width", low=8, high=64, step=8) and type(width.low) is int
    assert (name.choices, skip.low, type(skip.low)) == (("relu", 2, True), 0.0, float)
    assert rate.to_json() == {"name": "learning_rate", "low": 0.001, "high": 1.0, "log": True}


@pytest.mark.parametrize(
    ("space", "named"),
    [
        ({}, "no parameter"),
        ({"learning_rat": {"low": 0.1, "high": 1.0}}, "perhaps `learning_rate`"),
        ({"num_ranks": {"choices": [1, 2]}}, "`num_ranks` in"),  # changes no trial
        ({"datasets": {"choices": ["a", "b"]}}, "`datasets` in"),
        ({"learning_rate": 0.1}, "in braces"),
        ({"extra": {"choices": [1]}}, "`extra` in"),
        ({"set": {"width": 8}}, "`set.width` in"),
        ({"learning_rate": {"lo": 0.1, "high": 1.0}}, "perhaps `low`"),
        ({"learning_rate": {"low": 0.1}}, "Give low and high"),
        ({"learning_rate": {"low": 1.0, "high": 0.1}}, "low below high"),
        ({"learning_rate": {"low": 0.0, "high": 0.1, "log": True}}, "low above 0"),
        ({"learning_rate": {"low": 0.1, "high": 0.5, "log": 1}}, "log = true or false"),
        ({"learning_rate": {"low": 0.1, "high": 0.5, "step": 0.1, "log": True}}, "log or step"),
        ({"learning_rate": {"low": 0.1, "high": float("inf")}}, "Give low and high"),
        ({"learning_rate": {"low": 0.1, "high": 0.5, "choices": [0.1]}}, "not both"),
        ({"global_batch": {"low": 8.0, "high": 16.0}}, "integers"),
        ({"global_batch": {"low": 8, "high": 15, "step": 4}}, "exactly"),
        ({"global_batch": {"choices": [8, 8]}}, "each choice once"),
        ({"global_batch": {"choices": [8, True]}}, "values of type int"),
        ({"global_batch": {"choices": []}}, "a list of values"),
        ({"batchnorm": {"choices": ["ghost", "none"]}}, "ghost or sync or local"),
        ({"learning_rate": {"low": 1e-30, "high": 1.0, "step": 1e-30}}, "steps at most"),
        ({"set": {"x": {"low": -1.7e308, "high": 1.7e308}}}, "a range whose width is a finite number"),
        ({"batchnorm": {"low": 1, "high": 2}}, "choices, since it is no number"),
    ],
)
def test_a_wrong_space_is_refused_in_four_parts(space: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        space_of(space, "space.toml")
    assert named in str(caught.value) and "space.toml" in str(caught.value)
    assert all(f"\n  {part}: " in str(caught.value) for part in ("got", "allowed", "next"))


@given(st.integers(-50, 50), st.integers(1, 40), st.integers(1, 9), st.booleans())
def test_a_grid_goes_from_low_to_high_in_equal_steps(low: int, count: int, step: int, real: bool) -> None:
    scale = 0.1 if real else 1
    numbers = [round((low + step * n) * scale, 6) for n in range(count + 1)]
    parameter = Parameter(name="x", low=numbers[0], high=numbers[-1], step=round(step * scale, 6) if real else step)
    if real:
        assert parameter.grid() == pytest.approx(numbers) and all(type(n) is float for n in parameter.grid())
    else:
        assert parameter.grid() == numbers


def test_a_range_of_real_numbers_has_no_grid_without_a_step() -> None:
    with pytest.raises(ConfigError, match="a range without a step"):
        search("tune", {"learning_rate": {"low": 0.1, "high": 1.0}}, sampler="grid", trials=None)


def test_a_grid_beyond_memory_is_refused_before_it_is_made() -> None:
    for space in ({"seed": {"low": 0, "high": 2**62}}, {"set.x": {"low": 0.0, "high": 1.0, "step": 1e-12}}):
        with pytest.raises(ConfigError, match="--sampler grid") as caught:
            search("tune", space, sampler="grid", trials=3)
        assert "points at most" in caught.value.allowed


def test_the_flag_of_a_text_gives_the_same_text() -> None:
    for value in ("relu", "7", "true", "1e-3", "a b", 'a"b', '"7"', "[1]", "größe", "", 7, True, 1e-3):
        ((name, read),) = [setting(flag) for flag in flags_of({"set.x": value})[1:]]
        assert (name, read, type(read)) == ("x", value, type(value))


def test_a_trial_is_the_base_with_its_parameters_and_its_flags_are_those_of_the_job() -> None:
    base = search("tune").base
    config = config_of_trial(base, {"learning_rate": 0.1, "global_batch": 64, "canonical": True}, "there")
    assert (config.run, config.step.learning_rate, config.data.global_batch, config.data.epochs) == (
        "there",
        0.1,
        64,
        base.data.epochs,
    )
    base = base.but(extra={"depth": 2, "width": 8})
    assert config_of_trial(base, {"set.width": 64}, "there").model.extra == {"depth": 2, "width": 64}
    parameters = {"learning_rate": 0.1, "canonical": True, "set.width": 32, "set.bias": False}
    flags = ["--learning-rate", "0.1", "--canonical", "--set", "width=32", "--set", "bias=false"]
    assert flags_of(parameters) == flags and flags_of({"canonical": False}) == []


def test_every_end_and_choice_is_checked_before_anything_starts() -> None:
    config = search("tune", {"global_batch": {"choices": [8, 16]}, "learning_rate": {"low": 0.1, "high": 1.0}})
    found = [(each.data.global_batch, each.step.learning_rate) for each in corners(config.base, config.space, "check")]
    assert found == [(8, 0.1), (16, 0.1), (8, 1.0)]
    negative = space_of({"learning_rate": {"low": -1.0, "high": 1.0}}, "space.toml")
    with pytest.raises(ConfigError, match="learning_rate"):
        corners(config.base, negative, "check")
    with pytest.raises(ConfigError, match="shares of ranks"):
        dataclasses.replace(config, base=config.base.but(balance=True))
