"""Whole runs with compressed gradients: near the run without, the same after a restart, and over other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.storage.errors import ConfigError
from lockstep.training.compression.choose import CANDIDATES
from lockstep.training.config import TrainConfig
from lockstep.training.run.result import RunResult
from tests.training._threads import final_tensors, rows_of, run
from tests.training._tiny import write_table

pytestmark = pytest.mark.slow
METHODS = [
    "1bit",
    *(pytest.param(name, marks=pytest.mark.soak) for name in ("bf16", "qsgd:4", "topk:5%", "powersgd:1")),
]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    write_table(folder / "table", records={"train": 200, "test": 30})
    return str(folder / "table")


def config(dataset: str, url: Path, compression: str, num_ranks: int = 2, **more: Any) -> TrainConfig:
    defaults: dict[str, Any] = {
        "num_ranks": num_ranks,
        "global_batch": 24,
        "epochs": 2,
        "checkpoint_every": 1000,
        "launcher": "local",
    }
    defaults |= {"seed": 7, "model": "mlp"}
    return TrainConfig(datasets=(dataset,), run=str(url), compression=compression, **(defaults | more))


def train(*args: Any, **more: Any) -> RunResult:
    return run(config(*args, **more))


def weights(url: Path, kinds: tuple[str, ...] = ("weights",)) -> dict[str, np.ndarray]:
    return {name: value for name, value in final_tensors(str(url)).items() if name.split("/")[0] in kinds}


def sent(url: Path) -> int:
    return sum(row["sent_bytes"] for row in rows_of(str(url), "time").values())


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_stops_and_resumes_is_the_run_without_a_stop(method: str, table: str, tmp_path: Path) -> None:
    whole = train(table, tmp_path / "whole", method)
    first = train(table, tmp_path / "cut", method, max_steps=11)
    assert first.steps == 11
    resumed = train(table, tmp_path / "cut", method)
    assert resumed.steps == whole.steps
    kinds = ("weights", "optimizer", "compression")
    mine, other = weights(tmp_path / "whole", kinds), weights(tmp_path / "cut", kinds)
    assert mine.keys() == other.keys()
    assert all(value.tobytes() == other[name].tobytes() for name, value in mine.items())
    assert any(name.startswith("compression/") for name in mine) == (method not in ("bf16", "qsgd:4"))
    assert sent(tmp_path / "whole") > 0


def test_a_resumed_run_may_have_another_number_of_ranks(table: str, tmp_path: Path) -> None:
    train(table, tmp_path / "run", "1bit", max_steps=11)
    name = "compression/kept/000000/residual"
    before = [final_tensors(str(tmp_path / "run"), rank)[name] for rank in range(2)]
    assert all(np.abs(part).max() > 0 for part in before)
    assert train(table, tmp_path / "run", "1bit", 3, max_steps=12).steps == 12
    assert final_tensors(str(tmp_path / "run"), 2)[name].shape == before[0].shape


@pytest.mark.parametrize(
    ("method", "within", "more"),
    [
        ("bf16", 0.02, {}),
        pytest.param("fp16", 0.005, {}, marks=pytest.mark.soak),
        pytest.param("int8", 0.05, {}, marks=pytest.mark.soak),
        pytest.param("fp16", 0.02, {"precision": "mixed_float16", "micro_batches": 2}, marks=pytest.mark.soak),
    ],
)
def test_fewer_bits_train_as_thirty_two(
    method: str, within: float, more: dict[str, Any], table: str, tmp_path: Path
) -> None:
    train(table, tmp_path / "whole", "none", **more)
    train(table, tmp_path / "fewer", method, **more)
    mine, other = weights(tmp_path / "fewer"), weights(tmp_path / "whole")
    assert any(value.tobytes() != other[key].tobytes() for key, value in mine.items())
    assert max(float(np.abs(value - other[key]).max()) for key, value in mine.items()) < within
    assert sent(tmp_path / "fewer") < sent(tmp_path / "whole")


def test_deep_gradient_compression_takes_momentum_over(table: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="SGD"):
        train(table, tmp_path / "refused", "dgc:1%", model="mlp")
    result = train(table, tmp_path / "run", "dgc:5%", model="tests.training._models:momentum")
    assert result.steps == 16
    mine = final_tensors(str(tmp_path / "run"))
    assert any(name.endswith("/momentum") and np.abs(value).max() > 0 for name, value in mine.items())
    assert not any("momentum" in name for name in mine if name.startswith("optimizer/"))


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("int8", {"canonical": True}),
        ("bf16", {"precision": "float64"}),
        ("bf16", {"backend": "tensorflow", "trust_network": "lo"}),
        ("1bit", {"precision": "mixed_float16"}),
        ("1bit", {"non_finite": "skip"}),
        ("topk:1%", {"num_ranks": 1}),
        ("bf16", {"delay": 1}),
        ("bf16", {"sync_every": 4}),
        ("int9", {}),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(method: str, more: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="compression"):
        config("data", tmp_path / "run", method, **more)


@pytest.mark.soak
def test_auto_chooses_once(table: str, tmp_path: Path) -> None:
    train(table, tmp_path / "run", "auto", max_steps=2)
    chosen = final_tensors(str(tmp_path / "run"))["compression/chosen"].tobytes().decode()
    assert chosen in ("none", *CANDIDATES)
    train(table, tmp_path / "run", "auto", 3, max_steps=4)
    assert final_tensors(str(tmp_path / "run"))["compression/chosen"].tobytes().decode() == chosen


def test_a_run_resumes_only_with_its_own_method(table: str, tmp_path: Path) -> None:
    train(table, tmp_path / "run", "bf16", max_steps=2)
    with pytest.raises(ConfigError, match="compression"):
        train(table, tmp_path / "run", "fp16")
