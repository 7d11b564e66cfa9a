"""LARS: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks" (2017), algorithm 1."""

from __future__ import annotations

import re
from typing import Any

import keras
from keras import ops

from lockstep.storage.errors import ConfigError

EXCLUDED = ("bias", "beta", "gamma")  # and whatever has one dimension only, as the authors' later code does


@keras.saving.register_keras_serializable("lockstep")
class LARS(keras.optimizers.Optimizer):
    """SGD with momentum whose rate is scaled for each variable by how large it is against its gradient.

        local = trust * |w| / (|g| + weight_decay * |w|)
        velocity = momentum * velocity + rate * local * (g + weight_decay * w)
        w = w - velocity

    A variable or gradient of norm 0 has local = 1. Variables whose name matches one of `exclude` (regular expressions;
    biases and normalisations by default) or that have one dimension take plain steps with momentum, without decay. The
    velocity holds the rate, as in Keras' SGD; weight decay is part of the gradient, not Keras' decoupled one. Raises
    ConfigError for numbers that cannot be.
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
                "LARS cannot be made so",
                got=f"momentum={momentum}, trust={trust}, weight_decay={weight_decay}",
                allowed="momentum from 0 to below 1, trust above 0, weight_decay from 0 up",
                next_step="Correct the optimizer's arguments.",
            )
        self.momentum, self.trust, self.decay, self.exclude = momentum, trust, weight_decay, tuple(exclude)

    def build(self, variables: Any) -> None:
        """One velocity a variable."""
        if self.built:
            return
        super().build(variables)
        self.velocities = self.add_optimizer_variables(variables, "velocity")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """One variable's step."""
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
        """What the constructor takes."""
        own = {
            "momentum": self.momentum,
            "trust": self.trust,
            "weight_decay": self.decay,
            "exclude": list(self.exclude),
        }
        return {**super().get_config(), **own}

    def _is_excluded(self, variable: Any) -> bool:
        return len(variable.shape) < 2 or any(re.search(pattern, variable.name) for pattern in self.exclude)
