"""The daily DAG on a real Airflow and a real YARN in cluster mode, while its workers and its scheduler are killed."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.storage.dataset.manifest import load_chain
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import join
from lockstep.storage.verify import verify
from lockstep.training.results.audit import check_run_audit
from lockstep.training.run.published import REFUSED, read_published
from tests.cluster.daemons import Cluster
from tests.dags._airflow import DAGS, ROOT, SERVERS, Airflow, on_cluster, write_days, write_images
from tests.waiting import until

DAYS = ("2026-01-01", "2026-01-02")
LIMIT_S = 2400.0

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]


def applications(cluster: Cluster, tag: str) -> list[dict[str, Any]]:
    """What YARN knows of those with a tag, also of ended ones."""
    with urllib.request.urlopen(f"{cluster.yarn_url}/ws/v1/cluster/apps?applicationTags={tag}", timeout=30) as answer:
        found: list[dict[str, Any]] = (json.load(answer)["apps"] or {}).get("app", [])
    return found


def kill_worker(airflow: Airflow, day: str, task: str) -> None:
    """SIGKILL the process that runs the task."""
    title = f"airflow worker -- {airflow.tasks(day)[task][2]}"
    (worker,) = [process for process in psutil.process_iter() if title in " ".join(words(process))]
    os.kill(worker.pid, signal.SIGKILL)


def words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def late_submit(folder: Path) -> Path:
    """A spark-submit that tells of its first training only when the file `told` is there."""
    folder.mkdir()
    program = folder / "spark-submit"
    real = Path(sys.executable).with_name("spark-submit")
    program.write_text(
        f"""#!/bin/bash
case "$*" in
  *jobs/train.py*) if mkdir {folder}/first 2> {folder}/again; then
    {real} "$@" > {folder}/output 2>&1; code=$?
    until [ -e {folder}/told ]; do sleep 0.2; done
    cat {folder}/output; exit $code
  fi;;
esac
exec {real} "$@"
"""
    )
    program.chmod(0o755)
    return folder


def eager(folder: Path) -> Path:
    """A folder with the DAG whose later tries begin at once, while the application of the first one still runs."""
    folder.mkdir()
    text, delay = (DAGS / "lockstep_daily.py").read_text(), "timedelta(minutes=2)"
    assert text.count(delay) == 1
    (folder / "lockstep_daily.py").write_text(text.replace(delay, "timedelta(seconds=1)"))
    return folder


def test_killed_workers_and_a_killed_scheduler_lead_to_one_application_and_one_published_model(
    hadoop: Cluster, tmp_path: Path
) -> None:
    hadoop.start_yarn()
    bin_folder = late_submit(tmp_path / "bin")
    own = {
        "PATH": str(bin_folder),
        "AIRFLOW__SCHEDULER__USE_JOB_SCHEDULE": "False",  # no run but the back-fill's
        "AIRFLOW__CORE__DAGS_FOLDER": str(eager(tmp_path / "dags")),
        "AIRFLOW_VAR_LOCKSTEP_WEBLOG_HOME": str(ROOT),
    }
    airflow = on_cluster(tmp_path, hadoop, own)
    airflow.command("db", "migrate")
    write_days(tmp_path / "daily" / "weblog", DAYS, 4000)
    tags = [f"lockstep_weblog.train.{day}" for day in DAYS]

    def begun(tag: str, *states: str) -> Callable[[], bool]:
        return lambda: any(found["state"] in states for found in applications(hadoop, tag))

    try:
        airflow.start(*SERVERS)
        airflow.backfill(DAYS, json.dumps({"global_batch": "32", "epochs": "4"}))
        # The first day: the application was submitted, but its id is not kept yet.
        until(begun(tags[0], "ACCEPTED", "RUNNING", "FINISHED"), LIMIT_S)
        kill_worker(airflow, DAYS[0], "train")
        (bin_folder / "told").touch()
        # The second day: the task waits for its application; then the scheduler goes too, and comes back.
        until(begun(tags[1], "RUNNING"), LIMIT_S)
        kill_worker(airflow, DAYS[1], "train")
        airflow.processes["scheduler"].end()
        airflow.start("scheduler")
        for day in DAYS:
            assert set(airflow.wait(day, LIMIT_S).values()) == {"success"}
            assert airflow.tasks(day)["train"][1] == 2 and airflow.tasks(day)["publish"][1] == 1
    finally:
        airflow.stop()
    check_days(hadoop, "weblog")


def test_two_days_of_images_become_a_published_model(hadoop: Cluster, tmp_path: Path) -> None:
    hadoop.start_yarn()
    own = {"AIRFLOW__SCHEDULER__USE_JOB_SCHEDULE": "False", "AIRFLOW_VAR_LOCKSTEP_IMAGES_HOME": str(ROOT)}
    airflow = on_cluster(tmp_path, hadoop, own)
    airflow.command("db", "migrate")
    write_images(tmp_path / "daily" / "images", DAYS, 500)
    try:
        airflow.start(*SERVERS)
        airflow.backfill(DAYS, json.dumps({"global_batch": "32", "epochs": "1"}), dag="lockstep_images")
        for day in DAYS:
            assert set(airflow.wait(day, LIMIT_S).values()) == {"success"}
    finally:
        airflow.stop()
    check_days(hadoop, "images")
    chain = load_chain(f"{hadoop.hdfs_url}/nightly/images/datasets/{DAYS[1]}")
    assert [manifest.counts.written for _, manifest in chain] == [500, 500]


def check_days(hadoop: Cluster, kind: str) -> None:
    """Each step of each day was one application; runs are whole, and each sample of each step was used once."""
    for day in DAYS:
        for task in ("etl", "train", "publish"):
            found = applications(hadoop, f"lockstep_{kind}.{task}.{day}")
            assert [one["finalStatus"] for one in found] == ["SUCCEEDED"], (task, day, found)
        run = f"{hadoop.hdfs_url}/nightly/{kind}/runs/{day}"
        check_run_audit(run)
        assert verify(run) == []
    models = f"{hadoop.hdfs_url}/nightly/{kind}/models/lockstep_{kind}"
    fs = filesystem(models)
    current = read_published(fs, models)
    assert current is not None
    if not current["run"].endswith(DAYS[1]):  # the second day's was not better, and says so
        (reason,) = fs.list(join(models, REFUSED))
        assert current["run"].endswith(DAYS[0]) and DAYS[1] in reason.url
