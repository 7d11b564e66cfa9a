"""Losses of a rank's rows, scaled so that their sum over ranks is the loss of the whole global batch.

The exchange multiplies each rank's gradients by n_r / G and adds them: exact for a mean over rows. Keras also divides
by other numbers: the number of unmasked entries (`sum_over_batch_size`), the sum of the weights
(`mean_with_sample_weight`), or nothing (`sum`, `none`). Ranks add up this number in the forward pass, and each corrects
its loss by it. A plain mean costs nothing. docs/decisions/041-keras-on-ranks.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf
from keras.src.losses.loss import apply_mask, reduce_weighted_values
from numpy.typing import NDArray

from lockstep.storage.errors import ConfigError
from lockstep.training.steps.ordered import OrderedCalls
from lockstep.training.steps.patching import swapped

LOSS_BASE = keras.losses.Loss


@contextmanager
def changed_losses(
    model: keras.Model, changes: Callable[[Any], Iterator[AbstractContextManager[None]]]
) -> Iterator[None]:
    """While this is open, so are the contexts of `changes(losses)`, which is called once the compiled losses are built.

    In a user's own training loop the first loss builds them, within this context. A model without losses has no
    changes.
    """
    losses = model._compile_loss  # Keras has no public way to it
    with ExitStack() as stack:

        def change() -> None:
            for context in changes(losses):
                stack.enter_context(context)

        if losses is not None and losses.built:
            change()
        elif losses is not None:
            plain = losses.build

            def build(*args: Any) -> None:
                plain(*args)
                change()

            stack.enter_context(swapped(losses, "build", build))
        yield


Divides = Literal["rows", "mask", "weights", "nothing"]
log = logging.getLogger(__name__)


def divides_by(reduction: str | None, *, masked: bool, weighted: bool) -> Divides:
    """The number by which Keras divides the sum of a loss's values, except constants that are equal on all ranks."""
    if reduction in (None, "none", "sum"):
        return "nothing"
    if reduction == "mean_with_sample_weight":
        return "weights" if masked or weighted else "rows"
    return "mask" if masked else "rows"


