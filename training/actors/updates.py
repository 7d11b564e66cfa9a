"""A learner's model and its updates: V-trace targets, one sum of gradients over all learners, Keras' Adam."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops
from numpy.typing import NDArray

from lockstep.storage.errors import DataError
from lockstep.training.actors.config import AgentConfig
from lockstep.training.actors.environment import Shape
from lockstep.training.actors.player import ENDED, PLAYED
from lockstep.training.actors.vtrace import vtrace
from lockstep.training.comm.base import Communicator

VALUE_WEIGHT = 0.5  # of the values' squared errors in the loss, as in the paper's appendix
# How much of the mean square of advantages is kept at the next update while it rises, and over how many environment
# steps it falls. If each batch were divided by its own root mean square, batches without information would weigh as
# much as others, and a policy without entropy would stay so. Once a game is solved, small advantages are noise.
SIZE_KEPT = 0.99
SIZE_FALLS_STEPS = 300_000
# Of the mean square of centred logits in the loss. A policy of one action has neither a gradient of its own nor one of
# its entropy, so nothing else would bring the other actions back.
EXTREME_WEIGHT = 1e-3
CLIP_NORM = 0.5  # of the gradient over all variables
SMALL = 0.01  # of the policy's first kernel: at first all actions are about as likely
INPUT = "observation"


def make_model(shape: Shape, widths: Sequence[int], seed: int) -> tuple[keras.Model, list[keras.Variable]]:
    """Dense layers with tanh, and on top of them logits and a value; the variables are in the order of
    lockstep.training.actors.player.layer_shapes. Equal seeds give equal weights."""
    draws = iter(range(len(widths) + 2))

    def first(gain: float) -> keras.initializers.Initializer:
        return keras.initializers.Orthogonal(gain, seed=seed % (1 << 31) + next(draws))

    inputs = keras.Input((shape.inputs,), name=INPUT)
    layers = [keras.layers.Dense(width, "tanh", kernel_initializer=first(2**0.5)) for width in widths]
    heads = [
        keras.layers.Dense(shape.actions, kernel_initializer=first(SMALL), name="logits"),
        keras.layers.Dense(1, kernel_initializer=first(SMALL), name="value"),
    ]
    x = inputs
    for layer in layers:
        x = layer(x)
    model = keras.Model(inputs, {head.name: head(x) for head in heads}, name="agent")
    return model, [variable for layer in (*layers, *heads) for variable in layer.trainable_variables]


def columns_of(batch: Sequence[NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The parts of trajectories that an update uses, side by side: (steps, envs of all)."""
    names = ("observations", "actions", "log_mu", "rewards", "what")
    return {name: np.concatenate([record[name][0] for record in batch], axis=1) for name in names}


