"""--tensor-parallel: each rank of a tensor group has a part of the declared layers' weights, and computes that part.

All ranks of the group read the same rows, and agree in each step. docs/decisions/083-tensor.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import keras

from lockstep.storage.errors import ConfigError
from lockstep.training.comm.base import Communicator
from lockstep.training.exchange.compare_ranks import WeightCheck
from lockstep.training.exchange.exchange import Exchange
from lockstep.training.exchange.grid_exchange import GridExchange
from lockstep.training.steps.distribute import own_class
from lockstep.training.steps.model_state import PART, build_on_parts
from lockstep.training.strategies.every_step import EveryStep, Exchanging
from lockstep.training.strategies.parallel_layers import TensorGroup, divide_layers, undivide_layers
from lockstep.training.strategies.zero import ELEMENTWISE


class PartCheck(WeightCheck):
    """Compares weights between ranks with the same parts, and those that are not divided between mates too."""

    def __init__(self, data: Communicator, mates: Communicator, model: keras.Model) -> None:
        super().__init__(data, model.weights)
        self._of_mates = WeightCheck(mates, [one for one in model.weights if not hasattr(one, PART)])

    def compare(self, step: int) -> None:
        """Compare the weights after `step`, unless that is done. A collective. Raises DivergedError."""
        super().compare(step)
        self._of_mates.compare(step)


class DividedLayers(EveryStep):
    """One sum of gradients in each step, over the ranks with the same parts."""

    def __init__(self, exchange: GridExchange, group: TensorGroup) -> None:
        super().__init__(exchange.communicator, exchange.data)
        self._mates, self._group = exchange.mates, group

    def alone(self) -> AbstractContextManager[None]:
        return self._group.alone()

    def weight_check(self, model: keras.Model) -> WeightCheck:
        return PartCheck(self.data, self._mates, model)

    def undivide(self, model: keras.Model) -> None:
        undivide_layers(model)


class TensorParallel(Exchanging):
    """The way of --tensor-parallel."""

    def check_callbacks(self, callbacks: Sequence[Any]) -> None:
        check_callbacks(callbacks)

    def exchange_maker(self, whole: Communicator) -> Callable[..., Exchange]:
        return partial(GridExchange, grid=self._config.way.grid(self._config.ranks.num_ranks))

    def between_steps(self, model: keras.Model, exchange: Exchange) -> EveryStep:
        assert isinstance(exchange, GridExchange)
        check_optimizer(model)
        whole = exchange.communicator
        tensor = whole.group(self._config.way.grid(whole.num_ranks).tensor_group(whole.rank))
        tensor.deadline_s = whole.deadline_s
        group = TensorGroup(tensor, exchange.failed)
        divide_layers(model, group, exchange.data)
        build_on_parts(model.optimizer, model.trainable_variables)
        return DividedLayers(exchange, group)


def check_optimizer(model: keras.Model) -> None:
    """Raise ConfigError for an optimizer whose update of a part is not the part of its update."""
    optimizer, plain = model.optimizer, own_class(model.optimizer)
    wrong = [name for name in ("clipnorm", "global_clipnorm", "use_ema") if getattr(optimizer, name, None)]
    if plain not in ELEMENTWISE or wrong or optimizer.built:
        built = " that is built already" if optimizer.built else ""
        raise ConfigError(
            "--tensor-parallel cannot divide this optimizer's update over the ranks",
            got=f"{plain.__name__}{' with ' if wrong else ''}{', '.join(wrong)}{built}",
            allowed=f"{', '.join(one.__name__ for one in ELEMENTWISE[1:])} of keras.optimizers, not built yet, without "
            "clipnorm, global_clipnorm and use_ema: each element is updated from itself alone",
            next_step="Compile the model with one of these, or leave out --tensor-parallel.",
        )


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Raise ConfigError for Keras' callbacks that keep or write weights: a rank has a part only."""
    kinds = (keras.callbacks.ModelCheckpoint, keras.callbacks.SwapEMAWeights)
    wrong = [one for one in callbacks if isinstance(one, kinds) or getattr(one, "restore_best_weights", False)]
    if wrong:
        raise ConfigError(
            "--tensor-parallel cannot have a callback that keeps or writes weights, of which a rank has a part",
            got=", ".join(type(one).__name__ for one in wrong),
            allowed="callbacks that read metrics",
            next_step="Leave it out: --keep-best METRIC exports the best checkpoint.",
        )


WAY = TensorParallel
