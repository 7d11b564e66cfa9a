"""Metrics, evaluate, predict and callbacks of a user's own `fit` on ranks: what one process says, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.storage.errors import ConfigError
from lockstep.training.comm import Communicator, SoloCommunicator
from tests.training import _threads  # sets TensorFlow's threads before it makes them
from tests.training._fit_ranks import UNEVEN, fresh
from tests.training._ring import run_ring

pytestmark = pytest.mark.slow
RNG = np.random.default_rng(9)
BINARY = (RNG.integers(0, 2, (12, 1)), RNG.random((12, 1), np.float32))
CLASSES = (np.eye(3, dtype=np.float32)[RNG.integers(0, 3, 12)], RNG.dirichlet(np.ones(3), 12).astype(np.float32))
NUMBERS = (RNG.integers(0, 3, 12), CLASSES[1])
REAL = (RNG.random((12, 4), np.float32) + 0.1, RNG.random((12, 4), np.float32) + 0.1)
LABELS = (RNG.integers(0, 3, 12), RNG.integers(0, 3, 12))
# Which arguments and which data each metric of Keras wants; one that is new to Keras fails here until it is looked at.
METRICS: dict[str, tuple[dict[str, Any], Any]] = {
    **{
        name: ({}, REAL)
        for name in [
            "CosineSimilarity",
            "KLDivergence",
            "LogCoshError",
            "MeanAbsoluteError",
            "MeanAbsolutePercentageError",
            "MeanSquaredError",
            "MeanSquaredLogarithmicError",
            "Poisson",
            "R2Score",
            "RootMeanSquaredError",
            "ConcordanceCorrelation",
            "PearsonCorrelation",
        ]
    },
    **{
        name: ({}, BINARY)
        for name in [
            "AUC",
            "BinaryAccuracy",
            "BinaryCrossentropy",
            "FalseNegatives",
            "FalsePositives",
            "Hinge",
            "Precision",
            "Recall",
            "SquaredHinge",
            "TrueNegatives",
            "TruePositives",
        ]
    },
    **{
        name: ({value: 0.5}, BINARY)
        for name, value in {
            "PrecisionAtRecall": "recall",
            "RecallAtPrecision": "precision",
            "SensitivityAtSpecificity": "specificity",
            "SpecificityAtSensitivity": "sensitivity",
        }.items()
    },
    **{
        name: ({}, CLASSES)
        for name in ["CategoricalAccuracy", "CategoricalCrossentropy", "CategoricalHinge", "F1Score", "FBetaScore"]
    },
    "TopKCategoricalAccuracy": ({"k": 2}, CLASSES),
    "SparseCategoricalAccuracy": ({}, NUMBERS),
    "SparseCategoricalCrossentropy": ({}, NUMBERS),
    "SparseTopKCategoricalAccuracy": ({"k": 2}, NUMBERS),
    "Accuracy": ({}, LABELS),
    "IoU": ({"num_classes": 3, "target_class_ids": [0, 2]}, LABELS),
    "MeanIoU": ({"num_classes": 3}, LABELS),
    "BinaryIoU": ({}, BINARY),
    "OneHotIoU": ({"num_classes": 3, "target_class_ids": [1]}, CLASSES),
    "OneHotMeanIoU": ({"num_classes": 3}, CLASSES),
    "Mean": ({}, None),
    "Sum": ({}, None),
}
BASES = {"Metric", "MeanMetricWrapper"}


def names() -> list[str]:
    """Keras' own list; before TensorFlow is imported there is none."""
    import keras

    return sorted(name for name, value in vars(keras.metrics).items() if isinstance(value, type))


