"""A rank's side of a parameter server: it pushes gradients, pulls weights, and meets the other ranks for checkpoints.

The servers (`lockstep.training.strategies.server_process`) run the optimizer; this rank's own computes only the
learning rate. Each bucket of gradients is cut into equal parts, one a server. docs/strategies.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import keras
import numpy as np

from lockstep.storage.errors import CommunicationError, ConfigError
from lockstep.training import ways
from lockstep.training.comm.base import Communicator, part_bounds
from lockstep.training.exchange.agreement import Agreement
from lockstep.training.exchange.compare_ranks import view_of
from lockstep.training.exchange.exchange import GRACE_S, Array, Exchange
from lockstep.training.rules import CheckpointEvery
from lockstep.training.steps.batchnorm import statistics_of
from lockstep.training.steps.distribute import own_class
from lockstep.training.strategies.asynchronous import ApartExchange, AsyncSteps
from lockstep.training.strategies.every_step import EveryStep, Exchanging
from lockstep.training.strategies.local_steps import average
from lockstep.training.strategies.server_process import SERVER, Begin, Push, Rule, links_between, receive, send


class ServedExchange(ApartExchange):
    """An exchange whose steps push this rank's gradient to all servers, and pull their weights."""

    served = True

    def __init__(
        self, communicator: Communicator, scale: float | None = None, *, whole: Communicator, **options: Any
    ) -> None:
        """`communicator` is of the ranks, `whole` of ranks and servers."""
        super().__init__(communicator, scale, **options)
        servers = range(communicator.num_ranks, whole.num_ranks)
        self._links = links_between(whole, [whole.rank], servers)
        for link in self._links:
            link.deadline_s = whole.deadline_s + GRACE_S  # the server waits shorter, and names the late rank
        self.rule = Rule("sgd")
        self.rate = 0.0
        """The learning rate of the next step."""
        self.begins: list[list[Array]] = []
        """Weights and optimizer's state of each variable, on rank 0 before its first step."""
        self.variables: list[str] = []
        """The names that the gradients of all variables have in errors, in order; some may have none."""
        self.weights: list[Array] = []
        """The weights of each bucket, as the servers had them at the end of the last step."""
        self.slots: list[list[Array]] = []
        """The optimizer's state of each bucket at the last meeting."""
        self._meet_at = 0
        self._ended = False

    @property
    def applies(self) -> bool:
        """Whether this rank has sums to apply: never, since the servers apply them."""
        return False

    @property
    def sent_bytes(self) -> int:
        """Bytes sent so far, as in `Exchange`, those to the servers included."""
        return super().sent_bytes + sum(link.sent_bytes for link in self._links)

    def close(self, reason: BaseException | None = None) -> None:
        """End the exchange as `Exchange.close` does; without an error this rank has taken its last step, as when ranks
        leave.
        """
        try:
            if self.error is None and reason is None:
                self.end()
        finally:
            super().close(reason)

    def end(self) -> None:
        """This rank has taken its last step. A second call does nothing."""
        if self._ended:
            return
        self._ended = True
        for number in range(len(self._links)):
            with self._waiting_for(number) as link:
                if not self.weights and self.communicator.rank == 0:  # no step was left: servers begin with nothing
                    Begin(self.rule, (), (), self.step, self.step * self.communicator.num_ranks).send(link)
                link.send(np.array(Push(0, False, False, 0.0, 0.0)), SERVER)

    @cached_property
    def places(self) -> list[tuple[int, int, slice]]:
        """(place in `variables`, bucket, elements) of each gradient; in a step or after it."""
        found: list[tuple[int, int, slice]] = []
        place = -1
        for slot, name in zip(self._of_layout().gradients, self._names, strict=False):
            place = self.variables.index(name, place + 1)
            found.append((place, slot.bucket, slice(slot.start, slot.start + slot.size)))
        return found

    def _trade(self, flats: list[Array]) -> list[Array]:
        self.met = self._scheduled or self.step == self._meet_at
        if not self.weights:
            self.weights = [np.zeros_like(flat) for flat in flats]
            self.slots = [[np.zeros_like(flat) for _ in range(self.rule.slots)] for flat in flats]
            if self.communicator.rank == 0:
                self._begin()
        push = Push(self.step, self._asks, self.met, self.rate, self.scale)
        for number in range(len(self._links)):
            with self._waiting_for(number) as link:
                link.send(np.array(push, np.float64), SERVER)
                for flat in flats:
                    send(link, self._part(flat, number), SERVER)
        began = time.perf_counter()
        for number in range(len(self._links)):
            with self._waiting_for(number) as link:
                meet_at = np.zeros(1, np.int64)
                link.recv(meet_at, SERVER)
                if number == 0:  # which decides for all
                    self._meet_at = int(meet_at[0])
                for weights, slots in zip(self.weights, self.slots, strict=True):
                    for array in (weights, *(slots if self.met else ())):
                        receive(link, self._part(array, number), SERVER)
        self.waited_s = time.perf_counter() - began
        return self.weights

    def _begin(self) -> None:
        """Send the servers what they begin with."""
        for place, bucket, where in self.places:
            for flat, value in zip((self.weights[bucket], *self.slots[bucket]), self.begins[place], strict=True):
                flat[where] = value.reshape(-1)
        self.begins = []
        done = self.step - 1
        for number in range(len(self._links)):
            parts = [self._part(flat, number) for flat in self.weights]
            sizes, dtypes = tuple(part.size for part in parts), tuple(str(part.dtype) for part in parts)
            with self._waiting_for(number) as link:
                Begin(self.rule, sizes, dtypes, done, done * self.communicator.num_ranks).send(link)
                for weights, slots in zip(self.weights, self.slots, strict=True):
                    for flat in (weights, *slots):
                        send(link, self._part(flat, number), SERVER)

    def _part(self, flat: Array, server: int) -> Array:
        start, stop = part_bounds(flat.size, len(self._links))[server]
        return flat[start:stop]

    @contextmanager
    def _waiting_for(self, server: int) -> Iterator[Communicator]:
        try:
            yield self._links[server]
        except CommunicationError as error:
            raise CommunicationError(
                f"rank {self.communicator.rank}, step {self.step}, waits for server {server}: {error.what}",
                got=error.got,
                allowed=error.allowed,
                next_step=error.next_step,
            ) from error


