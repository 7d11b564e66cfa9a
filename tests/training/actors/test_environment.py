"""Environments that cannot be played are refused in four parts."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from lockstep.storage.errors import ConfigError, DataError
from lockstep.training.actors.agent import play
from lockstep.training.actors.environment import Environments, Shape, shape_of
from tests.training.actors._learning import run_learners, small

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
        (f"{HERE}:with_argument", "cannot be made", "with_argument() missing 1 required positional argument"),
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


FAULTS = [
    ("raises", "an error in step", "ValueError: the corridor is closed"),
    ("wrong_shape", "an error in step", "wrong shape"),
    ("no_observation", "an observation that is not finite", "nan"),
    ("no_reward", "a reward that is not finite", "inf"),
]


@pytest.mark.parametrize(("name", "what", "got"), FAULTS)
def test_a_fault_in_a_step_is_named_with_the_environment(name: str, what: str, got: str) -> None:
    envs = Environments(f"{HERE}:{name}", 2, 0)
    with pytest.raises(DataError, match=f"{HERE}:{name} gave {what}") as refused:
        for _ in range(3):
            envs.step(np.zeros(2, np.int32))
    assert got in refused.value.got and "check_env" in refused.value.next_step


@pytest.mark.parametrize(("name", "what", "got"), FAULTS[::2])
def test_a_fault_in_an_actor_ends_the_run_at_once_with_its_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, what: str, got: str
) -> None:
    """The actor is a process; another one would meet the same fault."""
    with pytest.raises(DataError, match=what) as refused:
        config = small(str(tmp_path / "run"), env=f"{HERE}:{name}")
        play(config, run_learners, report=lambda line: None, lease_watch_s=0.1)
    assert got in refused.value.got and "is replaced" not in capfd.readouterr().out
