"""Models whose training steps are no means over rows, by `tests.training._coupled:NAME`, and the same made for ranks.

`reaching(options)` says which: with `--set ranks=true` they call the functions of lockstep.on_ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from lockstep import on_ranks
from lockstep.features.schema.signature import Signature
from lockstep.training.models import ModelOptions

SGD = keras.optimizers.SGD


def reaching(options: ModelOptions) -> bool:
    """Whether the model is to call other ranks."""
    return bool(options.extra.get("ranks", False))


def joined(signature: Signature) -> tuple[dict[str, Any], Any]:
    """The inputs, and all of them as (n, k)."""
    inputs = {n: keras.Input(s.shape, dtype=s.dtype, name=n) for n, s in signature.features.items()}
    parts = [keras.layers.Flatten()(ops.cast(one, keras.config.floatx())) for one in inputs.values()]
    return inputs, parts[0] if len(parts) == 1 else keras.layers.Concatenate()(parts)


def columns(y: Any) -> Any:
    """Labels as (n, 1) numbers."""
    return ops.reshape(ops.cast(y, keras.config.floatx()), (-1, 1))


@keras.saving.register_keras_serializable("tests")
class InBatch(keras.losses.Loss):
    """Two vectors a row, y_pred (n, 2 d): all other rows' second vectors are negatives. One value a row, or `one`."""

    def __init__(self, reaches: bool, one: bool, **others: Any) -> None:
        super().__init__(**others)
        self.reaches, self.one = reaches, one

    def get_config(self) -> dict[str, Any]:
        """Its arguments."""
        return {**super().get_config(), "reaches": self.reaches, "one": self.one}

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """(n,), or (N,) of all ranks' rows; () with `one`."""
        user, item = ops.split(on_ranks.gather(y_pred) if self.reaches else y_pred, 2, axis=-1)
        scores = 5.0 * ops.matmul(user, ops.transpose(item))
        numbers = ops.arange(ops.shape(scores)[0])
        values = keras.losses.sparse_categorical_crossentropy(numbers, scores, from_logits=True)
        return ops.mean(values) if self.one else values


def pairs(signature: Signature, options: ModelOptions) -> keras.Model:
    """Two towers with in-batch negatives; `--set one=true`: one number for a batch."""
    inputs, x = joined(signature)
    towers = [keras.layers.UnitNormalization()(keras.layers.Dense(4, name=f"tower{n}")(x)) for n in range(2)]
    model = keras.Model(inputs, keras.layers.Concatenate()(towers))
    model.compile(SGD(0.5), InBatch(reaching(options), bool(options.extra.get("one"))))
    return model


@keras.saving.register_keras_serializable("tests")
class Balance(keras.layers.Layer):
    """A gate whose balance loss is a product of two means over the batch."""

    def __init__(self, reaches: bool, factor: float) -> None:
        super().__init__()
        self.reaches, self.factor = reaches, factor

    def build(self, shape: Any) -> None:
        self.gate = keras.layers.Dense(3, name="gate")
        self.gate.build(shape)

    def call(self, x: Any) -> Any:
        """(n, k) -> (n, k + 3)."""
        shares = ops.softmax(self.gate(x))
        of_all = on_ranks.gather(shares) if self.reaches else shares
        chosen = ops.mean(ops.one_hot(ops.argmax(of_all, -1), 3, dtype=of_all.dtype), axis=0)
        self.add_loss(self.factor * ops.sum(ops.mean(of_all, axis=0) * chosen))
        return ops.concatenate([x, shares], -1)


