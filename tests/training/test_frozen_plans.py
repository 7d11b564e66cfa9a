"""A run whose ranks calibrate, are killed and start again: the second start adds in the order of the first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.storage.errors import ConfigError, DataError
from lockstep.storage.fs import filesystem
from lockstep.storage.verify import verify
from lockstep.training.comm.comm_plan import make_plan
from lockstep.training.comm.hosts import Layout
from lockstep.training.config import TrainConfig
from lockstep.training.control.task import Limits
from lockstep.training.driver.train import Hooks, train
from lockstep.training.launch.local import run_local
from lockstep.training.run.comm_plans import freeze_plan, read_plans
from lockstep.training.run.paths import RunPaths
from tests.training._ranks import rank_path
from tests.training._tiny import write_table


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    rank_path(monkeypatch)
    write_table(tmp_path / "data")
    return TrainConfig(
        datasets=(str(tmp_path / "data"),),
        run=str(tmp_path / "run"),
        model="tiny",
        num_ranks=3,
        global_batch=8,
        epochs=1,
        launcher="local",
        stall_limit_s=300.0,
    )


@pytest.mark.slow
def test_a_restart_follows_the_frozen_plan(config: TrainConfig, capfd: pytest.CaptureFixture[str]) -> None:
    hooks = Hooks(entry="_plan_ranks:sums_killed_once", limits=Limits(grace_s=1.0, silent_s=60.0))
    result = train(config, run_local, hooks=hooks)
    assert (result.generation, result.restarts) == (2, 1)
    plans = list(Path(config.run, "comm").iterdir())
    assert [plan.name[:11] for plan in plans] == ["ranks-00003"]
    assert verify(config.run) == []
    rows = [
        json.loads(line)
        for part in sorted(Path(config.run, "metrics").glob("g*/part-*.jsonl"))
        for line in part.read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["sums"] == rows[1]["sums"]
    for generation, told in (("g0001", "calibrated now"), ("g0002", "as frozen before")):
        parts = Path(config.run, "logs", generation, "rank-00000").iterdir()
        assert any(told in part.read_text() for part in parts), generation
    assert "the order in which ranks add gradients is frozen in" in capfd.readouterr().err
    # A flipped bit in the plan is told, by the run's verification and by the next start.
    plans[0].write_bytes(plans[0].read_bytes().replace(b'"asked":"auto"', b'"asked":"autp"'))
    assert [finding.path for finding in verify(config.run)] == [f"comm/{plans[0].name}"]


@pytest.mark.parametrize(("name", "value"), [("backend", "tcp")])
def test_another_way_is_refused_where_there_is_a_result(config: TrainConfig, name: str, value: str) -> None:
    """Who resumes with another order of sums would get other last bits without having asked for them."""
    one = config.but(num_ranks=1)
    train(one, lambda *args, **kwargs: [{"steps": 1, "metrics": {}, "samples": 0, "seconds": 1.0}])
    with pytest.raises(ConfigError, match=f"another `{name}`") as caught:
        train(one.but(**{name: value}), run_local)  # type: ignore[arg-type] # a field of its own type
    assert f"--{name}" in caught.value.next_step


def test_a_plan_under_another_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be passed over, and each start would make a new one that cannot be written."""
    monkeypatch.setattr("lockstep.training.run.comm_plans.check_newest", lambda *place: None)
    fs, paths = filesystem(str(tmp_path)), RunPaths(str(tmp_path))
    documents = [make_plan(Layout(tuple(range(ranks))), "tcp", "ring").to_json() for ranks in (2, 3)]
    two, three = (Path(freeze_plan(fs, paths, 1, document)) for document in documents)
    assert read_plans(fs, paths, 3) == documents[1:]
    three.write_bytes(two.read_bytes())
    with pytest.raises(DataError, match="a plan for 2 ranks"):
        read_plans(fs, paths, 3)
