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
from lockstep.features.schema.signature import Signature, TensorSpec
from lockstep.storage.errors import ConfigError, DataError
from lockstep.storage.fs import filesystem
from lockstep.storage.verify import verify
from lockstep.training.config import TrainConfig
from lockstep.training.embeddings.sharded_embedding import ShardedEmbedding, sharded_layers, with_base
from lockstep.training.models import ModelOptions
from lockstep.training.models.inputs import inputs_of
from lockstep.training.models.two_tower import two_tower
from lockstep.training.models.wide_deep import wide_deep
from lockstep.training.results.audit import check_run_audit
from lockstep.training.results.export_run import export_run
from lockstep.training.results.report import write_report
from lockstep.training.run.checkpoint import base_url, read_manifest
from lockstep.training.run.checkpoint_division import read_whole
from lockstep.training.run.lineage import Checkpoint, find_tip
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import RunResult
from tests.builders.evaluations import evaluate
from tests.training import _models
from tests.training._threads import rows_of, run, run_threads
from tests.training._tiny import write_rows

slow = pytest.mark.slow
HERE = "tests.training.embeddings.test_sharded_embedding"
IDS = {"kind": "hash", "buckets": 300, "seed": 0, "output": "index"}
SCHEMA = Schema(
    (
        Field(name="sample_id", dtype="int64", kind="id"),
        Field(name="amount", dtype="float32"),
        Field(name="item", dtype="int64", encoding=IDS),
        Field(name="page", dtype="int64", encoding={"kind": "number", "dtype": "int64"}),
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
    page, label = pa.array(item * 2**50 - 5), (user + item) % 3 == 0
    columns = [ids, pa.array(amount), pa.array(item), page, pa.array(user), pa.array(label)]
    rows = pa.RecordBatch.from_arrays(columns, schema=SCHEMA.arrow_schema())
    root = str(tmp_path_factory.mktemp("data"))
    write_rows(root, SCHEMA, rows, {"train": 192, "test": 30}, "tfrecord", 2, 8, 0)
    return root


def fails(signature: Signature, options: ModelOptions) -> tuple[keras.Model, list[Any]]:
    """`two-tower`, with a rank that fails when a test says so."""
    return two_tower(signature, options), [_models.FailOnce()]


@keras.saving.register_keras_serializable("tests")
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


def growing(signature: Signature, options: ModelOptions) -> tuple[keras.Model, list[Any]]:
    """Two tables without a number of rows, of ids far apart, with a rank that fails when a test says so."""
    inputs = inputs_of(signature)
    ids = {name: inputs[name] * (1 << 40) - 5 for name in ("item", "user")}
    more: dict[str, Any] = {"admit_after": 2, "evict_after_steps": 4, "spread": 0.5}
    user = ShardedEmbedding(None, 4, name="users", **more)(ids["user"])
    item = ShardedEmbedding(None, 4, name="items", optimizer="adam", learning_rate=0.01, **more)(ids["item"])
    x = keras.layers.Flatten()(keras.layers.Concatenate()([user, item]))
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid", name="yes")(x))
    model.compile(optimizer="sgd", loss="binary_crossentropy")
    return model, [_models.FailOnce()]


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
    found = read_whole(tip.url, tip.manifest, ("weights", "optimizer", "tables"))
    if (base := base_url(tip.url, tip.manifest)) is not None:
        found = with_base(found, read_whole(base, read_manifest(base), ("tables",)))
    return found


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
    with pytest.raises(ConfigError, match="init-from cannot be combined with tables"):
        train(data, tmp_path / "later", 1, init_from=str(alone))
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
    assert not verify(str(url))
    check_run_audit(str(url))


GROWING: dict[str, Any] = {"model": f"{HERE}:growing", "shard_embeddings": None, "extra": {}}


@pytest.fixture(scope="module")
def grown(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    url = tmp_path_factory.mktemp("grown") / "run"
    train(data, url, 1, **GROWING)
    return url


def by_id(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tables without a number of rows in the order of ids: in a checkpoint they are in that of ranks and admission."""
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith("ids")]:
        begins = name.removesuffix("ids")
        order = np.argsort(tensors[name])
        for column in ("ids", "seen", *(("times",) if "waiting" in begins else ("rows", "squares", "means"))):
            if begins + column in tensors:
                found[begins + column] = tensors[begins + column][order]
    return found


@pytest.fixture
def differences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each checkpoint but the first of a process is a difference."""
    monkeypatch.setattr("lockstep.training.embeddings.sharded_embedding.LEAST_BYTES", 0)
    monkeypatch.setattr("lockstep.training.embeddings.sharded_embedding.MOST_DIFFERENCES", 1000)
    monkeypatch.setattr("lockstep.training.embeddings.sharded_embedding._bytes_of", lambda specs: 0)


def assert_kept(paths: RunPaths) -> Checkpoint:
    """The newest checkpoint is a difference, and its base and one more are there."""
    tip = find_tip(filesystem(paths.root), paths)
    assert tip is not None and tip.base is not None
    names = {path.name for path in Path(paths.checkpoints).iterdir()}
    assert {str(tip.ref), str(tip.base)} <= names and len(names) == 3
    return tip


@slow
@pytest.mark.usefixtures("differences")
def test_growing_tables_resumed_on_other_ranks_are_those_of_one(data: str, grown: Path, tmp_path: Path) -> None:
    """Resumed from a difference, across evictions."""
    url, more = tmp_path / "run", {**GROWING, "checkpoint_every": 1, "validate": "test", "keep_checkpoints": 2}
    train(data, url, 3, max_steps=11, **more)
    tip = assert_kept(RunPaths(str(url)))
    assert tip.base is not None and tip.base.step < 8
    result = train(data, url, 2, **more)
    one, many = by_id(tensors_at(grown)), by_id(tensors_at(url))
    assert_same(one, many, 1e-12)
    assert one["tables/users/totals"].sum(0).min() > 5 and len(one["tables/users/waiting_ids"]) > 2
    for name, figures in rows_of(str(url), "epoch")[16]["tables"].items():
        admitted, evicted, _ = one[f"tables/{name}/totals"].sum(0).tolist()
        assert (figures["admitted"], figures["evicted"]) == (admitted, evicted)
        assert figures["rows"] == admitted - evicted == len(one[f"tables/{name}/ids"])
    assert "ids wait for one" in Path(write_report(str(url))).read_text()
    assert not verify(str(url))
    # The export needs no Lockstep, and reads zeros for ids without a row.
    found = evaluate(str(url), data, "test", run_threads)["metrics"]
    assert result.metrics["val_loss"] == pytest.approx(found["loss"], rel=1e-6)
    loaded = keras.models.load_model(Path(url, "models", "g0002", "model.keras"))
    table = loaded.get_layer("users")
    assert {type(layer).__module__.split(".")[0] for layer in (*loaded.layers, *table.layers)} == {"keras"}
    ids, rows = one["tables/users/ids"], one["tables/users/rows"]
    np.testing.assert_allclose(table(ids[:, None]).numpy()[:, 0], rows, rtol=0, atol=1e-12)
    assert not table(ids[:, None] + 1).numpy().any()
    batch = {"item": np.arange(6)[:, None], "user": np.arange(6)[:, None], "page": np.zeros((6, 1), np.int64)}
    batch["amount"] = np.zeros((6, 1), np.float32)
    loaded.export(tmp_path / "saved", verbose=False)
    saved = tf.saved_model.load(str(tmp_path / "saved"))
    np.testing.assert_allclose(saved.serve(batch), loaded.predict(batch, verbose=0), atol=1e-7)


@slow
@pytest.mark.soak
@pytest.mark.usefixtures("differences")
def test_a_difference_to_a_whole_checkpoint_resumes_exactly(data: str, alone: Path, tmp_path: Path) -> None:
    """On other ranks; it is refused if its base is damaged, and retention keeps the base."""
    more: dict[str, Any] = {"model": f"{HERE}:fails", "checkpoint_every": 1, "keep_checkpoints": 2}
    train(data, tmp_path / "run", 2, max_steps=11, **more)
    fs, paths = filesystem(str(tmp_path)), RunPaths(str(tmp_path / "run"))
    tip = assert_kept(paths)
    (file, *_) = Path(paths.checkpoints, str(tip.base)).glob("rank-*")
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(DataError, match="is complete"):
        find_tip(fs, paths)
    file.write_bytes(content)
    assert not verify(paths.root)
    Path(paths.checkpoints, str(tip.base)).rename(tmp_path / "away")
    assert any("whose difference it holds, is missing" in finding.what for finding in verify(paths.root))
    (tmp_path / "away").rename(Path(paths.checkpoints, str(tip.base)))
    train(data, tmp_path / "run", 3, **more)
    assert_same(tensors_at(alone), tensors_at(tmp_path / "run"), 1e-12)


@slow
@pytest.mark.soak
@pytest.mark.parametrize("model", [{"model": f"{HERE}:fails"}, GROWING])
def test_a_restart_is_exact_to_the_bit(data: str, tmp_path: Path, model: dict[str, Any]) -> None:
    more: dict[str, Any] = {**model, "checkpoint_every": 4, "precision": "float32"}
    train(data, tmp_path / "whole", 2, **more)
    _models.FAIL_AT.update(step=11)
    assert train(data, tmp_path / "broken", 2, **more).restarts == 1
    whole, broken = by_id(tensors_at(tmp_path / "whole")), by_id(tensors_at(tmp_path / "broken"))
    assert {name: value.tobytes() for name, value in whole.items()} == {n: v.tobytes() for n, v in broken.items()}


@slow
def test_validation_evaluation_and_export_agree(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation asks the shards, in other numbers of batches on each rank; the export has plain Embedding layers, with
    the rows of the best checkpoint.
    """
    monkeypatch.setattr("lockstep.training.rank.validation.BATCH_ROWS", 7)
    url = tmp_path / "run"
    small = {"decay": 0.0, "dropout": 0.0, "width": 8, "any_ids": "page", "table_optimizer": "adam"}
    rule = {"validate": "test", "keep_best": "val_loss:max"}  # the loss falls: the first epoch's
    result = train(data, url, 3, model="wide-deep", extra=small, **rule)
    assert result.best is not None and result.best["step"] == 8 < result.steps
    found = evaluate(str(url), data, "test", run_threads)["metrics"]
    assert result.best["value"] == pytest.approx(found["loss"], rel=1e-6)
    by_step = evaluate(str(url), data, "test", run_threads, num_ranks=2, checkpoint=8)["metrics"]
    assert by_step["loss"] == pytest.approx(found["loss"], rel=1e-9)
    last = evaluate(str(url), data, "test", run_threads, num_ranks=2, checkpoint="last")["metrics"]
    assert last["loss"] == pytest.approx(result.metrics["val_loss"], rel=1e-6) != found["loss"]
    (file,) = Path(url, "models").glob("*/model.keras")
    loaded = keras.models.load_model(file)
    assert {type(layer).__module__.split(".")[0] for layer in loaded.layers} == {"keras"}
    assert len(tensors_at(url)["tables/_page_vectors/ids"]) > 20
    monkeypatch.setattr("lockstep.training.embeddings.sharded_embedding.COPIES", 1 << 40)
    with pytest.raises(ConfigError, match="do not fit into one process"):
        export_run(str(url), str(tmp_path / "model"), run_threads)
    assert train(data, tmp_path / "large", 2, max_steps=1).model is None


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
        ("an optimizer with clipnorm", {"model": f"{HERE}:clipped"}),
        ("canonical", {"canonical": True, "num_ranks": 2}),
        ("mixed_float16", {"precision": "mixed_float16"}),
        ("decay=0", {"extra": {"decay": 0.1}}),
        ("adagrad or adam", {"extra": {"table_optimizer": "sgd"}}),
        ("no ids without a bound", {"extra": {"any_ids": "user"}}),
        ("no table to divide", {"shard_embeddings": 1 << 40}),
        ("no table to divide", {"model": "mlp", "extra": {}}),
    ],
)
def test_what_cannot_be_combined_is_refused(data: str, tmp_path: Path, words: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=words):
        train(data, tmp_path / "run", **({"num_ranks": 1} | options))


def test_ready_models_of_ids_without_a_bound() -> None:
    """Named columns only; without any other ids there is still a bias."""
    spec, label = TensorSpec(shape=(1,), dtype="int64"), TensorSpec(shape=(), dtype="float32")
    signature = Signature(features={"a": spec, "b": spec, "c": spec}, label=label, num_classes=None)
    extra: dict[str, Any] = {"decay": 0.0, "any_ids": "a,b", "admit_after": 3, "evict_after_steps": 9}
    for function, tables in ((two_tower, 4), (wide_deep, 4)):
        layers = sharded_layers(function(signature, ModelOptions(extra=extra)))
        assert len(layers) == tables
        assert {(one.options.rows, one.options.admit_after, one.options.evict_after_steps) for one in layers} == {
            (None, 3, 9)
        }


def test_a_layer_without_its_table_says_so() -> None:
    layer = ShardedEmbedding(10, 2)
    with pytest.raises(Exception, match="not on this rank"):
        layer(np.zeros((3, 1), np.int64))