def mixture(signature: Signature, options: ModelOptions) -> keras.Model:
    """A gate that is kept in balance by `add_loss`, with the factor `--set factor`."""
    inputs, x = joined(signature)
    x = Balance(reaching(options), float(options.extra.get("factor", 4.0)))(keras.layers.Dense(5, "tanh")(x))
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(x))
    model.compile(SGD(0.5), "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
    return model


@keras.saving.register_keras_serializable("tests")
class SumLoss(keras.Model):
    """A loss of its own that is a sum over the batch."""

    reaches = False

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        """()."""
        loss = 0.01 * ops.sum(ops.square(columns(y) - y_pred))
        return on_ranks.total(loss) if self.reaches else loss


def summed(signature: Signature, options: ModelOptions) -> keras.Model:
    """A network with `SumLoss`."""
    inputs, x = joined(signature)
    model = SumLoss(inputs, keras.layers.Dense(1, "sigmoid")(keras.layers.Dense(5, "tanh")(x)))
    model.reaches = reaching(options)
    model.compile(SGD(0.1))
    return model


@keras.saving.register_keras_serializable("tests")
class Sam(keras.Model):
    """Changes its weights by the first gradient, and applies the second one there. Foret et al. (2021)."""

    reaches, clips = False, False

    def train_step(self, data: Any) -> Any:
        """The logs of a step."""
        x, y, w = keras.utils.unpack_x_y_sample_weight(data)
        weights = self.trainable_variables
        first = [0.05 * grad for grad in self._gradients(x, y, w)]
        norm = tf.linalg.global_norm(first) + 1e-12
        if self.clips:
            applied = [grad / norm for grad in first]
        else:
            for weight, grad in zip(weights, first, strict=True):
                weight.assign_add(grad / norm)
            applied = self._gradients(x, y, w)
            for weight, grad in zip(weights, first, strict=True):
                weight.assign_sub(grad / norm)
        self.optimizer.apply_gradients(zip(applied, weights, strict=True))
        return self.compute_metrics(x, y, self(x, training=True), w)

    def _gradients(self, x: Any, y: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True), w)
        found = tape.gradient(loss, self.trainable_variables)
        return on_ranks.mean(found) if self.reaches else found


def sharpness(signature: Signature, options: ModelOptions) -> keras.Model:
    """A network trained by `Sam`; `--set clips=true`: by gradients of norm 1 that it divides itself."""
    inputs, x = joined(signature)
    model = Sam(inputs, keras.layers.Dense(1, "sigmoid")(keras.layers.Dense(5, "tanh")(x)))
    model.reaches, model.clips = reaching(options), bool(options.extra.get("clips"))
    model.compile(SGD(0.1), "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
    return model


@keras.saving.register_keras_serializable("tests")
class Centre(keras.layers.Layer):
    """Subtracts the moving mean of what it has seen: weights that each step assigns."""

    def __init__(self, reaches: bool) -> None:
        super().__init__()
        self.reaches = reaches

    def build(self, shape: Any) -> None:
        self.centre = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False, name="centre")

    def call(self, x: Any, training: bool = False) -> Any:
        """(n, k) -> (n, k)."""
        if training:
            mean = ops.mean(x, axis=0)
            (mean,) = on_ranks.mean([mean]) if self.reaches else [mean]
            self.centre.assign(0.9 * self.centre + 0.1 * mean)
        return x - self.centre


def centred(signature: Signature, options: ModelOptions) -> keras.Model:
    """A network with a `Centre`."""
    inputs, x = joined(signature)
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(Centre(reaching(options))(x)))
    model.compile(SGD(0.1), "binary_crossentropy")
    return model


