"""A small environment: the right end of a corridor is worth 1, and each episode is cut after some steps."""

from __future__ import annotations

import os
import signal
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

LENGTH = 5
MOST_STEPS = 9
Seen = NDArray[np.float32]


class Corridor(gymnasium.Env[Seen, np.int64]):
    """Action 1 goes right, 0 left; the episode ends at the right end with a reward of 1."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (LENGTH,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Seen, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = 0
        return self._seen(), {}

    def step(self, action: np.int64) -> tuple[Seen, float, bool, bool, dict[str, Any]]:
        self.place = max(0, self.place + (1 if action == 1 else -1))
        ended = self.place == LENGTH - 1
        return self._seen(), float(ended), ended, False, {}

    def _seen(self) -> Seen:
        row: Seen = np.eye(LENGTH, dtype=np.float32)[self.place]
        return row


def corridor() -> gymnasium.Env[Seen, np.int64]:
    """The corridor, cut after MOST_STEPS."""
    return gymnasium.wrappers.TimeLimit(Corridor(), MOST_STEPS)


def crashing() -> gymnasium.Env[Seen, np.int64]:
    """An environment whose process ends at its first step."""

    class Crashing(Corridor):
        def step(self, action: np.int64) -> tuple[Seen, float, bool, bool, dict[str, Any]]:
            os._exit(3)

    return Crashing()


def waiting() -> gymnasium.Env[Seen, np.int64]:
    """An environment whose first step never ends."""

    class Waiting(Corridor):
        def step(self, action: np.int64) -> tuple[Seen, float, bool, bool, dict[str, Any]]:
            while True:
                signal.pause()

    return Waiting()


def not_an_env() -> object:
    """No environment."""
    return object()


class Faulty(Corridor):
    """A corridor that fails in its third step, by `fault`."""

    def __init__(self, fault: str) -> None:
        self._fault, self._steps = fault, 0

    def step(self, action: np.int64) -> tuple[Seen, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        seen, reward, ended, cut, more = super().step(action)
        if self._steps == 3:
            if self._fault == "raises":
                raise ValueError("the corridor is closed")
            if self._fault == "shape":
                seen = seen[1:]
            if self._fault == "observation":
                seen = seen * np.float32("nan")
            if self._fault == "reward":
                reward = float("inf")
        return seen, reward, ended, cut, more


def raises() -> gymnasium.Env[Seen, np.int64]:
    """Raises an error in a step."""
    return Faulty("raises")


def wrong_shape() -> gymnasium.Env[Seen, np.int64]:
    """Returns an observation of another shape."""
    return Faulty("shape")


def no_observation() -> gymnasium.Env[Seen, np.int64]:
    """Returns an observation of NaN."""
    return Faulty("observation")


def no_reward() -> gymnasium.Env[Seen, np.int64]:
    """Returns an infinite reward."""
    return Faulty("reward")


def with_argument(length: int) -> gymnasium.Env[Seen, np.int64]:
    """Cannot be called without an argument."""
    return Faulty(f"{length}")
