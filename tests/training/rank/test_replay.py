"""--replay: rows of earlier datasets in each batch, recounted from the audit with pandas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from lockstep.features.sample_id import sample_id
from lockstep.storage.errors import ConfigError
from lockstep.training.batches.audit_log import sample_hex
from lockstep.training.config import TrainConfig
from lockstep.training.results.audit import check_run_audit
from tests.training._threads import final_tensors, run
from tests.training._tiny import TABLE_SCHEMA, write_rows

pytestmark = pytest.mark.slow
ROWS = {"000001": 60, "000002": 90, "000003": 120}
BATCH, EPOCHS = 32, 3


def ids_of(name: str) -> list[int]:
    return [sample_id([f"{name} {row}".encode()], 0) for row in range(ROWS[name] + 20)]


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of increments, each of which continues the one before."""
    folder = tmp_path_factory.mktemp("days")
    parent: Any = None
    for number, (name, count) in enumerate(ROWS.items()):
        a, b = np.random.default_rng(number).standard_normal((2, count + 20)).astype(np.float32)
        columns = [pa.array(ids_of(name), pa.int64()), pa.array(a), pa.array(b), pa.array(a + b > 0)]
        rows = pa.RecordBatch.from_arrays(columns, schema=TABLE_SCHEMA.arrow_schema())
        made = write_rows(
            str(folder / name), TABLE_SCHEMA, rows, {"train": count, "test": 20}, "tfrecord", 2, 8, 0, parent=parent
        )
        parent = (folder / name, made)
    return folder


def config(dataset: Path, run_url: Path, **more: Any) -> TrainConfig:
    options: dict[str, Any] = {"num_ranks": 2, "global_batch": BATCH, "epochs": EPOCHS, "launcher": "local", **more}
    return TrainConfig(datasets=(str(dataset),), run=str(run_url), model="logistic", **options).with_all_datasets()


@pytest.fixture(scope="module")
def replayed(days: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the newest day, with a quarter of each batch from the two days before."""
    url = tmp_path_factory.mktemp("replayed") / "run"
    run(config(days, url, replay=0.25, audit=True))
    return url


def test_the_audit_has_the_asked_share_of_each_day(replayed: Path) -> None:
    """15 steps, since 24 of 32 rows are of the newest day, which has 120; 8 take 60 and 90 rows in their turn."""
    audit = pd.concat(map(pd.read_csv, sorted(replayed.glob("audit/g*/rank-*/*.csv"))))
    day_of = {sample_hex(one): name for name in ROWS for one in ids_of(name)[: ROWS[name]]}
    audit["day"] = audit["sample_id"].map(day_of)
    assert audit["day"].notna().all() and len(audit) == 15 * BATCH
    newest = audit["day"] == "000003"
    assert (audit[newest].groupby("step").size() == 24).all() and (audit[~newest].groupby("step").size() == 8).all()
    times = {
        name: audit.loc[audit["day"] == name, "sample_id"].value_counts().to_numpy().astype(np.int64) for name in ROWS
    }
    np.testing.assert_array_equal(times["000003"], [3] * 120, "three epochs")
    assert int(times["000001"].sum() + times["000002"].sum()) == 120
    assert max(times["000001"].max(), times["000002"].max()) == 1, "no earlier row twice before all came once"


def test_the_run_is_that_of_its_mixture_spelled_out(days: Path, replayed: Path, tmp_path: Path) -> None:
    urls = [str(days / name) for name in reversed(ROWS)]
    asked: dict[str, Any] = {"num_ranks": 1, "global_batch": BATCH, "epochs": EPOCHS, "launcher": "local"}
    run(TrainConfig(datasets=urls, run=str(tmp_path / "run"), model="logistic", mix=(3, 1), **asked))
    stored = [json.loads((one / "run.json").read_text())["plan"] for one in (replayed, tmp_path / "run")]
    assert stored[0] == stored[1] and stored[0]["ratios"] == [3, 1]
    for name, value in final_tensors(str(tmp_path / "run")).items():
        if name.startswith("weights"):
            np.testing.assert_allclose(value, final_tensors(str(replayed))[name], rtol=1e-5, err_msg=name)


def test_each_row_is_where_the_plan_has_it(replayed: Path) -> None:
    assert check_run_audit(str(replayed)).ok


def test_the_first_day_is_trained_on_alone(days: Path, tmp_path: Path) -> None:
    found = config(days / "000001", tmp_path / "run", replay=0.25)
    assert found.data.mix is None and found.data.datasets == (str(days / "000001"),)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"mix": (1, 1)}, "mix"),
        ({"since": "2026-01-01"}, "since"),
        ({"replay": 1.0}, "replay"),
        ({"replay": 0.0}, "replay"),
    ],
)
def test_what_contradicts_it_is_refused_by_name(days: Path, tmp_path: Path, more: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"`{named}`"):
        options: dict[str, Any] = {"replay": 0.25, **more}
        config(days, tmp_path / "run", **options)


@pytest.mark.parametrize(
    ("share", "batch", "more", "ratios"),
    [
        (0.3, 80, {}, (7, 3)),  # 80 rows in 8 lane groups: 3 of 10
        (0.3, 256, {}, (22, 10)),  # 10 of 32
        (0.3, 256, {"lanes": 64}, (3, 1)),  # 1 of 4
        (0.02, 32, {}, (3, 1)),  # at least one row in each lane group
        (0.99, 32, {}, (1, 3)),
        (0.3, 50, {"batchnorm": "local"}, (7, 3)),
    ],
)
def test_the_share_is_the_nearest_of_whole_rows(
    days: Path, tmp_path: Path, share: float, batch: int, more: dict[str, Any], ratios: tuple[int, int]
) -> None:
    assert config(days, tmp_path / "run", replay=share, global_batch=batch, **more).data.mix == ratios
    fits = np.abs(share - np.arange(1, rows := (batch // (more.get("lanes") or (1 if more else 8)))) / rows)
    assert abs(ratios[1] / sum(ratios) - share) == pytest.approx(fits.min(), abs=1e-12)


def test_the_audit_counts_the_share_that_was_met(
    days: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0.3 of 32 rows in 8 lane groups is one row of four."""
    done = run(config(days, tmp_path / "run", replay=0.3, audit=True, epochs=1))
    audit = pd.concat(map(pd.read_csv, sorted((tmp_path / "run").glob("audit/g*/rank-*/*.csv"))))
    newest = {sample_hex(one) for one in ids_of("000003")}
    earlier = ~audit["sample_id"].isin(newest)
    assert "--replay 0.3 takes 0.25 of each batch" in capsys.readouterr().err
    assert done.steps == 5 and (audit[earlier].groupby("step").size() == 8).all() and earlier.sum() == 40


def test_a_batch_too_small_for_both_is_refused(days: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="do not fit the global batch") as caught:
        run(config(days, tmp_path / "run", replay=0.25, global_batch=8))
    assert "--global-batch 32" in caught.value.next_step
