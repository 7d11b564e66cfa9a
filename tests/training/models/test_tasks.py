"""The loss of several tasks: that of plain Keras models of each, and the formula of learned weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lockstep.features.schema.signature import DATASET, Signature, TensorSpec
from lockstep.storage.errors import ConfigError

pytestmark = pytest.mark.slow
NUMBER = TensorSpec(shape=(1,), dtype="float32")
SIGNATURE = Signature(
    features={DATASET: TensorSpec(shape=(), dtype="int64"), "a": NUMBER, "b": NUMBER},
    label=TensorSpec(shape=(), dtype="int64"),
    num_classes=3,
    tasks=(3, 2),
)


def batch() -> tuple[dict[str, Any], np.ndarray]:
    """Five rows of the first task and three of the second."""
    rng = np.random.default_rng(0)
    task = np.array([0, 1, 0, 0, 1, 0, 1, 0])
    x = {"a": rng.normal(size=(8, 1)).astype("f4"), "b": rng.normal(size=(8, 1)).astype("f4"), DATASET: task}
    return x, np.where(task == 0, rng.integers(0, 3, 8), rng.integers(0, 2, 8))


def gradients(tasks: str) -> tuple[Any, dict[str, np.ndarray], float]:
    """The model with this --tasks, its gradients by the end of each weight's path, and its loss."""
    import tensorflow as tf

    from lockstep.training.models import ModelOptions, build

    options = ModelOptions(tasks=tasks, extra={"width": 4, "layers": 1, "dropout": 0.0})
    model = build("mlp", SIGNATURE, options).model
    if tasks == "uncertainty":
        model.log_variances.assign([0.7, -0.4])
    x, y = batch()
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x, y, model(x, training=True), None, True)
    found = tape.gradient(loss, [one.value for one in model.trainable_variables])
    names = ["/".join(one.path.split("/")[-2:]) for one in model.trainable_variables]
    return model, {name: np.asarray(one) for name, one in zip(names, found, strict=True)}, float(loss)


def plain(model: Any, weights: tuple[float, float]) -> tuple[dict[str, np.ndarray], list[float]]:
    """The gradients of two Keras models of one trunk, each fed the rows of its task, and the mean loss of each."""
    import keras
    import tensorflow as tf

    hidden = next(layer for layer in model.layers if isinstance(layer, keras.layers.Dense) and layer.units == 4)
    trunk = keras.layers.Dense(4, "relu")
    heads = [keras.layers.Dense(width, "softmax") for width in SIGNATURE.tasks or ()]
    inputs = keras.Input((2,))
    models = [keras.Model(inputs, head(trunk(inputs))) for head in heads]
    trunk.set_weights(hidden.get_weights())
    for number, head in enumerate(heads):
        head.set_weights(model.get_layer(f"_task_{number}").get_weights())
    x, y = batch()
    rows, means = np.hstack([x["a"], x["b"]]), []
    with tf.GradientTape() as tape:
        total = tf.constant(0.0)
        for number, one in enumerate(models):
            mine = x[DATASET] == number
            mean = keras.losses.SparseCategoricalCrossentropy()(y[mine], one(rows[mine]))
            means.append(mean)
            total += weights[number] * mean * mine.mean()
    variables = [*trunk.trainable_variables, *(v for head in heads for v in head.trainable_variables)]
    names = [f"{layer}/{kind}" for layer in (hidden.name, "_task_0", "_task_1") for kind in ("kernel", "bias")]
    found = tape.gradient(total, [one.value for one in variables])
    return {name: np.asarray(one) for name, one in zip(names, found, strict=True)}, [float(mean) for mean in means]


@pytest.mark.parametrize(
    ("tasks", "weights"),
    [("equal", (1, 1)), ("2,0.5", (2, 0.5)), ("uncertainty", (np.exp(-0.7), np.exp(0.4)))],
)
def test_gradients_are_those_of_plain_keras_models(tasks: str, weights: tuple[float, float]) -> None:
    model, mine, _ = gradients(tasks)
    wanted, _ = plain(model, weights)
    for name, value in wanted.items():
        np.testing.assert_allclose(mine[name], value, rtol=2e-5, atol=1e-7, err_msg=name)
    assert min(np.abs(value).max() for value in wanted.values()) > 1e-3


def test_learned_weights_are_those_of_the_formula() -> None:
    """L = sum of share_t (exp(-s_t) L_t + s_t / 2); its derivative by s_t is share_t (1/2 - exp(-s_t) L_t)."""
    model, mine, loss = gradients("uncertainty")
    _, means = plain(model, (1, 1))
    shares, logs = np.array([5 / 8, 3 / 8]), np.array([0.7, -0.4])
    assert loss == pytest.approx(float((shares * (np.exp(-logs) * means + logs / 2)).sum()), rel=1e-5)
    (name,) = [name for name in mine if name.endswith("log_variances")]
    np.testing.assert_allclose(mine[name], shares * (0.5 - np.exp(-logs) * means), rtol=1e-5, atol=1e-6)


def test_learned_weights_are_reported_and_fixed_ones_are_not() -> None:
    model, _, _ = gradients("uncertainty")
    x, y = batch()
    found = model.compute_metrics(x, y, model(x))
    assert [float(found[f"weight_{number}"]) for number in (0, 1)] == pytest.approx([np.exp(-0.7), np.exp(0.4)])
    model.log_variances.assign([0.0, 0.0])
    found = model.compute_metrics(x, y, model(x))
    assert float(found["weight_0"]) == pytest.approx((np.exp(-0.7) + 1) / 2), "the mean over steps"
    fixed, _, _ = gradients("2,0.5")
    assert "weight_0" not in fixed.compute_metrics(x, y, fixed(x))


def test_a_resnet_is_a_trunk() -> None:
    """Each row has the probabilities of its task's output layer on the trunk, which plain Keras computes."""
    import keras

    from lockstep.training.models import ModelOptions, build

    features = {DATASET: SIGNATURE.features[DATASET], "image": TensorSpec(shape=(8, 8, 1), dtype="uint8")}
    signature = Signature(features=features, label=SIGNATURE.label, num_classes=3, tasks=(3, 2))
    model = build("resnet8", signature, ModelOptions(tasks="equal")).model
    rng = np.random.default_rng(0)
    x = {"image": rng.integers(0, 256, (6, 8, 8, 1)).astype("u1"), DATASET: np.array([0, 1, 1, 0, 0, 1])}
    found = np.asarray(model(x, training=False))
    heads = [model.get_layer(f"_task_{number}") for number in (0, 1)]
    trunk = keras.Model(model.input, heads[0].input)
    hidden = np.asarray(trunk(x, training=False))
    assert heads[0].input is heads[1].input and hidden.ndim == 2
    for row, task in enumerate(x[DATASET]):
        kernel, bias = heads[task].get_weights()
        scores = np.exp(hidden[row] @ kernel + bias)
        np.testing.assert_allclose(found[row, : len(scores)], scores / scores.sum(), rtol=1e-4)
        assert found[row, len(scores) :].sum() == 0


def test_a_model_with_one_output_layer_is_refused() -> None:
    from lockstep.training.models import ModelOptions, build

    with pytest.raises(ConfigError, match="one output layer"):
        build("logistic", SIGNATURE, ModelOptions(tasks="equal"))