class Updates:
    """The model, its optimizer, and how trajectories change them; equal on all learners bit for bit."""

    def __init__(self, config: AgentConfig, shape: Shape, comm: Communicator, *, correct: bool = True) -> None:
        """`correct`: whether trajectories are corrected by V-trace; else they count as played by today's weights."""
        self.model, self._variables = make_model(shape, config.widths, config.seed)
        # AMSGrad: after a long time of small gradients, Adam would answer the first large one by the largest of steps.
        self._optimizer = keras.optimizers.Adam(
            config.learning_rate, global_clipnorm=CLIP_NORM, epsilon=1e-5, amsgrad=True
        )
        self._optimizer.build(self._variables)
        self._config, self._comm, self._correct = config, comm, correct
        self._horizon = 1.0 / (1.0 - config.discount)  # the value of a reward of 1 at each step
        self._square = keras.Variable(0.0, trainable=False, name="square")  # of advantages, the mean; 0 before a batch
        self._gradient = tf.function(self._gradient_of)
        self._apply = tf.function(self._applied)
        self._sizes = [int(np.prod(variable.shape)) for variable in self._variables]
        self.rho = 1.0
        """How far the last batch of this learner was off the policy: the mean over its steps of min(1, pi / mu)."""

    def weights(self) -> NDArray[np.float32]:
        """All weights as one array, in the order that `NumpyPolicy.flat` has."""
        return np.concatenate([np.asarray(variable).reshape(-1) for variable in self._variables])

    def update(self, batch: Sequence[NDArray[Any]], progress: float, words: Sequence[int]) -> NDArray[np.int64]:
        """Make one update of a batch of trajectories, records (1,), and those of the other learners.

        `progress` is the done share of the run, from 0 to 1; the rate falls to 0 with it. Returns the sums over all
        learners of `words`, small integers. A collective.
        """
        found, squares, rho = self._gradient(columns_of(batch))
        gradient, self.rho = found.numpy(), float(rho)
        # whole numbers below 2^24 are exact
        buffer = np.concatenate([gradient, squares.numpy(), np.asarray(words, np.float32)])
        self._comm.all_reduce(buffer)
        self._optimizer.learning_rate.assign(self._config.learning_rate * max(0.0, 1.0 - progress))
        self._apply(buffer[: gradient.size] / np.float32(self._comm.num_ranks))
        total, weight, *sums = buffer[gradient.size :]
        played = sum(record["actions"][0].size for record in batch) * self._comm.num_ranks
        self._take_size(float(total) / (float(weight) + 1e-6), played)
        return np.rint(sums).astype(np.int64)

    def _take_size(self, square: float, steps: int) -> None:
        before = float(self._square)
        kept = SIZE_KEPT if square > before else math.exp(-steps / SIZE_FALLS_STEPS)
        self._square.assign(kept * before + (1.0 - kept) * square if before > 0 else square)

    def tensors(self) -> dict[str, NDArray[Any]]:
        """Weights and the optimizer's state, by name."""
        return {name: np.asarray(variable) for name, variable in self._named().items()}

    def load(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Take what `tensors` returned. Raises DataError if names or shapes differ."""
        named = self._named()
        wrong = set(tensors) ^ set(named) or {n for n, one in named.items() if tuple(one.shape) != tensors[n].shape}
        if wrong:
            raise DataError(
                "the checkpoint does not fit the agent's model",
                got=", ".join(sorted(wrong)[:5]),
                allowed="the tensors of its model and optimizer",
                next_step="Resume with the options and versions that the run began with, or begin a new run.",
            )
        for name, variable in named.items():
            variable.assign(tensors[name])

    def _named(self) -> dict[str, keras.Variable]:
        found = {f"weights/{index:04d}": one for index, one in enumerate(self._variables)}
        found |= {f"optimizer/{index:04d}": one for index, one in enumerate(self._optimizer.variables)}
        return found | {"optimizer/square": self._square}

    def _gradient_of(self, columns: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Returns the gradient as one flat tensor, [sum of the advantages' squares, its weight], and the mean of
        min(1, pi / mu)."""
        observations = columns["observations"]
        steps, envs, inputs = (int(size) for size in observations.shape)
        played = ops.cast((columns["what"] & PLAYED) > 0, "float32")
        discounts = self._config.discount * ops.cast((columns["what"] & ENDED) == 0, "float32")
        count = float((steps - 1) * envs)
        with tf.GradientTape() as tape:
            found = self.model(ops.reshape(observations, (-1, inputs)), training=True)
            logits = ops.reshape(found["logits"], (steps, envs, -1))[:-1]
            values = ops.reshape(found["value"], (steps, envs)) * self._horizon
            log_pi = ops.log_softmax(logits)
            log_taken = ops.sum(log_pi * ops.one_hot(columns["actions"], logits.shape[-1]), axis=-1)
            true_ratios = ops.exp(log_taken - columns["log_mu"])
            ratios = true_ratios if self._correct else ops.ones_like(log_taken)
            targets = vtrace(
                ops.stop_gradient(ratios * played), columns["rewards"], ops.stop_gradient(values), discounts
            )
            # The size that advantages have without rho: else those of a batch that no policy of today plays would grow.
            weight = ops.sum(ops.square(ops.minimum(ratios * played, 1.0)))
            squares = ops.stop_gradient(ops.sum(ops.square(targets.advantages)))
            # A batch larger than usual is divided by its own size: so is the first failure after a game was solved.
            size = ops.sqrt(ops.maximum(self._square, squares / (weight + 1e-6)))
            policy = -ops.sum(targets.advantages / (size + 1e-6) * log_taken * played)
            value = ops.sum(ops.square((targets.values - values[:-1]) / self._horizon) * played)
            entropy = -ops.sum(ops.sum(ops.exp(log_pi) * log_pi, axis=-1) * played)
            centred = logits - ops.mean(logits, axis=-1, keepdims=True)
            extreme = ops.sum(ops.mean(ops.square(centred), axis=-1) * played)
            entropy_loss = EXTREME_WEIGHT * extreme - self._config.entropy * entropy
            loss = (policy + VALUE_WEIGHT * value + entropy_loss) / count
        gradients = tape.gradient(loss, [variable.value for variable in self._variables])
        rho = ops.sum(ops.minimum(true_ratios, 1.0) * played) / ops.maximum(ops.sum(played), 1.0)
        flat = ops.concatenate([ops.reshape(gradient, (-1,)) for gradient in gradients])
        return flat, ops.stack([squares, weight]), rho

    def _applied(self, flat: Any) -> None:
        parts = tf.split(flat, self._sizes)
        self._optimizer.apply(
            [ops.reshape(part, one.shape) for part, one in zip(parts, self._variables, strict=True)], self._variables
        )
