"""Two applications that each hold half of the slots that each needs: neither hangs, and the next try gets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from lockstep.storage.errors import ConfigError
from tests.spark.standalone import standalone
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[3]
LOG = ROOT / "data/open-bandit/bts_men_first2000.csv.gz"
TRAIN = ["--model", "logistic", "--num-ranks", "2", "--global-batch", "64", "--epochs", "1"]


def job(name: str, *flags: str, memory: str = "512m") -> subprocess.Popen[str]:
    """A job whose Spark session asks for executors of so much memory."""
    environment = os.environ | {"PYSPARK_SUBMIT_ARGS": f"--executor-memory {memory} --driver-memory 512m pyspark-shell"}
    return subprocess.Popen(
        [sys.executable, "-m", f"lockstep.jobs.{name}", *flags],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.soak
def test_two_applications_with_half_of_the_slots_each(tmp_path: Path) -> None:
    """The first can use the first worker alone and the second, by then, the other one: each waits for both."""
    data = str(tmp_path / "data")
    schema = ["--log-format", "csv", "--schema", "conf/clicks_schema.toml", "--input", str(LOG)]
    assert job("etl_logs", *schema, "--output", data, "--master", "local[2]").wait(300) == 0
    with standalone(tmp_path, ("800m", "600m")) as master:

        def train(run: str, limit_s: int, memory: str) -> subprocess.Popen[str]:
            where = ["--dataset", data, "--run", str(tmp_path / run), "--master", master]
            return job("train", *TRAIN, *where, "--start-limit", str(limit_s), memory=memory)

        large = train("large", 60, "700m")
        until(lambda: used(tmp_path) == 1, 60)
        small = train("small", 30, "500m")
        until(lambda: used(tmp_path) == 2, 60)
        for process in (small, large):
            printed, _ = process.communicate(timeout=300)
            assert process.returncode == ConfigError.exit_code == 2, printed
            assert "2 ranks, servers and spares wait up to" in printed
            assert "2 ranks, servers and spares exceed the 1 task slots" in printed
            assert "if other applications hold the rest of the cluster, wait for their end" in printed
        again = train("small", 120, "500m")
        printed, _ = again.communicate(timeout=300)
        assert again.returncode == 0, printed


def used(folder: Path) -> int:
    """Cores that the master has given away."""
    page = (folder / "page").read_text()
    with urllib.request.urlopen(f"http://127.0.0.1:{page}/json/", timeout=10) as answer:
        return int(json.load(answer)["coresused"])
