"""Models of the tests, by `tests.training._models:NAME`."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from lockstep.features.schema.signature import Signature
from lockstep.training.models import ModelOptions
from lockstep.training.models.logistic import logistic
from lockstep.training.rank import metrics
from lockstep.training.steps.distribute import exchange_of
from tests.waiting import until

FAIL_AT: dict[str, int] = {}  # {"step": n, "rank": r}: set by a test to make one rank fail once


def with_callbacks(signature: Signature, options: ModelOptions) -> tuple[keras.Model, list[Any]]:
    """Logistic regression with dropout, EarlyStopping, ReduceLROnPlateau and a rank that fails when told to."""
    inputs = {n: keras.Input(s.shape, dtype=s.dtype, name=n) for n, s in signature.features.items()}
    x = keras.layers.Concatenate()(list(inputs.values()))
    x = keras.layers.Dense(8, activation="relu")(x)
    x = Noise()(keras.layers.Dropout(0.3, seed=5)(x))
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(x))
    model.compile("adam", "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")], jit_compile=False)
    callbacks = [
        keras.callbacks.ReduceLROnPlateau(monitor="auc", mode="max", factor=0.5, patience=0, min_delta=0.05),
        keras.callbacks.EarlyStopping(monitor="loss", patience=50, restore_best_weights=True),
        FailOnce(),
    ]
    return model, callbacks


def with_averages(signature: Signature, options: ModelOptions) -> keras.Model:
    """Logistic regression whose weights become their moving averages at the end of the training."""
    model = logistic(signature, options)
    optimizer = keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9)
    model.compile(optimizer, "binary_crossentropy", metrics=["accuracy"], jit_compile=False)
    return model


def with_averages_of_gradients(signature: Signature, options: ModelOptions) -> keras.Model:
    """Logistic regression with three numbers of optimizer's state for each weight."""
    model = logistic(signature, options)
    model.compile(keras.optimizers.Adam(0.01, amsgrad=True), "binary_crossentropy", jit_compile=False)
    return model


class Tested(keras.callbacks.Callback):
    """Keeps the hooks of tests, and the ends of epochs, in order: (hook, number, logs)."""

    all: ClassVar[list[Tested]] = []
    """Those made in this process, one a rank and run."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int, dict[str, Any]]] = []
        Tested.all.append(self)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.events.append(("test begins", 0, dict(logs or {})))

    def on_test_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.events.append(("batch begins", batch, dict(logs or {})))

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.events.append(("batch ends", batch, dict(logs or {})))

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        self.events.append(("test ends", 0, dict(logs or {})))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.events.append(("epoch ends", epoch, dict(logs or {})))


def tested(signature: Signature, options: ModelOptions) -> tuple[keras.Model, list[Any]]:
    """Logistic regression, `Tested`."""
    return logistic(signature, options), [Tested()]


@keras.saving.register_keras_serializable("tests")
class Noise(keras.layers.Layer):
    """Draws without a seed of its own, so from a generator that is no part of the model."""

    def call(self, x: Any, training: bool = False) -> Any:
        """The same shape."""
        return x + 0.01 * keras.random.normal(keras.ops.shape(x)) if training else x


def diverging(signature: Signature, options: ModelOptions) -> keras.Model:
    """A model whose loss overflows after some steps."""
    model = logistic(signature, options)
    model.compile(keras.optimizers.SGD(1e30), "mean_squared_error", jit_compile=False)
    model.get_layer("probability").activation = keras.activations.linear
    return model


def clicks(signature: Signature, options: ModelOptions) -> keras.Model:
    """Log-odds with a regulariser, and metrics of Keras' that want labels (n, 1), with weights and without."""
    inputs = {n: keras.Input(s.shape, dtype=s.dtype, name=n) for n, s in signature.features.items()}
    numbers = [keras.ops.cast(value, "float32") for value in inputs.values()]
    last = keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.01))
    model = keras.Model(inputs, last(keras.layers.Concatenate()(numbers)))
    auc, accuracy = keras.metrics.AUC, keras.metrics.BinaryAccuracy
    model.compile(
        keras.optimizers.Adam(0.1),
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[
            auc(name="auc", from_logits=True),
            auc(name="pr", curve="PR", from_logits=True),
            accuracy(name="accuracy", threshold=0.0),
            keras.metrics.F1Score(threshold=0.5),
            keras.metrics.BinaryCrossentropy(name="bce", from_logits=True),
            keras.metrics.Hinge(),
            distance,
        ],
        weighted_metrics=[
            auc(name="auc", from_logits=True),
            accuracy(name="accuracy", threshold=0.0),
            keras.metrics.Hinge(),
        ],
        jit_compile=False,
    )
    return model


