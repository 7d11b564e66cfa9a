"""Fewer meetings: each rank trains by itself for K steps, then ranks average their models.

K steps apart: local SGD (Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019). After epochs of one sum
a step: post-local SGD (Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020). One average at the end of
the run: Zinkevich et al., "Parallelized Stochastic Gradient Descent" (NIPS 2010). With an outer learning rate and
Nesterov momentum on the averaged difference: DiLoCo (Douillard et al., 2023). The optimizer's state is averaged with
the weights, as Yu, Jin and Yang (ICML 2019) do with momentum; so ranks are equal after each meeting, and any number of
ranks can continue from its checkpoint. docs/strategies.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from lockstep.storage.errors import DataError
from lockstep.training import ways
from lockstep.training.comm.base import FLOATS, Communicator
from lockstep.training.exchange.agreement import FLAGS, SHOWN_SAMPLES, Agreement
from lockstep.training.exchange.buckets import copy_scaled
from lockstep.training.exchange.compare_ranks import view_of
from lockstep.training.exchange.exchange import Array, Exchange
from lockstep.training.run.checkpoint import Tensors
from lockstep.training.steps.batchnorm import statistics_of
from lockstep.training.strategies.every_step import EveryStep, Exchanging

KIND = "outer"


class LocalExchange(Exchange):
    """An exchange whose ranks can part: then a step applies the rank's own gradients, until `agree`."""

    def __init__(self, communicator: Communicator, scale: float | None = None, **options: Any) -> None:
        super().__init__(communicator, scale, **options)
        self._losses: list[float] = []

    def part(self) -> None:
        """Add no gradients in the steps that are traced from now on."""
        self.apart = True

    def agree_alone(self, loss: Array, wrong: list[str], gradients: Any) -> None:
        """End a step of this rank. Raises DataError, which ends the run, if something is not finite."""
        if not self.apart:
            super().agree_alone(loss, wrong, gradients)
            return
        try:
            if self.error is not None:
                raise self.error
            if wrong or not np.isfinite(loss):
                raise self._not_finite([*wrong, *(["the loss"] * (not np.isfinite(loss)))])
        except BaseException as error:
            self._fail(error)
            raise
        self.waited_s = 0.0
        self._step_apart(float(loss))

    def _step_apart(self, loss: float) -> None:
        """Count a step on which not all ranks have agreed."""
        self.step += 1
        self._losses.append(loss)
        self.agreement = Agreement(self.step, loss, stop=False, checkpoint=False, agreed=False, equal=False)

    def agree(self, *, equal: bool) -> Agreement:
        """Add up the losses of all steps since the last call, and the flags: a collective.

        `equal`: whether ranks have averaged their weights after this step.
        """
        assert self.agreement is not None, "a step comes first"
        words = np.array([*(loss * self.scale for loss in self._losses), *(flag in self._wanted for flag in FLAGS)])
        self._wanted.clear()
        self.communicator.all_reduce(words)
        count = len(self._losses)
        losses = tuple(words[:count].tolist())
        flags: dict[str, Any] = dict(zip(FLAGS, (bool(word > 0) for word in words[count:]), strict=True))
        self._losses = []
        self.agreement = replace(self.agreement, loss=losses[-1], losses=losses, agreed=True, equal=equal, **flags)
        return self.agreement

    def _not_finite(self, what: list[str]) -> DataError:
        step, mine = self.step + 1, {"what": what}
        if self._inquiry.policy.fed is not None:
            mine |= self._inquiry.policy.fed.of_step(step)
        self._inquiry.report(step, mine, skipped=False)
        samples = mine.get("samples", [])
        shown = f", of samples {' '.join(samples[:SHOWN_SAMPLES])}{' ...' * (len(samples) > SHOWN_SAMPLES)}"
        return DataError(
            f"step {step}: {what[-1]} is not finite on rank {self.communicator.rank}",
            got=f"{', '.join(what)}{shown if samples else ''}",
            allowed="finite numbers; this rank trained by itself since the last meeting, which the run loses",
            next_step="Lower the learning rate, clip gradients (clipnorm) or look at the data of this step.",
        )


class OuterStep:
    """SGD with Nesterov momentum, whose gradient is the averaged change of a model since the last meeting (DiLoCo).

    A rate of 1 without momentum leaves the average. A checkpoint has the momentum as outer/NUMBER/VARIABLE.
    """

    def __init__(self, variables: Sequence[Any], learning_rate: float, momentum: float) -> None:
        self._variables, self._rate, self._momentum = list(variables), learning_rate, momentum
        self._velocity: list[Array] = [np.zeros(v.shape, v.dtype) for v in self._variables] if momentum else []

    @property
    def changes(self) -> bool:
        """Whether a step differs from the average."""
        return (self._rate, self._momentum) != (1.0, 0.0)

    def values(self) -> list[Array]:
        """Copies of the variables' values."""
        return [np.array(view_of(variable)) for variable in self._variables]

    def apply(self, start: Sequence[Array], changes: Sequence[Array]) -> None:
        """A step from the values `start` along `changes`, which are start less average, in their precision."""
        for i, (variable, before, change) in enumerate(zip(self._variables, start, changes, strict=True)):
            if self._momentum:
                velocity = self._momentum * self._velocity[i] + change
                self._velocity[i] = velocity.astype(before.dtype)
                change = change + self._momentum * velocity
            variable.assign((before - self._rate * change).astype(before.dtype))

    def state(self) -> Tensors:
        """The momentum, for a checkpoint."""
        return {f"{KIND}/{i:06d}/{self._variables[i].path}": value for i, value in enumerate(self._velocity)}

    def load(self, tensors: Tensors, where: str) -> None:
        """Restore the `state` among `tensors`. Raises DataError if it does not fit the variables."""
        stored = [tensors[name].copy() for name in sorted(tensors) if name.startswith(f"{KIND}/")]
        if [value.shape for value in stored] != [value.shape for value in self._velocity]:
            raise DataError(
                f"the outer momentum in {where} does not fit the model",
                got=f"{len(stored)} tensors",
                allowed=f"the {len(self._velocity)} trained variables of the model",
                next_step="Resume with the model and the options that the run began with.",
            )
        self._velocity = stored


