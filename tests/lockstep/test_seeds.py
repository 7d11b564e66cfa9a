"""examples/seeds: what the listings of docs/seeds.md compute, on small parts of the repository's data.

Scripts that call `lockstep.train` run in this process, with its Spark session, and their ranks are threads.
"""

from __future__ import annotations

import gzip
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema
from lockstep.jobs import _train, train
from lockstep.jobs._pipeline import Pipeline
from lockstep.storage.fs import filesystem
from lockstep.training.config import TrainConfig
from lockstep.training.control.task import RankTask
from lockstep.training.models import receive
from lockstep.training.results.audit import check_run_audit
from lockstep.training.run.lineage import read_claims
from lockstep.training.run.paths import RunPaths
from tests.horovod.test_horovod_torch import run_torch
from tests.training._threads import LEAVE_AFTER, run, run_threads
from tests.training._tiny import write_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SEEDS = ROOT / "examples" / "seeds"
DATA = ROOT / "data" / "fashion-mnist"
TRAIN, TEST = 1200, 400
SCHEMA = Schema(
    (
        Field(name="sample_id", dtype="int64", kind="id"),
        Field(name="image", dtype="uint8", shape=(28, 28, 1)),
        Field(name="label", dtype="int64", kind="label", num_classes=10),
    )
)


