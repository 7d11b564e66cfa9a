"""Models by name: what they are made of, what they refuse, and how they are exported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from lockstep.features.schema.signature import Signature, TensorSpec
from lockstep.storage.errors import ConfigError
from lockstep.training.batches.augmenting import soft_signature
from lockstep.training.models import ModelOptions, build, function_of
from tests.training._tiny import encoder_of, write_images

pytestmark = pytest.mark.slow

NUMBER = TensorSpec(shape=(), dtype="float32")
TABLE = Signature(
    features={"a": TensorSpec(shape=(1,), dtype="float32"), "page": TensorSpec(shape=(5,), dtype="float32")},
    label=NUMBER,
    num_classes=None,
)


def images(height: int, width: int, channels: int) -> Signature:
    image = TensorSpec(shape=(height, width, channels), dtype="uint8")
    return Signature(features={"image": image}, label=TensorSpec(shape=(), dtype="int64"), num_classes=10)


def test_resnet20_has_the_papers_layers() -> None:
    """0.27 M parameters and 20 weighted layers: He et al., table 6; two more convolutions on the shortcuts."""
    import keras

    model = build("resnet20", images(32, 32, 3), ModelOptions()).model
    assert 0.27e6 < model.count_params() < 0.28e6
    main = [x for x in model.layers if isinstance(x, keras.layers.Conv2D) and x.kernel_size == (3, 3)]
    assert len(main) + 1 == 20
    assert model.layers[-2].input.shape[1:] == (8, 8, 64)


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_resnet_has_the_momentum_that_dgc_takes_over_if_asked(nesterov: bool) -> None:
    options = ModelOptions() if nesterov else ModelOptions(extra={"nesterov": False})
    optimizer = build("resnet8", images(8, 8, 1), options).model.optimizer
    assert (optimizer.momentum, optimizer.nesterov) == (0.9, nesterov)


@pytest.mark.parametrize(("middle", "spread"), [(-6.5, 1.0), (-6.5, 0.3), (0.0, 2.0), (0.0, 0.1), (3.0, 1.0)])
def test_the_auc_of_logistic_in_training_is_near_the_exact_one(middle: float, spread: float) -> None:
    """Also where 0.2 % are yes, and where a model that has just begun tells rows hardly apart."""
    model = build("logistic", TABLE, ModelOptions()).model
    metric = next(metric for metric in model._compile_metrics._user_metrics if metric.name == "auc")
    rng = np.random.default_rng(0)
    scores = 1 / (1 + np.exp(-(middle + spread * rng.standard_normal(100_000))))
    labels = (rng.random(100_000) < scores).astype(np.float32)
    metric.update_state(labels, scores.astype(np.float32)[:, None])
    assert float(metric.result()) == pytest.approx(roc_auc_score(labels, scores), abs=0.006)


@pytest.mark.parametrize(("size", "depth"), [((28, 28, 1), 8), ((17, 9, 4), 14)])  # any size and channels
def test_resnets_of_other_sizes(size: tuple[int, int, int], depth: int) -> None:
    from lockstep.training.steps.batchnorm import GhostBatchNormalization, statistics_of

    model = build(f"resnet{depth}", images(*size), ModelOptions(group_rows=2)).model
    assert model(np.zeros((3, *size), np.uint8)).shape == (3, 10)
    ghosts = [x for x in model.layers if isinstance(x, GhostBatchNormalization)]
    assert len(ghosts) == depth - 1
    assert len(statistics_of(model)) == 2 * len(ghosts)


def test_shares_of_classes_need_a_loss_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import keras

    from lockstep.training import models

    soft = soft_signature(images(8, 8, 1))
    model = build("resnet8", soft, ModelOptions()).model
    assert isinstance(model._compile_loss._user_loss, keras.losses.CategoricalCrossentropy)
    for loss in (keras.losses.SparseCategoricalCrossentropy(), "sparse_categorical_crossentropy"):
        model.compile(loss=loss)
        monkeypatch.setattr(models, "function_of", lambda _name: lambda _signature, _options: model)
        with pytest.raises(ConfigError, match="shares of classes"):
            build("own:model", soft, ModelOptions())
        assert build("own:model", images(8, 8, 1), ModelOptions()).model is model


def test_logistic_begins_at_one_half() -> None:
    model = build("logistic", TABLE, ModelOptions(learning_rate=0.25)).model
    out = model({"a": np.ones((3, 1), np.float32), "page": np.ones((3, 5), np.float32)})
    assert np.asarray(out).tolist() == [[0.5]] * 3
    assert float(model.optimizer.learning_rate.numpy()) == 0.25
    assert model.count_params() == 7


def test_ids_make_the_same_logistic_model_as_columns() -> None:
    """Id 0 is the row without a 1; an id twice in a sequence counts twice, as two ones would."""
    import keras

    number = TensorSpec(shape=(1,), dtype="float32")
    ids = {"page": TensorSpec(shape=(3,), dtype="int64", ids=6), "item": TensorSpec(shape=(1,), dtype="int64", ids=4)}
    columns = {"page": TensorSpec(shape=(5,), dtype="float32"), "item": TensorSpec(shape=(3,), dtype="float32")}
    rng = np.random.default_rng(0)
    plain = {"n": rng.standard_normal((40, 1)).astype(np.float32)}
    chosen = {name: rng.integers(0, spec.ids or 0, (40, *spec.shape)) for name, spec in ids.items()}
    y = rng.integers(0, 2, 40).astype(np.float32)
    found = []
    for specs in (ids, columns):
        x = dict(chosen) if specs is ids else {n: np.eye(6)[v][..., 1:].sum(axis=1) for n, v in chosen.items()}
        x = {**plain, **{n: v[:, : specs[n].shape[0]].astype(specs[n].dtype) for n, v in x.items()}}
        signature = Signature(features={"n": number, **specs}, label=NUMBER, num_classes=None)
        model = build("logistic", signature, ModelOptions()).model
        # Adam has its own way with the sparse gradients of an embedding; ranks exchange them as whole tensors.
        model.compile(keras.optimizers.SGD(1.0), "binary_crossentropy", run_eagerly=True)
        model.fit(x, y, epochs=2, batch_size=20, shuffle=False, verbose=0)
        found.append(np.asarray(model(x)))
    assert found[0].std() > 0.01
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "signature", "words"),
    [
        ("resnet21", images(8, 8, 1), "no model `resnet21`"),  # not 6n + 2
        ("transformers", TABLE, "no model `transformers`"),
        ("no_such_module:f", TABLE, "cannot be imported"),
        ("tests.training._tiny:nothing", TABLE, "has no function `nothing`"),
        ("resnet20", TABLE, "one image and one class"),
        ("logistic", images(8, 8, 1), "yes-or-no label"),
    ],
)
def test_what_cannot_be_built(name: str, signature: Signature, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(name, signature, ModelOptions())


@pytest.mark.parametrize("returned", [None, "model", ("a", "b")])
def test_a_function_must_return_a_compiled_model(returned: Any) -> None:
    from lockstep.training.models import check_built

    with pytest.raises(ConfigError, match="cannot be trained"):
        check_built("mine:model", returned)


def test_names_are_found_without_building() -> None:
    assert callable(function_of("resnet56"))


def test_an_export_loads_as_plain_keras(tmp_path: Path) -> None:
    import keras

    from lockstep.training.models.on_disk import export
    from lockstep.training.steps.batchnorm import GhostBatchNormalization

    manifest = write_images(tmp_path / "data")
    signature = encoder_of(manifest).signature
    model = build("resnet8", signature, ModelOptions(group_rows=2)).model
    for layer in model.layers:
        if isinstance(layer, GhostBatchNormalization):
            layer.moving_mean.assign(np.linspace(-1, 1, layer.moving_mean.shape[0]))
    sampled = {"column": "label", "shares": {"3": "1/10"}, "splits": ["train"]}
    own = {**manifest.created_by, "config": {"sampled": sampled}}
    files = export(model, str(tmp_path / "out"), str(tmp_path / "data"), replace(manifest, created_by=own), signature)
    assert json.loads((tmp_path / "out" / "schema.json").read_bytes()) == {**manifest.schema, "sampled": sampled}
    assert sorted(file["name"] for file in files) == ["model.keras", "schema.json", "signature.json"]
    loaded = keras.models.load_model(tmp_path / "out" / "model.keras")
    assert {type(layer).__module__.split(".")[0] for layer in loaded.layers} == {"keras"}
    x = np.random.default_rng(0).integers(0, 255, (4, 8, 8, 1), dtype=np.uint8)
    np.testing.assert_array_equal(np.asarray(loaded(x)), np.asarray(model(x)))
    assert any(isinstance(layer, GhostBatchNormalization) for layer in model.layers), "the model itself is unchanged"


OWN = """
def boom(signature, options):
    return {}["no such layer"]
"""


def test_what_an_own_function_raises_is_told_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_models.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("import os\n\n1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="raised KeyError") as caught:  # final: a restart would raise it again
        build("own_models:boom", TABLE, ModelOptions())
    assert "no such layer" in caught.value.got and "own_models.py:3" in caught.value.got
    with pytest.raises(ConfigError, match="cannot be imported") as caught:
        function_of("own_broken:build")
    assert "division by zero" in caught.value.got and "own_broken.py:3" in caught.value.got
