"""Gives a training step the rows of all ranks, means over ranks, and sums, for losses that are no means over rows.

The exchange multiplies each rank's gradients by n_r / G and adds them, so ranks train on the sum of (n_r / G) L_r,
where L_r is rank r's loss. That is the loss of the global batch if L_r is a mean over rows. Any other loss needs one of
these functions. On one rank, and outside of training steps, they return what they are given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast
from weakref import WeakSet

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from lockstep.storage.errors import ConfigError
from lockstep.training.steps.ordered import OrderedCalls

Array = NDArray[Any]
_STEP: ContextVar[StepOverRanks | None] = ContextVar("the step of a rank", default=None)
_UNREACHED: WeakSet[Any] = WeakSet()  # graphs in which a function of this file found no step


class StepOverRanks:
    """What the functions of this file do in a step of one rank, whose share of the rows is `scale` = n_r / G.

    `calls` reach the other ranks. Without them the step is one of parts of a rank's rows, such as micro-batches, which
    cannot see each other: `refused` is the flag to blame.
    """

    def __init__(
        self, calls: OrderedCalls | None, scale: float, micro_batches: int = 1, refused: str = "--micro-batches"
    ) -> None:
        self._calls, self._scale, self._micro_batches, self._refused = calls, scale, micro_batches, refused

    def gather(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The rows of all ranks, and the number of this rank's first row among them, int64 ()."""
        calls = self._reached("gather")

        @tf.custom_gradient
        def gathered(x: tf.Tensor) -> Any:
            rows, first = calls.call_in_step(self._rows, [x], [x.dtype, tf.int64], "on_ranks.gather")
            rows.set_shape((None, *x.shape[1:]))
            first.set_shape(())

            def gradient(upstream: tf.Tensor, _: Any = None) -> tf.Tensor:
                total = self._summed(upstream)
                return total[first : first + tf.shape(x, tf.int64)[0]] / max(self._scale, np.finfo(np.float32).tiny)

            return (rows, first), gradient

        return cast(tuple[tf.Tensor, tf.Tensor], gathered(x))

    def mean(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        """The means over ranks, weighted by their shares; without a gradient."""
        calls = self._reached("mean")
        means = calls.call_in_step(self._means, values, [value.dtype for value in values], "on_ranks.mean")
        for mean, value in zip(means, values, strict=True):
            mean.set_shape(value.shape)
        return means

    def total(self, value: tf.Tensor) -> tf.Tensor:
        """Return `value`, a sum over this rank's rows, such that ranks train on its sum over all rows."""
        return value * (self._micro_batches / self._scale) if self._scale else value

    def _reached(self, name: str) -> OrderedCalls:
        if self._calls is None:
            raise ConfigError(
                f"on_ranks.{name} needs all rows of a step at once",
                got=f"a step in parts: {self._refused}",
                allowed="steps of whole batches; a part of a batch cannot see the other parts",
                next_step=f"Leave out {self._refused}.",
            )
        return self._calls

    def _rows(self, mine: Array) -> list[Array]:
        assert self._calls is not None
        flat = np.ascontiguousarray(mine).reshape(-1).view(np.uint8)
        comm = self._calls.communicator
        parts = [part.view(mine.dtype).reshape(-1, *mine.shape[1:]) for part in comm.all_gather_ragged(flat)]
        first = sum(len(part) for part in parts[: comm.rank])
        return [np.concatenate(parts), np.array(first, np.int64)]

    def _summed(self, upstream: tf.Tensor) -> tf.Tensor:
        """The ranks' gradients of all rows, each weighted by its rank's share, added up."""
        calls = self._reached("gather")

        def total(mine: Array) -> Array:
            flat = mine.astype(np.float64).reshape(-1) * self._scale
            calls.communicator.all_reduce(flat)
            return flat.reshape(mine.shape).astype(mine.dtype)

        @tf.custom_gradient
        def summed(upstream: tf.Tensor) -> Any:
            def refuse(*_: Any) -> Any:
                raise ConfigError(
                    "on_ranks.gather has no second derivative",
                    got="a gradient of a gradient, as of a gradient penalty",
                    allowed="first derivatives of what is gathered",
                    next_step="Compute the penalty from rows that are not gathered.",
                )

            (found,) = calls.call_in_step(total, [upstream], [upstream.dtype], "the gradient of on_ranks.gather")
            found.set_shape(upstream.shape)
            return found, refuse

        return summed(tf.convert_to_tensor(upstream))

    def _means(self, *mine: Array) -> list[Array]:
        assert self._calls is not None
        flat = np.concatenate([value.astype(np.float64).reshape(-1) for value in mine]) * self._scale
        self._calls.communicator.all_reduce(flat)
        parts = np.split(flat, np.cumsum([value.size for value in mine])[:-1])
        return [part.reshape(value.shape).astype(value.dtype) for part, value in zip(parts, mine, strict=True)]


def _step() -> StepOverRanks | None:
    if (step := _STEP.get()) is None and not tf.executing_eagerly():
        _UNREACHED.add(tf.compat.v1.get_default_graph())
    return step


def check_reached() -> None:
    """Raise ConfigError, where gradients of ranks are exchanged, if this step's loss saw one rank's rows only."""
    if not tf.executing_eagerly() and tf.compat.v1.get_default_graph() in _UNREACHED:
        raise ConfigError(
            "this step called on_ranks.gather, mean or total, and does not know the other ranks",
            got="a train_step that on_ranks.rank_step has not changed",
            allowed="steps of lockstep train, of a model after rank_step, or within RankStep.tracing",
            next_step="Call on_ranks.rank_step(model, comm) after compile.",
        )


@contextmanager
def step_over_ranks(step: StepOverRanks) -> Iterator[None]:
    """While this is open, a training step is traced (or run, in eager mode) for which `step` answers."""
    before = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(before)


def gather(x: Any) -> Any:
    """The rows of all ranks, (n, ...) -> (N, ...), in the order of the ranks; with a gradient.

    A loss that compares the rows of a batch with each other computes from gathered rows what one rank would: each rank
    gets its rows' part of all ranks' gradients. Ranks may have different numbers of rows. A collective in a training
    step on several ranks; elsewhere, as in an evaluation, `x` itself.

    >>> import keras, numpy as np
    >>> from lockstep import on_ranks
    >>> on_ranks.gather(np.ones((4, 2), "float32")).shape
    TensorShape([4, 2])
    """
    return gather_from(x)[0]


def gather_from(x: Any) -> tuple[Any, Any]:
    """Return what `gather` does, and the number of this rank's first row among all rows, int64 ()."""
    x, step = tf.convert_to_tensor(x), _step()
    return (x, tf.zeros((), tf.int64)) if step is None else step.gather(x)


def mean(values: Any) -> Any:
    """The mean over ranks, weighted by their rows, of each tensor in nested `values`, None for None; no gradient.

    For gradients of one's own, which a step uses before its optimizer applies others, and for values that a step
    assigns to weights. A collective in a training step on several ranks; elsewhere `values` themselves.

    >>> from lockstep import on_ranks
    >>> [float(value) for value in on_ranks.mean([1.0, 2.0])]
    [1.0, 2.0]
    """
    step = _step()
    flat = [None if value is None else tf.convert_to_tensor(value) for value in tf.nest.flatten(values)]
    present = [value for value in flat if value is not None]
    if step is not None and present:
        means = iter(step.mean([tf.stop_gradient(value) for value in present]))
        flat = [None if value is None else next(means) for value in flat]
    return tf.nest.pack_sequence_as(values, flat)


def total(value: Any) -> Any:
    """A loss that is a sum over rows, from its sum over this rank's rows: ranks then train on the sum over all rows.

    The value is the sum divided by this rank's share of the rows, so its mean over ranks is the sum over all rows.
    Outside of training steps it is the sum itself.

    >>> from lockstep import on_ranks
    >>> float(on_ranks.total(3.0))
    3.0
    """
    value, step = keras.ops.convert_to_tensor(value), _step()
    return value if step is None else step.total(value)
