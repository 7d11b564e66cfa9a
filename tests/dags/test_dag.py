"""The Airflow DAG: what it says, and one real run of all four tasks through spark-submit."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DAG_FILE = ROOT / "jobs" / "dags" / "lockstep_weblog.py"
AIRFLOW = ROOT / ".venv-airflow" / "bin" / "python"
LOG = ROOT / "data" / "weblogs" / "nasa_access_log_1995-07-09.log.gz"
LINES = 1500

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def airflow(folder: Path, *arguments: str, limit_s: float) -> str:
    """Run Airflow's Python with a home of its own under `folder`; returns its output."""
    assert AIRFLOW.exists(), "run `make airflow-venv` first; `make test` does"
    environment = {
        **{name: text for name, text in os.environ.items() if not name.startswith(("AIRFLOW", "PYTEST", "PYTHON"))},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # the spark-submit of our environment
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


def test_the_dag_runs_from_log_to_evaluation(tmp_path: Path) -> None:
    with gzip.open(LOG, "rb") as source:
        small = b"".join(source.readline() for _ in range(LINES))
    (tmp_path / "access.log").write_bytes(small)
    conf = {
        "input": str(tmp_path / "access.log"),
        "root": str(tmp_path / "results"),
        "global_batch": "32",
        "epochs": "1",
    }
    (tmp_path / "conf.json").write_text(json.dumps(conf))
    airflow(tmp_path, "-m", "airflow", "db", "migrate", limit_s=400)
    output = airflow(
        tmp_path, str(Path(__file__).with_name("_run_dag.py")), str(DAG_FILE), str(tmp_path / "conf.json"), limit_s=1800
    )
    told = next((line for line in output.splitlines() if line.startswith("RESULT ")), None)
    assert told is not None, output[-6000:]
    result = json.loads(told.removeprefix("RESULT "))
    wanted = dict.fromkeys(("etl", "verify", "train", "evaluate"), "success at try 1")
    assert result["tasks"] == wanted, output[-6000:]
    assert result["state"] == "success"
    assert result["foreign"] == []  # importing the DAG needs Airflow alone
    (run,) = (tmp_path / "results").iterdir()
    assert ":" not in run.name
    assert (run / "dataset" / "_manifest.json").is_file()
    assert list((run / "run" / "results").glob("g*.json"))


def test_the_dag_is_scheduled_bounded_and_in_order(tmp_path: Path) -> None:
    code = (
        "import json, sys, importlib.util as u\n"
        "s = u.spec_from_file_location('d', sys.argv[1]); m = u.module_from_spec(s); s.loader.exec_module(m)\n"
        "d = m.dag\n"
        "print('RESULT ' + json.dumps({'catchup': d.catchup, 'active': d.max_active_runs,\n"
        "  'schedule': str(d.schedule),\n"
        "  'down': {t.task_id: sorted(t.downstream_task_ids) for t in d.tasks},\n"
        "  'limits': [t.execution_timeout is not None for t in d.tasks], 'retries': [t.retries for t in d.tasks]}))"
    )
    output = airflow(tmp_path, "-c", code, str(DAG_FILE), limit_s=400)
    told = json.loads(next(line for line in output.splitlines() if line.startswith("RESULT "))[7:])
    assert told["catchup"] is False and told["active"] == 1 and told["schedule"] == "@daily"
    assert told["down"] == {"etl": ["verify"], "verify": ["train"], "train": ["evaluate"], "evaluate": []}
    assert all(told["limits"]) and told["retries"] == [2, 0, 2, 2]
