"""Sample weights and ids for an embedding, from the shard to the optimizer, at any number of ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lockstep.features.sample_id import sample_id
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError
from lockstep.training.config import TrainConfig
from lockstep.training.reading.open import OpenSplit
from lockstep.training.results.audit import check_run_audit
from lockstep.training.run.result import RunResult
from tests.builders.blocks import read_all
from tests.builders.evaluations import evaluate
from tests.training._threads import final_tensors, run, run_threads
from tests.training._tiny import write_rows
from tests.training.rank.test_fit import assert_same

pytestmark = pytest.mark.slow

SCHEMA = Schema(
    (
        sample_id_field(),
        Field(
            name="item",
            dtype="int64",
            encoding={"kind": "hash", "buckets": 40, "seed": 42, "output": "index"},
        ),
        Field(
            name="seen",
            dtype="string",
            shape=(None,),
            encoding={"kind": "sequence", "length": 2, "of": {"kind": "hash", "buckets": 9, "seed": 42}},
        ),
        Field(name="x", dtype="float64"),
        Field(name="weight", dtype="float32", kind="weight"),
        Field(name="label", dtype="bool", kind="label"),
    )
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(str(tmp_path_factory.mktemp("data") / "weighted"), 3)


def write(url: str, seed: int) -> str:
    """Half of the rows weigh 3 and have x > 0 as their label; the others weigh nothing and say the opposite."""
    rng = np.random.default_rng(seed)
    count = 130
    x = rng.standard_normal(count)
    counts = rng.integers(0, 2, count) == 1
    seen = [[f"v{n}" for n in rng.integers(0, 5, size)] for size in rng.integers(0, 4, count)]
    columns = [
        pa.array([sample_id([str(row).encode()], 0) for row in range(count)], pa.int64()),
        pa.array(rng.integers(0, 10, count)),
        pa.array(seen, pa.list_(pa.field("element", pa.string()))),
        pa.array(x),
        pa.array(np.where(counts, 3, 0).astype(np.float32)),
        pa.array((x > 0) == counts),
    ]
    rows = pa.RecordBatch.from_arrays(columns, schema=SCHEMA.arrow_schema())
    write_rows(url, SCHEMA, rows, {"train": 100, "test": 30}, "tfrecord", 2, 8, 0)
    return url


def test_weights_and_ids_are_the_same_at_any_number_of_ranks(dataset: str, tmp_path: Path) -> None:
    import keras

    results = {}
    for ranks in (1, 3):
        options: dict[str, Any] = {"global_batch": 24, "epochs": 3, "launcher": "local", "precision": "float64"}
        options |= {"learning_rate": 0.1, "num_ranks": ranks, "run": str(tmp_path / str(ranks))}
        results[ranks] = run(TrainConfig(datasets=(dataset,), model="logistic", **options))
    mine, other = (final_tensors(str(tmp_path / name)) for name in ("1", "3"))
    assert_same(mine, other)
    assert results[1].metrics["loss"] == pytest.approx(results[3].metrics["loss"], rel=1e-9)
    assert any(value.shape == (41 + 10 + 1, 1) and value.any() for value in mine.values()), "the table of ids"

    told = evaluate(str(tmp_path / "3"), dataset, "test", run_threads, num_ranks=2, batch=7, baseline="majority")
    split = OpenSplit.at(dataset, "test")
    rows = split.encoder.encode(read_all(split.reader, [split.reader.table.run(i) for i in range(4)]))
    assert rows.weight is not None and rows.y is not None
    model = keras.models.load_model(Path(told["model"], "model.keras"))
    plain = model.evaluate(rows.x, rows.y, sample_weight=rows.weight, batch_size=30, verbose=0, return_dict=True)
    plain["auc"] = told["metrics"][
        "auc"
    ]  # Keras' own is by thresholds; tests/training/results/test_evaluate.py has the exact one
    assert {name: told["metrics"][name] for name in plain} == pytest.approx(plain, rel=1e-5)
    kept = rows.weight > 0
    right = (np.asarray(model.predict(rows.x, verbose=0)).ravel() > 0.5) == rows.y
    assert right[kept].mean() > 0.8 and right[~kept].mean() < 0.4, "rows without weight taught nothing"
    assert told["baseline"]["metrics"]["loss"] > told["metrics"]["loss"]


def test_a_mixture_of_weighted_rows_goes_on_with_other_ranks(dataset: str, tmp_path: Path) -> None:
    """Two thirds of each batch are of the second dataset; its sample ids are the first one's, its epochs its own."""
    options: dict[str, Any] = {"global_batch": 24, "launcher": "local", "precision": "float64", "audit": True}
    options |= {"datasets": (dataset, write(str(tmp_path / "second"), 4)), "mix": (1, 2), "learning_rate": 0.1}

    def train(name: str, num_ranks: int, epochs: int, **more: Any) -> RunResult:
        numbers = {"run": str(tmp_path / name), "num_ranks": num_ranks, "epochs": epochs}
        return run(TrainConfig(model="logistic", **{**options, **numbers, **more}))

    straight = train("straight", 1, 3)
    train("broken", 3, 1)
    later = train("broken", 2, 3)
    assert straight.steps == later.steps == 3 * 100 // 8 and len(later.left_over) == 4
    assert_same(final_tensors(str(tmp_path / "straight")), final_tensors(str(tmp_path / "broken")))
    assert straight.metrics["loss"] == pytest.approx(later.metrics["loss"], rel=1e-9)
    for name in ("straight", "broken"):
        report = check_run_audit(str(tmp_path / name))
        assert report.ok and report.samples == 37 * 24 and len(report.left_over) == 4
    shutil.rmtree(tmp_path / "straight" / "models")  # from its checkpoint, which names both datasets
    told = evaluate(str(tmp_path / "straight"), options["datasets"][1], "test", run_threads, batch=30)
    assert told["samples"] == 30 and told["model"].endswith("g0001")
    with pytest.raises(ConfigError, match="another `ratios`") as caught:
        train("broken", 2, 4, mix=(2, 1))
    assert "--mix" in caught.value.next_step
    with pytest.raises(ConfigError, match="another `ratios`"):
        train("broken", 2, 4, mix=None)  # the same records end to end