class ServedSteps(AsyncSteps):
    """The model has the servers' weights after each step, and their optimizer's state after each meeting."""

    def __init__(self, model: keras.Model, exchange: ServedExchange) -> None:
        """Raises ConfigError for an optimizer that servers do not have."""
        super().__init__(model, exchange)
        self._served = exchange
        self._served.rule = rule_of(model.optimizer)
        self._variables = list(model.trainable_variables)
        self._served.variables = [f"the gradient of {variable.path}" for variable in self._variables]
        self._begun = False

    def begin_epoch(self, epoch: int, last: int) -> None:
        super().begin_epoch(epoch, last)
        if not self._begun and self.communicator.rank == 0:
            self._served.begins = [[np.array(view_of(one)) for one in (v, *self._slots(v))] for v in self._variables]
        self._begun = True

    def step_begins(self) -> None:
        self._served.rate = float(keras.ops.convert_to_tensor(self._model.optimizer.learning_rate))

    def step_ends(self, agreement: Agreement, *, epoch_ends: bool) -> Agreement:
        self._model.optimizer._iterations.assign_add(1)
        for place, bucket, where in self._served.places:
            self._assign(self._variables[place], self._served.weights[bucket][where])
        return super().step_ends(agreement, epoch_ends=epoch_ends)

    def finish(self) -> None:
        self._served.end()

    def _average(self) -> None:
        for place, bucket, where in self._served.places:
            for slot, flat in zip(self._slots(self._variables[place]), self._served.slots[bucket], strict=True):
                self._assign(slot, flat[where])
        average(statistics_of(self._model), self.communicator, self._served.scale)

    def _slots(self, variable: Any) -> list[Any]:
        optimizer = self._model.optimizer
        place, rule = optimizer._get_variable_index(variable), self._served.rule
        if rule.name == "adam":
            return [optimizer._momentums[place], optimizer._velocities[place]]
        return [optimizer.momentums[place]] if rule.slots else []

    @staticmethod
    def _assign(variable: Any, flat: Array) -> None:
        variable.assign(flat.reshape(variable.shape).copy())  # a variable keeps the memory of what it is assigned


def rule_of(optimizer: keras.optimizers.Optimizer) -> Rule:
    """The update of Keras' SGD or Adam. Raises ConfigError for other optimizers, and for settings that servers lack."""
    plain = own_class(optimizer)
    known = plain in (keras.optimizers.SGD, keras.optimizers.Adam)
    names = ("weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "use_ema", "amsgrad")
    others = [name for name in names if getattr(optimizer, name, None)]
    if not known or others:
        raise ConfigError(
            "parameter servers cannot apply this optimizer's updates",
            got=f"{plain.__name__}{' with ' if others else ''}{', '.join(others)}",
            allowed="keras.optimizers.SGD, also with momentum, and Adam, without weight decay, clipping and averages",
            next_step="Compile the model with one of these, or use --strategy async, where ranks apply updates.",
        )
    if plain is keras.optimizers.Adam:
        numbers = [float(number) for number in (optimizer.beta_1, optimizer.beta_2, optimizer.epsilon)]
        return Rule("adam", beta_1=numbers[0], beta_2=numbers[1], epsilon=numbers[2])
    return Rule("sgd", float(optimizer.momentum), bool(optimizer.nesterov))


class Served(Exchanging):
    """The way of --strategy parameter-server."""

    sums_gradients = False

    def exchange_maker(self, whole: Communicator) -> Callable[..., Exchange]:
        config, way = self._config, self._config.way
        assert isinstance(way, ways.ParameterServer)
        every = CheckpointEvery.parse(config.checkpoints.checkpoint_every).steps
        return partial(ServedExchange, staleness=way.staleness or 0, every=every, whole=whole)

    def between_steps(self, model: keras.Model, exchange: Exchange) -> EveryStep:
        assert isinstance(exchange, ServedExchange)
        return ServedSteps(model, exchange)


WAY = Served
