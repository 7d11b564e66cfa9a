"""A model's own classes: refused before the training exactly where Keras cannot load the model that it has saved."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from lockstep.storage.errors import ConfigError
from lockstep.training.models import ModelOptions
from lockstep.training.models.own_classes import check_loads
from tests.training._tiny import write_table

layers = keras.layers
MAKES: dict[str, Any] = {
    "layer": (layers.Dense, {}, lambda one: {"layer": one}),
    "nested layer": (layers.Dense, {}, lambda one: {"layer": layers.TimeDistributed(one)}),
    "layer in a model": (layers.Dense, {}, lambda one: {"layer": keras.Sequential([layers.Dense(4), one])}),
    "loss": (keras.losses.Loss, {"call": lambda self, y, p: keras.ops.mean(y - p)}, lambda one: {"loss": one}),
    "metric": (keras.metrics.Mean, {}, lambda one: {"metrics": [one]}),
    "optimizer": (keras.optimizers.SGD, {}, lambda one: {"optimizer": one}),
    "initializer": (
        keras.initializers.Initializer,
        {"__call__": lambda self, shape, dtype=None: keras.ops.zeros(shape)},
        lambda one: {"layer": layers.Dense(2, kernel_initializer=one)},
    ),
    "constraint": (
        keras.constraints.Constraint,
        {"__call__": lambda self, value: value},
        lambda one: {"layer": layers.Dense(2, kernel_constraint=one)},
    ),
}
"""By kind the class that an own one extends, its methods, and how a model has one of it."""


def own_class(base: type, methods: Mapping[str, Any], *, keeps: bool) -> type:
    """A class of `base` with an argument `given`, which its get_config keeps or not."""

    def made(self: Any, given: Any, **others: Any) -> None:
        base.__init__(self, **({"units": 2} if base is layers.Dense else {}) | others)  # type: ignore[misc] # a base
        self.given = given

    def get_config(self: Any) -> dict[str, Any]:
        return {**base.get_config(self), "given": self.given}  # type: ignore[attr-defined] # all have it

    more = {"get_config": get_config} if keeps else {}
    return type("Own", (base,), {"__module__": __name__, "__init__": made, **methods, **more})


def compiled(layer: Any = None, loss: Any = "mse", optimizer: Any = "sgd", metrics: Any = ()) -> keras.Model:
    """A small model with an own part."""
    inputs = keras.Input((3, 4))
    model = keras.Model(inputs, (layer or layers.Dense(2))(inputs))
    model.compile(optimizer, loss, metrics=list(metrics))
    model.optimizer.build(model.trainable_variables)
    return model


def loads(model: keras.Model, path: Path) -> bool:
    """Whether Keras saves the model, and loads it."""
    try:
        model.save(path)
        keras.models.load_model(path)
    except Exception:  # whatever Keras raises
        return False
    return True


def refused(model: keras.Model, registered: frozenset[str] | None = None) -> ConfigError | None:
    known = frozenset(keras.saving.get_custom_objects()) if registered is None else registered
    try:
        check_loads(model, "mine:build", known)
    except ConfigError as error:
        return error
    return None


@pytest.mark.parametrize("keeps", [True, False], ids=["with get_config", "without"])
@pytest.mark.parametrize("registers", [True, False], ids=["registered", "not registered"])
@pytest.mark.parametrize("kind", MAKES)
def test_a_model_is_refused_exactly_where_keras_cannot_load_it(
    tmp_path: Path, kind: str, registers: bool, keeps: bool
) -> None:
    base, methods, place = MAKES[kind]
    own = own_class(base, methods, keeps=keeps)
    if registers:
        own = keras.saving.register_keras_serializable(f"{kind}{keeps}")(own)
    model = compiled(**place(own(given=0.5)))
    error = refused(model)
    assert (error is None) == loads(model, tmp_path / "model.keras")
    if not registers:
        assert error is not None and f"{__name__}.Own" in error.what and "not registered" in error.got
        assert "@keras.saving.register_keras_serializable()" in error.next_step
        assert "def get_config(self)" in error.next_step


def test_a_class_that_holds_what_its_configuration_lacks_is_named() -> None:
    @keras.saving.register_keras_serializable("lacks")
    class Wraps(keras.layers.Layer):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def call(self, x: Any) -> Any:
            return self.inner(x)

    error = refused(compiled(keras.Sequential([Wraps(layers.Dense(2))])))
    assert error is not None and error.what.endswith("Wraps") and "get_config" in error.got


@pytest.mark.parametrize("kind", MAKES)
def test_an_argument_with_a_default_is_kept_or_refused(tmp_path: Path, kind: str) -> None:
    """Keras loads such a class without it, with another value."""
    base, methods, place = MAKES[kind]
    error = refused(model := compiled(**place(keras.saving.register_keras_serializable(f"default {kind}")(
        type("Default", (base,), {"__module__": __name__, "__init__": with_default(base), **methods})
    )(given=0.5))))  # fmt: skip
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    given = [one.given for one in parts_of(loaded) if type(one).__name__ == "Default"]
    assert len(given) == 1
    assert (error is None) == (given == [0.5])
    assert error is None or "lacks given" in error.got


@pytest.mark.parametrize("kind", MAKES)
def test_a_class_with_the_arguments_of_keras_is_not_refused(tmp_path: Path, kind: str) -> None:
    """Keras leaves some of them out of configurations, such as lora_rank of Dense."""
    base, methods, place = MAKES[kind]
    own = keras.saving.register_keras_serializable(f"plain {kind}")(
        type("Plain", (base,), {"__module__": __name__, **methods})
    )
    model = compiled(**place(own(2) if base is layers.Dense else own()))
    assert refused(model) is None and loads(model, tmp_path / "model.keras")


def with_default(base: type) -> Any:
    def made(self: Any, given: float = 1.0, **others: Any) -> None:
        base.__init__(self, **({"units": 2} if base is layers.Dense else {}) | others)  # type: ignore[misc] # a base
        self.given = given

    return made


def parts_of(model: keras.Model) -> list[Any]:
    """Layers and what they hold, the loss, the metrics and the optimizer."""
    inside = [one for one in model._flatten_layers() if one is not model]
    held = [getattr(one, name, None) for one in inside for name in ("kernel_initializer", "kernel_constraint")]
    metrics = getattr(model._compile_metrics, "_user_metrics", None) or []
    return [*inside, *held, model.loss, *metrics, model.optimizer]


@keras.saving.register_keras_serializable("named")
def shifted(y_true: Any, y_pred: Any) -> Any:
    """A loss of a user's own."""
    return keras.ops.mean(y_true - y_pred)


