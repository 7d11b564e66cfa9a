"""A rank's `train_step` under `--canonical`: unit after unit by one piece of graph, added up in the order of a tree.

The state that a unit changes is reset for each: moving averages to their values before the step, metrics to zero, seed
generators to a state made of (seed, step, unit). So a unit's results do not depend on the other units of its rank.
Gradients, moving averages, metric states and losses are added up over units and ranks; the optimizer sees the sums
once. The exchange must be over `TreeSums`, with scale 1: a unit's share is in its loss.
docs/decisions/079-comparing-ranks.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from lockstep.storage.errors import ConfigError
from lockstep.training.comm.base import Communicator
from lockstep.training.steps.batchnorm import batchnorm_as, statistics_of
from lockstep.training.steps.draws import drawn_from, draws_of_step, step_of
from lockstep.training.steps.losses import Denominators, weighed_by_rows
from lockstep.training.steps.model_state import METRICS, SEEDS, variables_of
from lockstep.training.steps.over_ranks import StepOverRanks, step_over_ranks
from lockstep.training.steps.patching import swapped
from lockstep.training.steps.rank_step import KeptStatistics, SkippedStep, install_step, remove_step

NOTHING, KEEP, ADD = 0, 1, 2


def carries(units: int) -> list[list[int]]:
    """The steps of each unit's value in the tree over `units`: row u has an entry for each depth, the root's first.

    A value goes up from its unit's own depth. KEEP: it is a left part and waits there; ADD: it is a right part, added
    to the one that waits, and the sum goes one up; NOTHING: the value does not get there, or its unit is not that deep.
    At most one value waits at each depth. The last one is kept at depth 0: the sum of all.
    """
    deepest = (units - 1).bit_length()
    table = [[NOTHING] * (deepest + 1) for _ in range(units)]

    def enter(first: int, stop: int, depth: int, is_right: bool) -> None:
        if depth:
            table[stop - 1][depth] = ADD if is_right else KEEP
        else:
            table[stop - 1][0] = KEEP
        if stop - first > 1:
            middle = first + (stop - first) // 2
            enter(first, middle, depth + 1, False)
            enter(middle, stop, depth + 1, True)

    enter(0, units, 0, False)
    return table


class CanonicalStep:
    """Takes the part of `RankStep` under --canonical. A rank has `count` units from number `first` on, of `units`.

    `group_rows` are a unit's rows if BatchNormalization is `ghost`; None leaves it Keras' own, also over a unit.
    """

    error: BaseException | None = None
    """Always None: the step has no collective that could fail."""

    def __init__(
        self, model: keras.Model, *, units: int, first: int, count: int, seed: int, group_rows: int | None
    ) -> None:
        self._model, self._units, self._first, self._count = model, units, first, count
        self._seed, self._group_rows = seed, group_rows
        self._statistics = statistics_of(model)
        self._metrics = variables_of(model, METRICS)
        self._check_metrics()
        self.metric_sums = [_like(variable) for variable in self._metrics]
        """Statistics for the exchange: the sum that the step adds to each metric state, over all units."""
        self._seeds = variables_of(model, SEEDS)
        self._leader = True
        self._plain: Any = None
        self._absent: list[bool] = []
        self._variables: list[Any] = []

    def install(self, model: keras.Model, communicator: Communicator) -> None:
        """Make `model.fit` trace this step, until `remove`. The first rank keeps the metrics of all ranks."""
        self._leader = communicator.rank == 0
        self._plain = model.train_step
        kept, skipped = KeptStatistics(model), SkippedStep(model)

        def train_step(data: Any) -> Any:
            logs: dict[str, Any] = {}
            with skipped.step(logs), kept.step():
                self._step(data)
                logs |= model.get_metrics_result()
            return logs

        install_step(model, train_step)

    def remove(self, model: keras.Model) -> None:
        """Restore the model's own train_step and test_step."""
        remove_step(model)

    def _step(self, data: Any) -> None:
        optimizer = self._model.optimizer
        states = [*self._statistics, *self._metrics, *self._seeds]
        before = [tf.identity(variable.value) for variable in states]
        sums = self._added_up(data, before[: len(self._statistics)])
        gradients, statistics, metrics, loss = self._parted(sums)
        for variable, old in zip(states, before, strict=True):
            variable.assign(old)
        for variable, value in zip([*self._statistics, *self.metric_sums], [*statistics, *metrics], strict=True):
            variable.assign(value)
        optimizer.scale_loss(loss)  # passes the step's loss, which the exchange reports
        absent = zip(gradients, self._absent, strict=True)
        optimizer.apply([None if missing else gradient for gradient, missing in absent], self._variables)
        # Zero on other ranks: metrics are read from the sum over ranks, as without --canonical.
        for variable, total in zip(self._metrics, self.metric_sums, strict=True):
            added = variable.value + tf.cast(total.value, variable.dtype)
            variable.assign(added if self._leader else tf.zeros_like(added))

    def _added_up(self, data: Any, statistics: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The tree's sums over this rank's units, in the order of `_leaves`."""
        parts = tf.nest.map_structure(
            lambda x: tf.reshape(x, (self._count, x.shape[0] // self._count, *x.shape[1:])), data
        )
        self._variables = list(self._model.trainable_weights)
        zeros = [tf.zeros(v.shape, v.dtype) for v in (*self._variables, *self._statistics, *self.metric_sums)]
        zeros.append(tf.zeros((), keras.config.floatx()))
        steps = tf.constant(carries(self._count), tf.int32)  # (count, depths)

        def unit(number: tf.Tensor, *waiting: tf.Tensor) -> list[tf.Tensor]:
            part = tf.nest.map_structure(lambda x: tf.gather(x, number), parts)
            value = self._leaves(part, number, statistics)
            kept: list[list[tf.Tensor]] = []
            for depth in reversed(range(steps.shape[1])):
                waits = list(waiting[depth * len(zeros) : (depth + 1) * len(zeros)])
                waits, value = _carry(steps[number, depth], waits, value)
                kept.insert(0, waits)
            return [number + 1, *(tensor for waits in kept for tensor in waits)]

        found = tf.while_loop(
            lambda number, *_: number < self._count,
            unit,
            [tf.constant(0), *zeros * steps.shape[1]],
            parallel_iterations=1,
        )
        return list(found[1 : 1 + len(zeros)])  # the values kept at the root

    def _leaves(self, data: Any, number: tf.Tensor, statistics: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """One unit's gradients and moving averages, times its share, its metric states and its share of the loss."""
        model, optimizer = self._model, self._model.optimizer
        self._begin(number, statistics)
        losses: list[tf.Tensor] = []
        applied: list[tuple[list[Any], Any]] = []
        plain_scale = optimizer.scale_loss

        def scale_loss(loss: tf.Tensor) -> tf.Tensor:
            losses.append(loss * tf.cast(1.0 / self._units, loss.dtype))
            return plain_scale(losses[0])

        def apply(grads: Sequence[Any], trainable_variables: Any = None) -> None:
            applied.append((list(grads), trainable_variables))

        with (
            swapped(optimizer, "scale_loss", scale_loss),
            swapped(optimizer, "apply", apply),
            weighed_by_rows(model, data),
            batchnorm_as(model, group_rows=self._group_rows),
            Denominators(None, 1.0 / self._units).of(model),
            step_over_ranks(StepOverRanks(None, 1.0 / self._units, refused="--canonical")),
            draws_of_step(self._seed, self._step_and_unit(number)),
        ):
            logs = self._plain(data)
        self._check_step(logs, losses, applied)
        gradients = self._dense(*applied[0])
        means = [v.value * tf.cast(1.0 / self._units, v.dtype) for v in self._statistics]
        states = [tf.cast(v.value, s.dtype) for v, s in zip(self._metrics, self.metric_sums, strict=True)]
        return [*gradients, *means, *states, tf.cast(losses[0], keras.config.floatx())]

    def _begin(self, number: tf.Tensor, statistics: Sequence[tf.Tensor]) -> None:
        for variable, old in zip(self._statistics, statistics, strict=True):
            variable.assign(old)
        for variable in self._metrics:
            variable.assign(tf.zeros(variable.shape, variable.dtype))
        for place, variable in enumerate(self._seeds):
            words = self._step_and_unit(number)
            variable.assign(drawn_from(self._seed, f"seed generator {place} of a unit", words, variable.dtype))

    def _step_and_unit(self, number: tf.Tensor) -> list[tf.Tensor]:
        return [step_of(self._model.optimizer), tf.cast(number + self._first, tf.int64)]

    def _dense(self, grads: list[Any], variables: Any) -> list[tf.Tensor]:
        """Whole tensors in the order of the model's variables; zeros, and a note, for variables without gradient."""
        given = {id(v): grad for v, grad in zip(variables, grads, strict=True)} if variables is not None else None
        found = grads if given is None else [given.get(id(v)) for v in self._variables]
        self._absent = [grad is None for grad in found]
        return [
            tf.zeros(v.shape, v.dtype) if grad is None else tf.cast(tf.convert_to_tensor(grad), v.dtype)
            for v, grad in zip(self._variables, found, strict=True)
        ]

    def _parted(self, sums: list[tf.Tensor]) -> tuple[list[Any], list[Any], list[Any], Any]:
        grads, stats = len(self._variables), len(self._statistics)
        return sums[:grads], sums[grads : grads + stats], sums[grads + stats : -1], sums[-1]

    def _check_step(self, logs: Any, losses: list[Any], applied: list[Any]) -> None:
        same = isinstance(logs, dict) and set(logs) == set(self._model.get_metrics_result())
        if len(losses) != 1 or len(applied) != 1 or not same:
            raise ConfigError(
                "the model's train_step cannot be run unit by unit",
                got=f"{len(losses)} calls of optimizer.scale_loss, {len(applied)} of apply, "
                f"{'the metrics' if same else 'other values than the metrics'} returned",
                allowed="one call of each, and the model's metrics returned, as in Keras' own train_step",
                next_step="Train without --canonical, or call scale_loss and apply once and return the metrics.",
            )

    def _check_metrics(self) -> None:
        other = next((v for v in self._metrics if v.aggregation not in (None, "none", "sum")), None)
        if other is not None:
            raise ConfigError(
                f"the state {other.path} of a metric cannot be added up unit by unit",
                got=f"aggregation {other.aggregation}",
                allowed="sum",
                next_step="Leave the metric out, or train without --canonical.",
            )


def _like(variable: Any) -> keras.Variable:
    """A variable for sums of `variable`; integers are summed in float64."""
    dtype = variable.dtype if "float" in variable.dtype else "float64"
    name = f"sum_of_{variable.path.replace('/', '_')}"
    return keras.Variable(np.zeros(variable.shape), dtype=dtype, trainable=False, name=name)


def _carry(step: tf.Tensor, waits: list[tf.Tensor], value: list[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """One depth of `carries`: the value that then waits there, and the value that goes up."""

    def nothing() -> list[tf.Tensor]:
        return [*waits, *value]

    def keep() -> list[tf.Tensor]:
        return [*value, *value]

    def add() -> list[tf.Tensor]:
        return [*waits, *(one + other for one, other in zip(waits, value, strict=True))]

    found = tf.switch_case(step, [nothing, keep, add])
    return list(found[: len(waits)]), list(found[len(waits) :])
