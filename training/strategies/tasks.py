"""--strategy tasks: ranks train one task each on a copy of the model, and average the trunk every K steps.

The trunk is all of the model but the tasks' output layers. With K = 1 and SGD it takes the steps that it takes where
one sum has the rows of all tasks; an output layer takes those of its task's loss alone, which are larger there by the
whole batch over the task's part of it. Ranks that train the same task train apart between meetings too.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np

from lockstep.storage.errors import ConfigError
from lockstep.training import ways
from lockstep.training.comm.base import FLOATS, Communicator
from lockstep.training.exchange.exchange import Exchange
from lockstep.training.steps.batchnorm import statistics_of
from lockstep.training.steps.heads import head_name, heads_of
from lockstep.training.strategies.every_step import EveryStep, Exchanging
from lockstep.training.strategies.layers import slots_of
from lockstep.training.strategies.local_steps import LocalExchange, LocalSteps, average


class TaskSteps(LocalSteps):
    """At a meeting ranks average the trunk by their shares of the rows; each output layer is that of its task's ranks.

    The optimizer's state goes with its weight. So all ranks are equal after a meeting, and any number of them can
    continue from its checkpoint.
    """

    def __init__(
        self, model: keras.Model, exchange: LocalExchange, *, every: int, tasks: int, mine: int, each: int
    ) -> None:
        """`mine` is the task of this rank, one of `tasks`, which `each` ranks train. Raises ConfigError for a model
        without an output layer for each task.
        """
        super().__init__(model, exchange, every=every)
        heads = heads_of(model)
        if len(heads) != tasks:
            raise ConfigError(
                "the model has no output layer for each task",
                got=f"{len(heads)} layers named {head_name(0)}, {head_name(1)} ...",
                allowed=f"{tasks}, one for each dataset",
                next_step="Name the layers so, or use --strategy sync, which asks for no names.",
            )
        task_of = {id(one): number for number, layer in heads.items() for one in layer.weights}
        of_slot = {id(slot): weight for slot, weight in slots_of(model)}
        found = [(one, one) for one in (*model.trainable_variables, *statistics_of(model))]
        slots = (one for one in model.optimizer.variables if len(one.shape) and np.dtype(one.dtype) in FLOATS)
        found += [(slot, of_slot.get(id(slot), slot)) for slot in slots]
        self._trunk = [one for one, weight in found if id(weight) not in task_of]
        self._heads = [[one for one, weight in found if task_of.get(id(weight)) == number] for number in range(tasks)]
        self._mine, self._each = mine, each

    def _meet(self) -> None:
        average(self._trunk, self.communicator, self._exchange.scale)
        for number, head in enumerate(self._heads):
            average(head, self.communicator, 1 / self._each if number == self._mine else 0.0)


class Trunks(Exchanging):
    """The way of --strategy tasks."""

    sums_gradients = False

    def exchange_maker(self, whole: Communicator) -> Callable[..., Exchange]:
        return LocalExchange

    def between_steps(self, model: keras.Model, exchange: Exchange) -> EveryStep:
        assert isinstance(exchange, LocalExchange)
        config, way = self._config, self._config.way
        assert isinstance(way, ways.Tasks)
        mine, each = way.task_of(config, self._context.world.rank)
        tasks = len(config.data.datasets)
        return TaskSteps(model, exchange, every=way.sync_every, tasks=tasks, mine=mine, each=each)


WAY = Trunks
