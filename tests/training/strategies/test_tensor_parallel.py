"""--tensor-parallel: ranks that divide layers train one rank's model; checkpoints and exports are the plain model's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.storage.errors import ConfigError
from lockstep.training.comm import Communicator
from lockstep.training.results.audit import check_run_audit
from tests.training._ring import run_ring
from tests.training._threads import final_tensors
from tests.training.rank.test_fit import assert_no_bit_differs, assert_same, assert_same_result, train

pytestmark = pytest.mark.slow
PAIR = "tests.training._sequences:pair"
IN_FULL: dict[str, Any] = {"precision": "float64", "epochs": 6, "validate": "test", "validate_every": 3, "lanes": 8}
HEADS: dict[str, Any] = {"extra": {"heads": 4, "width": 16, "layers": 1, "dropout": 0.0}}


@pytest.fixture(scope="module")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> str:
    """200 rows to train on, and 30 to test."""
    from tests.training._sequences import write_sequences

    folder = tmp_path_factory.mktemp("data") / "sequences"
    write_sequences(folder, {"train": 200, "test": 30})
    return str(folder)


@pytest.fixture(scope="module")
def alone(sequences: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Any]]:
    """One rank's runs of both models, and plain data parallel ones of the pair, which has dropout."""
    folder, found = tmp_path_factory.mktemp("alone"), {}
    for name, ranks, model, more in (
        ("heads", 1, "transformer", HEADS),
        ("pair", 1, PAIR, {}),
        ("pair 2", 2, PAIR, {}),
    ):
        found[name] = (str(folder / name), train(sequences, folder / name, ranks, model, **IN_FULL, **more))
    return found


@pytest.mark.parametrize(
    ("name", "tensor", "ranks"),
    [
        ("heads", 2, 4),
        ("pair", 2, 2),
        pytest.param("heads", 2, 2, marks=pytest.mark.soak),
        pytest.param("heads", 4, 4, marks=pytest.mark.soak),
        pytest.param("pair", 3, 3, marks=pytest.mark.soak),  # 7 columns: 3, 2 and 2
    ],
)
def test_parts_of_layers_are_one_rank_in_float64(
    sequences: str, alone: dict[str, tuple[str, Any]], tmp_path: Path, name: str, tensor: int, ranks: int
) -> None:
    """50 steps: weights, Adam's averages of the gradients, metrics and validation; dropout follows the data rank."""
    model, more = ("transformer", HEADS) if name == "heads" else (PAIR, {})
    url, expected = alone[name]
    options = {**IN_FULL, **more, "tensor_parallel": tensor, "audit": True}
    found = train(sequences, tmp_path / "run", ranks, model, **options)
    assert found.steps == expected.steps == 50
    assert_same(final_tensors(url), final_tensors(str(tmp_path / "run")))
    assert_same_result(expected, found)
    assert check_run_audit(str(tmp_path / "run")).ok


def test_a_restart_changes_no_bit_and_the_export_is_plain(sequences: str, tmp_path: Path) -> None:
    """A rank fails between two checkpoints; the exported model has Keras' own layers, and the checkpoint's numbers."""
    import keras

    from tests.training import _models

    _models.FAIL_AT.update(step=10)
    more = {**IN_FULL, "epochs": 2, "checkpoint_every": 7, "audit": True, "tensor_parallel": 2}
    broken = train(sequences, tmp_path / "broken", 2, PAIR, **more)
    assert not _models.FAIL_AT and broken.restarts == 1
    whole = train(sequences, tmp_path / "whole", 2, PAIR, **more)
    assert_no_bit_differs((tmp_path / "whole", whole), (tmp_path / "broken", broken))
    assert check_run_audit(str(tmp_path / "broken")).ok
    exported = keras.models.load_model(next((tmp_path / "broken").rglob("model.keras")))
    kinds = {keras.layers.InputLayer, keras.layers.Dense, keras.layers.Embedding, keras.layers.Activation}
    assert kinds <= {type(layer) for layer in exported.layers}
    stored = final_tensors(str(tmp_path / "broken"))
    for kind, variables in (("weights", exported.weights), ("optimizer", exported.optimizer.variables)):
        names = sorted(name for name in stored if name.startswith(f"{kind}/"))
        for name, one in zip(names, variables, strict=True):
            assert np.array_equal(one.numpy(), stored[name].astype(one.dtype)), name  # Keras loads the rate as float32


