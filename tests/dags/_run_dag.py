"""Runs in .venv-airflow: import the DAG, run it once by dag.test(), print what became of each task as JSON."""

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
    dag_run = module.dag.test(run_conf=json.loads(Path(conf).read_text(encoding="utf-8")))
    states = {task.task_id: f"{task.state} at try {task.try_number}" for task in dag_run.get_task_instances()}
    print("RESULT " + json.dumps({"state": str(dag_run.state), "tasks": states, "foreign": sorted(foreign)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
