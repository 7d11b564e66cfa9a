"""Runs whose tables are in shards: as one rank in float64, resumed on other ranks, validated, exported, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

from lockstep.features.sample_id import sample_id
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema
from lockstep.features.schema.signature import Signature
from lockstep.storage.errors import ConfigError, DataError
from lockstep.storage.fs import filesystem
from lockstep.storage.verify import verify
from tests.training import _models
from tests.training._threads import rows_of, run, run_threads
from tests.training._tiny import write_rows
from training.config import TrainConfig
from training.models import ModelOptions
from training.models.inputs import inputs_of
from training.models.two_tower import two_tower
from training.results.audit import check_run_audit
from training.results.evaluate import evaluate
from training.results.export_run import export_run
from training.run.checkpoint_division import read_whole
from training.run.lineage import find_tip
from training.run.paths import RunPaths
from training.run.result import RunResult
from training.strategies.sharded_embedding import ShardedEmbedding

slow = pytest.mark.slow
HERE = "tests.training.strategies.test_sharded_embedding"
IDS = {"kind": "hash", "buckets": 300, "seed": 0, "output": "index"}
SCHEMA = Schema(
    (
        Field(name="sample_id", dtype="int64", kind="id"),
        Field(name="amount", dtype="float32"),
        Field(name="item", dtype="int64", encoding=IDS),
        Field(name="user", dtype="int64", encoding=IDS),
        Field(name="label", dtype="bool", kind="label"),
    )
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """192 training rows and 30 test rows; 7 batches of 5 for a validation, so that ranks have different numbers."""
    rng, total = np.random.default_rng(0), 222
    user, item, amount = rng.zipf(1.4, total) % 60, rng.zipf(1.2, total) % 90, rng.random(total, np.float32)
    ids = pa.array([sample_id([str(row).encode()], 0) for row in range(total)], type=pa.int64())
    columns = [ids, pa.array(amount), pa.array(item), pa.array(user), pa.array((user + item) % 3 == 0)]
    rows = pa.RecordBatch.from_arrays(columns, schema=SCHEMA.arrow_schema())
    root = str(tmp_path_factory.mktemp("data"))
    write_rows(root, SCHEMA, rows, {"train": 192, "test": 30}, "tfrecord", 2, 8, 0)
    return root


def fails(signature: Signature, options: ModelOptions) -> tuple[keras.Model, list[Any]]:
    """`two-tower`, with a rank that fails when a test says so."""
    return two_tower(signature, options), [_models.FailOnce()]


class Spoiled(keras.layers.Layer):
    """Its input (n, k), whose gradient is NaN in the rows that `wild` (n, 1) marks."""

    def call(self, x: Any, wild: Any) -> Any:
        @tf.custom_gradient
        def same(x: Any) -> Any:
            return tf.identity(x), lambda upstream: tf.where(wild, tf.cast(np.nan, upstream.dtype), upstream)

        return same(x)


def spoiled(signature: Signature, options: ModelOptions) -> keras.Model:
    """Rows in shards, whose gradients are not finite while an item above 285 is in the batch; its loss always is."""
    inputs = inputs_of(signature)
    x = keras.layers.Flatten()(ShardedEmbedding(300, 3, name="items")(inputs["item"]))
    x = Spoiled()(x, inputs["item"] > 285)
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(x))
    model.compile(optimizer="sgd", loss="binary_crossentropy")
    return model


def clipped(signature: Signature, options: ModelOptions) -> keras.Model:
    """`two-tower` with an optimizer that clips gradients."""
    model = two_tower(signature, options)
    model.compile(optimizer=keras.optimizers.Adam(clipnorm=1.0), loss="binary_crossentropy")
    return model


def train(data: str, url: Path, num_ranks: int, model: str = "two-tower", **more: Any) -> RunResult:
    options: dict[str, Any] = {
        "global_batch": 24, "lanes": 8, "batchnorm": "local", "epochs": 2, "checkpoint_every": 1000, "seed": 7,
        "launcher": "local", "precision": "float64", "shard_embeddings": 0, "audit": True,
        "extra": {"decay": 0.0, "embedding": 4},
    }  # fmt: skip
    return run(TrainConfig(datasets=(data,), run=str(url), num_ranks=num_ranks, model=model, **(options | more)))


def tensors_at(url: Path) -> dict[str, np.ndarray]:
    """All weights, optimizer state and tables in the newest checkpoint, whole."""
    tip = find_tip(filesystem(str(url)), RunPaths(str(url)))
    assert tip is not None
    return dict(read_whole(tip.url, tip.manifest, ("weights", "optimizer", "tables")))


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray], atol: float) -> None:
    assert set(one) == set(other)
    for name, value in one.items():
        np.testing.assert_allclose(other[name], value, rtol=0, atol=atol, err_msg=name)


@pytest.fixture(scope="module")
def alone(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    url = tmp_path_factory.mktemp("alone") / "run"
    assert train(data, url, 1).steps == 16
    return url


@slow
def test_many_ranks_are_one_rank_in_float64(data: str, alone: Path, tmp_path: Path) -> None:
    train(data, tmp_path / "run", 3, validate="test")
    one, many = tensors_at(alone), tensors_at(tmp_path / "run")
    assert_same(one, many, 1e-12)
    assert {name for name in one if name.startswith("tables")} == {
        f"tables/_{side}_{what}/{part}" for side in ("item", "user") for what in ("bias", "vector")
        for part in ("rows", "squares")
    }  # fmt: skip
    assert (one["tables/_item_vector/squares"] > 0).sum() > 20
    losses = [row["loss"] for _, row in sorted(rows_of(str(tmp_path / "run"), "step").items())]
    assert losses[-1] < losses[0]


@slow
def test_resumed_on_other_ranks(data: str, alone: Path, tmp_path: Path) -> None:
    """3 ranks, then 2, then 4, with a failure in the middle of an epoch on the way: as one rank that never stopped."""
    url = tmp_path / "run"
    more: dict[str, Any] = {"model": f"{HERE}:fails", "checkpoint_every": 3}
    train(data, url, 3, max_steps=5, **more)
    _models.FAIL_AT.update(step=8)
    assert train(data, url, 2, max_steps=10, **more).restarts == 1
    assert not _models.FAIL_AT
    train(data, url, 4, **more)
    assert_same(tensors_at(alone), tensors_at(url), 1e-12)
    verify(str(url))
    check_run_audit(str(url))


@slow
@pytest.mark.soak
def test_a_restart_is_exact_to_the_bit(data: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"model": f"{HERE}:fails", "checkpoint_every": 4, "precision": "float32"}
    train(data, tmp_path / "whole", 2, **more)
    _models.FAIL_AT.update(step=11)
    assert train(data, tmp_path / "broken", 2, **more).restarts == 1
    whole, broken = tensors_at(tmp_path / "whole"), tensors_at(tmp_path / "broken")
    assert {name: value.tobytes() for name, value in whole.items()} == {n: v.tobytes() for n, v in broken.items()}


@slow
def test_validation_evaluation_and_export_agree(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation asks the shards, in other numbers of batches on each rank; the export has plain Embedding layers."""
    monkeypatch.setattr("training.rank.validation.BATCH_ROWS", 7)
    url = tmp_path / "run"
    result = train(data, url, 3, model="wide-deep", validate="test", extra={"decay": 0.0, "dropout": 0.0, "width": 8})
    found = evaluate(str(url), data, "test", run_threads)["metrics"]
    assert result.metrics["val_loss"] == pytest.approx(found["loss"], rel=1e-6)
    by_step = evaluate(str(url), data, "test", run_threads, num_ranks=2, checkpoint=result.steps)["metrics"]
    assert by_step["loss"] == pytest.approx(found["loss"], rel=1e-9)
    (file,) = Path(url, "models").glob("*/model.keras")
    loaded = keras.models.load_model(file)
    assert {type(layer).__module__.split(".")[0] for layer in loaded.layers} == {"keras"}
    monkeypatch.setattr("training.strategies.sharded_embedding.COPIES", 1 << 40)
    with pytest.raises(ConfigError, match="do not fit into one process"):
        export_run(str(url), str(tmp_path / "model"), run_threads)
    assert train(data, tmp_path / "large", 2).model is None


