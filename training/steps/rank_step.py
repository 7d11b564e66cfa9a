"""A model's `train_step` on ranks: while it is traced, batch statistics and losses are those of the global batch.

docs/decisions/041-keras-on-ranks.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from lockstep.storage.errors import ConfigError
from lockstep.training.comm.base import Communicator
from lockstep.training.steps.batchnorm import (
    GhostBatchNormalization,
    SyncMoments,
    batchnorm_as,
    normalisations,
    statistics_of,
)
from lockstep.training.steps.distribute import exchange_of, is_first, is_last, skipped_of, steps_of
from lockstep.training.steps.draws import draws_of_step, step_of
from lockstep.training.steps.losses import Denominators, weigh_tests, weighed_by_rows
from lockstep.training.steps.optimizers import without_loss_scale
from lockstep.training.steps.ordered import OrderedCalls
from lockstep.training.steps.over_ranks import StepOverRanks, step_over_ranks
from lockstep.training.steps.patching import swapped


def install_step(model: keras.Model, train_step: Callable[[Any], Any]) -> None:
    """Make `fit` and `train_on_batch` trace `train_step`, and tests weigh batches by rows, until `remove_step`."""
    object.__setattr__(model, "train_step", train_step)  # bypasses Keras' tracking
    model.train_function = None
    weigh_tests(model)


def remove_step(model: keras.Model) -> None:
    """Restore the model's own train_step, test_step and fit."""
    for name in ("train_step", "test_step", *({"fit"} & vars(model).keys())):
        object.__delattr__(model, name)
    model.train_function = model.test_function = None


class KeptStatistics:
    """Restores the moving averages of `model` after a step that loss scaling has skipped.

    Without loss scaling it does nothing: a value that is not finite then ends the run.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._before: list[tf.Variable] = []  # with gradient accumulation: their values before its first micro-batch

    @contextmanager
    def step(self) -> Iterator[None]:
        """Open while a whole training step is traced (or run, in eager mode), the optimizer's `apply` included."""
        optimizer = self._model.optimizer
        statistics = statistics_of(self._model)
        if not (isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and statistics):
            yield
            return
        if not optimizer.built:
            optimizer.build(self._model.trainable_variables)
        scale = tf.identity(optimizer.dynamic_scale.value)
        before = self._kept([tf.identity(variable.value) for variable in statistics], without_loss_scale(optimizer))
        yield
        skipped = optimizer.dynamic_scale.value < scale  # nothing else lowers it
        for variable, old in zip(statistics, before, strict=True):
            variable.assign(tf.where(skipped, old, variable.value))

    def _kept(self, values: list[Any], counts: keras.optimizers.Optimizer) -> list[Any]:
        if steps_of(counts) == 1:
            return values
        if not self._before:
            with tf.init_scope():
                self._before = [tf.Variable(tf.zeros(value.shape, value.dtype), trainable=False) for value in values]
        first = is_first(counts)
        for variable, value in zip(self._before, values, strict=True):
            variable.assign(tf.where(first, value, variable))
        return [variable.read_value() for variable in self._before]


class MicroStatistics:
    """Averages the moving averages of `model` over the `micro_batches` that its optimizer accumulates."""

    def __init__(self, model: keras.Model, micro_batches: int) -> None:
        self._model, self._micro_batches = model, micro_batches
        self._before: list[tf.Variable] = []
        self._sums: list[tf.Variable] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Open while a whole training step is traced (or run, in eager mode), the optimizer's `apply` included."""
        optimizer, statistics = self._model.optimizer, statistics_of(self._model)
        if self._micro_batches == 1 or not statistics:
            yield
            return
        if not self._before:
            with tf.init_scope():
                self._before, self._sums = (
                    [tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False) for v in statistics] for _ in range(2)
                )
        counts = without_loss_scale(optimizer)
        first, last = is_first(counts), is_last(counts)
        for variable, before, total in zip(statistics, self._before, self._sums, strict=True):
            before.assign(tf.where(first, variable.value, before))
            total.assign(tf.where(first, tf.zeros_like(total), total))
            variable.assign(before.read_value())
        plain = optimizer.apply

        def apply(*args: Any, **kwargs: Any) -> None:
            """Runs after the forward pass, and before the exchange of the last micro-batch takes the averages."""
            for variable, total in zip(statistics, self._sums, strict=True):
                total.assign_add(variable.value)
                variable.assign(tf.where(last, total / self._micro_batches, variable.value))
            plain(*args, **kwargs)

        with swapped(optimizer, "apply", apply):
            yield


