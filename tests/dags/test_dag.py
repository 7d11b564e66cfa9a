"""The daily DAG by Airflow: its declaration and two days; in `make soak` all but upload by the real spark-submit."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DAG_FILE = ROOT / "jobs" / "dags" / "lockstep_daily.py"
AIRFLOW = ROOT / ".venv-airflow" / "bin" / "python"
LOG = ROOT / "data" / "weblogs" / "nasa_access_log_1995-07-09.log.gz"
LINES = 3000  # of a day
DAYS = ("2026-01-01", "2026-01-02")
TASKS = ("upload", "etl", "verify", "train", "publish")

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
        "AIRFLOW_CONN_LOCKSTEP_LOCAL": json.dumps({"conn_type": "spark", "host": "local[1]"}),
        "PYSPARK_PYTHON": sys.executable,
    }
    done = subprocess.run(
        [str(AIRFLOW), *arguments], env=environment, cwd=folder, capture_output=True, text=True, timeout=limit_s
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    return output


def run_dag(folder: Path) -> dict[str, Any]:
    """Run the DAG for DAYS on small logs, below `folder`; returns what _run_dag.py prints. All tasks must succeed.

    spark-submit is _spark_submit.py.
    """
    (folder / "bin").mkdir()
    submit = folder / "bin" / "spark-submit"
    submit.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("_spark_submit.py")} "$@"\n')
    submit.chmod(0o755)
    with gzip.open(LOG, "rb") as source:
        for day in DAYS:
            (folder / "daily" / day).mkdir(parents=True)
            small = b"".join(source.readline() for _ in range(LINES))
            (folder / "daily" / day / "access.log").write_bytes(small)
    conf = {"input": str(folder / "daily"), "root": str(folder / "results"), "global_batch": "32", "epochs": "1"}
    (folder / "conf.json").write_text(json.dumps(conf))
    airflow(folder, "-m", "airflow", "db", "migrate", limit_s=400)
    script = str(Path(__file__).with_name("_run_dag.py"))
    output = airflow(folder, script, str(DAG_FILE), str(folder / "conf.json"), *DAYS, limit_s=1800, path=submit.parent)
    told = next((line for line in output.splitlines() if line.startswith("RESULT ")), None)
    assert told is not None, output[-6000:]
    result: dict[str, Any] = json.loads(told.removeprefix("RESULT "))
    wanted = {"state": "success", "tasks": dict.fromkeys(TASKS, "success at try 1")}
    assert result["runs"] == [wanted] * len(DAYS), output[-6000:]
    assert result["foreign"] == []  # importing the DAG needs Airflow alone
    return result


def test_a_day_continues_the_day_before_with_jobs_other_than_etl_and_verify_only_parsed(tmp_path: Path) -> None:
    told = run_dag(tmp_path)["declared"]
    assert told["catchup"] is False and told["active"] == 1 and "0 0 * * *" in told["schedule"]
    assert told["down"] == {name: [after] for name, after in pairwise(TASKS)} | {"publish": []}
    assert all(told["limits"]) and told["retries"] == [2, 2, 0, 2, 2]

    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert [job for job, *_ in calls] == ["upload", "etl_logs", "verify", "train", "publish"] * len(DAYS)
    root = tmp_path / "results"
    first, second = (json.loads((root / "datasets" / day / "_manifest.json").read_text()) for day in DAYS)
    assert first["parent"] is None and second["parent"]["url"].endswith(DAYS[0])
    flags = [arguments for job, _, arguments in calls if job == "train"]
    assert f"--run={root}/runs/{DAYS[1]}" in flags[1] and f"--init-from={root}/models/lockstep_weblog" in flags[1]
    assert not any(flag.startswith("--init-from") for flag in flags[0])


@pytest.mark.soak
def test_two_days_from_log_to_a_published_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_ALL", "1")
    run_dag(tmp_path)
    current = json.loads((tmp_path / "results" / "models" / "lockstep_weblog" / "_current.json").read_text())
    assert current["run"].endswith(DAYS)
