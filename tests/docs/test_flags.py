"""Each flag that README and pages give to a job is one of that job, and each that they speak of is one of some job."""

from __future__ import annotations

import importlib
import re
from functools import cache

import pytest

from tests.docs.steps import ROOT

PAGES = [
    "README.md",
    "SKILL.md",
    *sorted(str(path.relative_to(ROOT)) for folder in ("docs", "examples") for path in (ROOT / folder).rglob("*.md")
            if "decisions" not in path.parts),
]  # fmt: skip
JOBS = sorted(path.stem for path in (ROOT / "jobs").glob("[a-z]*.py") if "def parser(" in path.read_text("utf-8"))
# A call ends with its line (`\` joins the next one), with a tick of prose, a cell of a table or a redirection.
CALL = re.compile(r"(?:(?<![\w.])lockstep |\bjobs/)([a-z_]+)(?:\.py)?((?:\\\n|[^\n`|<>])*)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")
OTHERS = {  # the first two lines are spark-submit's
    "--archives", "--conf", "--executor-cores", "--files", "--jars",
    "--deploy-mode", "--driver-memory", "--num-executors", "--packages", "--py-files",
    "--nproc-per-node", "--output-filename", "--tee",  # torchrun, horovodrun
    "--hosts", "--mbit", "--mib", "--train",  # benchmarks
    "--after", "--data", "--log", "--namenode", "--out", "--rank", "--rows", "--signal", "--way",  # scripts of examples
    "--cores", "--host", "--memory", "--port", "--total-executor-cores", "--work-dir",  # Spark's standalone master
    "--pid", "--logdir",  # py-spy, tensorboard
    "--properties-file",  # spark-submit's
    "--from-file", "--grace-period", "--tail",  # kubectl
    "--keytab", "--principal",  # spark-submit's, under Kerberos
    "--hdfs",  # lockstep doctor
    "--version",  # lockstep alone
    "--conn-extra", "--conn-host", "--conn-type", "--dag-id", "--from-date", "--to-date", "--max-active-runs",
    "--reprocess-behavior", "--state",  # airflow
}  # fmt: skip


@cache
def flags_of(job: str) -> frozenset[str]:
    parser = importlib.import_module(f"lockstep.jobs.{job}").parser()
    return frozenset(option for action in parser._actions for option in action.option_strings)


def calls(page: str) -> list[tuple[str, str]]:
    """Job and flag of each call on a page."""
    found = []
    for job, rest in CALL.findall((ROOT / page).read_text(encoding="utf-8")):
        if job in JOBS:
            own = re.split(r"\S+\.py\b", rest)[0] if job == "launch" else rest  # behind the script's name its own
            found += [(job, flag) for flag in FLAG.findall(own)]
    return found


@pytest.mark.parametrize("page", PAGES)
def test_a_call_gives_a_job_only_flags_that_it_has(page: str) -> None:
    assert [(job, flag) for job, flag in calls(page) if flag not in flags_of(job)] == []


@pytest.mark.parametrize("page", PAGES)
def test_a_flag_that_is_spoken_of_is_one_of_a_job(page: str) -> None:
    known = OTHERS.union(*map(flags_of, JOBS))
    assert sorted(set(FLAG.findall((ROOT / page).read_text(encoding="utf-8"))) - known) == []


def test_calls_are_found() -> None:
    assert {"train", "launch", "profile_run", "etl_logs"} <= {job for page in PAGES for job, _ in calls(page)}
    assert sum(len(calls(page)) for page in PAGES) > 100
