"""Runs in .venv-airflow: run the DAG once by dag.test() and print its declaration and each task's state as JSON."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path


def main(path: str, conf: str) -> None:
    spec = importlib.util.spec_from_file_location("lockstep_weblog", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lockstep_weblog"] = module
    spec.loader.exec_module(module)
    foreign = {"pyspark", "tensorflow", "pyarrow", "lockstep", "etl", "training"} & set(sys.modules)
    dag = module.dag
    declared = {
        "catchup": dag.catchup,
        "active": dag.max_active_runs,
        "schedule": str(dag.schedule),
        "down": {task.task_id: sorted(task.downstream_task_ids) for task in dag.tasks},
        "limits": [task.execution_timeout is not None for task in dag.tasks],
        "retries": [task.retries for task in dag.tasks],
    }
    dag_run = dag.test(run_conf=json.loads(Path(conf).read_text(encoding="utf-8")))
    states = {task.task_id: f"{task.state} at try {task.try_number}" for task in dag_run.get_task_instances()}
    result = {"state": str(dag_run.state), "tasks": states, "foreign": sorted(foreign), "declared": declared}
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