@keras.saving.register_keras_serializable("tests")
class Gan(keras.Model):
    """A critic and a generator, each with an optimizer, whose noise is a function of the row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.critic = keras.Sequential([keras.Input((width,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(1)])
        self.generator = keras.Sequential([keras.Input((2,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(width)])
        self.losses_of = [keras.metrics.Mean(name="critic_loss"), keras.metrics.Mean(name="generator_loss")]

    def get_config(self) -> dict[str, Any]:
        """Its arguments."""
        return {"width": self.width}

    @property
    def metrics(self) -> list[Any]:
        """One for each network."""
        return self.losses_of

    def call(self, x: Any) -> Any:
        """The critic's judgement, (n, 1)."""
        return self.critic(self._numbers(x))

    def compile(self, critic: Any, generator: Any, *, one_in_compile: bool = True) -> None:
        """Keras' compile knows the critic's optimizer, or none of both."""
        super().compile(**({"optimizer": critic} if one_in_compile else {}))
        self.of_critic, self.of_generator = critic, generator

    def train_step(self, data: Any) -> Any:
        """The logs of a step."""
        x = self._numbers(keras.utils.unpack_x_y_sample_weight(data)[0])
        noise = ops.sin(7.0 * x[:, :2])
        judge = keras.losses.BinaryCrossentropy(from_logits=True)
        with tf.GradientTape() as tape:
            real, fake = self.critic(x), self.critic(self.generator(noise))
            loss = judge(ops.ones_like(real), real) + judge(ops.zeros_like(fake), fake)
        weights = self.critic.trainable_weights
        self.of_critic.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.losses_of[0].update_state(loss)
        with tf.GradientTape() as tape:
            fake = self.critic(self.generator(noise))
            loss = judge(ops.ones_like(fake), fake)
        weights = self.generator.trainable_weights
        self.of_generator.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.losses_of[1].update_state(loss)
        return {metric.name: metric.result() for metric in self.metrics}

    def _numbers(self, x: Any) -> Any:
        parts = [ops.cast(one, keras.config.floatx()) for one in x.values()]
        return ops.concatenate([ops.reshape(one, (ops.shape(one)[0], -1)) for one in parts], -1)


def gan(signature: Signature, options: ModelOptions) -> keras.Model:
    """A `Gan`; `--set one=false`: its compile passes no optimizer to Keras'."""
    model = Gan(sum(max(1, *spec.shape, 1) for spec in signature.features.values()))
    one = bool(options.extra.get("one", True))
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02), one_in_compile=one)
    return model


@keras.saving.register_keras_serializable("tests")
class Vector(keras.Model):
    """Returns a vector among its logs, as Keras' fit accepts it."""

    def train_step(self, data: Any) -> Any:
        """The logs of a step."""
        logs = super().train_step(data)
        return {**logs, "twice": ops.stack([logs["loss"], 2 * logs["loss"]])}


def vector(signature: Signature, options: ModelOptions) -> keras.Model:
    """Logistic regression by `Vector`."""
    inputs, x = joined(signature)
    model = Vector(inputs, keras.layers.Dense(1, "sigmoid")(x))
    model.compile(SGD(0.1), "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
    return model


MADE_FOR_RANKS: dict[str, tuple[Callable[..., keras.Model], dict[str, Any]]] = {
    "in-batch negatives, a value a row": (pairs, {}),
    "in-batch negatives, one number": (pairs, {"one": True}),
    "a balance loss": (mixture, {}),
    "a sum": (summed, {}),
    "weights changed within a step": (sharpness, {}),
    "gradients divided by their norm": (sharpness, {"clips": True}),
    "weights that a step assigns": (centred, {}),
}
"""Models that are refused on several ranks, and with `ranks` are those of one; and their settings."""


@keras.saving.register_keras_serializable("tests")
class Largest(keras.metrics.Metric):
    """The largest output of an epoch: no sum."""

    def __init__(self, **others: Any) -> None:
        super().__init__(**{"name": "largest", **others})
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Of a batch."""
        self.value.assign(ops.maximum(self.value, ops.max(ops.cast(y_pred, self.value.dtype))))

    def result(self) -> Any:
        """()."""
        return self.value


def largest(signature: Signature, options: ModelOptions) -> keras.Model:
    """Logistic regression with `Largest`."""
    inputs, x = joined(signature)
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(x))
    model.compile(SGD(0.1), "binary_crossentropy", metrics=[Largest()])
    return model
