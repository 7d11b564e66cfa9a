"""Scaling rules, warm-up, momentum that follows the rate, and LARS against its own formula in NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.storage.errors import ConfigError
from tests.training._fit_ranks import alone, assert_as_one, fresh, on_ranks, precision

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)],
)
def test_rules(rule: Any, expected: float) -> None:
    from lockstep.training.steps.optimizers import factor_of

    assert factor_of(rule, 1024, 256) == expected


def test_a_loss_scale_is_taken_off_and_any_other_optimizer_is_itself() -> None:
    import keras

    from lockstep.training.steps.optimizers import without_loss_scale

    adam = keras.optimizers.Adam()
    scaled = keras.optimizers.LossScaleOptimizer(adam)
    assert without_loss_scale(adam) is adam and without_loss_scale(None) is None
    assert without_loss_scale(scaled) is adam
    # The one that counts steps is the one that Keras hands the gradients to.
    weight = keras.Variable(np.ones(2, np.float32))
    scaled.build([weight])
    scaled.apply([keras.ops.ones(2) * scaled.dynamic_scale], [weight])
    assert int(without_loss_scale(scaled).iterations) == 1


def test_warm_up_rises_in_a_line_and_survives_saving() -> None:
    import keras

    from lockstep.training.steps.optimizers import WarmUp

    schedule = WarmUp(0.1, 4.0, start=1.0, warm_up_steps=5)
    rates = [float(schedule(step)) for step in range(8)]
    np.testing.assert_allclose(rates, [0.16, 0.22, 0.28, 0.34, 0.4, 0.4, 0.4, 0.4], rtol=1e-6)
    # Two micro-batches a step, over a schedule of the model's own, which sees steps.
    inner = keras.optimizers.schedules.PiecewiseConstantDecay([2], [1.0, 0.5])
    schedule = WarmUp(inner, 2.0, calls_per_step=2)
    assert [float(schedule(call)) for call in range(8)] == [2.0] * 6 + [1.0] * 2
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(schedule))
    assert [float(again(call)) for call in range(8)] == [float(schedule(call)) for call in range(8)]
    for wrong in ({"factor": 0.0}, {"start": -1.0}, {"warm_up_steps": -1}, {"calls_per_step": 0}):
        with pytest.raises(ConfigError, match="invalid arguments of a learning rate"):
            WarmUp(0.1, **wrong)


def steps_of(optimizer: Any, weights: list[np.ndarray], gradients: list[list[np.ndarray]]) -> list[np.ndarray]:
    """Variables after a step for each list of gradients; names tell kernels from biases."""
    import keras

    names = ["kernel", "bias", "gamma", "table"]
    variables = [keras.Variable(w, name=name, dtype="float64") for w, name in zip(weights, names, strict=False)]
    optimizer.build(variables)
    for step in gradients:
        optimizer.apply([keras.ops.convert_to_tensor(g) for g in step], variables)
    return [np.asarray(v) for v in variables]


def test_momentum_follows_the_rate() -> None:
    """Equation 10 of Goyal et al.; with a constant rate no bit differs from Keras' SGD, which rounds 0.9 to float32."""
    import keras

    from lockstep.training.steps.optimizers import CorrectedSGD, WarmUp

    rng = np.random.default_rng(0)
    w, gradients = rng.standard_normal(5), [[rng.standard_normal(5)] for _ in range(6)]
    with precision("float64"):
        rates = [0.1 * (0.2 + 0.8 * min(1, (i + 1) / 4)) for i in range(6)]
        expected, velocity = w.copy(), np.zeros(5)
        for i, (gradient,) in enumerate(gradients):
            velocity = 0.875 * velocity * (rates[i] / rates[i - 1] if i else 1.0) + rates[i] * gradient
            expected -= velocity
        schedule = WarmUp(0.1, start=0.2, warm_up_steps=4)
        (mine,) = steps_of(CorrectedSGD(schedule, momentum=0.875), [w], gradients)
        np.testing.assert_allclose(mine, expected, rtol=1e-12)
        (lagging,) = steps_of(keras.optimizers.SGD(schedule, momentum=0.875), [w], gradients)
        assert not np.allclose(lagging, expected)
        for options in ({"momentum": 0.9, "nesterov": True}, {"momentum": 0.0}):
            pair = [
                steps_of(kind(0.1, weight_decay=0.01, **options), [w], gradients)[0]
                for kind in (CorrectedSGD, keras.optimizers.SGD)
            ]
            assert np.array_equal(pair[0], pair[1])


