"""Learning rates for larger global batches: scaling rules, gradual warm-up and momentum that follows the rate.

Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour" (2017): the linear rule (section 2.1),
gradual warm-up (2.2), momentum correction (3). The square-root rule is Krizhevsky's, "One weird trick for parallelizing
convolutional neural networks" (2014). docs/models.md has the traps.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

import keras
import numpy as np
from keras import ops

from lockstep.storage.errors import ConfigError

Rule = Literal["none", "linear", "sqrt"]
EXCLUDED = ("bias", "beta", "gamma")  # and variables of one dimension, as in the authors' later code


def without_loss_scale(optimizer: Any) -> Any:
    """The optimizer that counts steps and updates weights: the one inside a LossScaleOptimizer, else `optimizer`."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def factor_of(rule: Rule, global_batch: int, base_batch: int) -> float:
    """The factor from the rate for `base_batch` to that for `global_batch`."""
    share = global_batch / base_batch
    return {"none": 1.0, "linear": share, "sqrt": share**0.5}[rule]


@keras.saving.register_keras_serializable("lockstep")
class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """`base` (a number, or a schedule of the step) times a factor that rises over `warm_up_steps` steps.

    The factor of step i (from 0) rises linearly from `start` to `factor`: start + (factor - start) * (i + 1) /
    warm_up_steps, so step warm_up_steps - 1 is the first with the whole rate. `calls_per_step` are the micro-batches of
    a step: Keras passes a schedule the number of calls, not of steps.
    """

    def __init__(
        self, base: Any, factor: float = 1.0, *, start: float = 0.0, warm_up_steps: int = 0, calls_per_step: int = 1
    ) -> None:
        super().__init__()
        if not (factor > 0 and start >= 0 and warm_up_steps >= 0 and calls_per_step >= 1):
            raise ConfigError(
                "invalid arguments of a learning rate's warm-up",
                got=f"factor={factor}, start={start}, warm_up_steps={warm_up_steps}, calls_per_step={calls_per_step}",
                allowed="factor above 0, start and warm_up_steps from 0, calls_per_step from 1 up",
                next_step="Correct the schedule.",
            )
        self.base, self.factor, self.start = base, factor, start
        self.warm_up_steps, self.calls_per_step = warm_up_steps, calls_per_step

    def __call__(self, step: Any) -> Any:
        """The rate of a step, floatx."""
        dtype = keras.config.floatx()
        step = ops.floor_divide(ops.cast(step, "int64"), self.calls_per_step)
        rate = ops.convert_to_tensor(self.base(step) if callable(self.base) else self.base, dtype)
        if not self.warm_up_steps:
            return rate * self.factor
        done = ops.minimum(ops.cast(step + 1, dtype) / self.warm_up_steps, ops.ones((), dtype))
        return rate * (self.start + (self.factor - self.start) * done)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        base = self.base
        schedule = isinstance(base, keras.optimizers.schedules.LearningRateSchedule)
        return {
            "base": keras.saving.serialize_keras_object(base) if schedule else base,
            "factor": self.factor,
            "start": self.start,
            "warm_up_steps": self.warm_up_steps,
            "calls_per_step": self.calls_per_step,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> WarmUp:
        """The inverse of `get_config`."""
        base = config["base"]
        return cls(
            **{**config, "base": keras.saving.deserialize_keras_object(base) if isinstance(base, dict) else base}
        )


@keras.saving.register_keras_serializable("lockstep")
class CorrectedSGD(keras.optimizers.SGD):
    """Keras' SGD whose momentum follows the learning rate.

    Keras computes velocity = momentum * velocity - rate * gradient, which includes the rates of earlier steps. When the
    rate changes, the velocity is first multiplied by new / old; otherwise a rising rate would take effect too late, and
    a falling one would overshoot. With a constant rate it is SGD, bit for bit.
    """

    def build(self, variables: Any) -> None:
        """Keras' variables, and the previous step's rate, 0 at the start."""
        if self.built:
            return
        super().build(variables)
        self.last_rate = self.add_variable(shape=(), dtype=keras.config.floatx(), name="last_rate")

    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        rate = ops.cast(learning_rate, self.last_rate.dtype)
        changed = ops.logical_and(self.last_rate > 0, self.last_rate != rate)
        ratio = ops.where(changed, rate / ops.maximum(self.last_rate, keras.config.epsilon() ** 2), 1.0)
        for velocity in self.momentums:
            self.assign(velocity, velocity * ops.cast(ratio, velocity.dtype))
        super()._backend_update_step(grads, trainable_variables, learning_rate)
        self.assign(self.last_rate, rate)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """The scaling of a model's learning rate; a row of the run's metrics."""

    rule: Rule
    global_batch: int
    base_batch: int | None
    base_rate: float | dict[str, Any]
    """The model's own: a number, or the configuration of its schedule."""
    factor: float
    peak: float | None
    """base_rate * factor; None if the model has a schedule of its own."""
    warm_up_steps: int
    momentum_correction: bool
    notes: tuple[str, ...]
    """Warnings about this optimizer."""

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object."""
        return {**asdict(self), "notes": list(self.notes)}


def scale_learning_rate(
    model: keras.Model,
    rule: Rule,
    *,
    global_batch: int,
    base_batch: int | None,
    warm_up_steps: int = 0,
    calls_per_step: int = 1,
) -> Scaled:
    """Scale and warm up the learning rate of a compiled model whose optimizer is not built yet.

    With a rule the warm-up goes from the base rate to the scaled one, without a rule from nearly 0 to the model's own.
    A plain SGD with momentum becomes a CorrectedSGD if the rate changes. Without warm-up and schedules the rate stays a
    variable, which callbacks may set. Raises ConfigError for a MultiOptimizer and a rate that is a function.
    """
    optimizer = without_loss_scale(model.optimizer)
    rate = getattr(optimizer, "_learning_rate", None)
    schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    if optimizer.built or not (schedule or isinstance(rate, keras.Variable)):
        raise ConfigError(
            f"the learning rate of {type(optimizer).__name__} cannot be scaled",
            got=f"{type(rate).__name__}{', already built' if optimizer.built else ''}",
            allowed="one optimizer that is not built yet, with a number or a Keras schedule as its rate",
            next_step="Scale the rates in the model's function, and leave out --learning-rate-scaling.",
        )
    factor = 1.0 if base_batch is None else factor_of(rule, global_batch, base_batch)
    base: Any = rate if schedule else float(str(np.asarray(rate)))  # 0.05, not its float32 value
    if warm_up_steps or (schedule and (factor != 1.0 or calls_per_step > 1)):
        start = 0.0 if rule == "none" else min(1.0, factor)
        warm = WarmUp(base, factor, start=start, warm_up_steps=warm_up_steps, calls_per_step=calls_per_step)
        changes = warm_up_steps > 0 or factor != 1.0
        if changes and type(optimizer) is keras.optimizers.SGD and optimizer.momentum:
            # In place: `compile` was given this object, and it is saved with the model.
            object.__setattr__(optimizer, "__class__", CorrectedSGD)
        optimizer.learning_rate = warm
    elif not schedule:
        optimizer.learning_rate = base * factor
    return Scaled(
        rule=rule,
        global_batch=global_batch,
        base_batch=base_batch,
        base_rate=keras.saving.serialize_keras_object(base)["config"] if schedule else base,
        factor=factor,
        peak=None if schedule else base * factor,
        warm_up_steps=warm_up_steps,
        momentum_correction=isinstance(optimizer, CorrectedSGD),
        notes=_notes(optimizer, rule, factor),
    )


def _notes(optimizer: Any, rule: Rule, factor: float) -> tuple[str, ...]:
    notes = []
    if optimizer.weight_decay and factor != 1.0:
        decay = "as much per epoch as before" if rule == "linear" else f"{1 / factor:.3g} times as much per epoch"
        notes.append(f"decoupled weight decay is multiplied by the rate: {decay}")
    if getattr(optimizer, "momentum", 0) and not isinstance(optimizer, CorrectedSGD):
        notes.append("momentum includes the rates of earlier steps")
    if rule == "linear" and not isinstance(optimizer, keras.optimizers.SGD):
        notes.append("the linear rule was found for SGD; for adaptive optimizers sqrt is usual")
    return tuple(notes)


@keras.saving.register_keras_serializable("lockstep")
class LARS(keras.optimizers.Optimizer):
    """SGD with momentum, whose rate is scaled for each variable by the ratio of its norm to its gradient's.

        local = trust * |w| / (|g| + weight_decay * |w|)
        velocity = momentum * velocity + rate * local * (g + weight_decay * w)
        w = w - velocity

    A variable or gradient of norm 0 has local = 1. Variables whose name matches one of `exclude` (regular expressions;
    biases and normalisations by default) or that have one dimension take plain steps with momentum, without decay. The
    velocity includes the rate, as in Keras' SGD; weight decay is part of the gradient, not Keras' decoupled one. Raises
    ConfigError for numbers out of range.
    """

    def __init__(
        self,
        learning_rate: Any = 0.1,
        momentum: float = 0.9,
        trust: float = 0.001,
        weight_decay: float = 0.0,
        exclude: tuple[str, ...] = EXCLUDED,
        name: str = "lars",
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        if not (0 <= momentum < 1 and trust > 0 and weight_decay >= 0):
            raise ConfigError(
                "LARS got invalid arguments",
                got=f"momentum={momentum}, trust={trust}, weight_decay={weight_decay}",
                allowed="momentum from 0 to below 1, trust above 0, weight_decay from 0 up",
                next_step="Correct the optimizer's arguments.",
            )
        self.momentum, self.trust, self.decay, self.exclude = momentum, trust, weight_decay, tuple(exclude)

    def build(self, variables: Any) -> None:
        """One velocity per variable."""
        if self.built:
            return
        super().build(variables)
        self.velocities = self.add_optimizer_variables(variables, "velocity")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Apply one variable's step."""
        rate, gradient = ops.cast(learning_rate, variable.dtype), ops.cast(gradient, variable.dtype)
        velocity = self.velocities[self._get_variable_index(variable)]
        if not self._is_excluded(variable):
            size, slope = (
                ops.sqrt(ops.sum(ops.square(value))) for value in (ops.convert_to_tensor(variable), gradient)
            )
            divisor = slope + self.decay * size
            usual = ops.logical_and(size > 0, slope > 0)
            local = ops.where(usual, self.trust * size / ops.where(usual, divisor, 1), ops.ones_like(size))
            gradient = local * (gradient + self.decay * variable)
        self.assign(velocity, self.momentum * velocity + rate * gradient)
        self.assign_sub(variable, velocity)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        own = {
            "momentum": self.momentum,
            "trust": self.trust,
            "weight_decay": self.decay,
            "exclude": list(self.exclude),
        }
        return {**super().get_config(), **own}

    def _is_excluded(self, variable: Any) -> bool:
        return len(variable.shape) < 2 or any(re.search(pattern, variable.name) for pattern in self.exclude)
