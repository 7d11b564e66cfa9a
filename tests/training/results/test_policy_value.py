"""The value of a run's policy, beside sums over the model's own predictions by pandas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from lockstep.features.sample_id import sample_id
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError, DataError
from lockstep.training.config import TrainConfig
from lockstep.training.results.policy_value import PolicyRequest, evaluate_policy, summary
from tests.training._threads import run, run_threads
from tests.training._tiny import write_rows
from tests.training.models.test_policy import ACTIONS, EXTRA

pytestmark = pytest.mark.slow
TRAIN, TEST = 512, 256


def write_decisions(root: Path, *, least: float = 0.1) -> tuple[str, pd.DataFrame]:
    """Decisions of a policy that likes small numbers; those of the test split as pandas has them."""
    rng = np.random.default_rng(0)
    shares = np.array([0.4, 0.3, 0.2, 0.1])
    action = rng.choice(ACTIONS, TRAIN + TEST, p=shares)
    age = rng.normal(size=TRAIN + TEST).astype("float32")
    visitor = np.repeat(np.arange((TRAIN + TEST) // 4), 4)
    reward = (rng.random(TRAIN + TEST) < 0.1 + 0.2 * action * (age > 0)).astype("float32")
    propensity = np.maximum(shares[action], 0.1).astype("float32")
    propensity[-1] = least
    frame = pd.DataFrame({"action": action, "age": age, "propensity": propensity, "reward": reward, "visitor": visitor})
    schema = Schema(
        (
            Field(name="sample_id", dtype="int64", kind="id"),
            Field(name="action", dtype="int64", kind="label", num_classes=ACTIONS),
            Field(name="age", dtype="float32"),
            Field(name="propensity", dtype="float32"),
            Field(name="reward", dtype="float32"),
            Field(name="visitor", dtype="int64", encoding={"kind": "ignore"}),
        )
    )
    ids = pa.array([sample_id([str(row).encode()], 0) for row in range(len(frame))], type=pa.int64())
    named = schema.arrow_schema()
    columns = [ids, *(pa.array(frame[name]) for name in named.names[1:])]
    rows = pa.RecordBatch.from_arrays(
        [column.cast(field.type) for column, field in zip(columns, named, strict=True)], schema=named
    )
    write_rows(str(root), schema, rows, {"train": TRAIN, "test": TEST}, "tfrecord", 2, 64, 0)
    return str(root), frame


def trained(dataset: str, root: Path) -> str:
    config = TrainConfig(
        datasets=(dataset,), run=str(root / "run"), model="policy", num_ranks=2, global_batch=64, lanes=8, epochs=3,
        learning_rate=0.02, launcher="local", extra={**EXTRA, "loss": "dr", "embedding": 3},
    )  # fmt: skip
    run(config)
    return config.run


def by_pandas(url: str, frame: pd.DataFrame) -> dict[str, Any]:
    import keras

    (file,) = Path(url, "models").glob("*/model.keras")
    model = keras.models.load_model(file)
    assert type(model).__module__.startswith("keras.")
    test, train = frame[TRAIN:], frame[:TRAIN]
    x = {name: test[[name]].to_numpy() for name in ("age", "propensity", "reward")}
    shares = model.predict(x, verbose=0).astype(np.float64)
    shares /= shares.sum(axis=1, keepdims=True)
    usual = train.reward.astype("float64").mean()
    of_action = train.groupby("action").reward.agg(["sum", "count"]).astype("float64")
    judged = ((of_action["sum"] + 10 * usual) / (of_action["count"] + 10)).to_numpy()
    reward, taken = test.reward.to_numpy(np.float64), test.action.to_numpy()
    weight = shares[np.arange(TEST), taken] / test.propensity.to_numpy(np.float64)
    robust = shares @ judged + weight * (reward - judged[taken])
    return {
        "logged": reward.mean(),
        "ips": (weight * reward).mean(),
        "snips": (weight * reward).sum() / weight.sum(),
        "dr": robust.mean(),
    }


def test_values_are_those_of_pandas_at_one_and_two_ranks(tmp_path: Path) -> None:
    dataset, frame = write_decisions(tmp_path / "data")
    url = trained(dataset, tmp_path)
    wanted, found = by_pandas(url, frame), []
    for num_ranks in (1, 2):
        request = PolicyRequest(url, dataset, "test", reward="reward", propensity="propensity", num_ranks=num_ranks)
        found.append(evaluate_policy(request, run_threads))
    assert found[0] == found[1]
    assert found[0]["samples"] == TEST
    assert {name: one["value"] for name, one in found[0]["values"].items()} == pytest.approx(wanted, rel=1e-6)
    assert "SNIPS" in summary(found[0]) and f"{TEST} decisions" in summary(found[0])
    request = PolicyRequest(url, dataset, "test", reward="reward", propensity="propensity", clusters="visitor")
    assert evaluate_policy(request, run_threads)["values"]["ips"]["value"] == pytest.approx(wanted["ips"], rel=1e-6)


def test_what_cannot_be_weighed_is_refused(tmp_path: Path) -> None:
    dataset, _ = write_decisions(tmp_path / "data", least=0.0)
    url = trained(dataset, tmp_path)
    with pytest.raises(DataError, match="1 of 256 decisions cannot be weighed"):
        evaluate_policy(PolicyRequest(url, dataset, "test", reward="reward", propensity="propensity"), run_threads)
    for reward, propensity in (("earned", "propensity"), ("reward", "chance")):
        with pytest.raises(ConfigError, match="a stored column of one number"):
            evaluate_policy(PolicyRequest(url, dataset, "test", reward=reward, propensity=propensity), run_threads)
