"""`distribute(optimizer, ...)`: the user's Keras optimizer, reducing gradients over all ranks before it applies them.

The object stays the user's own; its class becomes a subclass whose `apply` exchanges first. So it must be the outermost
optimizer: finiteness, loss scale, clipping, decay and averages see the global gradients, equal bit for bit on every
rank; accumulation adds on each rank separately. docs/decisions/041-keras-on-ranks.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast
from weakref import WeakSet, ref

import keras
import numpy as np
import tensorflow as tf

from lockstep.storage.errors import ConfigError
from lockstep.training.comm.base import Communicator
from lockstep.training.control.context import report_faults_of
from lockstep.training.exchange.agreement import STOPS, NonFinitePolicy
from lockstep.training.exchange.buckets import BUCKET_BYTES, Layout
from lockstep.training.exchange.exchange import Exchange
from lockstep.training.exchange.sparse import ROWS_FROM_BYTES
from lockstep.training.steps import fused
from lockstep.training.steps.distribute_checks import check_step, check_wish, compare_start
from lockstep.training.steps.model_state import WHOLE, undivided
from lockstep.training.steps.optimizers import without_loss_scale
from lockstep.training.steps.ordered import put_last, tail
from lockstep.training.steps.over_ranks import check_reached
from lockstep.training.steps.reduction import Reduction, exchange_for

Gradients = list[Any]
POLICY = "mixed_float16"
_USED: WeakSet[Communicator] = WeakSet()  # used by the thread of an exchange
_ENDED: WeakSet[Exchange] = WeakSet()


def steps_of(optimizer: keras.optimizers.Optimizer) -> int:
    """Micro-batches per update, 1 without accumulation."""
    return optimizer.gradient_accumulation_steps or 1


def is_first(optimizer: keras.optimizers.Optimizer) -> tf.Tensor:
    """Whether this micro-batch begins a cycle; bool ()."""
    return tf.equal(optimizer._iterations.value % steps_of(optimizer), 0)


def is_last(optimizer: keras.optimizers.Optimizer) -> tf.Tensor:
    """Whether this micro-batch ends a cycle; bool ()."""
    return tf.equal((optimizer._iterations.value + 1) % steps_of(optimizer), 0)


def local_sums(optimizer: keras.optimizers.Optimizer, grads: Gradients, variables: list[Any]) -> Gradients:
    """The sums of this rank's micro-gradients so far, with the present ones; None for None.

    They have the scale of `grads`: with `loss_scale_factor` Keras divides by it before it accumulates.
    """
    factor = optimizer.loss_scale_factor

    def so_far(grad: Any, variable: Any) -> tf.Tensor:
        held = tf.cast(_accumulator(optimizer, variable), grad.dtype)
        return grad + (held if factor is None else held * tf.cast(factor, grad.dtype))

    return [None if grad is None else so_far(grad, variable) for grad, variable in zip(grads, variables, strict=True)]


def empty(optimizer: keras.optimizers.Optimizer) -> None:
    """Set all accumulators to zero."""
    for accumulator in optimizer._accumulated_gradients:
        if accumulator is not None:
            accumulator.assign(tf.zeros_like(accumulator.value))


def reduced_at_last(
    optimizer: keras.optimizers.Optimizer,
    grads: Gradients,
    variables: list[Any],
    reduce: Callable[[Gradients], Gradients],
    hold: Callable[[], Any],
) -> Gradients:
    """The gradients for Keras' `apply` in this micro-batch: the ranks' sum on the last of a cycle, else `grads`."""
    grads = [None if grad is None else tf.convert_to_tensor(grad) for grad in grads]
    present = [i for i, grad in enumerate(grads) if grad is not None]

    def last() -> Gradients:
        reduced = reduce(local_sums(optimizer, grads, variables))
        with tf.control_dependencies([reduced[i] for i in present]):  # the sums have been read
            empty(optimizer)
        return [tf.identity(reduced[i]) for i in present]

    def held() -> Gradients:
        with tf.control_dependencies([hold()]):
            return [tf.identity(grads[i]) for i in present]

    result: Gradients = [None] * len(grads)
    with tf.control_dependencies(tail()):
        values = tf.cond(is_last(optimizer), last, held)
    put_last(values[0])
    for i, value in zip(present, values, strict=True):
        value.set_shape(grads[i].shape)
        result[i] = value
    return result


def _accumulator(optimizer: keras.optimizers.Optimizer, variable: Any) -> tf.Tensor:
    return optimizer._accumulated_gradients[optimizer._get_variable_index(variable)].value


def scaled(optimizer: keras.optimizers.Optimizer, *, automatic: bool) -> keras.optimizers.Optimizer:
    """Return `optimizer`, in a LossScaleOptimizer if `automatic` and the global policy is mixed_float16.

    `compile` would wrap it likewise, and then finds it done.
    """
    scaling = keras.optimizers.LossScaleOptimizer
    if automatic and keras.config.dtype_policy().name == POLICY and not isinstance(optimizer, scaling):
        return scaling(optimizer, name="loss_scale_optimizer")
    return optimizer


def apply_in_cycles(
    optimizer: keras.optimizers.LossScaleOptimizer,
    grads: Gradients,
    variables: list[Any],
    reduce: Callable[[Gradients], Gradients],
    hold: Callable[[], Any],
) -> None:
    """Do what `LossScaleOptimizer.apply` does, with an inner optimizer that accumulates."""
    inner = without_loss_scale(optimizer)
    scale = optimizer.dynamic_scale.value
    grads = [None if g is None else tf.convert_to_tensor(g) / tf.cast(scale, g.dtype) for g in grads]

    def last() -> tf.Tensor:
        reduced = reduce(local_sums(inner, grads, variables))
        with tf.control_dependencies([grad for grad in reduced if grad is not None]):  # the sums have been read
            empty(inner)
            return tf.cond(optimizer.check_finite(reduced), lambda: update(reduced), skip)

    def update(reduced: Gradients) -> tf.Tensor:
        inner.apply(reduced, variables)
        count = optimizer.step_counter.value + 1
        full = tf.equal(count, optimizer.dynamic_growth_steps)
        optimizer.dynamic_scale.assign(tf.where(full, scale * 2.0, scale))
        optimizer.step_counter.assign(tf.where(full, tf.zeros_like(count), count))
        return tf.constant(True)

    def skip() -> tf.Tensor:
        inner._iterations.assign_sub(steps_of(inner) - 1)  # the cycle starts over
        optimizer._stateful_handle_non_finite_grads()
        return tf.constant(False)

    def held() -> tf.Tensor:
        with tf.control_dependencies([hold()]):
            inner.apply(grads, variables)
            return tf.constant(True)

    with tf.control_dependencies(tail()):
        put_last(tf.cond(is_last(inner), last, held))


OptimizerT = TypeVar("OptimizerT", bound=keras.optimizers.Optimizer)


def distribute(
    optimizer: OptimizerT,
    communicator: Communicator,
    scale: float | None = None,
    *,
    statistics: Sequence[keras.Variable] = (),
    bucket_bytes: int = BUCKET_BYTES,
    rows_from_bytes: int = ROWS_FROM_BYTES,
    auto_scale_loss: bool = True,
    finalizes: bool = True,
    compression: Any = None,
    same_start: bool = True,
    non_finite: NonFinitePolicy = STOPS,
    make_exchange: Callable[..., Exchange] = exchange_for,
) -> OptimizerT:
    """Make `optimizer` reduce gradients over the ranks of `communicator`; returns the same object.

    `scale` is n_r / G, this rank's share of the global batch (None: all ranks have batches of one size). `statistics`
    are float variables that the forward pass updates on each rank (moving averages): after each step they hold their
    mean, weighted by the shares. Gradients by rows (embeddings) of variables of at least `rows_from_bytes` are sent by
    rows while that is fewer bytes. Under the policy mixed_float16 an optimizer without loss scaling is returned in a
    LossScaleOptimizer, as `compile` would wrap it, unless `auto_scale_loss` is false. `finalizes`: whether the end of
    `fit` is the end of the run, where `use_ema` makes the averages the weights; if false, call `finalize`.
    `compression` makes whole gradients smaller before they are summed (see `Reduction`). `same_start`: before the first
    sum ranks compare weights and the optimizer's settings, and check that their shares add up to 1; if false, the
    caller must do so. `non_finite`: what happens to a step that is not finite. `make_exchange` makes the exchange:
    `exchange_for`, also with a compression of messages, or one of `lockstep.training.strategies`.

    A collective if `communicator` already has an exchange: the new one gets a group of its own. `exchange_of` returns
    the exchange. Raises ConfigError for an optimizer that cannot be the outermost one, and for invalid arguments.

    >>> import keras
    >>> from lockstep import on_ranks
    >>> optimizer = on_ranks.distribute(keras.optimizers.Adam(0.01), on_ranks.communicator())
    >>> isinstance(optimizer, keras.optimizers.Adam)
    True
    """
    statistics = tuple(statistics)  # which may be an iterator
    check_wish(optimizer, communicator, scale, statistics, bucket_bytes, rows_from_bytes)
    known = [optimizer, without_loss_scale(optimizer), *getattr(optimizer, "optimizers", ())]
    if tf.distribute.has_strategy() or any(isinstance(one, _Distributed) for one in known):
        raise ConfigError(
            "this optimizer is distributed already",
            got=f"{type(optimizer).__name__} under {type(tf.distribute.get_strategy()).__name__}",
            allowed="one way to distribute",
            next_step="Call distribute once, on the outermost optimizer, outside any tf.distribute scope.",
        )
    outermost = scaled(optimizer, automatic=auto_scale_loss)
    plain = type(outermost)
    if communicator in _USED:
        communicator = communicator.group(range(communicator.num_ranks))
    _USED.add(communicator)
    scaled_loss = isinstance(outermost, keras.optimizers.LossScaleOptimizer)
    exchange = make_exchange(communicator, scale, scaled_loss=scaled_loss, non_finite=non_finite)
    report_faults_of(partial(_fault_of, ref(exchange)))
    reduction = Reduction(exchange, statistics, bucket_bytes, rows_from_bytes, compression)
    # Saved models name the class and its module: those of the plain class, so that they load without Lockstep.
    names = {"__module__": plain.__module__, "__doc__": plain.__doc__}
    object.__setattr__(outermost, "_lockstep", _State(reduction, plain, finalizes, same_start))  # past Keras' tracking
    object.__setattr__(outermost, "__class__", type(plain.__name__, (_Distributed, plain), names))
    return cast(OptimizerT, outermost)


def undistribute(optimizer: keras.optimizers.Optimizer) -> None:
    """Restore the optimizer's own class and end its exchange; compile a model that was trained with it again.

    Raises ConfigError for an optimizer that is not distributed.

    >>> import keras
    >>> from lockstep import on_ranks
    >>> optimizer = on_ranks.distribute(keras.optimizers.Adam(0.01), on_ranks.communicator())
    >>> on_ranks.undistribute(optimizer)
    >>> type(optimizer) is keras.optimizers.Adam
    True
    """
    state = _state(optimizer)
    exchange = state.reduction.exchange
    _ENDED.add(exchange)
    exchange.close(
        ConfigError(
            "this step was traced with an exchange that has ended",
            got=f"a {state.plain.__name__} that was passed to undistribute since",
            allowed="steps traced after distribute",
            next_step="Compile the model again after undistribute, or set model.train_function = None.",
        )
    )
    object.__setattr__(optimizer, "__class__", state.plain)
    object.__delattr__(optimizer, "_lockstep")
    _USED.discard(exchange.communicator)


def _fault_of(known: ref[Exchange]) -> BaseException | None:
    """An exchange's fault, while it is in use."""
    exchange = known()
    return None if exchange is None or exchange in _ENDED else exchange.fault()


