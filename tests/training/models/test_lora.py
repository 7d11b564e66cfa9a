"""--lora-rank: equal to Keras' own `enable_lora` and `fit` on one process, exact after a kill, and exported plain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.storage.errors import ConfigError
from lockstep.training.results.audit import check_run_audit
from lockstep.training.results.export_run import export_run
from tests.training._fit_ranks import precision
from tests.training._threads import final_tensors, run_threads
from tests.training._tiny import write_table
from tests.training.rank.test_fit import assert_no_bit_differs, train
from tests.training.results.test_evaluate import rows_of

pytestmark = pytest.mark.slow
RANK, SEED, ROWS, STEPS, RATE = 3, 7, 64, 15, 0.02
FIXED: dict[str, Any] = {"precision": "float64", "global_batch": ROWS, "epochs": STEPS, "seed": SEED}
SET: dict[str, Any] = {"width": 12, "dropout": 0.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """(data, data with other rows, a run on the first)."""
    folder = tmp_path_factory.mktemp("base")
    for name, seed in (("first", 0), ("later", 3)):
        write_table(folder / name, records={"train": ROWS, "test": 30}, seed=seed)
    train(str(folder / "first"), folder / "run", 1, "mlp", **FIXED | {"epochs": 5}, extra=SET)
    return str(folder / "first"), str(folder / "later"), str(folder / "run")


def exported(run: str | Path) -> Any:
    import keras

    from tests.training._models import Noise

    return keras.models.load_model(next(Path(run).rglob("model.keras")), custom_objects={"Noise": Noise})


@precision("float64")
def tuned_by_keras(run: str, dataset: str) -> list[Any]:
    """The merged weights after `fit` on all rows of each step, on one process."""
    import keras

    from lockstep.training.models.lora import adapter_seed

    model = exported(run)
    dense = [layer for layer in model.layers if isinstance(layer, keras.layers.Dense)]
    for number, layer in enumerate(dense):
        first = keras.initializers.HeUniform(adapter_seed(SEED, number))
        layer.enable_lora(RANK, a_initializer=first)
        layer.bias.trainable = False
    model.compile(keras.optimizers.Adam(RATE), "binary_crossentropy")
    _, rows = rows_of(dataset, "train")
    model.fit(rows.x, rows.y, batch_size=ROWS, epochs=STEPS, shuffle=False, verbose=0)
    kept = [value for layer in dense for value in (keras.ops.convert_to_numpy(layer.kernel), layer.bias.numpy())]
    return kept


@pytest.mark.parametrize(("ranks", "more"), [(2, {}), (3, {"zero": 2})])
def test_ranks_fine_tune_as_keras_does_on_one_process(
    base: tuple[str, str, str], tmp_path: Path, ranks: int, more: dict[str, Any]
) -> None:
    """Adapters are float32, as Keras makes them, and Adam's 1 - 0.999^t has five digits there: Keras' operations and
    TensorFlow's fused one differ by 6e-6 of a step.
    """
    _, later, first = base
    more = {"lora_rank": RANK, "init_from": first, "learning_rate": RATE, "extra": SET, **more}
    train(later, tmp_path / "run", ranks, "mlp", **FIXED, **more)
    oracle, mine = tuned_by_keras(first, later), exported(tmp_path / "run").get_weights()
    moved = 0.0
    for value, other, before in zip(mine, oracle, exported(first).get_weights(), strict=True):
        np.testing.assert_allclose(value, other, atol=2e-5)
        moved = max(moved, float(np.abs(value - before).max()))
        assert value.ndim == 2 or np.array_equal(value, before), "biases stay"
    assert moved > 0.01
    state = {name: one.shape for name, one in final_tensors(str(tmp_path / "run")).items() if "optimizer" in name}
    export_run(str(tmp_path / "run"), str(tmp_path / "model"), run_threads, checkpoint="last")
    for one, other in zip(mine, exported(tmp_path / "model").get_weights(), strict=True):
        np.testing.assert_array_equal(one, other, "the model of a checkpoint is merged too")
    assert state and all("lora" in name for name, shape in state.items() if shape), sorted(state)


def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    """The model is a user's, with dropout and callbacks."""
    from tests.training import _models  # imports TensorFlow

    own = "tests.training._models:with_callbacks"
    write_table(tmp_path / "table", records={"train": 200, "test": 30})
    table = str(tmp_path / "table")
    train(table, tmp_path / "before", 1, own)
    options: dict[str, Any] = {"checkpoint_every": 7, "audit": True, "epochs": 2, "lora_rank": 2}
    options["init_from"] = str(tmp_path / "before")
    whole = train(table, tmp_path / "whole", 2, own, **options)
    _models.FAIL_AT.update(step=10)
    broken = train(table, tmp_path / "broken", 2, own, **options)
    assert not _models.FAIL_AT and (whole.restarts, broken.restarts) == (0, 1)
    assert_no_bit_differs((tmp_path / "whole", whole), (tmp_path / "broken", broken))
    assert check_run_audit(str(tmp_path / "broken")).ok


def test_what_cannot_be_adapted_is_refused_by_name(base: tuple[str, str, str], tmp_path: Path) -> None:
    import keras

    from lockstep.training.models.lora import enable_lora

    def refused(*layers: Any) -> str:
        model = keras.Sequential([keras.Input((4, 3)), *layers])
        model.compile("adam", "mse")
        with pytest.raises(ConfigError, match="--lora-rank") as caught:
            enable_lora(model, 2, 0)
        return str(caught.value)

    assert "gru" in refused(keras.layers.GRU(2), keras.layers.Dense(1))
    assert "last" in refused(keras.layers.Dense(1, kernel_constraint="unit_norm", name="last"))
    assert "no layer" in refused(keras.layers.LayerNormalization())
    frozen = keras.layers.GRU(2, trainable=False)
    model = keras.Sequential([keras.Input((4, 3)), frozen, keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    enable_lora(model, 2, 0)
    assert [one.name for one in model.trainable_variables] == ["lora_kernel_a", "lora_kernel_b"]
    keras.utils.clear_session()
    first, _, run = base
    both: list[tuple[dict[str, Any], str]] = [({}, "--init-from"), ({"init_from": run, "delay": 1}, "lora_rank")]
    for more, named in both:
        with pytest.raises(ConfigError, match=named):
            train(first, tmp_path / "run", 1, "mlp", lora_rank=2, **more)
