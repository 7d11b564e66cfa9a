"""Jobs called by `python -m` and by spark-submit, from a folder that is not the project's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from lockstep.jobs._cli import run_job
from tests.training._tiny import write_table

ROOT = Path(__file__).resolve().parents[2]
JOBS = sorted(path.stem for path in (ROOT / "jobs").glob("[a-z]*.py"))


def call(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=360, check=False)


def test_the_jobs_are_those_of_the_design() -> None:
    assert JOBS == [
        "agent",
        "baseline",
        "bench_comm",
        "control",
        "cross_validate",
        "describe",
        "doctor",
        "etl_images",
        "etl_logs",
        "etl_table",
        "evaluate",
        "evaluate_policy",
        "export",
        "fill_cache",
        "index",
        "launch",
        "models",
        "package",
        "pipeline",
        "plan_memory",
        "predict",
        "profile_run",
        "publish",
        "report",
        "runs",
        "scale",
        "stacks",
        "status",
        "track",
        "train",
        "tune",
        "upload",
        "verify",
        "watch",
    ]


@pytest.mark.slow
def test_help_and_a_bad_flag_by_module_and_by_spark_submit(tmp_path: Path) -> None:
    """In processes of their own; tests/test_house.py makes the same calls of each job, in forks of one process."""
    (tmp_path / "json.py").write_text("raise SystemExit('the folder of the call is not to be imported from')\n")
    (tmp_path / "elsewhere").mkdir()
    by_module = [sys.executable, "-m", "lockstep.jobs.train"]
    by_submit = [str(Path(sys.executable).with_name("spark-submit")), str(ROOT / "jobs" / "etl_logs.py")]
    done = call(*by_module, "--help", cwd=tmp_path / "elsewhere")
    assert done.returncode == 0 and "--config" in done.stdout, done.stderr
    for command in (by_module, by_submit):
        done = call(*command, "--colour", "red", cwd=tmp_path / "elsewhere")
        assert done.returncode == 2, done.stderr
        told = done.stdout + done.stderr  # spark-submit joins the two
        error = told[told.index("error: ") :].splitlines()
        assert [line.split(":")[0].strip() for line in error[1:4]] == ["got", "allowed", "next"]
        assert "Traceback" not in told


@pytest.mark.slow
def test_a_session_takes_the_settings_of_spark_submit_though_java_was_asked_before(tmp_path: Path) -> None:
    """As in lockstep doctor, which asks YARN's queue before its session starts."""
    script = tmp_path / "asks_first.py"
    script.write_text(
        "from pyspark import SparkContext\n"
        "SparkContext._ensure_initialized()\n"
        "import lockstep\n"
        "with lockstep.spark_session('asks') as spark:\n"
        "    print(spark.sparkContext.master, spark.conf.get('spark.asked'))\n"
    )
    submit = str(Path(sys.executable).with_name("spark-submit"))
    command = [submit, "--master", "local[3]", "--conf", "spark.asked=yes", str(script)]
    done = call(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "local[3] yes" in done.stdout


@pytest.mark.slow
def test_a_reader_that_goes_ends_a_job_quietly(tmp_path: Path) -> None:
    """As `| head` does: 141, as a shell reports of others, where the job was not done; its own code where it was."""
    write_table(tmp_path / "d")
    file, small = (
        str(ROOT / "jobs" / "{}.py"),
        "from lockstep.jobs._cli import run_job; run_job(lambda argv: print('done') or 3)",
    )
    began = []
    for words, errors in (
        ([file.format("describe"), "d"], subprocess.PIPE),
        ([file.format("verify"), "d"], subprocess.PIPE),
        ([file.format("verify"), "d"], subprocess.STDOUT),
        ([file.format("verify"), "--help"], subprocess.PIPE),
        (["-c", small], subprocess.PIPE),
    ):
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert process.stdout is not None
        process.stdout.close()
        began.append((process, words))
    codes = []
    for process, words in began:
        with process:
            told = "" if process.stderr is None else process.stderr.read()
            codes.append(process.wait(120))
        assert "Broken" not in told and "Traceback" not in told and "error" not in told, (words, told)
    assert codes == [0, 141, 141, 0, 3]


def test_a_broken_pipe_that_is_not_ours_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.storage.files.deadlines.left_behind", lambda: 0)

    def main(argv: Sequence[str]) -> int:
        one, other = socket.socketpair()
        other.close()
        with one:
            one.sendall(b"x")
        return 0

    with pytest.raises(SystemExit) as ended:
        run_job(main, [])
    assert ended.value.code == 1 and "unexpected BrokenPipeError" in capsys.readouterr().err
