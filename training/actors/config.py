"""The configuration of an agent's run, as RUN/agent.json keeps it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lockstep.storage.errors import DataError, differences, require
from lockstep.storage.urls import absolute
from lockstep.training.actors.environment import Shape
from lockstep.training.control.protocol import Message

GROWS = ("steps", "actors")
"""What a later call of a run may change."""


@dataclass(frozen=True, kw_only=True)
class AgentConfig(Message):
    """What to play, with whom, and how to learn from it. Raises ConfigError for invalid values."""

    env: str
    """An environment of Gymnasium, such as CartPole-v1, or `module:function`, which returns one."""
    run: str
    """The path or URL of the run."""
    learners: int = 1
    """Ranks that share gradients."""
    actors: int = 2
    """Processes that play, for each learner."""
    steps: int = 500_000
    """Steps of environments, over all actors of all learners."""
    seed: int = 0
    envs: int = 8
    """Environments of an actor, which it steps together."""
    unroll: int = 20
    """Steps of each environment in a trajectory."""
    batch: int = 1
    """Trajectories in a learner's part of an update."""
    widths: tuple[int, ...] = (64, 64)
    """Units of each hidden layer."""
    learning_rate: float = 1e-3
    """The rate at the start; it falls linearly to 0 at the last step."""
    discount: float = 0.99
    """What a reward is worth one step later."""
    entropy: float = 0.01
    """The weight of the policy's entropy in the loss."""
    max_lag: int = 32
    """A trajectory whose weights are more updates old is dropped."""
    save_every_s: float = 30.0
    """Seconds between checkpoints."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "run", absolute(self.run))
        object.__setattr__(self, "widths", tuple(self.widths))
        for name in ("learners", "actors", "steps", "envs", "unroll", "batch"):
            self._check(name, getattr(self, name) >= 1, "1 or more")
        self._check("seed", 0 <= self.seed < 1 << 63, "0 to 2^63 - 1")
        self._check("widths", bool(self.widths) and min(self.widths) >= 1, "one layer or more, of 1 unit or more")
        self._check("learning_rate", 0 < self.learning_rate < math.inf, "a number above 0")
        self._check("discount", 0 <= self.discount < 1, "from 0 to below 1")
        self._check("entropy", 0 <= self.entropy < math.inf, "a number from 0 up")
        self._check("max_lag", self.max_lag >= 0, "an integer from 0 up")
        self._check("save_every_s", 0 < self.save_every_s < math.inf, "seconds above 0")

    def _check(self, name: str, right: bool, allowed: str) -> None:
        require(right, f"--{name.replace('_', '-')}", repr(getattr(self, name)), allowed)

    def check_resumes(self, stored: AgentConfig) -> None:
        """Raise DataError unless this call may continue the run of `stored`; only GROWS, its place and how often it is
        saved may differ."""
        free = {name: getattr(self, name) for name in (*GROWS, "run", "save_every_s")}
        found = differences(self.to_json(), replace(stored, **free).to_json())
        if found:
            raise DataError(
                f"{self.run} was begun with other options",
                got=", ".join(found),
                allowed=f"the options that it began with; {' and '.join(GROWS)} may change",
                next_step="Give the same options, or begin a new run.",
            )


@dataclass(frozen=True, kw_only=True)
class LearnerOrder(Message):
    """What a learner is asked to do."""

    config: AgentConfig
    staging: str
    """Where rank 0 uploads checkpoints and the model."""
    checkpoint: str | None
    """The URL of the checkpoint to resume from."""
    shape: Shape