def weighed_clicks(signature: Signature, options: ModelOptions) -> keras.Model:
    """Log-odds with a loss that the sum of the weights divides."""
    model = clicks(signature, options)
    loss = keras.losses.BinaryCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
    model.compile("adam", loss, jit_compile=False)
    return model


@keras.saving.register_keras_serializable("tests")
def distance(y_true: Any, y_pred: Any) -> Any:
    """A metric of a user's own, made for labels (n,)."""
    return keras.ops.abs(y_true - keras.ops.squeeze(y_pred, -1))


def correlated(signature: Signature, options: ModelOptions) -> keras.Model:
    """`clicks` with a correlation, which is no number where all labels are one."""
    model = clicks(signature, options)
    model.compile(keras.optimizers.Adam(0.01), model.loss, metrics=["pearson_correlation"], jit_compile=False)
    return model


def knows_clicks(signature: Signature, options: ModelOptions) -> keras.Model:
    """The log-odds of `_tiny.write_clicks`, which no step changes."""
    inputs = {n: keras.Input(s.shape, dtype=s.dtype, name=n) for n, s in signature.features.items()}
    known = {"a": 0.5, "page": 0.25}
    kernel = np.array([[known[name]] for name in inputs], np.float32)
    last = keras.layers.Dense(
        1, kernel_initializer=keras.initializers.Constant(kernel), bias_initializer=keras.initializers.Constant(-6.0)
    )
    joined = keras.layers.Concatenate()([keras.ops.cast(value, "float32") for value in inputs.values()])
    model = keras.Model(inputs, last(joined))
    metrics = [keras.metrics.AUC(name="auc", from_logits=True)]
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1e-30), loss, metrics=metrics, jit_compile=False)
    return model


def softmax(signature: Signature, options: ModelOptions) -> keras.Model:
    """Logistic regression of an image's class."""
    (name, image), *_ = signature.features.items()
    inputs = keras.Input(image.shape, dtype=image.dtype, name=name)
    x = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(inputs))
    model = keras.Model({name: inputs}, keras.layers.Dense(signature.num_classes, "softmax")(x))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False)
    return model


def stops(signature: Signature, options: ModelOptions) -> tuple[keras.Model, list[Any]]:
    """A model whose training one rank alone wants to stop."""
    return logistic(signature, options), [StopOnOneRank()]


def small_conv(signature: Signature, options: ModelOptions) -> keras.Model:
    """One convolution with Keras' own BatchNormalization, which the run makes ghost or sync."""
    (name, image), *_ = signature.features.items()
    inputs = keras.Input(image.shape, dtype=image.dtype, name=name)
    x = keras.layers.Conv2D(3, 3, 2)(keras.layers.Rescaling(1 / 255)(inputs))
    x = keras.layers.ReLU()(keras.layers.BatchNormalization(momentum=0.9)(x))
    out = keras.layers.Dense(signature.num_classes, "softmax")(keras.layers.Flatten()(x))
    model = keras.Model({name: inputs}, out)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy", jit_compile=False)
    return model


def clipped_with_averages(signature: Signature, options: ModelOptions) -> keras.Model:
    """`small_conv` with dropout, by AdamW with clipping by the norm of all gradients, decay and averaged weights."""
    model = small_conv(signature, options)
    outputs = keras.layers.Dropout(0.2)(model.output)
    model = keras.Model(model.input, outputs / keras.ops.sum(outputs, axis=-1, keepdims=True))
    optimizer = keras.optimizers.AdamW(0.01, global_clipnorm=0.05, use_ema=True, ema_overwrite_frequency=7)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False)
    return model


def small_conv_that_fails(signature: Signature, options: ModelOptions) -> tuple[keras.Model, list[Any]]:
    """`small_conv` with a rank that fails when told to; under mixed_float16 its loss scale overflows at first."""
    model = small_conv(signature, options)
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        model.optimizer.initial_scale = 2.0**22
    return model, [FailOnce()]


def momentum(signature: Signature, options: ModelOptions) -> keras.Model:
    """Logistic regression by SGD with momentum."""
    model = logistic(signature, options)
    model.compile(keras.optimizers.SGD(0.25, momentum=0.875), "binary_crossentropy", jit_compile=False)
    return model


def accumulating(signature: Signature, options: ModelOptions) -> keras.Model:
    """Logistic regression whose optimizer takes a step every second batch."""
    model = logistic(signature, options)
    model.compile(keras.optimizers.SGD(0.25, gradient_accumulation_steps=2), "binary_crossentropy", jit_compile=False)
    return model


def momentum_that_fails(signature: Signature, options: ModelOptions) -> tuple[keras.Model, list[Any]]:
    """`momentum` with a rank that fails when told to."""
    return momentum(signature, options), [FailOnce()]