class LocalSteps(EveryStep):
    """Ranks meet after each step whose number is a multiple of `every`, and at the end of each epoch from `first_epoch`
    on; with 0 once, at the end of the run.

    At a meeting ranks average trained weights, moving averages and the optimizer's state, by their shares of the global
    batch. Then `learning_rate` and `momentum` are those of an OuterStep.
    """

    def __init__(
        self,
        model: keras.Model,
        exchange: LocalExchange,
        *,
        every: int,
        first_epoch: int = 0,
        learning_rate: float = 1.0,
        momentum: float = 0.0,
    ) -> None:
        super().__init__(exchange.communicator)
        self._model, self._exchange, self._every, self._first_epoch = model, exchange, every, first_epoch
        self._outer = OuterStep(model.trainable_variables, learning_rate, momentum)
        self._start: list[Array] = []  # trained weights after the last meeting

    def begin_epoch(self, epoch: int, last: int) -> None:
        if epoch >= self._first_epoch and not self._exchange.apart:
            self._exchange.part()
            self._model.train_function = None  # traced again, without sums
        self._keep_start()

    def step_ends(self, agreement: Agreement, *, epoch_ends: bool) -> Agreement:
        if not self._exchange.apart:
            return agreement
        meets = self._every > 0 and (agreement.step % self._every == 0 or epoch_ends)
        if not (meets or epoch_ends):
            return agreement
        began = time.perf_counter()
        agreement = self._exchange.agree(equal=meets)
        if meets:
            self._meet()
        self._exchange.waited_s += time.perf_counter() - began
        return agreement

    def end(self) -> None:
        if self._exchange.apart and self._every == 0:
            self._meet()

    def state(self) -> Tensors:
        return self._outer.state()

    def load(self, tensors: Tensors, where: str) -> None:
        self._outer.load(tensors, where)

    def _keep_start(self) -> None:
        if self._outer.changes and self._exchange.apart:
            self._start = self._outer.values()

    def _meet(self) -> None:
        average_state(self._model, self.communicator, self._exchange.scale)
        if self._outer.changes:
            means = self._outer.values()
            self._outer.apply(self._start, [start - mean for start, mean in zip(self._start, means, strict=True)])
        self._keep_start()


def average_state(model: keras.Model, communicator: Communicator, share: float) -> None:
    """Average trained weights, moving averages and the optimizer's state over ranks, as `average`."""
    # The optimizer's scalars (its count of steps, rates) are equal on all ranks; rounding would change them.
    slots = [v for v in model.optimizer.variables if len(v.shape) and np.dtype(v.dtype) in FLOATS]
    average([*model.trainable_variables, *statistics_of(model), *slots], communicator, share)


def average(variables: list[Any], communicator: Communicator, share: float) -> None:
    """Replace float variables by their means over ranks, weighted by each rank's `share`, which add up to 1.

    A collective: one sum a dtype, equal bit for bit on every rank.
    """
    for dtype in sorted({str(variable.dtype) for variable in variables}):
        chosen = [variable for variable in variables if variable.dtype == dtype]
        values = [np.ascontiguousarray(view_of(variable)).reshape(-1) for variable in chosen]
        flat = communicator.allocate(sum(value.size for value in values), values[0].dtype)
        start = 0
        for value in values:
            copy_scaled(value, share, flat[start : start + value.size], communicator.num_ranks)
            start += value.size
        del values
        communicator.all_reduce(flat)
        start = 0
        for variable in chosen:
            size = int(np.prod(variable.shape, dtype=np.int64))
            variable.assign(flat[start : start + size].reshape(variable.shape).copy())
            start += size


class Meetings(Exchanging):
    """The way of --sync-every."""

    sums_gradients = False

    def exchange_maker(self, whole: Communicator) -> Callable[..., Exchange]:
        return LocalExchange

    def between_steps(self, model: keras.Model, exchange: Exchange) -> EveryStep:
        assert isinstance(exchange, LocalExchange)
        way = self._config.way
        assert isinstance(way, ways.LocalSteps)
        return LocalSteps(
            model,
            exchange,
            every=way.sync_every,
            first_epoch=way.sync_until_epoch,
            learning_rate=way.outer_learning_rate,
            momentum=way.outer_momentum,
        )


WAY = Meetings