def test_each_metric_of_keras_is_that_of_all_rows() -> None:
    import keras

    from lockstep.training.steps.model_state import sum_variables

    assert set(names()) - BASES == set(METRICS)
    weights = RNG.random(12)
    for name, (options, data) in METRICS.items():

        def updated(rows: slice, name: str = name, options: Any = options, data: Any = data) -> Any:
            metric = getattr(keras.metrics, name)(**options)
            arrays = (REAL[0][:, 0],) if data is None else data
            for start in range(rows.start, rows.stop, 3):
                part = slice(start, min(start + 3, rows.stop))
                metric.update_state(*(array[part] for array in arrays), sample_weight=weights[part])
            return metric

        def one(comm: Communicator, updated: Any = updated) -> Any:
            metric = updated(UNEVEN[comm.rank])
            sum_variables(metric.variables, comm)
            return np.asarray(metric.result())

        whole = np.asarray(updated(slice(0, 12)).result())
        results = run_ring(3, one)
        assert all(np.array_equal(results[0], other) for other in results), name
        np.testing.assert_allclose(results[0], whole, rtol=1e-5, err_msg=name)


def test_states_that_are_no_sums() -> None:
    """A metric says so to Keras' add_variable; what cannot be combined is refused by name."""
    import keras

    from lockstep.training.steps.model_state import sum_variables

    def variable(aggregation: str, value: float) -> Any:
        metric = keras.metrics.Metric(name="own")
        return metric.add_variable((), keras.initializers.Constant(value), aggregation=aggregation, name="state")

    def one(comm: Communicator) -> list[float]:
        values = [np.nan if comm.rank else 7.0, comm.rank + 1.0, comm.rank + 1.0]
        variables = [variable(*pair) for pair in zip(("only_first_replica", "mean", "sum"), values, strict=True)]
        sum_variables(variables, comm)
        with pytest.raises(ConfigError, match="own/state of a metric cannot be combined"):
            sum_variables([variable("none", 1.0)], comm)
        return [float(v.numpy()) for v in variables]

    assert run_ring(3, one) == [[7.0, 2.0, 6.0]] * 3


def test_states_of_metrics_that_go_on_with_another_number_of_ranks() -> None:
    """Two ranks wrote; then there are three: their sum is that of the two, whatever is not a sum is on each."""
    import keras

    from lockstep.training.steps.model_state import METRICS as KIND
    from lockstep.training.steps.model_state import load_metrics, tensors_of, variables_of

    class Own(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="own")
            for kind in ("sum", "mean", "only_first_replica"):
                self.add_variable((), keras.initializers.Constant(0.0), aggregation=kind, name=kind)

        def update_state(self, *_: Any, **__: Any) -> None:
            """Set by hand."""

        def result(self) -> Any:
            return self.variables[0]

    def found(parts: Sequence[tuple[float, ...]], *, takes_sums: bool) -> list[float]:
        own = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        own.compile(loss=None, metrics=[Own()])
        own.build((None, 1))
        own._symbolic_build(data_batch=(np.zeros((1, 1)), np.zeros((1, 1))))
        states = [v for v in variables_of(own, KIND) if "own" in v.path]
        written = []
        for part in parts:
            for variable, value in zip(states, part, strict=True):
                variable.assign(value)
            written.append({name: value.copy() for name, value in tensors_of(own, KIND).items()})
        load_metrics(own, written, "where", takes_sums=takes_sums)
        return [float(v.numpy()) for v in states]

    two = [(3.0, 2.0, 7.0), (4.0, 4.0, np.nan)]
    assert found(two, takes_sums=True) == [7.0, 3.0, 7.0]
    assert found(two, takes_sums=False) == [0.0, 3.0, 7.0]
    assert found([(4.0, 4.0, 9.0)], takes_sums=True) == [4.0, 4.0, 9.0]  # the same number of ranks: its own


def model() -> Any:
    import keras

    layers = [keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1, "sigmoid")]
    built = keras.Sequential(layers)
    metrics = [keras.metrics.AUC(name="auc"), keras.metrics.F1Score(threshold=0.5, name="f1")]
    built.compile(keras.optimizers.SGD(0.5), "binary_crossentropy", metrics=metrics)
    return built


