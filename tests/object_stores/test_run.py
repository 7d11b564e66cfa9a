"""Runs on S3: the same bits as on a disk, resumed after kills, and one driver at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.storage.fs import filesystem, walk
from lockstep.storage.publish import is_temporary
from lockstep.storage.urls import join
from lockstep.storage.verify import verify
from lockstep.training.config import TrainConfig
from lockstep.training.run.lineage import find_tip, read_claims
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import find_result
from tests.object_stores.server import ObjectServer
from tests.training._driver_alone import drive
from tests.training._tiny import write_table
from tests.waiting import WAIT_S

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture
def config(root: str) -> TrainConfig:
    write_table(join(root, "data"))
    return TrainConfig(
        datasets=(join(root, "data"),), run=join(root, "run"), model="tiny", num_ranks=1, global_batch=8, epochs=2,
        checkpoint_every=5, keep_checkpoints=2, launcher="local",
    )  # fmt: skip


def everything(run: str) -> dict[str, bytes]:
    """Each file of the run and its bytes, but for temporary ones."""
    fs = filesystem(run)
    urls = [entry.url for entry in walk(fs, run) if not is_temporary(entry.name)]
    return {url.removeprefix(f"{run}/"): fs.read_bytes(url) for url in urls}


def weights(run: str) -> dict[str, bytes]:
    """The files of the newest checkpoint that hold numbers."""
    fs = filesystem(run)
    tip = find_tip(fs, RunPaths(run))
    assert tip is not None
    return {name: fs.read_bytes(join(tip.url, name)) for name in tip.manifest["files"]}


def test_a_run_has_the_bits_of_one_on_a_disk_and_holds_no_secret(
    config: TrainConfig, s3: ObjectServer, tmp_path: Path
) -> None:
    write_table(tmp_path / "data")
    here = config.but(datasets=(str(tmp_path / "data"),), run=str(tmp_path / "run"))
    assert drive(here).steps == drive(config).steps == 25
    assert weights(config.run) == weights(here.run)
    assert verify(config.run) == []
    files = everything(config.run)
    assert {name for name in files if not name.startswith("reports/")} == {
        name for name in everything(here.run) if not name.startswith("reports/")
    }
    secrets = [value.encode() for name, value in s3.environment.items() if name.endswith("KEY")]
    assert len(secrets) == 1 and not [name for name, data in files.items() if secrets[0] in data]
    more = drive(config.but(epochs=3))
    assert more.generation == 2 and verify(config.run) == []


@pytest.fixture
def started(config: TrainConfig) -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def start(config: TrainConfig, method: str, pattern: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.training._driver_alone", json.dumps(config.to_json())]
    process = subprocess.Popen(
        [*command, method, pattern, "train"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), process.communicate()[0]
    return process


CALLS = [
    ("put_new", r"/run\.json$"),
    ("put_new", r"/generations/000001\.json$"),
    ("put_new", r"/\.staging/.*/step-0000000010/_manifest"),
    ("put_new", r"/checkpoints/step-0000000010.*/_publishing"),
    ("_copy", r"/checkpoints/step-0000000010.*/rank-00000"),
    ("_copy", r"/checkpoints/step-0000000010.*/_manifest"),
    ("_copy", r"/\.trash/g0001/.*rank-00000"),
    ("_copy", r"/\.trash/g0001/.*_manifest"),
    ("delete", r"/\.trash/g0001/"),
    ("put_new", r"/metrics/g0001/part-00001"),
    ("_copy", r"/models/g0001/_manifest"),
    ("put_new", r"/results/g0001"),
    ("put_over", r"/run/lease\.json$"),
]


@pytest.mark.parametrize(("method", "pattern"), CALLS)
def test_a_driver_killed_at_any_call_leaves_a_run_that_resumes_to_the_same_bits(
    config: TrainConfig, started: list[subprocess.Popen[str]], method: str, pattern: str, whole: dict[str, bytes]
) -> None:
    process = start(config, method, pattern)
    started.append(process)
    process.kill()
    process.wait()
    assert drive(config).steps == 25
    assert weights(config.run) == whole
    assert verify(config.run) == []
    names = set(everything(config.run))
    kept = {name.split("/")[1] for name in names if name.startswith("checkpoints/")}
    assert len(kept) <= config.checkpoints.keep_checkpoints
    assert not [name for name in names if name.startswith(".staging/")]


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The weights of the same run on a disk, without a kill."""
    folder = tmp_path_factory.mktemp("whole")
    write_table(folder / "data")
    config = TrainConfig(
        datasets=(str(folder / "data"),), run=str(folder / "run"), model="tiny", num_ranks=1, global_batch=8, epochs=2,
        checkpoint_every=5, keep_checkpoints=2, launcher="local",
    )  # fmt: skip
    drive(config)
    return weights(config.run)


@pytest.mark.parametrize(("method", "pattern"), CALLS)
def test_a_driver_that_wakes_changes_nothing_that_counts(
    config: TrainConfig, started: list[subprocess.Popen[str]], method: str, pattern: str, whole: dict[str, bytes]
) -> None:
    """It was stopped, and another one has taken the run over and finished it."""
    old = start(config, method, pattern)
    started.append(old)
    result = drive(config, take_over=True)
    fs, paths = filesystem(config.run), RunPaths(config.run)
    before, claims, counts = everything(config.run), read_claims(fs, paths), find_result(fs, paths)
    os.kill(old.pid, signal.SIGCONT)
    said = old.communicate(timeout=WAIT_S)[0]
    assert "SupersededError" in said or "ConfigError" in said, said
    assert old.returncode in (1, 2)
    # Under its own generation, one write that its server had accepted may come late: it is in no chain.
    after = everything(config.run)
    late = {name for name in after.keys() ^ before.keys() if "g0001" not in name}
    assert not late and all(after[name] == before[name] for name in before.keys() & after.keys())
    assert read_claims(fs, paths) == claims and find_result(fs, paths) == counts
    assert weights(config.run) == whole
    assert verify(config.run) == []
    assert drive(config) == result


def race(config: TrainConfig, started: list[subprocess.Popen[str]], whole: dict[str, bytes]) -> int:
    """Two drivers begin one run: both are stopped before their first write, and woken together. Returns the winner."""
    pair = [start(config, "put_new", r"\.json$") for _ in range(2)]
    started += pair
    for driver in pair:
        os.kill(driver.pid, signal.SIGCONT)
    said = [driver.communicate(timeout=WAIT_S)[0] for driver in pair]
    codes = [driver.returncode for driver in pair]
    assert sorted(codes) in ([0, 1], [0, 2]), said
    assert "SupersededError" in said[codes.index(max(codes))] or "ConfigError" in said[codes.index(max(codes))], said
    assert list(read_claims(filesystem(config.run), RunPaths(config.run))) == [1]
    assert weights(config.run) == whole and verify(config.run) == []
    return codes.index(0)


def test_of_two_drivers_of_one_run_one_wins(
    config: TrainConfig, started: list[subprocess.Popen[str]], whole: dict[str, bytes]
) -> None:
    winners = [race(config.but(run=f"{config.run}-{number}"), started, whole) for number in range(3)]
    assert set(winners) <= {0, 1}  # each race has compared claims, weights and what the loser said


def test_the_server_is_the_one_of_the_test(s3: ObjectServer, config: TrainConfig) -> None:
    assert s3.endpoint in filesystem(config.run).whom
