"""--ewc: the Fisher information is that of a loop over rows, and the pull that of plain Keras on one process."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.features.schema.signature import Signature, TensorSpec
from lockstep.storage.errors import ConfigError
from lockstep.training.results.audit import check_run_audit
from lockstep.training.run.checkpoint import tensors_in
from tests.training._fit_ranks import precision
from tests.training._threads import final_tensors
from tests.training._tiny import write_clicks, write_images, write_table
from tests.training.rank.test_fit import assert_no_bit_differs, train
from tests.training.results.test_evaluate import rows_of

pytestmark = pytest.mark.slow
ROWS, SEED, LAMBDA, STEPS, RATE = 64, 7, 30.0, 12, 0.05
FIXED: dict[str, Any] = {"precision": "float64", "global_batch": ROWS, "epochs": STEPS, "seed": SEED}
SET: dict[str, Any] = {"width": 6, "dropout": 0.0}


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """(a day's table, the next day's, a run on the first with --ewc 0)."""
    folder = tmp_path_factory.mktemp("days")
    for name, seed in (("first", 0), ("second", 3)):
        write_table(folder / name, records={"train": ROWS, "test": 30}, seed=seed)
    train(str(folder / "first"), folder / "run", 2, "mlp", **FIXED, extra=SET, ewc=0.0)
    return str(folder / "first"), str(folder / "second"), str(folder / "run")


def exported(run: str | Path) -> Any:
    import keras

    return keras.models.load_model(next(Path(run).rglob("model.keras")))


def fisher_in(run: str | Path) -> list[np.ndarray]:
    (file,) = Path(run).rglob("fisher.safetensors")
    found = tensors_in(np.frombuffer(file.read_bytes(), np.uint8), str(file))
    return [np.array(found[name]) for name in sorted(found)]


def fisher_by_rows(run: str, dataset: str, *, logits: bool = False) -> list[np.ndarray]:
    """The mean of squared gradients, one row after another, of the label that is drawn for it."""
    import keras
    import tensorflow as tf

    from lockstep.training.steps.ewc import drawn_labels

    model, (_, rows) = exported(run), rows_of(dataset, "train")
    predicted = model.predict(rows.x, verbose=0).astype(np.float64)
    if logits:
        predicted = np.exp(predicted) / np.exp(predicted).sum(axis=1, keepdims=True)
    if predicted.shape[1] == 1:
        predicted = np.concatenate([1 - predicted, predicted], axis=1)
    labels = drawn_labels(predicted, SEED, rows.sample_id)
    sums = [np.zeros(one.shape) for one in model.trainable_variables]
    weights = np.ones(len(labels)) if rows.weight is None else rows.weight
    for number, label in enumerate(labels):
        with tf.GradientTape() as tape:
            output = model({name: value[number : number + 1] for name, value in rows.x.items()}, training=False)
            output = tf.nn.softmax(output) if logits else output
            chance = output[0, label] if output.shape[1] > 1 else output[0, 0] if label else 1 - output[0, 0]
            loss = -tf.math.log(chance)
        for one, grad in zip(sums, tape.gradient(loss, model.trainable_variables), strict=True):
            one += weights[number] * keras.ops.convert_to_numpy(grad).astype(np.float64) ** 2
    return [one / weights.sum() for one in sums]


def assert_close(mine: list[np.ndarray], other: list[np.ndarray], relative: float) -> None:
    for one, value in zip(mine, other, strict=True):
        assert np.abs(one - value).max() <= relative * np.abs(value).max(), (one, value)
        assert np.abs(value).max() > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_fisher_information_is_that_of_a_loop_over_rows(
    days: tuple[str, str, str], tmp_path: Path, ranks: int
) -> None:
    first, _, run = days  # of two ranks
    if ranks == 1:
        train(first, tmp_path / "run", 1, "mlp", **FIXED, extra=SET, ewc=0.0)
        run = str(tmp_path / "run")
    assert_close(fisher_in(run), fisher_by_rows(run, first), 1e-6)


def with_statistics(signature: Signature, options: Any) -> Any:
    """Four logits, after a batch normalisation."""
    import keras

    entry = {"image": keras.Input((8, 8, 1), dtype="uint8", name="image")}
    x = keras.layers.Rescaling(1 / 255)(keras.layers.Flatten()(entry["image"]))
    x = keras.layers.BatchNormalization()(keras.layers.Dense(5, activation="tanh")(x))
    model = keras.Model(entry, keras.layers.Dense(4)(x))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    return model


def test_of_classes_with_batch_statistics(tmp_path: Path) -> None:
    """300 rows are two batches, on two ranks one each; moving averages normalise, and are not of the weights."""
    write_images(tmp_path / "images", records={"train": 300, "test": 30})
    data = str(tmp_path / "images")
    train(data, tmp_path / "run", 2, "tests.training.rank.test_ewc:with_statistics", epochs=1, ewc=0.0)
    found = fisher_in(tmp_path / "run")
    assert len(found) == len(exported(tmp_path / "run").trainable_variables) == 6
    assert_close(found, fisher_by_rows(str(tmp_path / "run"), data, logits=True), 1e-5)


def test_rows_count_by_their_weights(tmp_path: Path) -> None:
    write_clicks(tmp_path / "clicks", records={"train": ROWS, "test": 30}, log_odds=-1.0)
    data = str(tmp_path / "clicks")
    train(data, tmp_path / "run", 2, "logistic", **FIXED, ewc=0.0)
    assert_close(fisher_in(tmp_path / "run"), fisher_by_rows(str(tmp_path / "run"), data), 1e-6)


def test_labels_are_drawn_with_the_predicted_probabilities() -> None:
    from lockstep.training.steps.ewc import drawn_labels

    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 40_000)
    drawn = drawn_labels(np.tile([0.1, 0.0, 0.65, 0.25], (len(ids), 1)), SEED, ids)
    shares = np.bincount(drawn, minlength=4) / len(ids)
    assert np.abs(shares - [0.1, 0.0, 0.65, 0.25]).max() < 0.008, "3 standard deviations"
    other = drawn_labels(np.tile([0.1, 0.0, 0.65, 0.25], (len(ids), 1)), SEED + 1, ids)
    assert 0.3 < (drawn == other).mean() < 0.6, "another seed draws others"
    np.testing.assert_array_equal(drawn[5:9], drawn_labels(np.tile([0.1, 0, 0.65, 0.25], (4, 1)), SEED, ids[5:9]))


@precision("float64")
def pulled_by_keras(run: str, dataset: str, strength: float) -> list[np.ndarray]:
    """The weights after SGD on all rows in each step, with the penalty written out."""
    import keras
    import tensorflow as tf

    model, (_, rows) = exported(run), rows_of(dataset, "train")
    fisher, old = fisher_in(run), [one.numpy() for one in model.trainable_variables]
    optimizer = keras.optimizers.SGD(RATE, momentum=0.9)
    for _ in range(STEPS):
        with tf.GradientTape() as tape:
            predicted = model(rows.x, training=True)[:, 0]
            y = rows.y.astype("float64")
            loss = -tf.reduce_mean(y * tf.math.log(predicted) + (1 - y) * tf.math.log(1 - predicted))
            gaps = [one - before for one, before in zip(model.trainable_variables, old, strict=True)]
            loss += strength / 2 * sum(tf.reduce_sum(f * gap**2) for f, gap in zip(fisher, gaps, strict=True))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
    return [one.numpy() for one in model.trainable_variables]


def plain_sgd(signature: Any, options: Any) -> Any:
    """An mlp with the optimizer of `pulled_by_keras`."""
    import keras

    from lockstep.training.models.mlp import mlp

    model = mlp(signature, options)
    model.compile(keras.optimizers.SGD(RATE, momentum=0.9), "binary_crossentropy", jit_compile=False)
    return model


PULLED: list[Any] = [
    (2, {}),
    pytest.param(1, {}, marks=pytest.mark.soak),
    pytest.param(2, {"micro_batches": 2}, marks=pytest.mark.soak),
    pytest.param(2, {"canonical": True}, marks=pytest.mark.soak),
]
OWN = "tests.training.rank.test_ewc:plain_sgd"


@pytest.mark.parametrize(("ranks", "more"), PULLED)
def test_ranks_are_pulled_as_plain_keras_is(
    days: tuple[str, str, str], tmp_path: Path, ranks: int, more: dict[str, Any]
) -> None:
    _, second, first = days
    train(second, tmp_path / "run", ranks, OWN, **FIXED, init_from=first, ewc=LAMBDA, extra=SET, **more)
    mine, oracle = exported(tmp_path / "run").get_weights(), pulled_by_keras(first, second, LAMBDA)
    free, before = pulled_by_keras(first, second, 0.0), exported(first).get_weights()
    assert_close(mine, oracle, 1e-6)
    assert max(np.abs(a - b).max() for a, b in zip(oracle, free, strict=True)) > 0.01, "the pull matters"
    assert max(np.abs(a - b).max() for a, b in zip(oracle, before, strict=True)) > 0.01, "and is no halt"


def test_without_strength_no_bit_differs(days: tuple[str, str, str], tmp_path: Path) -> None:
    _, second, first = days
    plain_and_zero: list[tuple[str, dict[str, Any]]] = [("plain", {}), ("zero", {"ewc": 0.0})]
    for name, more in plain_and_zero:
        train(second, tmp_path / name, 2, "mlp", global_batch=16, epochs=3, init_from=first, extra=SET, **more)
    plain, zero = (final_tensors(str(tmp_path / name)) for name in ("plain", "zero"))
    assert plain.keys() == zero.keys()
    for name, value in plain.items():
        np.testing.assert_array_equal(value, zero[name], name)


def test_earlier_days_count_less_and_less(days: tuple[str, str, str], tmp_path: Path) -> None:
    _, second, first = days
    train(second, tmp_path / "run", 2, "mlp", **FIXED, init_from=first, ewc=LAMBDA, extra=SET)
    own = fisher_by_rows(str(tmp_path / "run"), second)
    expected = [0.9 * before + now for before, now in zip(fisher_in(first), own, strict=True)]
    assert_close(fisher_in(tmp_path / "run"), expected, 1e-6)


NOISY = "tests.training._models:with_callbacks"


@pytest.fixture(scope="module")
def undisturbed(days: tuple[str, str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Path]:
    """(a run with dropout and callbacks, its result, the run that it begins from)."""
    first, second, _ = days
    folder = tmp_path_factory.mktemp("undisturbed")
    train(first, folder / "before", 1, NOISY, ewc=0.0, epochs=2)
    return folder / "run", train(second, folder / "run", 2, NOISY, **again(folder / "before")), folder / "before"


def again(before: Path) -> dict[str, Any]:
    return {"checkpoint_every": 5, "audit": True, "epochs": 4, "ewc": LAMBDA, "init_from": str(before)}


def test_a_killed_run_ends_with_the_same_bits(
    days: tuple[str, str, str], undisturbed: tuple[Path, Any, Path], tmp_path: Path
) -> None:
    from tests.training import _models  # imports TensorFlow

    url, whole, before = undisturbed
    _models.FAIL_AT.update(step=7)
    broken = train(days[1], tmp_path / "broken", 2, NOISY, **again(before))
    assert not _models.FAIL_AT and (whole.restarts, broken.restarts) == (0, 1)
    assert_no_bit_differs((url, whole), (tmp_path / "broken", broken))
    assert_close(fisher_in(url), fisher_in(tmp_path / "broken"), 0.0)
    assert check_run_audit(str(tmp_path / "broken")).ok


def test_a_run_resumes_when_the_earlier_one_is_gone(days: tuple[str, str, str], tmp_path: Path) -> None:
    _, second, first = days
    options: dict[str, Any] = {"global_batch": ROWS, "precision": "float64", "extra": SET, "ewc": LAMBDA}
    train(second, tmp_path / "whole", 1, "mlp", **options, init_from=first, epochs=6)
    shutil.copytree(first, tmp_path / "first")
    for epochs in (3, 6):
        train(second, tmp_path / "run", 1, "mlp", **options, init_from=str(tmp_path / "first"), epochs=epochs)
        shutil.rmtree(tmp_path / "first", ignore_errors=True)
    whole, resumed = (final_tensors(str(tmp_path / name)) for name in ("whole", "run"))
    for name, value in whole.items():
        np.testing.assert_array_equal(value, resumed[name], name)


@pytest.mark.soak
@pytest.mark.parametrize("more", [{"delay": 1}, {"sync_every": 2}])
def test_ways_that_exchange_later_are_pulled_too(
    days: tuple[str, str, str], tmp_path: Path, more: dict[str, Any]
) -> None:
    _, second, first = days
    found = {}
    for strength in (0.0, LAMBDA):
        run = tmp_path / f"{strength}"
        train(second, run, 2, "mlp", **FIXED, init_from=first, ewc=strength, extra=SET, learning_rate=RATE, **more)
        gaps = [a - b for a, b in zip(exported(run).get_weights(), exported(first).get_weights(), strict=True)]
        found[strength] = sum(float(np.sum(f * gap**2)) for f, gap in zip(fisher_in(first), gaps, strict=True))
    assert 0 < found[LAMBDA] < 0.5 * found[0.0]


def test_what_has_no_fisher_information_is_refused_by_name(days: tuple[str, str, str], tmp_path: Path) -> None:
    first, second, run = days
    train(first, tmp_path / "plain", 1, "logistic", epochs=1)
    model = str(next((tmp_path / "plain").rglob("model.keras")))
    checkpoint = str(next((tmp_path / "plain" / "checkpoints").glob("step-*")))
    for source, named in ((str(tmp_path / "plain"), "without fisher"), (model, "a file"), (checkpoint, "a checkpoint")):
        with pytest.raises(ConfigError, match="nothing to hold on to") as caught:
            train(second, tmp_path / "run", 1, "logistic", ewc=1.0, init_from=source)
        assert named in caught.value.got
    refused: list[dict[str, Any]] = [{"lora_rank": 2}, {"zero": 1}, {"ewc": -1.0}, {"ewc": float("nan")}]
    for more in refused:
        with pytest.raises(ConfigError, match=r"--ewc|ewc"):
            train(second, tmp_path / "run", 1, "mlp", **{"ewc": 1.0, "init_from": run, **more})


def test_a_model_without_probabilities_is_refused_by_name() -> None:
    import keras

    from lockstep.training.steps.ewc import check_model

    class Own(keras.Model):
        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

    label = TensorSpec(shape=(), dtype="float32")
    classes = Signature(features={}, label=label, num_classes=4)
    number = Signature(features={}, label=label, num_classes=None, label_is_number=True)
    entry = keras.Input((3,))
    plain = keras.Model(entry, keras.layers.Dense(4)(entry))
    check_model(plain, classes)
    wide = keras.Model(entry, keras.layers.Dense(5)(entry))
    for model, signature, named in (
        (Own(entry, keras.layers.Dense(4)(entry)), classes, "its own train_step"),
        (plain, number, "a label"),
        (wide, classes, "outputs"),
    ):
        with pytest.raises(ConfigError, match="--ewc cannot say") as caught:
            check_model(model, signature)
        assert named in caught.value.got