def pictures(split: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The first images (count, 28, 28) uint8 and labels (count,) uint8 of a split of data/fashion-mnist."""
    images = gzip.decompress((DATA / f"{split}-images-idx3-ubyte.gz").read_bytes())[16:]
    labels = gzip.decompress((DATA / f"{split}-labels-idx1-ubyte.gz").read_bytes())[8:]
    return np.frombuffer(images, np.uint8).reshape(-1, 28, 28)[:count], np.frombuffer(labels, np.uint8)[:count]


@pytest.fixture(scope="module")
def garments(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The dataset of the page's first command, of fewer pictures, and without its ETL."""
    output = str(tmp_path_factory.mktemp("data") / "garments")
    parts = [pictures("train", TRAIN), pictures("t10k", TEST)]
    images, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
    columns = [
        pa.array(np.arange(len(labels)), pa.int64()),
        pa.array([image.tobytes() for image in images], pa.binary()),
        pa.array(labels, pa.int64()),
    ]
    rows = pa.RecordBatch.from_arrays(columns, schema=SCHEMA.arrow_schema())
    write_rows(output, SCHEMA, rows, {"train": TRAIN, "test": TEST}, "parquet", shards=2, block_records=64, seed=0)
    return output


def threads(task: RankTask, num_ranks: int, **options: Any) -> list[dict[str, Any]]:
    """Ranks as threads, which get the function of a script as processes do."""
    order = task.payload
    if order.get("model_function"):
        receive(TrainConfig.from_json(order["config"]).model.model, order["model_function"])
    return run_threads(task, num_ranks, **options)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ranks of `lockstep.train`, and of a pipeline on this host, be threads of this process."""
    monkeypatch.setattr("lockstep.training.launch.local.run_local", threads)
    monkeypatch.setattr("lockstep.jobs._pipeline.run_local", threads)


@pytest.fixture
def few_partitions(spark: SparkSession) -> Iterator[SparkSession]:
    """The session, whose shuffles of small data take two tasks."""
    before = str(spark.conf.get("spark.sql.shuffle.partitions"))
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    yield spark
    spark.conf.set("spark.sql.shuffle.partitions", before)


def script(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a script of the folder here; returns its last line."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    capsys.readouterr()
    runpy.run_path(str(SEEDS / name), run_name="__main__")
    return capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("way", ["parts", "blocks"])
def test_a_model_in_parts_of_layers_or_blocks_is_the_run_of_one_rank(
    way: str, garments: str, in_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    flags = ["--dataset", garments, "--out", str(tmp_path), "--way", way, "--epochs", "1"]
    last = script("model_parallel.py", *flags, monkeypatch=monkeypatch, capsys=capsys)
    words = last.split()
    assert float(words[-2]) < 1e-4, last
    assert float(words[2].rstrip(",")) > 0.3, last


def test_federated_rounds_of_three_workers_learn(
    spark: object, in_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("lockstep.spark_session", lambda *_: nullcontext(spark))
    flags = ["--data", str(DATA), "--out", str(tmp_path), "--rows", "900", "--rounds", "3"]
    last = script("federated.py", *flags, monkeypatch=monkeypatch, capsys=capsys)
    assert last.startswith("3 rounds of 3 workers: accuracy ") and float(last.split()[-1]) > 0.5, last
    assert check_run_audit(str(tmp_path / "run")).ok


def own_layers(folder: Path, *flags: str) -> list[dict[str, np.ndarray]]:
    """What each of three workers has stored."""
    folder.mkdir()
    launch = [sys.executable, "-m", "lockstep.jobs.launch", "--num-ranks", "3", "--launcher", "local"]
    command = [*launch, str(SEEDS / "own_layers.py"), "--data", str(DATA), "--out", str(folder), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [dict(np.load(folder / f"own-{rank}.npz")) for rank in range(3)]


def test_workers_share_the_hidden_layer_and_keep_their_last_one(tmp_path: Path) -> None:
    kept, shared = own_layers(tmp_path / "kept"), own_layers(tmp_path / "shared", "--all")
    for name in ("arr_0", "arr_1"):
        np.testing.assert_array_equal(kept[0][name], kept[2][name])
    assert not np.allclose(kept[0]["arr_2"], kept[2]["arr_2"])
    for with_own, without in zip(kept, shared, strict=True):
        assert with_own["accuracy"] > without["accuracy"] + 0.2


def test_all_gather_then_sum_counts_the_bias_twice_and_has_no_gradient() -> None:
    launch = ["-m", "lockstep.jobs.launch", "--num-ranks", "2", "--launcher", "local"]
    done = run_torch(*launch, str(SEEDS / "all_gather.py"))
    lines = sorted(done.stdout.splitlines())
    assert lines == [
        line for rank in (0, 1)
        for line in (f"[rank {rank}] bias counted 2 times; gradient: False",
                     f"[rank {rank}] mended: output True gradient True")
    ], done.stdout + done.stderr  # fmt: skip


def test_ranks_come_and_leave_and_no_sample_is_lost(garments: str, tmp_path: Path) -> None:
    slots, run_url = tmp_path / "slots", str(tmp_path / "run")
    slots.write_text("2")
    flags = ["--config", str(SEEDS / "elastic.toml"), "--dataset", garments, "--run", run_url, "--epochs", "2"]
    config = _train.config_of(train.parser().parse([*flags, "--slots-file", str(slots)]))
    LEAVE_AFTER[8] = partial(slots.write_text, "1")
    LEAVE_AFTER[20] = partial(slots.write_text, "4")
    result = run(config)
    claims = read_claims(filesystem(run_url), RunPaths(run_url)).values()
    assert [claim.num_ranks for claim in claims] == [2, 1, 4]
    report = check_run_audit(run_url)
    assert report.ok and len(report.left_over) == 2 * TRAIN % 64 and result.steps == 2 * TRAIN // 64, report


def test_visits_become_a_sample_a_visitor_and_a_regression(
    few_partitions: SparkSession, in_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    requests: dict[bytes, int] = {}
    with gzip.open(ROOT / "data" / "weblogs" / "nasa_access_log_1995-07-09.log.gz") as log:
        for line in log:
            if b'"GET /' in line and line.split()[-2] in (b"200", b"304"):
                visitor = line.split()[0]
                requests[visitor] = requests.get(visitor, 0) + 1
    outcome = Pipeline.load(str(SEEDS / "visits.toml"), str(tmp_path)).run(few_partitions)
    assert outcome.manifest.counts.written == sum(count >= 5 for count in requests.values())
    assert outcome.metric == "r2" and outcome.value > 0.2 > outcome.evaluation["baseline"]["metrics"]["r2"]


def test_petastorm_reads_the_pictures_that_the_files_hold(garments: str) -> None:
    command = [sys.executable, str(SEEDS / "petastorm_rows.py"), "--dataset", garments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    images, labels = pictures("train", TRAIN)
    counts = " ".join(map(str, np.bincount(labels, minlength=10)))
    wanted = f"rows {TRAIN} of classes {counts} sum of pixels {images.sum(dtype=np.int64)}"
    assert wanted in done.stdout.splitlines(), done.stdout + done.stderr