class SkippedStep:
    """Restores the state of `model` except trained weights after a step that its distributed optimizer skipped."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model

    @contextmanager
    def step(self, result: dict[str, Any]) -> Iterator[None]:
        """Open while a whole training step is traced (or run, in eager mode), the optimizer's `apply` included.

        The caller fills `result` with the step's return values; they are updated if they are the model's metrics.
        """
        model = self._model
        if not exchange_of(model.optimizer).skips_any:
            yield
            return
        variables = [*model.non_trainable_weights, *model.metrics_variables]
        before = [tf.identity(variable.value) for variable in variables]
        yield
        skipped = tf.equal(skipped_of(model.optimizer), 1)
        for variable, old in zip(variables, before, strict=True):
            variable.assign(tf.where(skipped, old, variable.value))
        metrics = model.get_metrics_result()
        if set(metrics) == set(result):
            result.update(metrics)


log = logging.getLogger(__name__)


class RankStep:
    """The changes to a rank's step, compared with one process, besides the optimizer's exchange.

    `scale` is this rank's share n_r / G of the global batch. `group_rows` makes BatchNormalization `ghost`, `sync`
    makes it use all ranks' rows, neither leaves it `local`. The model does not stay changed: layers and losses are
    Keras' own again once a step has been traced, and saved models are Keras' own. On one rank gradients are those of
    Keras, except with `ghost`; moving averages of a skipped step or of micro-batches, and the weights of reported
    losses, are not. `micro_batches` is the optimizer's gradient accumulation: parts of one batch, of equal size. With
    `seed`, draws of keras.random without a seed depend on it, the step and the rank; else they are the process's own.
    `checked`: the caller checks that losses are means over rows (lockstep.training.steps.row_means); else a warning
    says so.
    """

    def __init__(
        self,
        scale: float,
        *,
        group_rows: int | None = None,
        sync: bool = False,
        micro_batches: int = 1,
        seed: int | None = None,
        checked: bool = False,
    ) -> None:
        if group_rows is not None and sync:
            raise ConfigError(
                "batch statistics cannot be both over lane groups and over all ranks",
                got=f"group_rows={group_rows} and sync",
                allowed="one of them",
                next_step="Leave out group_rows or sync.",
            )
        self._scale, self._group_rows, self._sync, self._micro_batches = scale, group_rows, sync, micro_batches
        self._seed, self._checked = seed, checked
        self._calls: OrderedCalls | None = None

    @property
    def error(self) -> BaseException | None:
        """The exception that ended a collective of the step: TensorFlow repeats only its text."""
        return None if self._calls is None else self._calls.error

    def install(self, model: keras.Model, communicator: Communicator) -> None:
        """Make `model.fit` and `train_on_batch` trace this step, until `remove`. The model must be compiled.

        `communicator` must be a group, `comm.group(range(n))`, since the exchange uses its own at the same time.
        """
        self._calls = OrderedCalls(communicator)
        if self._sync and self._micro_batches > 1 and normalisations(model):
            raise ConfigError(
                "batch statistics over all ranks cannot be split into micro-batches",
                got=f"sync and {self._micro_batches} micro-batches",
                allowed="sync with one, ghost with micro-batches of whole lane groups",
                next_step="Use --batchnorm ghost or --micro-batches 1.",
            )
        self._warn(model)
        plain, kept, micro = model.train_step, KeptStatistics(model), MicroStatistics(model, self._micro_batches)
        skipped = SkippedStep(model)

        def train_step(data: Any) -> Any:
            logs: dict[str, Any] = {}
            with (
                skipped.step(logs),
                kept.step(),
                micro.step(),
                weighed_by_rows(model, data),
                self.tracing(model),
                self._draws(model, communicator.rank),
            ):
                logs |= plain(data)
            return logs

        install_step(model, train_step)

    def remove(self, model: keras.Model) -> None:
        """Restore the model's own train_step and test_step."""
        remove_step(model)

    @contextmanager
    def tracing(self, model: keras.Model) -> Iterator[None]:
        """Open during the forward pass, loss and gradients of one step, after `install`."""
        calls = self._calls
        assert calls is not None, "install() comes first"
        several = calls.communicator.num_ranks > 1 and exchange_of(model.optimizer).together
        of_ranks = SyncMoments(calls, self._scale) if self._sync and several else None
        with calls.tracing(), batchnorm_as(model, group_rows=self._group_rows, of_ranks=of_ranks):
            if not several and self._micro_batches == 1:
                yield
                return
            reached = calls if self._micro_batches == 1 else None
            with (
                Denominators(calls, self._scale, self._micro_batches, checked=self._checked).of(model),
                step_over_ranks(StepOverRanks(reached, self._scale, self._micro_batches)),
            ):
                yield

    def _draws(self, model: keras.Model, rank: int) -> AbstractContextManager[None]:
        if self._seed is None:
            return nullcontext()
        step, exchange = step_of(model.optimizer), exchange_of(model.optimizer)
        if exchange.delay:  # the optimizer counts updates, which come later
            step = tf.reshape(tf.numpy_function(lambda: np.int64(exchange.step), [], tf.int64), ())
        return draws_of_step(self._seed, [step, tf.constant(rank, tf.int64)])

    def _warn(self, model: keras.Model) -> None:
        """Warn of effects that the results do not show."""
        own = type(model)
        its_own = own.train_step is not keras.Model.train_step or own.compute_loss is not keras.Model.compute_loss
        if its_own and not self._checked:
            log.warning("%s computes its loss itself: what it adds to compile's must be means over rows", own.__name__)
        layers = [layer.name for layer in normalisations(model) if not isinstance(layer, GhostBatchNormalization)]
        if layers and self._group_rows == 1:
            log.warning("%s: batch statistics over groups of one row; use a larger global batch or sync", layers[0])
        if layers and self._group_rows is None and not self._sync:
            log.warning(
                "%s: batch statistics are over each rank's rows, so they depend on the number of ranks", layers[0]
            )
