"""--strategy tasks: a group of ranks trains one task on a copy of the model, and all average the trunk every K steps.

The trunk is all of the model but the tasks' output layers. The ranks of a task add their gradients in each step. With
K = 1 there is one copy: all ranks add all gradients, and take the steps of --strategy sync. With more, an output
layer's gradient is its task's part of that sum: its task's gradient times the task's share of the rows. So with SGD an
average after each step would be that sum too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np

from lockstep.storage.errors import ConfigError
from lockstep.training import ways
from lockstep.training.comm.base import FLOATS, Communicator
from lockstep.training.exchange.agreement import FLAGS
from lockstep.training.exchange.buckets import Layout
from lockstep.training.exchange.exchange import Array, Exchange
from lockstep.training.exchange.sparse import Table
from lockstep.training.steps.batchnorm import statistics_of
from lockstep.training.steps.heads import head_name, heads_of
from lockstep.training.strategies.every_step import EveryStep, Exchanging
from lockstep.training.strategies.layers import slots_of
from lockstep.training.strategies.local_steps import LocalExchange, LocalSteps, average


class TaskExchange(LocalExchange):
    """Sums over the ranks of one task in each step; all ranks agree only at a meeting."""

    apart = True

    def __init__(
        self,
        communicator: Communicator,
        scale: float | None = None,
        *,
        members: Sequence[int],
        heads: Sequence[str],
        **options: Any,
    ) -> None:
        """`members` are this task's ranks, `heads` the names of all output layers; `scale` is n_r / G of the whole
        global batch.
        """
        group = communicator.group(members)
        group.deadline_s = communicator.deadline_s
        super().__init__(communicator, scale, data=group, **options)
        self._heads, self._share = frozenset(heads), 0.0  # the task's part of the rows, from the first step on

    @property
    def alone(self) -> bool:
        """Whether gradients stay in the graph: a task of one rank has nothing to add."""
        return self.data.num_ranks == 1

    @property
    def together(self) -> bool:
        """Whether a step's loss is that of several ranks' rows: those of the task."""
        return self.data.num_ranks > 1

    def use(self, layout: Layout, names: Sequence[str], tables: Sequence[Table] = ()) -> None:
        if not self._share:
            share = np.array([self.scale])
            self.data.all_reduce(share)
            self._share = float(share[0])
        super().use(layout, names, tables)

    def factor(self, name: str) -> float:
        """What makes the task's sum its mean, of an output layer times the task's share."""
        layers = name.rpartition(" ")[2].split("/")  # `the gradient of mlp/_task_0/kernel`
        return self.scale if self._heads.intersection(layers) else self.scale / self._share

    def kept_factor(self, name: str) -> float:
        return self.factor(name)

    def _words(self, loss: Array) -> list[float]:
        """No flags, which wait for the next meeting."""
        return [float(loss), 0.0, *(0.0 for _ in FLAGS)]

    def _agree(self, words: Sequence[float], wrong: list[str], gradients: Any, own_loss: Array) -> None:
        """End a step of this task's ranks. Raises DataError, which ends the run, if something is not finite."""
        if wrong or not np.isfinite(words[0]):
            raise self._not_finite([*wrong, *(["the loss"] * (not np.isfinite(words[0])))])
        self._step_apart(float(own_loss))


class TaskSteps(LocalSteps):
    """At a meeting ranks average the trunk by their shares of the rows; each output layer is that of its task's ranks.

    The optimizer's state goes with its weight. So all ranks are equal after a meeting, and any number of them can
    continue from its checkpoint.
    """

    def __init__(self, model: keras.Model, exchange: TaskExchange, *, every: int, tasks: int, mine: int) -> None:
        """`mine` is the task of this rank, one of `tasks`."""
        super().__init__(model, exchange, every=every)
        self.adds = exchange.data
        task_of = {id(one): number for number, layer in heads_of(model).items() for one in layer.weights}
        of_slot = {id(slot): weight for slot, weight in slots_of(model)}
        found = [(one, one) for one in (*model.trainable_variables, *statistics_of(model))]
        slots = (one for one in model.optimizer.variables if len(one.shape) and np.dtype(one.dtype) in FLOATS)
        found += [(slot, of_slot.get(id(slot), slot)) for slot in slots]
        self._trunk = [one for one, weight in found if id(weight) not in task_of]
        self._heads = [[one for one, weight in found if task_of.get(id(weight)) == number] for number in range(tasks)]
        self._leads = mine if exchange.data.rank == 0 else None

    def _meet(self) -> None:
        average(self._trunk, self.communicator, self._exchange.scale)
        for number, head in enumerate(self._heads):
            average(head, self.communicator, 1.0 if number == self._leads else 0.0)


class Trunks(Exchanging):
    """The way of --strategy tasks."""

    sums_gradients = False

    def exchange_maker(self, whole: Communicator) -> Callable[..., Exchange] | None:
        way = self._way()
        if way.sync_every == 1:
            return None
        mine, each = way.task_of(self._config, self._context.world.rank)
        heads = [head_name(number) for number in range(len(self._config.data.datasets))]
        return partial(TaskExchange, members=range(mine * each, (mine + 1) * each), heads=heads)

    def between_steps(self, model: keras.Model, exchange: Exchange) -> EveryStep:
        way, tasks = self._way(), len(self._config.data.datasets)
        check_heads(model, tasks)
        if not isinstance(exchange, TaskExchange):
            return super().between_steps(model, exchange)
        mine, _ = way.task_of(self._config, self._context.world.rank)
        return TaskSteps(model, exchange, every=way.sync_every, tasks=tasks, mine=mine)

    def _way(self) -> ways.Tasks:
        assert isinstance(self._config.way, ways.Tasks)
        return self._config.way


def check_heads(model: keras.Model, tasks: int) -> None:
    """Raise ConfigError for a model without an output layer for each task."""
    heads = heads_of(model)
    if len(heads) != tasks:
        raise ConfigError(
            "the model has no output layer for each task",
            got=f"{len(heads)} layers named {head_name(0)}, {head_name(1)} ...",
            allowed=f"{tasks}, one for each dataset",
            next_step="Name the layers so, or use --strategy sync, which asks for no names.",
        )


WAY = Trunks
