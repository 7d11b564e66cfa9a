"""--strategy federated: clients train in rounds, on one rank each; the result is the same at any number of ranks."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pytest

from lockstep.features.schema.declare import load_schema
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema
from lockstep.features.schema.signature import Signature
from lockstep.jobs.verify import audit_faults
from lockstep.storage.errors import ConfigError, DataError
from lockstep.training.batches.clients import ClientRows, read_table
from lockstep.training.comm.base import SoloCommunicator
from lockstep.training.config import TrainConfig
from lockstep.training.models import ModelOptions
from lockstep.training.plan.client_plan import ClientPlan, ClientTable
from lockstep.training.plan.privacy import uncovered
from lockstep.training.reading.open import OpenSplit
from lockstep.training.results.audit import ROW, Part, Span
from lockstep.training.results.audit_clients import check_clients
from lockstep.training.run import notes
from lockstep.training.run.result import RunResult
from tests.training import _threads  # sets TensorFlow's threads before it makes them
from tests.training._tiny import write_rows
from tests.training.rank.test_fit import assert_no_bit_differs, train

OWN = "tests.training.strategies.test_federated"
CLIENTS = ("ann", "bob", "cid", "dan", "eve", "fay", "gus")
SCHEMA = Schema(
    (
        Field(name="sample_id", dtype="int64", kind="id"),
        Field(name="a", dtype="float32"),
        Field(name="b", dtype="float32"),
        Field(name="who", dtype="string", encoding={"kind": "ignore"}),
        Field(name="label", dtype="bool", kind="label"),
    )
)


def write_clients(root: object, *, rows: int = 120, test: int = 30, seed: int = 0) -> list[str]:
    """Rows of clients of uneven sizes, mixed over all blocks; returns the client of each training row."""
    rng = np.random.default_rng(seed)
    who = [CLIENTS[int(i)] for i in rng.choice(len(CLIENTS), rows + test, p=np.arange(1, 8) / 28)]
    a, b = rng.standard_normal((2, rows + test)).astype(np.float32)
    columns = [pa.array(range(rows + test)), pa.array(a), pa.array(b), pa.array(who), pa.array(a + b > 0)]
    batch = pa.RecordBatch.from_arrays(columns, schema=SCHEMA.arrow_schema())
    write_rows(str(root), SCHEMA, batch, {"train": rows, "test": test}, "tfrecord", 2, 8, seed)
    return who[:rows]


FAIL_AT: list[int] = []


class FailOnce(keras.callbacks.Callback):
    """Fails in the round of FAIL_AT, on whichever rank comes first."""

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if FAIL_AT and epoch == FAIL_AT[0]:
            FAIL_AT.clear()
            raise RuntimeError("told to fail")


def adam(signature: Signature, options: ModelOptions) -> tuple[keras.Model, list[Any]]:
    """Dropout by seeds of its own and by those of the process, batch normalisation, and callbacks."""
    inputs = {name: keras.Input(spec.shape, dtype=spec.dtype, name=name) for name, spec in signature.features.items()}
    x = keras.layers.Dense(4, activation="tanh")(keras.layers.Concatenate()(list(inputs.values())))
    x = keras.layers.BatchNormalization()(keras.layers.Dropout(0.3, seed=5)(x))
    x = Jitter()(x)
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(x))
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", jit_compile=False)
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=0, min_delta=1.0)
    return model, [plateau, FailOnce()]


@keras.saving.register_keras_serializable("tests")
class Jitter(keras.layers.Layer):
    """Draws from the process's generator."""

    def call(self, x: Any, training: bool = False) -> Any:
        """The same shape."""
        return x + 0.01 * keras.random.normal(keras.ops.shape(x)) if training else x


def sgd(signature: Signature, options: ModelOptions) -> keras.Model:
    """Logistic regression by plain SGD, with a penalty."""
    inputs = {name: keras.Input(spec.shape, dtype=spec.dtype, name=name) for name, spec in signature.features.items()}
    x = keras.layers.Concatenate()(list(inputs.values()))
    y = keras.layers.Dense(1, activation="sigmoid", kernel_regularizer="l2")(x)
    model = keras.Model(inputs, y)
    model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy", jit_compile=False)
    return model


