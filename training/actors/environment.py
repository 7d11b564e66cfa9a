"""Environments of Gymnasium, by id or by `module:function`: observations as flat float32, actions as numbers from 0.

A user's function takes no arguments and returns a `gymnasium.Env`. Several environments are stepped together; where
Gymnasium has a vectorised form of one (CartPole-v1), that is used. An environment whose episode has ended is reset by
its next step, which ignores the action (`AutoresetMode.NEXT_STEP`): so the last observation of an episode is seen.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lockstep.storage.errors import ConfigError, DataError, nearest

if TYPE_CHECKING:
    import gymnasium

WIDE_INPUTS = 100_000
SIGNATURES = {
    "reset": "reset(*, seed=None, options=None) returns (observation, dict)",
    "step": "step(action) returns (observation, reward, ended, cut, dict), each observation of its space's shape",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a policy for an environment takes and gives."""

    inputs: int
    """Numbers in an observation."""
    actions: int
    """Actions to choose from."""


class Environments:
    """Some environments of one kind, stepped together."""

    def __init__(self, name: str, count: int, seed: int) -> None:
        """Open and reset `count` environments. Raises ConfigError for a name that is unknown, a module that cannot be
        imported, and spaces other than those that a policy takes."""
        self._name = name
        self._envs = _open(name, count)
        space = self._envs.single_observation_space
        self.shape = _shape_of(name, space, self._envs.single_action_space)
        self._one_hot = type(space).__name__ == "Discrete"
        self._first_state = int(getattr(space, "start", 0))
        self._first_action = int(self._envs.single_action_space.start)
        with self._named("reset"):
            found, _ = self._envs.reset(seed=seed % (1 << 31))
        self.observations = self._flat(found)
        """What is seen now: (count, inputs) float32."""

    def step(self, actions: NDArray[np.int32]) -> tuple[NDArray[Any], NDArray[np.bool_], NDArray[np.bool_]]:
        """Take `actions` (count,); returns rewards, whether an episode ended by its own, and whether it was cut, all
        (count,). `observations` are then the new ones. Raises DataError for what the environment raises, and for
        rewards that are not finite."""
        with self._named("step"):
            found, rewards, ended, cut, _ = self._envs.step(actions.astype(np.int64) + self._first_action)
        self.observations = self._flat(found)
        if not np.isfinite(rewards).all():
            raise self._fault("a reward that is not finite", str(rewards[~np.isfinite(rewards)][0]), "a finite number")
        return rewards, ended, cut

    def close(self) -> None:
        """Close all of them."""
        self._envs.close()

    @contextlib.contextmanager
    def _named(self, method: str) -> Iterator[None]:
        """What a method of the user's raises ends the run with this method's name."""
        try:
            yield
        except Exception as error:  # a user's environment may raise anything
            ours = (sys.prefix, sys.base_prefix, __file__)
            frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(ours)]
            place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
            raise self._fault(
                f"an error in {method}", f"{type(error).__name__}: {error}"[:500] + place,
                f"{method} as gymnasium.Env has it: {SIGNATURES[method]}",
            ) from error  # fmt: skip

    def _fault(self, what: str, got: str, allowed: str) -> DataError:
        return DataError(
            f"the environment {self._name} gave {what}", got=got, allowed=allowed,
            next_step="Correct the environment; gymnasium.utils.env_checker.check_env looks for such faults.",
        )  # fmt: skip

    def _flat(self, found: Any) -> NDArray[np.float32]:
        if self._one_hot:
            rows: NDArray[np.float32] = np.eye(self.shape.inputs, dtype=np.float32)[found - self._first_state]
            return rows
        flat = np.asarray(found, np.float32).reshape(len(found), -1)
        if not np.isfinite(flat).all():
            raise self._fault("an observation that is not finite", str(flat[~np.isfinite(flat)][0]), "finite numbers")
        return flat


def shape_of(name: str) -> Shape:
    """Open an environment once to see its shape. Raises what `Environments` raises."""
    envs = Environments(name, 1, 0)
    envs.close()
    return envs.shape


def _open(name: str, count: int) -> Any:
    try:
        import gymnasium
    except ModuleNotFoundError as error:
        raise ConfigError(
            "agents need Gymnasium",
            got=str(error),
            allowed="an environment with requirements-agents.txt",
            next_step="pip install -r requirements-agents.txt",
        ) from None
    module, colon, function = name.partition(":")
    if colon and function.isidentifier():
        make = _function(name, module, function)
        mode = gymnasium.vector.AutoresetMode.NEXT_STEP
        return gymnasium.vector.SyncVectorEnv([lambda: _env_of(name, make)] * count, autoreset_mode=mode)
    try:
        return gymnasium.make_vec(name, num_envs=count)
    except (gymnasium.error.Error, ImportError) as error:
        known = [spec for spec in gymnasium.registry if isinstance(spec, str)]
        raise ConfigError(
            f"the environment {name} cannot be opened",
            got=" ".join(str(error).split())[:300] + nearest(name, known),
            allowed="an id of gymnasium.registry, or module:function, which returns a gymnasium.Env",
            next_step="Correct --env, or install the package that has this environment.",
        ) from None


def _function(name: str, module: str, function: str) -> Callable[[], gymnasium.Env[Any, Any]]:
    try:
        loaded = importlib.import_module(module)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(
            f"the environment {name} cannot be imported",
            got=f"{type(error).__name__}: {error}",
            allowed="module:function, importable where the actors run",
            next_step="Fix the module, or name its folder with --code.",
        ) from error
    found = getattr(loaded, function, None)
    if not callable(found):
        raise ConfigError(
            f"the module {module} has no function `{function}`",
            got=name + nearest(function, [known for known, value in vars(loaded).items() if callable(value)]),
            allowed="module:function, a function without arguments that returns a gymnasium.Env",
            next_step="Correct --env, or add the function to the module.",
        )
    made: Callable[[], gymnasium.Env[Any, Any]] = found
    return made


def _env_of(name: str, make: Callable[[], gymnasium.Env[Any, Any]]) -> gymnasium.Env[Any, Any]:
    import gymnasium

    try:
        env = make()
    except Exception as error:  # a user's function may raise anything
        raise ConfigError(
            f"the environment {name} cannot be made",
            got=f"{type(error).__name__}: {error}",
            allowed="a function without arguments that returns a gymnasium.Env",
            next_step="Call it by itself in Python, and correct it.",
        ) from error
    if not isinstance(env, gymnasium.Env):
        raise ConfigError(
            f"{name} returned no environment",
            got=type(env).__name__,
            allowed="a gymnasium.Env",
            next_step="Return an instance of your gymnasium.Env.",
        )
    return env


def _shape_of(name: str, observations: Any, actions: Any) -> Shape:
    kind = type(actions).__name__
    if kind != "Discrete":
        raise ConfigError(
            f"the actions of {name} are not numbered",
            got=str(actions),
            allowed="a Discrete action space",
            next_step="Wrap the environment so that it takes one of some actions, and name it by module:function.",
        )
    kind = type(observations).__name__
    inputs = int(observations.n) if kind == "Discrete" else int(np.prod(observations.shape)) if kind == "Box" else 0
    if not 1 <= inputs <= WIDE_INPUTS:
        raise ConfigError(
            f"the observations of {name} do not fit a policy",
            got=str(observations)[:200],
            allowed=f"a Box or Discrete space of up to {WIDE_INPUTS} numbers",
            next_step="Wrap the environment (gymnasium.wrappers.FlattenObservation), and name it by module:function.",
        )
    return Shape(inputs, int(actions.n))