def exchange_of(optimizer: keras.optimizers.Optimizer) -> Exchange:
    """The exchange of a distributed optimizer. Raises ConfigError for an optimizer that is not distributed.

    >>> import keras
    >>> from lockstep import on_ranks
    >>> optimizer = on_ranks.distribute(keras.optimizers.Adam(0.01), on_ranks.communicator())
    >>> on_ranks.exchange_of(optimizer).waited_s  # seconds for other ranks, so far
    0.0
    """
    return _state(optimizer).reduction.exchange


def layout_of(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> Layout:
    """The buckets of the gradients of all these variables."""
    return _state(optimizer).reduction.layout_of(variables)


def skipped_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """Return, in the step that is being traced and after `apply`, int32 (): 1 if the ranks agreed to skip it."""
    return tf.reshape(_state(optimizer).reduction.skipped, ())


def own_class(optimizer: keras.optimizers.Optimizer) -> type[keras.optimizers.Optimizer]:
    """The optimizer's own class, distributed or not."""
    state: _State | None = getattr(optimizer, "_lockstep", None)
    return type(optimizer) if state is None else state.plain


def finalize(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> None:
    """The last action of Keras' `fit`: with `use_ema`, the averages become the weights."""
    _state(optimizer)  # raises for a plain one
    super(_Distributed, optimizer).finalize_variable_values(variables)


def apply_sums(optimizer: keras.optimizers.Optimizer, sums: Sequence[Any], variables: Sequence[Any]) -> None:
    """One update with gradients that the ranks have summed already, outside of any step."""
    _state(optimizer)  # raises for a plain one
    super(_Distributed, optimizer).apply(list(sums), list(variables))


class _State:
    def __init__(self, reduction: Reduction, plain: type, finalizes: bool, same_start: bool) -> None:
        self.reduction, self.plain, self.finalizes, self.compares = reduction, plain, finalizes, same_start
        self.loss: tf.Tensor | None = None


def _state(optimizer: Any) -> _State:
    state: _State | None = getattr(optimizer, "_lockstep", None)
    if state is None:
        raise ConfigError(
            "this optimizer is not distributed",
            got=f"a plain {type(optimizer).__name__}",
            allowed="an optimizer that distribute has returned; undistribute makes it a plain one again",
            next_step="Compile the model with distribute(optimizer, communicator).",
        )
    return state


class _Distributed:
    """Mixed in before the optimizer's own class, to which `super()` refers; mypy cannot know it: hence type: ignore."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "loss_scale_factor" and value is None:  # the first action of an optimizer around another one
            raise ConfigError(
                "a distributed optimizer cannot be inside another one",
                got=f"{type(self).__name__}, wrapped in a LossScaleOptimizer or MultiOptimizer (`compile` does so for "
                "a model of the policy mixed_float16)",
                allowed="the outermost optimizer: one around it would check finiteness on each rank separately",
                next_step="Call distribute on the outer optimizer, or on model.optimizer after compile.",
            )
        super().__setattr__(name, value)

    @classmethod
    def from_config(cls, config: dict[str, Any], **more: Any) -> Any:
        """A plain optimizer of the same settings, as from any saved one."""
        return cls.__mro__[2].from_config(config, **more)  # type: ignore[attr-defined] # Keras' class follows this mixin

    @tf.autograph.experimental.do_not_convert
    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Keras passes the step's local mean loss here; it is sent with the last bucket."""
        _state(self).loss = loss
        return super().scale_loss(loss)  # type: ignore[misc] # Keras' class follows this mixin

    # Plain Python while a user's tf.function is traced: it does not depend on tensors' values.
    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduce, then apply; with accumulation only on the last micro-batch of each cycle."""
        me = cast(keras.optimizers.Optimizer, self)
        state, grads = _state(self), list(grads)
        if not grads:  # like Keras
            return
        variables = list(me._trainable_variables if trainable_variables is None else trainable_variables)
        if not me.built:
            me.build(variables)
        loss, state.loss = state.loss, None
        if loss is None:  # the user's train_step does not call scale_loss: there is no loss to report
            loss = tf.zeros((), tf.float32)
        elif loss.dtype.size < 4:
            loss = tf.cast(loss, tf.float32)
        check_step(variables, state.reduction.exchange.communicator.num_ranks)
        if state.compares:
            exchange = state.reduction.exchange
            compare_start(exchange.communicator, exchange.scale, me, undivided(variables))
            state.compares = False
        if not state.reduction.exchange.alone:
            check_reached()
        exchange, scaling = state.reduction.exchange, isinstance(me, keras.optimizers.LossScaleOptimizer)
        counts = without_loss_scale(me)
        apply = super().apply  # type: ignore[misc]  # Keras' own, of the class that this one is mixed into

        def reduce(local: list[Any]) -> list[Any]:
            return state.reduction(local, variables, loss, rows=me.loss_scale_factor is None)

        def hold() -> tf.Tensor:
            return tf.numpy_function(_holding(exchange), [loss], tf.int32, name="hold")

        if all(grad is None for grad in grads):
            reduce(grads)  # ranks that have gradients raise
            apply(grads, trainable_variables)  # raises Keras' own error
        elif exchange.divides:
            exchange.update(me, reduce(grads), variables)
        elif exchange.skips_any or exchange.delay or exchange.served:
            _apply_unless_skipped(apply, reduce(grads), trainable_variables, state.reduction)
        elif steps_of(counts) == 1:
            apply(reduce(grads), trainable_variables)
        elif scaling:
            apply_in_cycles(me, grads, variables, reduce, hold)
        else:
            sums = reduced_at_last(me, grads, variables, reduce, hold)
            apply(sums, trainable_variables)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """One variable's update, the last stage of `apply`."""
        if fused.can_fuse_update(_state(self).plain, self, gradient, variable):
            fused.update(self, gradient, variable, learning_rate)
        else:
            super().update_step(gradient, variable, learning_rate)  # type: ignore[misc] # Keras' class follows this mixin

    def save_own_variables(self, store: Any) -> None:
        """Do what Keras does, to save the optimizer. Raises ConfigError if this rank has a part of the state only."""
        divides = _state(self).reduction.exchange.divides
        if divides and (whole_of := WHOLE.get()) is not None:
            for number, variable in enumerate(cast(keras.optimizers.Optimizer, self).variables):
                store[str(number)] = whole_of(variable)
            return
        if divides:
            raise ConfigError(
                "a rank cannot save an optimizer whose state is divided over the ranks",
                got="a callback, or a call, that saves the whole model of a run with --zero",
                allowed="weights; the run's checkpoints and its model have the whole state",
                next_step="Use ModelCheckpoint(..., save_weights_only=True), or leave out --zero.",
            )
        super().save_own_variables(store)  # type: ignore[misc] # Keras' class follows this mixin

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Finalize the values if this end of `fit` is the end of the run; Keras calls this at each end of `fit`."""
        if _state(self).finalizes:
            super().finalize_variable_values(var_list)  # type: ignore[misc] # Keras' class follows this mixin


def _apply_unless_skipped(apply: Any, sums: list[Any], variables: Any, reduction: Reduction) -> None:
    """Keras' own update of weights, its state and its count of steps, unless the ranks skip the step."""

    def update() -> tf.Tensor:
        apply(sums, variables)
        return tf.constant(0)

    skipped = tf.reshape(reduction.skipped, ())  # a numpy_function's result has no shape
    tf.cond(tf.equal(skipped, 1), lambda: tf.constant(0), update)


def _holding(exchange: Exchange) -> Any:
    def hold(loss: Any) -> Any:
        exchange.hold(loss)
        return np.int32(0)

    return hold