def by_batches(signature: Signature, options: ModelOptions) -> tuple[keras.Model, list[Any]]:
    """`sgd` with a callback that counts batches."""
    return sgd(signature, options), [keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_: None), Batches()]


class Batches(keras.callbacks.Callback):
    """Counts batches."""

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Nothing."""


def falling(signature: Signature, options: ModelOptions) -> keras.Model:
    """`sgd` with a schedule over a run."""
    model = sgd(signature, options)
    rate = keras.optimizers.schedules.CosineDecay(0.1, 10)
    model.compile(keras.optimizers.SGD(rate), "binary_crossentropy", jit_compile=False)
    return model


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data") / "clients"
    write_clients(folder)
    return str(folder)


def rounds(data: str, url: Path, num_ranks: int, model: str = f"{OWN}:sgd", **more: Any) -> RunResult:
    options: dict[str, Any] = {"clients": "who", "client_fraction": 0.5, "global_batch": 8, "local_epochs": 2}
    options |= {"epochs": 3, "strategy": "federated", "audit": True, "batchnorm": "local", "precision": "float64"}
    return train(data, url, num_ranks, model, **(options | more))


def assert_close(one: Path, other: Path, kinds: tuple[str, ...] = ("weights/", "optimizer/", "outer/")) -> None:
    found = [_threads.final_tensors(str(url)) for url in (one, other)]
    mine, theirs = ({name: value for name, value in each.items() if name.startswith(kinds)} for each in found)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert np.max(np.abs(value - theirs[name]), initial=0.0) <= 1e-12, name


@pytest.mark.slow
def test_the_same_at_any_number_of_ranks(data: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = []
    for ranks in (1, 2, 3):
        found.append(rounds(data, tmp_path / str(ranks), ranks, f"{OWN}:adam", validate="test", outer_momentum=0.5))
        assert_close(tmp_path / "1", tmp_path / str(ranks))
        assert audit_faults(str(tmp_path / str(ranks))) == []
    assert "3 rounds, as planned; each client on one rank" in capfd.readouterr().out
    assert len({result.samples for result in found}) == 1 and {result.steps for result in found} == {3}
    for result in found:
        assert {"loss", "val_loss"} <= result.metrics.keys()
        assert result.metrics == pytest.approx(found[0].metrics, rel=1e-9) and result.privacy is None


@pytest.mark.slow
def test_noise_is_the_same_at_any_number_of_ranks_and_has_the_accountants_epsilon(data: str, tmp_path: Path) -> None:
    import dp_accounting as dp
    from dp_accounting import pld

    private: dict[str, Any] = {"update_clip": 0.1, "noise_multiplier": 2.0, "privacy_delta": 0.01}
    found = [rounds(data, tmp_path / str(ranks), ranks, **private) for ranks in (1, 2)]
    assert_close(tmp_path / "1", tmp_path / "2")
    event = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.5, dp.GaussianDpEvent(2.0)), 3)
    epsilon = pld.PLDAccountant().compose(event).get_epsilon(0.01)
    for result in found:
        assert result.privacy is not None and result.privacy["epsilon"] == epsilon
        assert f"epsilon {epsilon:.4f} at delta 0.01; not covered: losses, metrics" in result.summary()
    assert rounds(data, tmp_path / "1", 1, **private).privacy == found[0].privacy  # read again
    with pytest.raises(ConfigError, match="delta is too large"):
        rounds(data, tmp_path / "more", 1, **{**private, "privacy_delta": 0.5})


@pytest.mark.slow
def test_all_clients_and_one_full_step_are_sync_sgd(data: str, tmp_path: Path) -> None:
    rounds(data, tmp_path / "rounds", 2, client_fraction=1.0, global_batch=120, local_epochs=1)
    train(data, tmp_path / "sync", 2, f"{OWN}:sgd", global_batch=120, epochs=3, precision="float64")
    assert_close(tmp_path / "rounds", tmp_path / "sync", ("weights/",))


@pytest.mark.slow
def test_a_restart_changes_no_bit_and_other_calls_are_refused(data: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint_every": 1, "outer_learning_rate": 0.7, "outer_momentum": 0.9}
    whole = rounds(data, tmp_path / "whole", 2, f"{OWN}:adam", **options)
    FAIL_AT.append(2)
    broken = rounds(data, tmp_path / "broken", 2, f"{OWN}:adam", **options)
    assert not FAIL_AT and (whole.restarts, broken.restarts) == (0, 1)
    assert_no_bit_differs((tmp_path / "whole", whole), (tmp_path / "broken", broken))
    assert audit_faults(str(tmp_path / "broken")) == []
    assert rounds(data, tmp_path / "broken", 3, f"{OWN}:adam", **{**options, "epochs": 4}).steps == 4
    assert audit_faults(str(tmp_path / "broken")) == []  # clients may go to other ranks with a generation
    others: dict[str, Any] = {"clients": "a", "client_fraction": 0.4, "local_epochs": 1, "update_clip": 1.0}
    for name, value in others.items():
        with pytest.raises(ConfigError, match=f"begun with another `{name}`|no clients in"):
            rounds(data, tmp_path / "whole", 2, f"{OWN}:adam", **{**options, name: value})
    with pytest.raises(ConfigError, match="begun with another `strategy`"):
        train(data, tmp_path / "whole", 2, f"{OWN}:adam", batchnorm="local", precision="float64")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "more", "said"),
    [
        ("adam", {"batchnorm": "ghost"}, "normalises its own batches"),
        ("adam", {"update_clip": 1.0, "noise_multiplier": 1.0, "privacy_delta": 0.01}, "would reveal a client"),
        ("by_batches", {}, "counts batches"),
        ("falling", {}, "counts steps of a whole run"),
        ("sgd", {"clients": "nobody"}, "no clients in `nobody`"),
        ("sgd", {"clients": "b"}, "a field of float32"),
        ("sgd", {"num_ranks": 8}, "more ranks than clients"),
    ],
)
def test_what_a_client_cannot_have_is_refused(
    data: str, tmp_path: Path, model: str, more: dict[str, Any], said: str
) -> None:
    options = {"num_ranks": 1, **more}
    with pytest.raises(ConfigError, match=said):
        rounds(data, tmp_path / "run", options.pop("num_ranks"), f"{OWN}:{model}", **options)


def test_noise_without_the_accountant_is_refused_before_a_rank_starts(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)  # what an import finds where it is not installed
    with pytest.raises(ConfigError, match="needs the package dp-accounting"):
        rounds(data, tmp_path / "run", 1, update_clip=0.1, noise_multiplier=2.0, privacy_delta=0.01)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"clients": None}, "clients"),
        ({"client_fraction": 0.0}, "client_fraction"),
        ({"local_epochs": 0}, "local_epochs"),
        ({"update_clip": 0.0}, "update_clip"),
        ({"noise_multiplier": 1.0, "privacy_delta": 1e-5}, "noise_multiplier"),
        ({"noise_multiplier": 1.0, "update_clip": 1.0}, "privacy_delta"),
        ({"privacy_delta": 1e-5}, "privacy_delta"),
        ({"canonical": True}, "strategy"),
        ({"micro_batches": 2}, "strategy"),
        ({"precision": "mixed_float16"}, "strategy"),
        ({"delay": 1}, "delay"),
        ({"sync_every": 4}, "sync_every"),
        ({"compression": "bf16"}, "compression"),
        ({"augment": "flip"}, "augment"),
        ({"lanes": 4}, "lanes"),
        ({"staleness": 1}, "staleness"),
        ({"batchnorm": "sync"}, "batchnorm"),
        ({"strategy": "sync"}, "clients"),
        ({"strategy": "sync", "clients": None, "local_epochs": 2}, "local_epochs"),
    ],
)
def test_what_does_not_fit_is_refused(more: dict[str, Any], named: str) -> None:
    options: dict[str, Any] = {"strategy": "federated", "clients": "who", "num_ranks": 2, "global_batch": 8}
    with pytest.raises(ConfigError, match=f"`{named}`"):
        TrainConfig(datasets=("data",), run="run", model="logistic", epochs=2, **{**options, **more})


def small(noise: float = 0.0, clip: float | None = None) -> Any:
    """A strategy over one weight (2, 1) that begins at 0, and its model."""
    from lockstep.training.strategies.federated import Federated
    from lockstep.training.strategies.local_steps import LocalExchange

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros", use_bias=False)])
    model.compile(keras.optimizers.SGD(1.0, momentum=0.5), "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    exchange = LocalExchange(SoloCommunicator(), 1.0)
    exchange.part()
    return model, Federated(model, exchange, clip=clip, noise_multiplier=noise)


def test_a_clients_change_is_clipped_and_noise_has_the_stated_deviation() -> None:
    model, strategy = small(noise=1.5, clip=5.0)
    (weight,) = model.trainable_variables
    strategy.begin_epoch(0, 1)
    for change in ([[3.0], [4.0]], [[6.0], [8.0]], [[0.0], [1.0]]):  # of norms 5, 10 and 1
        strategy.client_begins()
        assert not weight.numpy().any() and not any(float(v.numpy().any()) for v in strategy._reset)
        model.optimizer.apply([keras.ops.convert_to_tensor(-np.array(change, np.float32))], [weight])
        strategy.client_ends("c", 1.0)
    strategy.round_ends(4.0, np.random.default_rng(7))
    noise = 1.5 * 5.0 * np.random.default_rng(7).standard_normal(2)[:, None]
    assert weight.numpy() == pytest.approx((np.array([[6.0], [9.0]]) + noise) / 4.0)
    with pytest.raises(DataError, match="client `dan` are not finite"):
        strategy.begin_epoch(1, 2)
        weight.assign(np.full((2, 1), np.inf))
        strategy.client_ends("dan", 1.0)


TABLE = ClientTable.of([(["b", "a"], np.array([0, 0, 1, 0], np.int32)), (["c", "a"], np.array([0, 1, 1], np.int32))])
PLAN = ClientPlan(dataset_digest="d", split="train", records=7, seed=1, clients="who", client_fraction=0.5,
                  local_epochs=2, global_batch=2, each=False)  # fmt: skip


def test_the_plan() -> None:
    assert TABLE.names == ("a", "b", "c") and TABLE.of_row.tolist() == [1, 1, 0, 1, 2, 0, 0]
    assert TABLE.counts.tolist() == [3, 3, 1]
    assert TABLE.owners(2).tolist() == [0, 1, 0] and set(TABLE.owners(3).tolist()) == {0, 1, 2}
    drawn = [PLAN.drawn(number, 10) for number in range(400)]
    assert {len(one) for one in drawn} == {5} and all((np.diff(one) > 0).all() for one in drawn)
    assert np.bincount(np.concatenate(drawn)) == pytest.approx(np.full(10, 200), abs=50)
    each = [replace(PLAN, each=True).drawn(number, 10) for number in range(400)]
    assert len({len(one) for one in each}) > 3 and np.mean([len(one) for one in each]) == pytest.approx(5, abs=0.3)
    assert not np.array_equal(PLAN.order(0, 1, 0, 9), PLAN.order(0, 1, 1, 9))
    assert len(replace(PLAN, client_fraction=1e-6).drawn(0, 10)) == 1
    stored: Any = SimpleNamespace(digest="other")
    with pytest.raises(DataError, match="not a plan of clients over this dataset"):
        ClientPlan.of(PLAN.identity(), stored)


def as_audited(num_ranks: int, rounds: int) -> list[Part]:
    """The audit of ranks that do what the plan says; sample i of TABLE's rows has id 10 + i."""
    parts, owners = [], TABLE.owners(num_ranks)
    for rank in range(num_ranks):
        rows = [
            (number + 1, local, 10 + np.flatnonzero(TABLE.of_row == client)[place], 0)
            for number in range(rounds)
            for client in PLAN.drawn(number, 3)
            if owners[client] == rank
            for local in range(2)
            for place in PLAN.order(number, client, local, int(TABLE.counts[client]))
        ]
        parts.append(Part(f"rank-{rank}", 1, rank, np.array(rows, ROW)))
    return parts