def test_evaluate_and_predict() -> None:
    """Two rows on three ranks: one has none."""
    from lockstep.training.steps.own_fit import evaluate, predict

    x, y = REAL[0][:2], np.array([[0.0], [1.0]])
    models = [fresh(model) for _ in range(3)]
    plain = fresh(model)
    whole = plain.evaluate(x, y, batch_size=5, verbose=0, return_dict=True)
    predicted = plain.predict(x, verbose=0)

    def one(comm: Communicator) -> Any:
        mine = models[comm.rank]
        return evaluate(mine, comm, x, y, batch_size=5), predict(mine, comm, x, batch_size=5)

    ranks = run_ring(3, one)
    with pytest.raises(ConfigError, match="no rows"):
        predict(plain, SoloCommunicator(), iter([x]))
    with pytest.raises(ConfigError, match="got: 0 rows"):
        evaluate(plain, SoloCommunicator(), x[:0], y[:0])
    for metrics, outputs in ranks:
        assert set(metrics) == set(whole)
        for name, value in whole.items():
            np.testing.assert_allclose(metrics[name], np.squeeze(value), rtol=1e-5, err_msg=name)
        assert metrics == ranks[0][0]
        np.testing.assert_allclose(outputs, predicted, rtol=1e-5)


def test_losses_of_single_outputs_count_rows() -> None:
    """Batches of 5 and of 1 row on each rank: Keras' own would count them alike. The whole is one batch."""
    import keras

    from lockstep.training.steps.own_fit import evaluate

    def make() -> Any:
        inputs = keras.Input((4,))
        model = keras.Model(inputs, {name: keras.layers.Dense(4, name=name)(inputs) for name in "ab"})
        model.compile("sgd", {"a": "mse", "b": "mae"})
        return model

    x, y = REAL[0], {"a": REAL[1], "b": REAL[1][::-1].copy()}
    plain = fresh(make)
    plain.run_eagerly = True  # not traced
    whole = plain.evaluate(x, y, batch_size=12, verbose=0, return_dict=True)
    models = [fresh(make) for _ in range(2)]
    for metrics in run_ring(2, lambda comm: evaluate(models[comm.rank], comm, x, y, batch_size=5)):
        assert metrics == pytest.approx(whole, rel=1e-5)


def test_callbacks_decide_alike_and_write_once(tmp_path: Path) -> None:
    """Uneven ranks with validation; one rank's own callback stops all of them in the middle of an epoch."""
    import keras

    from lockstep.training.steps.distribute import distribute
    from lockstep.training.steps.own_fit import callbacks_on_ranks, rank_step

    x, y = REAL[0], BINARY[0].astype("float32")
    shares = (slice(0, 4), slice(4, 12))  # batches of 2 and 4: two steps an epoch

    class Seen(keras.callbacks.Callback):
        def __init__(self, stop_at: int | None) -> None:
            super().__init__()
            self.logs: list[dict[str, float]] = []
            self.steps, self.stop_at = 0, stop_at

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.logs.append({name: float(np.squeeze(value)) for name, value in logs.items()})

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 1
            if self.steps == self.stop_at:
                self.model.stop_training = True

    models = [fresh(model) for _ in shares]
    comms = _threads._join(2, 1)
    seen = [Seen(None), Seen(7)]

    def one(rank: int) -> int:
        mine, comm, share = models[rank], comms[rank], shares[rank]
        mine.optimizer = distribute(mine.optimizer, comm, (share.stop - share.start) / 12)
        rank_step(mine, comm)
        file = tmp_path / f"{rank}.csv"
        callbacks = [
            keras.callbacks.ModelCheckpoint(tmp_path / f"{rank}.weights.h5", save_weights_only=True),
            keras.callbacks.CSVLogger(file),
            keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=0, min_delta=10),
            keras.callbacks.EarlyStopping(monitor="val_auc", mode="max", patience=50),
            seen[rank],
        ]
        validation = (x[share][:3], y[share][:3])
        mine.fit(
            x[share],
            y[share],
            batch_size=2 * (rank + 1),
            epochs=6,
            verbose=0,
            shuffle=False,
            callbacks=callbacks_on_ranks(callbacks, mine, comm),
            validation_data=validation,
        )
        return seen[rank].steps

    with ThreadPoolExecutor(2) as pool:
        steps = list(pool.map(one, (0, 1)))
    assert steps == [8, 8], "asked after step 7, agreed with step 8"
    assert seen[0].logs == seen[1].logs and len(seen[0].logs) == 4
    assert {"auc", "f1", "loss", "val_auc", "val_f1", "val_loss", "learning_rate"} <= set(seen[0].logs[0])
    assert seen[0].logs[-1]["learning_rate"] < 0.5, "ReduceLROnPlateau has acted"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.csv", "0.weights.h5"]
    # The last epoch's validation, with the weights that both have.
    rows = np.r_[0:3, 4:7]
    plain = fresh(model)
    plain.set_weights(models[0].get_weights())
    whole = plain.evaluate(x[rows], y[rows], batch_size=6, verbose=0, return_dict=True)
    assert seen[0].logs[-1]["val_auc"] == pytest.approx(whole["auc"], rel=1e-5)
    assert seen[0].logs[-1]["val_loss"] == pytest.approx(whole["loss"], rel=1e-5)
    with pytest.raises(ConfigError, match="BackupAndRestore"):
        callbacks_on_ranks([keras.callbacks.BackupAndRestore(tmp_path)], models[0], comms[0])
    for comm in comms:
        comm.close()