def told_to_fail(model: keras.Model) -> bool:
    """True at the step in FAIL_AT, and for one rank alone where two threads ask in the same moment."""
    step = FAIL_AT.get("step")
    return step == int(model.optimizer.iterations.numpy()) and FAIL_AT.pop("step", None) is not None


class FailOnce(keras.callbacks.Callback):
    """Raises at the step in FAIL_AT, on whichever rank comes first."""

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Called after each step."""
        if told_to_fail(self.model):
            raise RuntimeError("told to fail")


def momentum_that_parts(signature: Signature, options: ModelOptions) -> tuple[keras.Model, list[Any]]:
    """`momentum` with one bit of one rank's weights that changes by itself."""
    return momentum(signature, options), [FlipOnce()]


class FlipOnce(keras.callbacks.Callback):
    """Changes the last bit of a weight after the step in FAIL_AT, on whichever rank comes first."""

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Called after each step."""
        if told_to_fail(self.model):
            weight = self.model.weights[0]
            weight.assign(np.nextafter(np.asarray(weight), np.float32(np.inf)))


class StopOnOneRank(keras.callbacks.Callback):
    """Only the first model to get to step 5 stops."""

    asked = False

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Called after each step."""
        if batch == 4 and not StopOnOneRank.asked:
            StopOnOneRank.asked = True
            self.model.stop_training = True


def restless(signature: Signature, options: ModelOptions) -> tuple[keras.Model, list[Any]]:
    """Dropout and batch normalisation, and a layer that draws and counts at each call, also in a test."""
    inputs = {n: keras.Input(s.shape, dtype=s.dtype, name=n) for n, s in signature.features.items()}
    x = keras.layers.Concatenate()(list(inputs.values()))
    x = keras.layers.BatchNormalization(momentum=0.8)(keras.layers.Dense(8, activation="relu")(x))
    x = Restless()(keras.layers.Dropout(0.3, seed=5)(x))
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid", kernel_regularizer="l2")(x))
    optimizer = keras.optimizers.Adam(0.02)
    model.compile(optimizer, "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")], jit_compile=False)
    return model, [keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, factor=0.5, min_delta=0.02)]


def with_dropout(signature: Signature, options: ModelOptions) -> keras.Model:
    """`restless` without its callback."""
    return restless(signature, options)[0]


@keras.saving.register_keras_serializable("tests")
class Restless(keras.layers.Layer):
    """Adds a draw from its own seeds, times the calls so far, to its input."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seeds = keras.random.SeedGenerator(3)
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, x: Any) -> Any:
        """The same shape."""
        self.calls.assign_add(1.0)
        return x + 1e-3 * self.calls * keras.random.normal(keras.ops.shape(x), seed=self.seeds)


def watches_validation(signature: Signature, options: ModelOptions) -> tuple[keras.Model, list[Any]]:
    """Logistic regression with dropout whose rate and end follow the validation loss."""
    inputs = {n: keras.Input(s.shape, dtype=s.dtype, name=n) for n, s in signature.features.items()}
    x = keras.layers.Dropout(0.3, seed=5)(keras.layers.Concatenate()(list(inputs.values())))
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(x))
    optimizer = keras.optimizers.Adam(0.05)
    model.compile(optimizer, "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")], jit_compile=False)
    return model, [keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=0, factor=0.5, min_delta=0.02)]


def killed_in_a_validation(signature: Signature, options: ModelOptions) -> tuple[keras.Model, list[Any]]:
    """`watches_validation`; the first process that takes its second step of a test is killed, once.

    The setting `kill_once` names a file that it makes before. Without it nothing happens.
    """
    model, callbacks = watches_validation(signature, options)
    plain, marker, steps = model.test_step, options.extra.get("kill_once"), []

    def count() -> Any:
        steps.append(1)
        if marker is not None and len(steps) == 2:
            with contextlib.suppress(FileExistsError), open(str(marker), "x"):
                os.kill(os.getpid(), signal.SIGKILL)
        return np.float32(0)

    def test_step(data: Any) -> Any:
        with tf.control_dependencies([tf.numpy_function(count, [], tf.float32)]):
            return plain(data)

    object.__setattr__(model, "test_step", test_step)  # bypasses Keras' tracking
    return model, callbacks


def waits_in_its_second_epoch(signature: Signature, options: ModelOptions) -> tuple[keras.Model, list[Any]]:
    """`momentum` with an accuracy, whose second epoch begins when the file in the environment's WAIT_FOR is there."""
    model = logistic(signature, options)
    model.compile(keras.optimizers.SGD(0.25), "binary_crossentropy", metrics=["accuracy"], jit_compile=False)
    path = os.environ.get("WAIT_FOR", os.devnull)

    def wait(epoch: int, logs: dict[str, Any] | None = None) -> None:
        if epoch == 1:
            until(lambda: os.path.exists(path))

    return model, [keras.callbacks.LambdaCallback(on_epoch_begin=wait)]