@slow
def test_a_step_that_is_not_finite_changes_no_row(data: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"extra": {}, "audit": False}
    with pytest.raises(DataError, match="the gradient of items/rows_are_finite"):
        train(data, tmp_path / "stops", 2, f"{HERE}:spoiled", **options)
    train(data, tmp_path / "skips", 2, f"{HERE}:spoiled", **options, non_finite="skip")
    skipped = [row.get("skipped", False) for row in rows_of(str(tmp_path / "skips"), "step").values()]
    assert 1 <= sum(skipped) < len(skipped)
    assert all(np.isfinite(value).all() for value in tensors_at(tmp_path / "skips").values())


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("micro-batches", {"micro_batches": 2}),
        ("delay", {"delay": 1}),
        ("compression", {"compression": "bf16"}),
        ("sync-every", {"sync_every": 4}),
        ("init-from", {"init_from": "@"}),
        ("an optimizer with clipnorm", {"model": f"{HERE}:clipped"}),
        ("canonical", {"canonical": True, "num_ranks": 2}),
        ("mixed_float16", {"precision": "mixed_float16"}),
        ("decay=0", {"extra": {"decay": 0.1}}),
        ("no table to divide", {"shard_embeddings": 1 << 40}),
        ("no table to divide", {"model": "mlp", "extra": {}}),
    ],
)
def test_what_cannot_be_combined_is_refused(data: str, tmp_path: Path, words: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=words):
        train(data, tmp_path / "run", **({"num_ranks": 1} | options))


def test_a_layer_without_its_table_says_so() -> None:
    layer = ShardedEmbedding(10, 2)
    with pytest.raises(Exception, match="not on this rank"):
        layer(np.zeros((3, 1), np.int64))