class Denominators:
    """The losses of one rank. `scale` is n_r / G, by which the exchange multiplies its gradients.

    With `micro_batches` the optimizer takes the mean over that many calls: sums are multiplied to compensate, and
    denominators of masks and weights, unknown before the last micro-batch, are refused. They are also refused without
    `calls`, where a rank takes its rows unit by unit and `scale` is a unit's share; `refused` is the flag to blame.
    `checked`: losses that return one number are known to be means over rows (lockstep.training.steps.row_means).
    """

    def __init__(
        self,
        calls: OrderedCalls | None,
        scale: float,
        micro_batches: int = 1,
        refused: str = "--canonical",
        *,
        checked: bool = False,
    ) -> None:
        self._calls, self._scale, self._micro_batches = calls, scale, micro_batches
        self._refused, self._checked = refused, checked

    @contextmanager
    def of(self, model: keras.Model) -> Iterator[None]:
        """While a training step of `model` is traced, its losses are those of the global batch.

        Terms of `add_loss` and regularisers count as means over rows, as Keras computes activity regularisers.
        """

        def changes(losses: Any) -> Iterator[AbstractContextManager[None]]:
            yield swapped(losses, "_flat_losses", self._of_all(losses._flat_losses))

        with changed_losses(model, changes):
            yield

    def _of_all(self, entries: list[Any]) -> list[Any]:
        none = next((entry for entry in entries if entry.loss.reduction in (None, "none")), None)
        if none is not None and len(entries) > 1:
            raise ConfigError(
                f"the loss {none.name} without a reduction is not the only loss",
                got=f"reduction none, {len(entries)} losses",
                allowed="reduction none for the only loss: Keras adds the others once for each of its values",
                next_step="Use reduction `sum`.",
            )
        return [entry._replace(loss=self._loss(entry.loss)) for entry in entries]

    def _loss(self, loss: Any) -> Any:
        def of_all(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            return self._global(loss, y_true, y_pred, sample_weight)

        return of_all

    def _global(self, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
        """Keras' loss of this rank's rows, times this rank's correction."""
        mask = keras.src.backend.get_keras_mask(y_pred)
        if type(loss).__call__ is not LOSS_BASE.__call__:
            return self._unknown(loss, loss(y_true, y_pred, sample_weight), mask, sample_weight)
        with tf.name_scope(loss.name):
            y_pred, y_true = (
                keras.tree.map_structure(lambda x: keras.ops.convert_to_tensor(x, dtype=loss.dtype), y)
                for y in (y_pred, y_true)
            )
            values = loss.call(y_true, y_pred)
            of_values = keras.src.backend.get_keras_mask(values)
            if of_values is not None:
                mask = of_values if mask is None else mask & of_values
            local = reduce_weighted_values(values, sample_weight, mask, loss.reduction, loss.dtype)
            if len(values.shape) == 0:
                return self._unknown(loss, local, mask, sample_weight)
            divides = divides_by(loss.reduction, masked=mask is not None, weighted=sample_weight is not None)
            if divides == "rows":
                return local
            if divides == "nothing":
                total = tf.reduce_sum(local) * self._micro_batches / self._scale
                # `none` leaves a value for each entry: Keras adds their gradients, and reports their mean.
                return total if loss.reduction == "sum" else total + tf.stop_gradient(tf.reduce_mean(local) - total)
            self._check_whole(loss, divides)
            if divides == "mask":
                return self._corrected(local, tf.reduce_sum(tf.cast(mask, tf.float64)), loss.name)
            weights = apply_mask(sample_weight, mask, dtype=loss.dtype, reduction=loss.reduction)
            return self._corrected(local, tf.reduce_sum(tf.cast(weights, tf.float64)), loss.name)

    def _check_whole(self, loss: Any, divides: Divides) -> None:
        """Raise ConfigError if a step sees its rows in parts: only the whole has the number that divides the loss."""
        if self._micro_batches > 1 or self._calls is None:
            parts = self._refused if self._calls is None else "--micro-batches"
            raise ConfigError(
                f"the loss {loss.name} cannot be split into {'parts' if self._calls is None else 'micro-batches'}",
                got=f"a sum divided by the batch's {divides}, and {parts}",
                allowed="losses that are divided by the number of rows, or by nothing",
                next_step=f"Leave out {parts}, or use reduction `sum` with weights that you have divided.",
            )

    def _corrected(self, local: Any, part: Any, name: str) -> Any:
        """Compute local * (part / sum of parts) / scale; 0 where no rank has a part."""

        calls = self._calls
        assert calls is not None, "refused before"

        def correction(part: NDArray[np.float64]) -> np.float64:
            total = np.array([part])
            calls.communicator.all_reduce(total)
            return np.float64(0 if total[0] == 0 or self._scale == 0 else part / total[0] / self._scale)

        (factor,) = calls.call_in_step(correction, [part], [tf.float64], f"the loss {name}")
        factor.set_shape(())
        return local * tf.cast(factor, local.dtype)

    def _unknown(self, loss: Any, local: Any, mask: Any, sample_weight: Any) -> Any:
        """A loss that returns one number for all rows: treated as a mean over rows, or refused if it cannot be one."""
        function = getattr(loss, "fn", None)
        of_keras = (type(loss) if function is None else function).__module__.startswith("keras.")
        if of_keras or mask is not None or sample_weight is not None:
            raise ConfigError(
                f"the loss {loss.name} cannot be split over ranks",
                got="one number for a whole batch" + ("" if of_keras else ", with a mask or sample weights"),
                allowed="one value a row (for Dice and Tversky an `axis` that leaves out the rows'), "
                "without a mask and weights a mean over rows",
                next_step="Return one value a row from `call` and leave the reduction to Keras.",
            )
        if not self._checked:
            log.warning("the loss %s returns one number: it must be a mean over its rows", loss.name)
        return local


@contextmanager
def weighed_by_rows(model: keras.Model, data: Any) -> Iterator[None]:
    """While a step on the batch `data` (the argument of train_step and test_step) is traced or run: weigh the model's
    reported losses by rows.
    """

    def changes(losses: Any) -> Iterator[AbstractContextManager[None]]:
        for metric in losses.metrics:  # empty for a single output
            x = keras.utils.unpack_x_y_sample_weight(data)[0]
            rows = tf.shape(next(part for part in keras.tree.flatten(x) if part is not None))[0]
            yield swapped(metric, "update_state", partial(_update, metric.update_state, rows))

    with changed_losses(model, changes):
        yield


def weigh_tests(model: keras.Model) -> None:
    """Make `evaluate` of `model`, and the validation of its `fit`, weigh reported losses by rows from now on."""
    plain = model.test_step
    if getattr(plain, "weighs_by_rows", False):
        return

    def test_step(data: Any) -> Any:
        with weighed_by_rows(model, data):
            return plain(data)

    test_step.weighs_by_rows = True  # type: ignore[attr-defined]  # a mark, for the second call
    object.__setattr__(model, "test_step", test_step)  # bypasses Keras' tracking
    model.test_function = None


def _update(plain: Any, rows: Any, value: Any, sample_weight: Any = None) -> Any:
    return plain(value, sample_weight=rows)