def test_the_audit_finds_a_client_on_two_ranks_and_what_was_not_planned() -> None:
    def faults(parts: list[Part]) -> list[str]:
        return check_clients(PLAN, TABLE, np.arange(10, 17), [Span(1, 2, 1, 6)], parts)

    parts = as_audited(2, 6)
    assert all(len(part.rows) for part in parts) and faults(parts) == []
    moved = replace(parts[1], rows=np.concatenate([parts[1].rows, parts[0].rows[-1:]]))
    client = TABLE.names[TABLE.of_row[int(parts[0].rows["id"][-1]) - 10]]
    assert any(f"client `{client}` is in rank-0 too" in line for line in faults([parts[0], moved]))
    assert "rows of" in faults([replace(parts[0], rows=parts[0].rows[:-1]), parts[1]])[0]
    swapped = parts[0].rows.copy()
    swapped["id"][[0, 1]] = swapped["id"][[1, 0]]
    assert "where the plan has" in faults([replace(parts[0], rows=swapped), parts[1]])[0]
    swapped["id"][0] = 99
    assert any("not in the dataset" in line for line in faults([replace(parts[0], rows=swapped), parts[1]]))


def test_a_rank_reads_its_clients_only_and_refuses_more_than_its_memory(data: str, tmp_path: Path) -> None:
    opened = OpenSplit.at(data, "train")
    table = read_table(opened.reader, "who")
    assert table.names == CLIENTS and table.counts.sum() == 120
    rows = ClientRows(opened.reader, opened.encoder, table, [2, 5], 1 << 20)
    for client in (2, 5):
        ids = rows.of(client, np.arange(table.counts[client])).sample_id
        assert ids.tolist() == np.flatnonzero(table.of_row == client).tolist()
    with pytest.raises(ConfigError, match="do not fit into its memory") as caught:
        ClientRows(opened.reader, opened.encoder, table, [2, 5], 100)
    assert "bytes of" in caught.value.got and "100 bytes" in caught.value.allowed
    assert rows.bytes < 1 << 20


