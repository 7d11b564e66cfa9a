"""The daily DAG by Airflow: its declaration and two days; in `make soak` all but upload by the real spark-submit."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyarrow import csv

from lockstep.training.results.forgetting import forgetting_of
from lockstep.training.results.report import write_report
from tests.dags._airflow import DAGS, SERVERS, Airflow, write_days

LINES = 3000  # of a day
DAYS = ("2026-01-01", "2026-01-02")
OFTEN, SELDOM = b"/history/history.html", b"/shuttle/missions/sts-71/images/images.html"
"""Pages of DAYS whose visitors ask again within half an hour: 84 % and 30 %."""
TASKS = ("upload", "etl", "verify", "train", "publish")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def on_this_host(folder: Path) -> Airflow:
    """An Airflow whose spark-submit is _spark_submit.py, and its database."""
    (folder / "bin").mkdir(parents=True)
    submit = folder / "bin" / "spark-submit"
    submit.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("_spark_submit.py")} "$@"\n')
    submit.chmod(0o755)
    own = {"PATH": str(submit.parent), "LOCKSTEP_CALLS": str(folder / "calls.jsonl")}
    airflow = Airflow(folder, {"host": "local[2]"}, own)
    airflow.command("db", "migrate")
    return airflow


def settings(folder: Path, days: Sequence[str], **more: str) -> str:
    """Write logs for the days below `folder`; returns the params of a run of the DAG, with `more` of them."""
    write_days(folder / "daily", days, LINES)
    conf = {"input": str(folder / "daily"), "root": str(folder / "results"), "global_batch": "32", "epochs": "1"}
    return json.dumps(conf | more)


def run_dag(folder: Path, airflow: Airflow, days: Sequence[str], **more: str) -> dict[str, Any]:
    """Run the DAG for one day after the other; returns what _run_dag.py prints. All tasks must succeed. Days whose logs
    are there keep them."""
    new = [] if (folder / "daily" / days[0]).exists() else days
    (folder / "conf.json").write_text(settings(folder, new, **more))
    script = str(Path(__file__).with_name("_run_dag.py"))
    output = airflow.python(script, str(DAGS / "lockstep_daily.py"), str(folder / "conf.json"), *days, limit_s=1800)
    told = next((line for line in output.splitlines() if line.startswith("RESULT ")), None)
    assert told is not None, output[-6000:]
    result: dict[str, Any] = json.loads(told.removeprefix("RESULT "))
    wanted = {"state": "success", "tasks": dict.fromkeys(TASKS, "success at try 1")}
    assert result["runs"] == [wanted] * len(days), output[-6000:]
    assert result["foreign"] == []  # importing the DAG needs Airflow alone
    return result


def test_a_day_continues_the_day_before_with_jobs_other_than_etl_and_verify_only_parsed(tmp_path: Path) -> None:
    told = run_dag(tmp_path, on_this_host(tmp_path), DAYS, replay="0.25", max_drop="0.05")["declared"]
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
    assert all("--replay=0.25" in each for each in flags), "the first day has no earlier one, and is trained on alone"
    assert not any(flag.startswith("--ewc") for each in flags for flag in each), "what is not set is no flag"
    assert all("--max-drop=0.05" in arguments for job, _, arguments in calls if job == "publish")


@pytest.mark.soak
def test_nights_that_replay_and_publish_what_forgets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second day replays the first and is held to it; the third one is a better model that fell on earlier days."""
    monkeypatch.setenv("LOCKSTEP_ALL", "1")
    airflow, results = on_this_host(tmp_path), tmp_path / "results"
    run_dag(tmp_path, airflow, DAYS, replay="0.25", ewc="5", max_drop="0.5")
    published = results / "models" / "lockstep_weblog"
    current = json.loads((published / "_current.json").read_text())
    assert current["run"].endswith(DAYS)
    first, second = (json.loads((results / "runs" / day / "run.json").read_text()) for day in DAYS)
    assert "ratios" not in first["plan"] and second["plan"]["ratios"] == [3, 1]
    assert second["first_weights"] == f"{results}/runs/{DAYS[0]}/models/g0001"
    assert (results / "runs" / DAYS[1] / "models" / "g0001" / "fisher.safetensors").is_file()
    found = forgetting_of(str(results / "runs" / DAYS[1]), "test")
    assert found is not None and found.missing == 0 and len(found.days) == 2
    assert_rows_of_both_days(results)

    write_reversed_day(tmp_path / "daily", "2026-01-03")
    run_dag(tmp_path, airflow, ["2026-01-03"], replay="0.25", ewc="5", max_drop="0.01")
    assert json.loads((published / "_current.json").read_text()) == current
    (refused,) = (json.loads(file.read_text()) for file in (published / "_refused").iterdir())
    assert refused["run"].endswith("2026-01-03") and refused["reason"].startswith("better, but worse by")
    matrix = forgetting_of(str(results / "runs" / "2026-01-03"), "test")
    assert matrix is not None and matrix.missing == 0 and len(matrix.days) == 3
    assert max(np.array(matrix.values[1], float) - np.array(matrix.values[2][:2], float)) > 0.01
    report = Path(write_report(str(results / "runs" / "2026-01-03"))).read_text()
    assert all(f"{value:.4f}" in report for row in matrix.values for value in row)


