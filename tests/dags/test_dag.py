"""The Airflow DAG: its declaration, and a run by Airflow; in `make soak` all of its tasks by the real spark-submit."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DAG_FILE = ROOT / "jobs" / "dags" / "lockstep_weblog.py"
AIRFLOW = ROOT / ".venv-airflow" / "bin" / "python"
LOG = ROOT / "data" / "weblogs" / "nasa_access_log_1995-07-09.log.gz"
LINES = 1500

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def airflow(folder: Path, *arguments: str, limit_s: float, path: Path | None = None) -> str:
    """Run Airflow's Python with a home of its own under `folder`; returns its output.

    Programs come from the folder `path`, if given, and from our environment, which has spark-submit.
    """
    assert AIRFLOW.exists(), "run `make airflow-venv` first; `make test` does"
    environment = {
        **{name: text for name, text in os.environ.items() if not name.startswith(("AIRFLOW", "PYTEST", "PYTHON"))},
        "PATH": os.pathsep.join([*([str(path)] if path else []), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "LOCKSTEP_CALLS": str(folder / "calls.jsonl"),
        "AIRFLOW_HOME": str(folder / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(DAG_FILE.parent),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__UNIT_TEST_MODE": "False",
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", "host": "local[2]"}),
        "PYSPARK_PYTHON": sys.executable,
    }
    done = subprocess.run(
        [str(AIRFLOW), *arguments], env=environment, cwd=folder, capture_output=True, text=True, timeout=limit_s
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    return output


def run_dag(folder: Path, path: Path | None = None) -> dict[str, Any]:
    """Run the DAG once on a small log, below `folder`; returns what _run_dag.py prints. All tasks must succeed."""
    with gzip.open(LOG, "rb") as source:
        small = b"".join(source.readline() for _ in range(LINES))
    (folder / "access.log").write_bytes(small)
    conf = {"input": str(folder / "access.log"), "root": str(folder / "results"), "global_batch": "32", "epochs": "1"}
    (folder / "conf.json").write_text(json.dumps(conf))
    airflow(folder, "-m", "airflow", "db", "migrate", limit_s=400)
    script = str(Path(__file__).with_name("_run_dag.py"))
    output = airflow(folder, script, str(DAG_FILE), str(folder / "conf.json"), limit_s=1800, path=path)
    told = next((line for line in output.splitlines() if line.startswith("RESULT ")), None)
    assert told is not None, output[-6000:]
    result: dict[str, Any] = json.loads(told.removeprefix("RESULT "))
    wanted = dict.fromkeys(("etl", "verify", "train", "evaluate"), "success at try 1")
    assert result["tasks"] == wanted, output[-6000:]
    assert result["state"] == "success"
    assert result["foreign"] == []  # importing the DAG needs Airflow alone
    return result


def test_the_dag_is_scheduled_and_runs_its_jobs_in_order(tmp_path: Path) -> None:
    """ETL and verification run; the calls of training and evaluation are parsed by their jobs (_spark_submit.py)."""
    (tmp_path / "bin").mkdir()
    submit = tmp_path / "bin" / "spark-submit"
    submit.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("_spark_submit.py")} "$@"\n')
    submit.chmod(0o755)
    told = run_dag(tmp_path, submit.parent)["declared"]
    assert told["catchup"] is False and told["active"] == 1 and told["schedule"] == "@daily"
    assert told["down"] == {"etl": ["verify"], "verify": ["train"], "train": ["evaluate"], "evaluate": []}
    assert all(told["limits"]) and told["retries"] == [2, 0, 2, 2]

    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert [job for job, *_ in calls] == ["etl_logs", "verify", "train", "evaluate"]
    assert all(options[:2] == ["--master", "local[2]"] for _, options, _ in calls)
    (run,) = (tmp_path / "results").iterdir()
    assert ":" not in run.name
    assert (run / "dataset" / "_manifest.json").is_file()
    train, evaluate = (flags for _, _, flags in calls[2:])
    for flags in (train, evaluate):
        assert flags[flags.index("--dataset") + 1] == str(run / "dataset")
        assert flags[flags.index("--run") + 1] == str(run / "run")
    assert train[train.index("--epochs") + 1] == "1"


@pytest.mark.soak
def test_the_dag_runs_from_log_to_evaluation(tmp_path: Path) -> None:
    run_dag(tmp_path)
    (run,) = (tmp_path / "results").iterdir()
    assert (run / "dataset" / "_manifest.json").is_file()
    assert list((run / "run" / "results").glob("g*.json"))