class SleepsOnRankOne(keras.callbacks.Callback):
    """Sleeps before each step, on the second of the models that this process builds."""

    made = itertools.count()

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds * (next(self.made) % 2)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Called before each step."""
        time.sleep(self._seconds)


def sleepy(signature: Signature, options: ModelOptions) -> tuple[keras.Model, list[Any]]:
    """Logistic regression, `SleepsOnRankOne`."""
    return logistic(signature, options), [SleepsOnRankOne(0.15)]


class SleepsAlways(keras.callbacks.Callback):
    """Sleeps before each step."""

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Called before each step."""
        time.sleep(0.05)


def slowly(signature: Signature, options: ModelOptions) -> tuple[keras.Model, list[Any]]:
    """Logistic regression, at most 20 steps a second."""
    return logistic(signature, options), [SleepsAlways()]


class SleepsByRow(keras.callbacks.Callback):
    """Sleeps before each step for each of the rank's rows, on rank 1 twice as long."""

    def __init__(self, row_s: float, global_batch: int) -> None:
        super().__init__()
        self._batch_s = row_s * global_batch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Called before each step."""
        exchange = exchange_of(self.model.optimizer)
        time.sleep(self._batch_s * exchange.scale * (2 if exchange.communicator.rank == 1 else 1))


def sleeps_by_row(signature: Signature, options: ModelOptions) -> tuple[keras.Model, list[Any]]:
    """Logistic regression, `SleepsByRow` with 4 ms a row; a row of times for each step."""
    metrics.ROW_EVERY_S = 0.0
    return logistic(signature, options), [SleepsByRow(0.004, options.global_batch)]


def drops(signature: Signature, options: ModelOptions) -> tuple[keras.Model, list[Any]]:
    """A dense net of one image with batch normalisation, dropout and `Noise`.

    The settings `kill_at` and `kill_once`: the first process that ends this step makes that file and is killed.
    `dropout` and `rate`: the share that is dropped, the learning rate.
    """
    ((name, spec),) = signature.features.items()
    inputs = keras.Input(spec.shape, dtype=spec.dtype, name=name)
    x = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(inputs))
    # No bias before batch normalisation: its gradient is rounding, which Adam would divide by its own size.
    x = keras.layers.BatchNormalization()(keras.layers.Dense(16, use_bias=False)(x))
    x = Noise()(keras.layers.Dropout(float(options.extra.get("dropout", 0.3)))(keras.layers.ReLU()(x)))
    model = keras.Model({name: inputs}, keras.layers.Dense(signature.num_classes or 1)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    rate = float(options.extra.get("rate", 0.05))
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"], jit_compile=False)

    def killed(batch: int, logs: dict[str, Any] | None = None) -> None:
        if model.optimizer.iterations.numpy() == options.extra.get("kill_at"):
            with contextlib.suppress(FileExistsError), open(str(options.extra["kill_once"]), "x"):
                os.kill(os.getpid(), signal.SIGKILL)

    return model, [keras.callbacks.LambdaCallback(on_train_batch_end=killed)]


@keras.saving.register_keras_serializable("tests")
class Looks(keras.layers.Layer):
    """Ends the process at a value that is no number."""

    def call(self, x: Any) -> Any:
        """The same values."""

        def look(values: Any) -> Any:
            if np.isnan(values).any():
                os.abort()
            return values

        return tf.ensure_shape(tf.numpy_function(look, [x], tf.float32), x.shape)


def dies_of_a_sample(signature: Signature, options: ModelOptions) -> keras.Model:
    """Logistic regression; native code ends the process at a sample whose first feature is no number."""
    inputs = {n: keras.Input(s.shape, dtype=s.dtype, name=n) for n, s in signature.features.items()}
    x = Looks()(keras.layers.Concatenate()(list(inputs.values())))
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(x))
    model.compile("sgd", "binary_crossentropy", jit_compile=False)
    return model


def stacked(signature: Signature, options: ModelOptions) -> tuple[keras.Model, list[Any]]:
    """Dense layers with dropout and penalties, a callback that sets the rate, and a rank that fails when told to."""
    inputs = {n: keras.Input(s.shape, dtype=s.dtype, name=n) for n, s in signature.features.items()}
    x = keras.layers.Concatenate(name="joined")(list(inputs.values()))
    for number in range(3):
        x = keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2", name=f"dense_{number}")(x)
        x = keras.layers.Dropout(0.2, seed=number, name=f"dropout_{number}")(x)
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid", name="last")(x), name="stacked")
    model.compile("adam", "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")], jit_compile=False)
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="auc", mode="max", factor=0.5, patience=0, min_delta=0.05)
    return model, [plateau, FailOnce()]
