"""--strategy layers: each rank trains its block of layers while the others rest, and ranks swap blocks every K steps.

All ranks read the same rows. With K = 1 each block is updated from the gradient of the whole model as it is: the
weights are those of one rank. With more steps a rank trains its block against blocks of the others that are up to K - 1
steps old, block coordinate descent side by side. Each rank computes the whole model: this divides neither memory nor
arithmetic, only the updates; --pipeline-stages divides both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from lockstep.training import ways
from lockstep.training.comm.base import Communicator
from lockstep.training.exchange.agreement import Agreement
from lockstep.training.exchange.compare_ranks import WeightCheck, view_of
from lockstep.training.exchange.exchange import Array, Exchange
from lockstep.training.steps.distribute import own_class
from lockstep.training.strategies.every_step import EveryStep, Exchanging
from lockstep.training.strategies.local_steps import LocalExchange, LocalSteps


def owners_of(model: keras.Model, num_ranks: int) -> list[tuple[keras.Variable, int]]:
    """Each weight of `model` and the rank that trains it: consecutive layers of about equal numbers of weights."""
    layers = [layer for layer in model._flatten_layers(include_self=False) if _own(layer)]
    sizes = [sum(int(np.prod(one.shape)) for one in _own(layer)) for layer in layers]
    middles = np.cumsum(sizes) - np.array(sizes) / 2
    found: dict[int, tuple[keras.Variable, int]] = {}
    for layer, middle in zip(layers, middles, strict=True):
        for one in _own(layer):
            found.setdefault(id(one), (one, int(middle * num_ranks / sum(sizes))))
    return [found.get(id(one), (one, 0)) for one in model.weights]


def _own(layer: keras.layers.Layer) -> list[keras.Variable]:
    """The weights of a layer without those of the layers in it."""
    return [*layer._trainable_variables, *(one for one in layer._non_trainable_variables if one.dtype != "string")]


def slots_of(model: keras.Model) -> list[tuple[keras.Variable, keras.Variable]]:
    """Each variable of the optimizer's state that belongs to a weight, and that weight."""
    twin = own_class(model.optimizer).from_config(model.optimizer.get_config())
    plain, of_twin = twin.add_variable_from_reference, dict[int, keras.Variable]()

    def noted(reference_variable: keras.Variable, *args: Any, **options: Any) -> keras.Variable:
        made = plain(reference_variable, *args, **options)
        of_twin[id(made)] = reference_variable
        return made

    object.__setattr__(twin, "add_variable_from_reference", noted)  # bypasses Keras' tracking
    twin.build(model.trainable_variables)
    pairs = zip(model.optimizer.variables, twin.variables, strict=True)  # made in the same order
    return [(mine, of_twin[id(other)]) for mine, other in pairs if id(other) in of_twin]


class LayerSteps(LocalSteps):
    """Between meetings, trained weights and slots of others' blocks stay; at a meeting each block is its owner's."""

    def __init__(self, model: keras.Model, exchange: LocalExchange, *, every: int) -> None:
        super().__init__(model, exchange, every=every)
        rank, num_ranks = self.communicator.rank, self.communicator.num_ranks
        self.data = self.adds = self.communicator.group([rank])
        owners = owners_of(model, num_ranks)
        of_weight = {id(one): owner for one, owner in owners}
        owners += [(slot, of_weight[id(weight)]) for slot, weight in slots_of(model)]
        self._blocks = [[one for one, owner in owners if owner == number] for number in range(num_ranks)]
        # Moving averages, and what else layers compute in their forward pass, are computed on.
        computed = {id(one) for one in model.non_trainable_weights}
        others = [block for number, block in enumerate(self._blocks) if number != rank]
        self._rest = [one for block in others for one in block if id(one) not in computed]
        self._kept: list[Array] = []

    def weight_check(self, model: keras.Model) -> WeightCheck:
        return WeightCheck(self.communicator, self.alike(model))

    def step_ends(self, agreement: Agreement, *, epoch_ends: bool) -> Agreement:
        agreement = super().step_ends(agreement, epoch_ends=epoch_ends)
        if not agreement.agreed:
            for variable, value in zip(self._rest, self._kept, strict=True):
                variable.assign(value)
        return agreement

    def _keep_start(self) -> None:
        if self._every > 1:
            self._kept = [np.array(view_of(one)) for one in self._rest]

    def _meet(self) -> None:
        for owner, block in enumerate(self._blocks):
            for variables in _by_dtype(block):
                values = [np.ascontiguousarray(view_of(one)).reshape(-1) for one in variables]
                flat = np.concatenate(values)
                self.communicator.broadcast(flat, owner)
                if owner != self.communicator.rank:
                    parts = np.split(flat, np.cumsum([value.size for value in values])[:-1])
                    for one, part in zip(variables, parts, strict=True):
                        one.assign(part.reshape(one.shape))
        self._keep_start()


def _by_dtype(variables: list[keras.Variable]) -> Iterator[list[keras.Variable]]:
    for dtype in sorted({str(one.dtype) for one in variables}):
        yield [one for one in variables if one.dtype == dtype]


class Blocks(Exchanging):
    """The way of --strategy layers."""

    sums_gradients = False

    def exchange_maker(self, whole: Communicator) -> Callable[..., Exchange]:
        def made(communicator: Communicator, scale: float | None = None, **options: Any) -> LocalExchange:
            # Each rank has all rows; what they report adds up to one loss.
            return LocalExchange(communicator, 1 / communicator.num_ranks, **options)

        return made

    def between_steps(self, model: keras.Model, exchange: Exchange) -> EveryStep:
        assert isinstance(exchange, LocalExchange)
        way = self._config.way
        assert isinstance(way, ways.Layers)
        return LayerSteps(model, exchange, every=way.sync_every)


WAY = Blocks