def test_what_was_made_of_rows_without_noise_is_named_beside_epsilon(capsys: pytest.CaptureFixture[str]) -> None:
    schema = load_schema("""
fields = [
    {name = "visitor", dtype = "string", encoding.kind = "ignore"},
    {name = "page", dtype = "string", encoding.kind = "vocabulary"},
    {name = "tags", dtype = "string", list = true, encoding = {kind = "sequence", length = 2, of.kind = "vocabulary"}},
    {name = "known", dtype = "string", encoding = {kind = "vocabulary", tokens = ["a", "b"]}},
    {name = "price", dtype = "float64", encoding.kind = "standardise"},
    {name = "stated", dtype = "float64", encoding = {kind = "standardise", mean = 3.5, deviation = 2}},
    {name = "hashed", dtype = "string", encoding = {kind = "hash", buckets = 7}},
    {name = "bought", dtype = "bool", kind = "label"},
]
""")
    config = TrainConfig(
        datasets=("data",), run="run", model="logistic", num_ranks=1, global_batch=8, epochs=3, launcher="local",
        strategy="federated", clients="visitor", update_clip=1.0, noise_multiplier=1.0, privacy_delta=1e-3,
        validate="test", early_stop="val_loss:min:2", keep_best="val_loss:min",
    )  # fmt: skip
    assert uncovered(config, schema) == [
        "the vocabulary of `page`, fitted on all rows",
        "the vocabulary of `tags`, fitted on all rows",
        "mean and deviation of `price`, fitted on all rows",
        "the end that --early-stop val_loss:min:2 chose by metrics",
        "the checkpoint that --keep-best val_loss:min chose by metrics",
    ]
    plain = config.but(early_stop=None, keep_best=None)
    declared = Schema(tuple(field for field in schema if field.name not in ("page", "tags", "price")))
    assert uncovered(plain, declared) == []
    notes.show(notes.of_private_search(config.options()["noise_multiplier"]))
    assert "the choice among trials by a metric without noise is not covered" in capsys.readouterr().err
    assert notes.of_private_search(0.0) == []
