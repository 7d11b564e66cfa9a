"""Federated averaging: clients train from the round's weights, and the weighted mean of their changes is applied.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (AISTATS 2017). The outer
step on the mean is that of Reddi et al., "Adaptive Federated Optimization" (ICLR 2021, FedAvgM), with Nesterov momentum
as for local steps. Clipping of each client's change and Gaussian noise on their sum, each client weighing the same:
McMahan et al., "Learning Differentially Private Recurrent Language Models" (ICLR 2018). docs/strategies.md.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from lockstep.storage.errors import ConfigError, DataError
from lockstep.training.comm.base import FLOATS
from lockstep.training.exchange.agreement import Agreement
from lockstep.training.exchange.compare_ranks import view_of
from lockstep.training.exchange.exchange import Array
from lockstep.training.run.checkpoint import Tensors
from lockstep.training.steps.batchnorm import normalisations, statistics_of
from lockstep.training.steps.optimizers import without_loss_scale
from lockstep.training.strategies.every_step import EveryStep
from lockstep.training.strategies.local_steps import LocalExchange, OuterStep


class Federated(EveryStep):
    """The rounds of one rank: `client_begins`, training, `client_ends` for each of its clients, then `round_ends`.

    Changes are added up in float64, on a rank in the order of its clients; so results are equal to rounding at any
    number of ranks. Other float weights, such as moving averages, are averaged too, without an outer step; with noise
    they stay what they are.
    """

    def __init__(
        self,
        model: keras.Model,
        exchange: LocalExchange,
        *,
        learning_rate: float = 1.0,
        momentum: float = 0.0,
        clip: float | None = None,
        noise_multiplier: float = 0.0,
    ) -> None:
        """Raises ConfigError for an optimizer whose state a client cannot begin again."""
        super().__init__(exchange.communicator)
        _check(model.optimizer)
        self._exchange, self._clip, self._noise = exchange, clip, noise_multiplier
        self._trained = list(model.trainable_variables)
        others = [(one, np.dtype(one.dtype) in FLOATS and not noise_multiplier) for one in model.non_trainable_weights]
        self._others = [one for one, averaged in others if averaged]
        if noise_multiplier and (statistics := statistics_of(model)):
            raise ConfigError(
                "moving averages of batch normalisation have no noise, and would reveal a client",
                got=f"--noise-multiplier {noise_multiplier} and {len(statistics)} moving averages",
                allowed="a model without BatchNormalization, or no noise",
                next_step="Use LayerNormalization or GroupNormalization, which keep no averages.",
            )
        self._outer = OuterStep(self._trained, learning_rate, momentum)
        # A rate that a callback sets stays; counts and slots begin again with each client.
        rate = getattr(model.optimizer, "_learning_rate", None)
        self._reset = [one for one in model.optimizer.variables if one is not rate]
        self._first = [np.array(view_of(one)) for one in self._reset]
        self._kept = [one for one, averaged in others if not averaged]
        self._start: list[Array] = []
        self._sums: list[Array] = []
        self._before: list[Array] = []

    def begin_epoch(self, epoch: int, last: int) -> None:
        """A round begins with the present weights."""
        self._start = [np.array(view_of(one)) for one in self._averaged]
        self._before = [np.array(view_of(one)) for one in self._kept]
        self._sums = [np.zeros(value.shape) for value in self._start]

    @property
    def _averaged(self) -> list[Any]:
        return [*self._trained, *self._others]

    def client_begins(self) -> None:
        """Give the model the round's weights and a new optimizer state."""
        variables, values = [*self._averaged, *self._kept, *self._reset], [*self._start, *self._before, *self._first]
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    def client_ends(self, name: str, weight: float) -> None:
        """Add the change of the client `name`. Raises DataError, which ends the run, if it is not finite."""
        changes = [
            np.asarray(view_of(one), np.float64) - start for one, start in zip(self._averaged, self._start, strict=True)
        ]
        norm = float(np.sqrt(sum(float(np.vdot(change, change)) for change in changes[: len(self._trained)])))
        if not np.isfinite(norm):
            raise DataError(
                f"round {self._exchange.step + 1}: the weights of client `{name}` are not finite",
                got=f"a change of norm {norm}",
                allowed="finite numbers; the run ends, and the round is lost",
                next_step="Lower the learning rate, clip gradients (clipnorm) or look at this client's samples.",
            )
        scale = 1.0 if self._clip is None else min(1.0, self._clip / max(norm, 1e-300))
        for i, change in enumerate(changes):
            self._sums[i] += (weight * scale if i < len(self._trained) else weight) * change

    def round_ends(self, weight: float, noise: np.random.Generator) -> None:
        """Apply the sum of all ranks' clients, divided by `weight`. A collective.

        Noise of standard deviation noise_multiplier * clip is added to each number of the sum, the same on all ranks.
        """
        self.client_begins()
        flat = self.communicator.allocate(sum(one.size for one in self._sums), np.float64)
        np.concatenate([one.reshape(-1) for one in self._sums], out=flat)
        self.communicator.all_reduce(flat)
        if self._noise:
            flat += self._noise * (self._clip or 0.0) * noise.standard_normal(flat.size)
        flat /= weight
        bounds = np.cumsum([0, *(one.size for one in self._sums)])
        means = [flat[bounds[i] : bounds[i + 1]].reshape(one.shape) for i, one in enumerate(self._sums)]
        count = len(self._trained)
        self._outer.apply(self._start[:count], [-mean for mean in means[:count]])
        for variable, start, mean in zip(self._others, self._start[count:], means[count:], strict=True):
            variable.assign((start + mean).astype(start.dtype))
        self._start, self._sums = [], []

    def step_ends(self, agreement: Agreement, *, epoch_ends: bool) -> Agreement:
        return self._exchange.agree(equal=True)

    def state(self) -> Tensors:
        return self._outer.state()

    def load(self, tensors: Tensors, where: str) -> None:
        self._outer.load(tensors, where)


def check_normalisation(model: keras.Model, batchnorm: str) -> None:
    """Raise ConfigError for batch normalisation over rows of several clients."""
    if batchnorm != "local" and normalisations(model):
        raise ConfigError(
            "a client normalises its own batches only",
            got=f"--batchnorm {batchnorm} and a model with BatchNormalization",
            allowed="--batchnorm local with --strategy federated",
            next_step="Give --batchnorm local, or use a model without BatchNormalization.",
        )


def _check(optimizer: keras.optimizers.Optimizer) -> None:
    rate = getattr(optimizer, "_learning_rate", None)
    schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    if schedule or getattr(optimizer, "use_ema", False) or without_loss_scale(optimizer) is not optimizer:
        raise ConfigError(
            "the model's optimizer counts steps of a whole run, and a client's begin again in each round",
            got=f"{type(optimizer).__name__} with {type(rate).__name__ if schedule else 'use_ema or loss scaling'}",
            allowed="an optimizer with a constant learning rate, without use_ema and without loss scaling",
            next_step="Give --learning-rate or compile the model with a constant rate; change it by a callback.",
        )
