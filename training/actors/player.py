"""Plays environments by a policy in NumPy and records trajectories; no TensorFlow, so an actor starts in a moment.

A trajectory is one record of a fixed NumPy dtype (`trajectory_dtype`), so that it is sent as one block of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.training.actors.environment import Environments, Shape

Array = NDArray[Any]
ENDED, PLAYED = 1, 2
"""Bits of `what`: the episode ended by its own with this step; the step was played, and did not reset."""


def trajectory_dtype(unroll: int, envs: int, inputs: int) -> np.dtype[Any]:
    """The record of `unroll` steps of `envs` environments: the version of the weights that played them; observations,
    with those after the last step; actions; the logarithm of the probability with which each was taken; rewards;
    `what` a step was (ENDED, PLAYED); and the return of the episode that ended with it, NaN elsewhere."""
    each = (unroll, envs)
    return np.dtype(
        [
            ("version", np.int64),
            ("observations", np.float32, (unroll + 1, envs, inputs)),
            ("actions", np.int32, each),
            ("log_mu", np.float32, each),
            ("rewards", np.float32, each),
            ("what", np.uint8, each),
            ("returns", np.float32, each),
        ]
    )


def layer_shapes(shape: Shape, widths: Sequence[int]) -> list[tuple[int, ...]]:
    """The shapes of kernels and biases: of the hidden layers, then of the policy's outputs and of the value."""
    found: list[tuple[int, ...]] = []
    for inputs, outputs in zip((shape.inputs, *widths), widths, strict=False):
        found += [(inputs, outputs), (outputs,)]
    return [*found, (widths[-1], shape.actions), (shape.actions,), (widths[-1], 1), (1,)]


class NumpyPolicy:
    """The policy of a multi-layer perceptron with tanh, from one flat array of all its weights."""

    def __init__(self, shape: Shape, widths: Sequence[int]) -> None:
        shapes = layer_shapes(shape, widths)
        ends = np.cumsum([int(np.prod(one)) for one in shapes])
        self.flat = np.zeros(int(ends[-1]), np.float32)
        """All weights, in the order of `layer_shapes`; fill it to set them."""
        self._views = [
            self.flat[end - int(np.prod(one)) : end].reshape(one) for one, end in zip(shapes, ends, strict=True)
        ]

    def logits(self, observations: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits (n, actions) of observations (n, inputs)."""
        x = observations
        for kernel, bias in zip(self._views[:-4:2], self._views[1:-4:2], strict=True):
            x = np.tanh(x @ kernel + bias)
        found: NDArray[np.float32] = x @ self._views[-4] + self._views[-3]
        return found


class Player:
    """Some environments, and the policy that plays them."""

    def __init__(self, name: str, envs: int, unroll: int, widths: Sequence[int], *, seed: Sequence[int]) -> None:
        """`seed` names the stream of draws: of the run, then which player it is. Raises what Environments raises."""
        self._random = np.random.Generator(np.random.Philox(np.random.SeedSequence(list(seed))))
        self.envs = Environments(name, envs, int(self._random.integers(1 << 31)))
        self.policy = NumpyPolicy(self.envs.shape, widths)
        self.version = 0
        """The version of the policy's weights, which each trajectory carries."""
        self._record = np.zeros(1, trajectory_dtype(unroll, envs, self.envs.shape.inputs))
        self._resets = np.zeros(envs, bool)  # whose next step is a reset
        self._returns = np.zeros(envs)

    def play(self) -> Array:
        """Play one trajectory; returns the record (1,), which the next call fills again."""
        record = self._record[0]
        record["version"] = self.version
        rows = np.arange(len(self._returns))
        for step in range(len(record["actions"])):
            seen = self.envs.observations
            logits = self.policy.logits(seen)
            # Gumbel-max: argmax of logits + Gumbel noise is a draw from softmax(logits).
            actions = np.argmax(logits - np.log(self._random.standard_exponential(logits.shape)), axis=1)
            shifted = logits - logits.max(axis=1, keepdims=True)
            rewards, ended, cut = self.envs.step(actions.astype(np.int32))
            played = ~self._resets
            self._returns = np.where(played, self._returns + rewards, 0.0)
            self._resets = (ended | cut) & played
            record["observations"][step] = seen
            record["actions"][step] = actions
            record["log_mu"][step] = shifted[rows, actions] - np.log(np.exp(shifted).sum(axis=1))
            record["rewards"][step] = np.where(played, rewards, 0.0)
            record["what"][step] = played * PLAYED + (ended & played) * ENDED
            record["returns"][step] = np.where(self._resets, self._returns, np.nan)
        record["observations"][-1] = self.envs.observations
        return self._record