@pytest.mark.soak
def test_first_weights_come_from_a_checkpoint_but_not_from_a_file(
    sequences: str, alone: dict[str, tuple[str, Any]], tmp_path: Path
) -> None:
    from lockstep.storage.fs import filesystem
    from lockstep.training.run.lineage import find_tip
    from lockstep.training.run.paths import RunPaths

    url, _ = alone["pair"]
    tip = find_tip(filesystem(url), RunPaths(url))
    assert tip is not None
    more = {**IN_FULL, "epochs": 1, "validate_every": 1}
    for tensor in (1, 2):
        train(sequences, tmp_path / f"{tensor}", tensor, PAIR, init_from=tip.url, tensor_parallel=tensor, **more)
    assert_same(*(final_tensors(str(tmp_path / f"{tensor}")) for tensor in (1, 2)))
    file = str(next(Path(url).rglob("model.keras")))
    with pytest.raises(ConfigError, match="cannot be loaded into parts"):
        train(sequences, tmp_path / "file", 2, PAIR, init_from=file, tensor_parallel=2, **more)


STARTS = ((2, 2, 0), (1, 2, 1), (3, 3, 0), (1, 1, 0))
MORE_STARTS = (
    (2, 2, 0),
    (1, 2, 0),
    (3, 3, 0),
    (1, 2, 1),
    (2, 4, 0),
    (1, 1, 0),
    (2, 2, 0),
    (1, 3, 2),
    (3, 3, 0),
    (2, 4, 0),
)
"""(Parts of layers, ranks, --zero) of one start after another."""


@pytest.mark.parametrize("path", [STARTS, pytest.param(MORE_STARTS, marks=pytest.mark.soak)], ids=["some", "more"])
def test_each_start_holds_what_another_has_saved(
    sequences: str, tmp_path: Path, compared: list[int], path: Any
) -> None:
    """A rank of each start compares what it has restored with the files, bit for bit."""
    for step, (tensor, ranks, stage) in enumerate(path, 1):
        more: dict[str, Any] = {"tensor_parallel": tensor, "zero": stage, "max_steps": step, "epochs": 2}
        train(sequences, tmp_path / "run", ranks, PAIR, audit=True, lanes=8, **more)
    assert len(compared) == len(path) - 1 and min(compared) > 20
    assert check_run_audit(str(tmp_path / "run")).ok