def unknown(y_true: Any, y_pred: Any) -> Any:
    """As `shifted`, but not registered."""
    return shifted(y_true, y_pred)


def test_functions_and_lambdas(tmp_path: Path) -> None:
    losses = (shifted, unknown, keras.losses.mean_squared_error, "mae", lambda y, p: shifted(y, p))
    for number, loss in enumerate(losses):
        error = refused(model := compiled(loss=loss))
        assert (error is None) == loads(model, tmp_path / f"{number}.keras"), loss
    error = refused(compiled(layers.Lambda(lambda x: x)))
    assert error is not None and error.what.endswith("a lambda")


def test_what_is_registered_while_the_models_function_runs_is_refused() -> None:
    model = compiled(loss=shifted)
    error = refused(model, frozenset())
    assert error is not None and error.got == "registered only while the model's function runs"


def test_random_numbers_and_names_are_as_without_the_check() -> None:
    @keras.saving.register_keras_serializable("draws")
    class Draws(keras.layers.Layer):
        def __init__(self, **others: Any) -> None:
            super().__init__(**others)
            self.dropout, self.first = layers.Dropout(0.5), (random.random(), np.random.random())

        def call(self, x: Any) -> Any:
            return self.dropout(x)

    def after(check: bool) -> list[Any]:
        keras.utils.clear_session()
        keras.utils.set_random_seed(3)
        model = compiled(Draws())
        if check:
            assert refused(model) is None
        dense = layers.Dense(3)
        dense.build((2, 2))
        return [random.random(), np.random.random(), dense.name, dense.kernel.numpy().tolist(),
                keras.random.normal((2,)).numpy().tolist()]  # fmt: skip

    assert after(True) == after(False)


@pytest.mark.slow
def test_a_run_ends_before_its_first_step_with_the_class_named(tmp_path: Path) -> None:
    from tests.training.rank.test_fit import train

    write_table(tmp_path / "data")
    with pytest.raises(ConfigError, match=r"but not loaded: the class tests\.training\.models\..*Own"):
        train(str(tmp_path / "data"), tmp_path / "run", 2, f"{__name__}:build")
    assert not list(tmp_path.glob("run/checkpoints/*"))


def build(signature: Any, options: ModelOptions) -> keras.Model:
    """A model with a class that no module registers."""
    inputs = {n: keras.Input(s.shape, dtype=s.dtype, name=n) for n, s in signature.features.items()}
    x = own_class(layers.Dense, {}, keeps=True)(given=1)(layers.Concatenate()(list(inputs.values())))
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x))
    model.compile("sgd", "binary_crossentropy", jit_compile=False)
    return model