def test_a_wish_to_stop_ends_one_fit_alone() -> None:
    """One in the middle of an accumulation, one with the last batch, which no step carries any more."""
    import keras

    from lockstep.training.steps.distribute import distribute
    from lockstep.training.steps.own_fit import callbacks_on_ranks

    def accumulating() -> Any:
        built = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        built.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=3), "mse")
        return built

    class Stops(keras.callbacks.Callback):
        def __init__(self, stop_at: int | None) -> None:
            super().__init__()
            self.batches, self.stop_at = 0, stop_at

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.batches += 1
            if self.batches == self.stop_at:
                self.model.stop_training = True

    models, comms = [fresh(accumulating) for _ in range(2)], _threads._join(2, 1)
    x, y = REAL[0], BINARY[0].astype("float32")

    def one(rank: int) -> list[int]:
        mine, comm, counted = models[rank], comms[rank], []
        mine.optimizer = distribute(mine.optimizer, comm)
        for stop_at in (4, 12, None):
            stops = Stops(stop_at if rank else None)
            callbacks = callbacks_on_ranks([stops], mine, comm)
            mine.fit(x, y, batch_size=1, epochs=2, verbose=0, shuffle=False, callbacks=callbacks)
            counted.append(stops.batches)
        comm.close()
        return counted

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(one, range(2))) == [[6, 12, 24]] * 2


def test_a_batch_normalisation_that_rank_step_does_not_know() -> None:
    """`ghost` is known to lockstep train alone; taken for `local` it would depend on the number of ranks."""
    from lockstep.training.steps.own_fit import rank_step

    with pytest.raises(ConfigError, match="batchnorm='ghost'"):
        rank_step(fresh(model), SoloCommunicator(), batchnorm="ghost")  # type: ignore[arg-type]  # a user's mistake


def test_rank_step_again_after_another_compile() -> None:
    """The second takes the place of the first; inside of each other they would take the loss from each other."""
    from lockstep.training.steps.distribute import distribute
    from lockstep.training.steps.own_fit import rank_step

    models = [fresh(model) for _ in range(2)]

    def one(comm: Communicator) -> list[float]:
        mine = models[comm.rank]
        mine.optimizer = distribute(mine.optimizer, comm)
        rank_step(mine, comm)
        mine.compile(mine.optimizer, "binary_crossentropy", jit_compile=False)
        rank_step(mine, comm)
        mine.train_on_batch(REAL[0][comm.rank : comm.rank + 2], np.array([[0.0], [1.0]]))
        return [float(np.abs(weight).sum()) for weight in mine.get_weights()]

    first, second = run_ring(2, one)
    assert first == second