def assert_rows_of_both_days(results: Path) -> None:
    """Each step of the second night has 24 rows of that day, each once, and 8 of the first, as evenly as can be."""
    from tensorflow.train import Example

    day_of = {
        f"{Example.FromString(record).features.feature['sample_id'].int64_list.value[0] % (1 << 64):016x}": day
        for day in DAYS
        for record in records_of(results / "datasets" / day, "train")
    }
    audits = sorted((results / "runs" / DAYS[1] / "audit").glob("g*/rank-*/*.csv"))
    ids = csv.ConvertOptions(column_types={"sample_id": pa.string()})
    rows = pa.concat_tables([csv.read_csv(file, convert_options=ids) for file in audits])
    days = pa.array([day_of[one] for one in rows["sample_id"].to_pylist()])
    counts = rows.append_column("day", days).group_by(["step", "day"]).aggregate([("sample_id", "count")])
    steps = sum(day == DAYS[1] for day in day_of.values()) // 24
    for day, share in ((DAYS[0], 8), (DAYS[1], 24)):
        of_day = counts.filter(pc.field("day") == day)["sample_id_count"]
        assert of_day.unique().to_pylist() == [share] and len(of_day) == steps > 10
        times = pc.value_counts(rows["sample_id"].filter(pc.equal(days, day))).field("counts")
        assert pc.max(times).as_py() == math.ceil(share * steps / sum(one == day for one in day_of.values()))


def write_reversed_day(folder: Path, day: str) -> None:
    """Write logs for a day of twice as many lines: who asks again within half an hour asks for SELDOM, others for
    OFTEN."""
    write_days(folder / "more", ["before", day], 2 * LINES)
    lines = [line.split(b" ") for line in (folder / "more" / day / "access.log").read_bytes().splitlines(keepends=True)]
    lines, seen = [words for words in lines if len(words) == 10], dict[bytes, datetime]()
    for words in reversed(lines):
        at = datetime.strptime(b" ".join(words[3:5]).decode(), "[%d/%b/%Y:%H:%M:%S %z]")
        again = words[0] in seen and seen[words[0]] - at <= timedelta(minutes=30)
        words[6], seen[words[0]] = (SELDOM if again else OFTEN), at
    (folder / day).mkdir()
    (folder / day / "access.log").write_bytes(b"".join(map(b" ".join, lines)))


@pytest.mark.soak
def test_seven_days_of_a_backfill_by_the_scheduler_are_those_of_seven_nights(tmp_path: Path) -> None:
    """Real ETL and verification; of the other jobs the arguments are parsed. Both write to the same place in turn."""
    week = [f"2026-01-{day:02d}" for day in range(1, 8)]
    run_dag(tmp_path, on_this_host(tmp_path), week)
    nights = files_below(tmp_path / "results" / "datasets")
    assert {name.split("/")[0] for name in nights} == set(week)
    assert_one_job_has_their_rows(tmp_path, week)
    (tmp_path / "results").rename(tmp_path / "nights")
    airflow = on_this_host(tmp_path / "other")  # which knows nothing of the nights
    airflow.own["AIRFLOW__SCHEDULER__USE_JOB_SCHEDULE"] = "False"  # no run but the back-fill's
    try:
        airflow.start(*SERVERS)
        airflow.backfill(week, settings(tmp_path, week))
        for day in week:
            assert airflow.wait(day, 900.0) == dict.fromkeys(TASKS, "success")
    finally:
        airflow.stop()
    assert files_below(tmp_path / "results" / "datasets") == nights


def assert_one_job_has_their_rows(folder: Path, days: Sequence[str]) -> None:
    """The records of the days' datasets together are those of one job over the logs of all days, split by split."""
    output, root = folder / "one", Path(__file__).parents[2]
    logs = [str(folder / "daily" / day / "access.log") for day in days]
    flags = ["--input", *logs, "--output", str(output), "--split", "group:visitor:80/20", "--master", "local[2]"]
    subprocess.run([sys.executable, "-m", "lockstep.jobs.etl_logs", *flags], cwd=root, check=True, timeout=900)
    for split in ("train", "test"):
        nights = [record for day in days for record in records_of(folder / "results" / "datasets" / day, split)]
        one = records_of(output, split)
        assert sorted(nights) == sorted(one) and len(set(one)) == len(one) > 100


def records_of(dataset: Path, split: str) -> list[bytes]:
    """The encoded records of a split: 8 bytes of length, 4 of its checksum, the record, 4 of its checksum."""
    found = []
    for shard in sorted((dataset / f"split={split}").glob("*.tfrecord")):
        data, place = shard.read_bytes(), 0
        while place < len(data):
            (length,) = struct.unpack_from("<Q", data, place)
            found.append(data[place + 12 : place + 12 + length])
            place += length + 16
    return found


def files_below(folder: Path) -> dict[str, bytes]:
    """All files of a folder and their bytes, by path."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
