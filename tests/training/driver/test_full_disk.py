"""Runs whose disk is full: a small tmpfs that the test fills."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.storage.errors import DiskFullError
from lockstep.storage.fs import filesystem
from lockstep.storage.verify import verify
from lockstep.training.config import TrainConfig
from lockstep.training.control.task import Limits
from lockstep.training.driver.train import Hooks, train
from lockstep.training.launch.local import run_local
from lockstep.training.run.lineage import find_tip
from lockstep.training.run.paths import RunPaths
from tests.small_disk import fill, small_disk
from tests.training._ranks import rank_path
from tests.training._threads import final_tensors, rows_of, run
from tests.training._tiny import write_table
from tests.training.rank.test_fit import assert_same

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data") / "table"
    write_table(folder)  # 100 training records
    return str(folder)


@pytest.fixture(scope="module")
def plain(data: str, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run without a cache."""
    made = config(data, tmp_path_factory.mktemp("plain") / "run", model="logistic", epochs=1)
    run(made)
    return made


def config(data: str, url: Path, **more: Any) -> TrainConfig:
    options: dict[str, Any] = {"num_ranks": 2, "global_batch": 8, "epochs": 2, "checkpoint_every": 5, "model": "tiny"}
    return TrainConfig(datasets=(data,), run=str(url), launcher="local", **options | more)


def test_a_run_on_a_full_tmpfs_ends_with_one_error_and_resumes_when_there_is_room(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rank_path(monkeypatch)
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        mine, ballast = config(data, disk / "run"), disk / "none"

        def fills() -> None:
            nonlocal ballast
            if len(list(Path(mine.run, "checkpoints").glob("step-*"))) == 1 and not ballast.exists():
                ballast = fill(disk)

        hooks = Hooks(entry="_ranks:train", limits=Limits(grace_s=1.0, silent_s=60.0), before_rename=fills)
        with pytest.raises(DiskFullError, match="the disk is full: cannot ") as raised:
            train(mine, run_local, hooks=hooks)
        assert raised.value.got == "No space left on device" and "Free space there" in raised.value.next_step
        assert "It resumes from step-0000000010.g0001." in raised.value.next_step
        assert "generation 1 failed" not in capsys.readouterr().err, "a restart would meet the full disk again"
        tip = find_tip(filesystem(mine.run), RunPaths(mine.run))
        assert tip is not None and tip.ref.step == 10
        assert [path.name for path in sorted(Path(mine.run, "checkpoints").iterdir())] == [
            "step-0000000005.g0001", "step-0000000010.g0001",
        ]  # fmt: skip
        ballast.unlink()
        result = train(mine, run_local, hooks=replace(hooks, before_rename=lambda: None))
        assert (result.steps, result.generation, verify(mine.run)) == (25, 2, [])


@pytest.mark.parametrize("from_the_start", [True, False])
def test_a_cache_on_a_full_tmpfs_costs_one_note_and_changes_no_weight(
    data: str, plain: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], from_the_start: bool
) -> None:
    with small_disk(tmp_path / "disk", 64 << 10) as disk:
        # Without room from the start its folders cannot be made; else the first blocks find none.
        fill(disk) if from_the_start else fill(disk, left_bytes=12 << 10)
        cached = plain.but(run=str(tmp_path / "cached"), cache=str(disk / "cache"), cache_bytes=1 << 30)
        run(cached)
        assert capsys.readouterr().err.count("takes no more blocks (No space left on device)") == 1
        rows = rows_of(cached.run, "reading").values()
        assert rows and all(("cache_hits" in row) != from_the_start for row in rows)
    assert_same(final_tensors(plain.run), final_tensors(cached.run))