def test_a_rank_holds_its_part_of_weights_and_optimizer_and_sends_sums_of_activations() -> None:
    """Four sums a block, of the whole activation each: two forward, two backward; 2 (T - 1) / T of it by a ring."""
    import keras
    import tensorflow as tf

    from lockstep.training.exchange.grid_exchange import GridExchange
    from lockstep.training.steps.distribute import distribute, exchange_of
    from lockstep.training.steps.model_state import build_on_parts
    from lockstep.training.strategies.parallel_layers import TensorGroup, divide_layers
    from lockstep.training.world import Grid

    rows, length, width, ranks = 8, 16, 64, 2

    def block() -> Any:
        layers = keras.layers
        inputs = keras.Input((length, width))
        y = layers.MultiHeadAttention(4, width // 4, name="heads")(inputs, inputs)
        x = inputs + y
        x = x + layers.Dense(width, name="narrow")(layers.Dense(4 * width, activation="gelu", name="wide")(x))
        model = keras.Model(inputs, x)
        model.parallel_layers = {"heads": "heads", "wide": "columns", "narrow": "rows"}
        model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
        return model

    models = [block() for _ in range(ranks)]
    whole = 4 * models[0].count_params()

    def work(comm: Communicator) -> tuple[int, int]:
        model, group = models[comm.rank], comm.group(range(ranks))
        group.choose = lambda nbytes: "ring"  # type: ignore[attr-defined] # of TCP
        make = partial(GridExchange, grid=Grid(1, tensor=ranks))
        distribute(model.optimizer, comm, 1.0, finalizes=False, same_start=False, make_exchange=make)
        exchange = exchange_of(model.optimizer)
        assert isinstance(exchange, GridExchange)
        divide_layers(model, TensorGroup(group, exchange.failed), exchange.data)
        build_on_parts(model.optimizer, model.trainable_variables)
        x = tf.constant(np.random.default_rng(0).standard_normal((rows, length, width)), tf.float32)

        @tf.function(autograph=False)
        def step() -> None:
            with tf.GradientTape() as tape:
                tape.watch(x)  # as of a layer below
                loss = tf.reduce_mean(tf.square(model(x, training=True)))
            *gradients, _ = tape.gradient(loss, [*model.trainable_variables, x])
            model.optimizer.apply(gradients, model.trainable_variables)

        step()
        before = group.sent_bytes
        step()
        sent = group.sent_bytes - before
        exchange.close()
        held = [*model.weights, *model.optimizer.variables]
        return sent, sum(one.numpy().nbytes for one in held)

    activation = 4 * rows * length * width
    for sent, held in run_ring(ranks, work):
        assert sent == pytest.approx(4 * 2 * (ranks - 1) / ranks * activation, rel=0.02)
        assert held == pytest.approx(3 * whole / ranks, rel=0.02)
    keras.utils.clear_session()


def pair_with(change: Any, **declared: str) -> Any:
    import keras

    def make(signature: Any) -> Any:
        layers = keras.layers
        inputs = {n: keras.Input(s.shape, dtype=s.dtype, name=n) for n, s in signature.features.items()}
        x = layers.Embedding(9, 4, name="ids")(inputs["path"])
        x = layers.Flatten()(x * keras.ops.expand_dims(keras.ops.cast(inputs["path_mask"], x.dtype), -1))
        x = layers.Dense(3, name="narrow")(change(layers.Dense(5, name="wide")(x)))
        model = keras.Model(inputs, layers.Dense(4, activation="softmax", name="last")(x))
        model.parallel_layers = declared or {"wide": "columns", "narrow": "rows"}
        model.compile("adam", "sparse_categorical_crossentropy", jit_compile=False)
        return model

    return make


@pytest.mark.parametrize(
    ("declared", "named"),
    [
        ({"wide": "columns"}, "the columns of `wide` go to `narrow`, a Dense"),
        ({"narrow": "rows"}, "the rows of `narrow` follow no columns"),
        ({"wide": "halves"}, "halves"),
        ({"broad": "columns"}, "no such layer"),
        ({"ids": "columns"}, "a Embedding"),
        ({"last": "columns"}, "activation softmax"),
    ],
)
def test_layers_that_cannot_be_divided_so_are_refused_by_name(declared: dict[str, str], named: str) -> None:
    assert named in refused(lambda x: x, **declared).got


def test_dropout_between_columns_and_rows_is_refused() -> None:
    import keras

    assert "to `between`, a Dropout" in refused(keras.layers.Dropout(0.5, name="between")).got


def refused(change: Any, **declared: str) -> ConfigError:
    """The error for a model of these layers on two ranks."""
    import keras

    from lockstep.features.encode.encoder import Encoder
    from lockstep.training.comm import SoloCommunicator
    from lockstep.training.strategies.parallel_layers import TensorGroup, divide_layers
    from tests.training._sequences import SCHEMA

    model = pair_with(change, **declared)(Encoder(SCHEMA, {}).signature)
    comm = SoloCommunicator()
    comm.num_ranks = 2
    with pytest.raises(ConfigError, match="tensor-parallel") as caught:
        divide_layers(model, TensorGroup(comm, lambda error: None), comm)
    keras.utils.clear_session()
    return caught.value
