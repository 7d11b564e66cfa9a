"""Runs with --where: they train and validate on the samples that NumPy selects, through kills, and on nothing else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lockstep.storage.errors import ConfigError
from lockstep.storage.fs import filesystem
from lockstep.storage.verify import verify
from lockstep.training.config import TrainConfig
from lockstep.training.driver.preflight import preflight
from lockstep.training.reading.open import OpenSplit
from lockstep.training.results.audit import audit_files, check_run_audit, parse_audit
from lockstep.training.run.lineage import find_tip
from lockstep.training.run.metrics import read_history
from lockstep.training.run.paths import RunPaths
from tests.builders.blocks import read_all
from tests.builders.evaluations import evaluate
from tests.training._threads import run, run_threads
from tests.training._tiny import TABLE_SCHEMA, write_rows, write_table

pytestmark = pytest.mark.slow
WHERE = "a > 0.25 AND b < 1.0 OR NOT label AND a > -0.5"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data") / "table"
    write_table(folder, records={"train": 400, "test": 300}, fmt="parquet", shards=3)
    return str(folder)


def config(dataset: str, url: Path, **more: Any) -> TrainConfig:
    options: dict[str, Any] = {"global_batch": 24, "epochs": 3, "seed": 7, "launcher": "local", "model": "logistic"}
    options |= {"datasets": dataset, "run": str(url), "num_ranks": 2, "where": WHERE, "audit": True}
    return TrainConfig(**options | more)


def selected(dataset: str, split: str) -> pa.RecordBatch:
    rows = read_all(OpenSplit.at(dataset, split).reader)
    a, b, label = (np.asarray(rows.column(name)).astype(np.float64) for name in ("a", "b", "label"))
    return rows.filter(pa.array((a > 0.25) & (b < 1.0) | (label == 0) & (a > -0.5)))


def used(url: str) -> Counter[tuple[int, int]]:
    """(epoch, sample id) of each sample that the run's audit lists."""
    fs, paths = filesystem(url), RunPaths(url)
    tip = find_tip(fs, paths)
    assert tip is not None
    parts = [parse_audit(fs.read_bytes(path), file=path) for path in audit_files(fs, paths, tip.ref)]
    return Counter((int(row["epoch"]), int(row["id"])) for rows in parts for row in rows)


def test_a_run_trains_and_validates_on_the_selected_samples_alone(data: str, tmp_path: Path) -> None:
    done = run(config(data, tmp_path / "run", validate="test"))
    train, test = selected(data, "train"), selected(data, "test")
    ids = set(train.column("sample_id").to_pylist())
    found = used(done.run)
    report = check_run_audit(done.run)
    left = {(epoch, np.uint64(int(name, 16)).astype(np.int64).item()) for epoch, name in report.left_over}
    assert found == Counter({(epoch, one) for epoch in range(3) for one in ids} - left)
    assert report.ok and len(left) == 3 * len(ids) - done.steps * 24
    # The same model, evaluated on a dataset that has the selected rows of the split and no others.
    write_rows(str(tmp_path / "alone"), TABLE_SCHEMA, test, {"test": len(test)}, "parquet", 2, 8, 0)
    wanted = evaluate(done.run, str(tmp_path / "alone"), "test", run_threads)
    last = read_history(done.run).epochs[-1]
    assert last["validation"]["samples"] == wanted["samples"] == len(test)
    validated = {name.removeprefix("val_"): v for name, v in last["metrics"].items() if name.startswith("val_")}
    assert validated == pytest.approx(wanted["metrics"], rel=1e-12, abs=0)
    assert verify(done.run) == []


def test_a_resumed_run_has_the_same_samples_and_no_other_condition(data: str, tmp_path: Path) -> None:
    run(config(data, tmp_path / "run", epochs=1))
    other_writing = WHERE.lower().replace("not label", "not  (label)").replace(" = ", "=").upper().lower()
    with pytest.raises(ConfigError, match="begun with another `where`"):
        preflight(config(data, tmp_path / "run", where="a > 0.25"))
    with pytest.raises(ConfigError, match="begun with another `where`"):
        preflight(config(data, tmp_path / "run", where=None))
    with pytest.raises(ConfigError, match="begun with another `where`"):
        preflight(config(data, tmp_path / "run", where=other_writing))  # parentheses count
    again = run(config(data, tmp_path / "run", where=WHERE.lower().replace(" > ", ">"), validate="test"))
    whole = run(config(data, tmp_path / "whole", validate="test"))
    assert used(again.run) == used(whole.run) and again.metrics == whole.metrics


def test_the_counts_of_a_run_are_read_and_not_made_again(data: str, tmp_path: Path) -> None:
    done = run(config(data, tmp_path / "run", epochs=1))
    path = RunPaths(done.run).selection
    before = filesystem(path).read_bytes(path)
    run(config(data, tmp_path / "run", epochs=2))
    assert filesystem(path).read_bytes(path) == before
    run(config(data, tmp_path / "run", epochs=3, validate="test"))  # has one more split to count
    assert len(filesystem(path).read_bytes(path)) > len(before)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"where": "c > 0"}, "no column `c`"),
        ({"where": "a >"}, "Correct --where"),
        ({"where": "a > 1000"}, "no sample of split `train`"),
        ({"on_bad_record": "skip"}, "stop with --where"),
        ({"strategy": "federated", "clients": "label"}, "None with --strategy federated"),
    ],
)
def test_a_condition_that_fits_no_sample_is_refused_before_anything_starts(
    data: str, tmp_path: Path, more: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        preflight(config(data, tmp_path / "run", **more))
    assert words in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_split_to_validate_on_needs_a_sample_too(data: str, tmp_path: Path) -> None:
    ids = read_all(OpenSplit.at(data, "train").reader).column("sample_id").to_pylist()[:200]
    where = f"sample_id IN ({', '.join(map(str, ids))})"
    with pytest.raises(ConfigError, match="no sample of split `test`"):
        preflight(config(data, tmp_path / "run", where=where, validate="test"))
    assert preflight(config(data, tmp_path / "run", where=where)).plan.identity()["records"] == 200


def test_a_mixture_takes_its_shares_of_the_selected_samples(data: str, tmp_path: Path) -> None:
    write_table(tmp_path / "other", records={"train": 250}, seed=3, shards=2)
    done = run(config(data, tmp_path / "run", datasets=(data, str(tmp_path / "other")), mix=(2, 1)))
    ids = {*selected(data, "train").column("sample_id").to_pylist()}
    ids |= {*selected(str(tmp_path / "other"), "train").column("sample_id").to_pylist()}
    found = used(done.run)
    assert check_run_audit(done.run).ok
    assert {one for _, one in found} <= ids and len(found) > len(ids)
