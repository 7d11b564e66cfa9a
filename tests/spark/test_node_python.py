"""Nodes without a fitting Python end ETL and training at once, with the program's name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.spark.node_python import wrong_python
from lockstep.storage.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
LOG = ROOT / "data" / "weblogs" / "nasa_access_log_1995-07-09.log.gz"
MISSING = "/no/such/python"


def test_other_errors_say_nothing_of_python() -> None:
    text = "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.11 than that in driver: 3.12"
    wrong = wrong_python(text)
    assert isinstance(wrong, ConfigError) and wrong.got == "3.11 and 3.12"
    assert wrong_python("java.io.IOException: Broken pipe") is None


def run(folder: Path, *words: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    """Run one of our commands; its executors start `python`."""
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": sys.executable,
    }  # fmt: skip
    command = [sys.executable, "-m", "lockstep", *words, "--master", "local[2]"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_jobs_on_nodes_without_python_end_at_once_and_name_it(tmp_path: Path) -> None:
    etl = ("etl_logs", "--input", str(LOG), "--split", "1/1", "--output")
    made = run(tmp_path, *etl, "dataset")
    assert made.returncode == 0, made.stderr
    train = ("train", "--dataset", "dataset", "--run", "run", "--model", "logistic", "--num-ranks", "1",
             "--global-batch", "64", "--epochs", "1", "--launcher", "barrier")  # fmt: skip
    for command in ((*etl, "other"), train):
        done = run(tmp_path, *command, python=MISSING)
        assert done.returncode == 2, done.stderr
        assert "error: the executors cannot start Python\n" in done.stderr
        assert f'got: Cannot run program "{MISSING}"' in done.stderr and "--archives FILE#python" in done.stderr
        assert "restart" not in done.stderr