def test_lars_is_its_formula() -> None:
    """Also a variable and a gradient of zeros, and what is left out of the adaptation."""
    import keras

    from lockstep.training.steps.optimizers import LARS

    rng = np.random.default_rng(1)
    weights = [rng.standard_normal((3, 2)), rng.standard_normal(2), rng.standard_normal((2, 2)), np.zeros((2, 2))]
    gradients = [[rng.standard_normal(w.shape) for w in weights] for _ in range(5)]
    gradients[2][0][:] = 0
    expected, velocities = [w.copy() for w in weights], [np.zeros_like(w) for w in weights]
    for step in gradients:
        for i, gradient in enumerate(step):
            w, size, slope = expected[i], np.linalg.norm(expected[i]), np.linalg.norm(gradient)
            if i in (0, 3):  # kernel and table; bias has one dimension, gamma its name
                local = 0.02 * size / (slope + 0.1 * size) if size and slope else 1.0
                gradient = local * (gradient + 0.1 * w)
            velocities[i] = 0.8 * velocities[i] + 0.5 * gradient
            expected[i] = w - velocities[i]
    with precision("float64"):
        optimizer = LARS(0.5, momentum=0.8, trust=0.02, weight_decay=0.1)
        for mine, value in zip(steps_of(optimizer, weights, gradients), expected, strict=True):
            np.testing.assert_allclose(mine, value, rtol=1e-12, atol=1e-15)
        again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
        assert again.get_config() == optimizer.get_config()
        assert (again.trust, again.decay, again.exclude) == (0.02, 0.1, ("bias", "beta", "gamma"))
    with pytest.raises(ConfigError, match="LARS got invalid arguments"):
        LARS(trust=0)


def linear_model(optimizer: Any) -> Any:
    def make() -> Any:
        import keras

        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        model.compile(optimizer(), "mse")
        return model

    return make


def test_lars_on_uneven_ranks_and_in_a_file(tmp_path: Path) -> None:
    import keras

    from lockstep.training.steps.optimizers import LARS

    rng = np.random.default_rng(3)
    x, y = rng.standard_normal((12, 5)), rng.standard_normal((12, 1))
    make = linear_model(lambda: LARS(1.0, weight_decay=0.01, trust=0.1, global_clipnorm=0.5))
    with precision("float64"):
        ranks = on_ranks(make, x, y, shares=(slice(0, 5), slice(5, 12)), steps=20)
        assert_as_one(alone(make, x, y, steps=20), ranks)
    ranks[0].save(tmp_path / "model.keras")
    assert type(keras.models.load_model(tmp_path / "model.keras").optimizer) is LARS


@pytest.mark.parametrize(
    ("optimizer", "options", "factor", "peak", "warm", "note"),
    [
        ("SGD", {"momentum": 0.9}, 4.0, 0.4, 10, None),
        ("AdamW", {}, 4.0, 0.4, 0, "decoupled weight decay"),
        ("Adam", {}, 4.0, 0.4, 0, "sqrt is usual"),
    ],
)
def test_what_was_done_is_told(
    optimizer: str, options: dict[str, Any], factor: float, peak: float, warm: int, note: str | None
) -> None:
    import keras

    from lockstep.training.steps.optimizers import CorrectedSGD, WarmUp, scale_learning_rate

    model = fresh(linear_model(lambda: getattr(keras.optimizers, optimizer)(0.1, **options)))
    told = scale_learning_rate(model, "linear", global_batch=64, base_batch=16, warm_up_steps=warm).to_json()
    assert (told["factor"], told["warm_up_steps"]) == (factor, warm)
    assert told["peak"] == pytest.approx(peak)
    assert note is None or note in " ".join(told["notes"])
    assert told["momentum_correction"] == isinstance(model.optimizer, CorrectedSGD) == (optimizer == "SGD")
    if warm:
        assert isinstance(model.optimizer._learning_rate, WarmUp)
    else:  # callbacks may still set it
        assert float(model.optimizer.learning_rate.numpy()) == pytest.approx(peak)
    model.optimizer.build(model.trainable_variables)
    with pytest.raises(ConfigError, match="already built"):
        scale_learning_rate(model, "linear", global_batch=64, base_batch=16)


def test_momentum_is_corrected_where_flags_change_the_rate_alone() -> None:
    """Micro-batches wrap a schedule, whose rates stay what they are: the step is that of whole batches."""
    import keras

    from lockstep.training.steps.optimizers import CorrectedSGD, scale_learning_rate

    def scaled(**options: Any) -> tuple[type, Any]:
        rate = keras.optimizers.schedules.CosineDecay(0.1, 10)
        model = fresh(linear_model(lambda: keras.optimizers.SGD(rate, momentum=0.9)))
        given = model.optimizer
        told = scale_learning_rate(model, global_batch=8, **options)
        assert model.optimizer is given, "what compile was given is saved with the model"
        assert told.momentum_correction == (type(given) is CorrectedSGD)
        return type(given), float(given._learning_rate(4))

    assert scaled(rule="none", base_batch=None, calls_per_step=2) == (keras.optimizers.SGD, pytest.approx(0.0904508))
    assert scaled(rule="none", base_batch=None, warm_up_steps=2)[0] is CorrectedSGD
    assert scaled(rule="linear", base_batch=4)[0] is CorrectedSGD
