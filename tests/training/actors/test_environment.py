"""Environments that cannot be played are refused in four parts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.storage.errors import ConfigError
from lockstep.training.actors.environment import Shape, shape_of

HERE = "tests.training.actors._corridor"


@pytest.mark.parametrize(
    ("name", "what", "got"),
    [
        ("CartPol-v1", "cannot be opened", "CartPole-v1"),
        ("Pendulum-v1", "the actions of Pendulum-v1 are not numbered", "Box"),
        ("Blackjack-v1", "the observations of Blackjack-v1 do not fit", "Tuple"),
        ("no_such_module_here:make", "cannot be imported", "ModuleNotFoundError"),
        (f"{HERE}:corrido", "has no function `corrido`", "perhaps `corridor`"),
        (f"{HERE}:not_an_env", "returned no environment", "object"),
    ],
)
def test_it_is_refused_with_the_reason(name: str, what: str, got: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(what)) as refused:
        shape_of(name)
    error = refused.value
    assert got in error.got and error.allowed and error.next_step


def test_a_module_that_raises_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_env_module.py").write_text("raise RuntimeError('out of order')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as refused:
        shape_of("broken_env_module:make")
    assert refused.value.got == "RuntimeError: out of order"


def test_the_shape_of_cart_pole() -> None:
    assert shape_of("CartPole-v1") == Shape(4, 2)


def test_the_shape_of_a_users_environment() -> None:
    assert shape_of(f"{HERE}:corridor") == Shape(5, 2)
