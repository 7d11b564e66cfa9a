"""Runs in .venv-airflow: run the daily DAG for some days by dag.test() and print declaration and states as JSON."""

from __future__ import annotations

import importlib.util
import json
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[Path(path).stem] = module
    spec.loader.exec_module(module)
    return module.weblog


def main(path: str, conf: str, *days: str) -> None:
    dag = load(path)
    foreign = {"pyspark", "tensorflow", "pyarrow", "lockstep", "etl", "training"} & set(sys.modules)
    declared = {
        "catchup": dag.catchup,
        "active": dag.max_active_runs,
        "schedule": str(dag.schedule),
        "down": {task.task_id: sorted(task.downstream_task_ids) for task in dag.tasks},
        "limits": [task.execution_timeout is not None for task in dag.tasks],
        "retries": [task.retries for task in dag.tasks],
    }
    for task in dag.tasks:
        task.retries = 0  # what fails is seen at once, and not after the delays between tries
    runs = []
    for day in days:
        when = datetime.fromisoformat(f"{day}T00:00:00+00:00") + timedelta(days=1)  # the interval is the day before
        dag_run = dag.test(logical_date=when, run_conf=json.loads(Path(conf).read_text(encoding="utf-8")))
        states = {task.task_id: f"{task.state} at try {task.try_number}" for task in dag_run.get_task_instances()}
        runs.append({"state": str(dag_run.state), "tasks": states})
    print("RESULT " + json.dumps({"runs": runs, "foreign": sorted(foreign), "declared": declared}))


if __name__ == "__main__":
    main(*sys.argv[1:])
