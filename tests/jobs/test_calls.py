"""Every job by `python -m` and by spark-submit, from a folder that is not the project's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
JOBS = sorted(path.stem for path in (ROOT / "jobs").glob("[a-z]*.py"))


def call(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=360, check=False)


def test_the_jobs_are_those_of_the_design() -> None:
    assert JOBS == [
        "bench_comm",
        "describe",
        "doctor",
        "etl_images",
        "etl_logs",
        "etl_table",
        "evaluate",
        "export",
        "index",
        "launch",
        "pipeline",
        "profile_run",
        "report",
        "train",
        "upload",
        "verify",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_help_and_a_bad_flag_by_module_and_by_file(job: str, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the folder of the call is not to be imported from')\n")
    (tmp_path / "elsewhere").mkdir()
    file = str(ROOT / "jobs" / f"{job}.py")
    # By file, as spark-submit runs it: its Java process takes seconds and is the same for all, so one job is enough.
    submit = str(Path(sys.executable).with_name("spark-submit")) if job == "etl_logs" else sys.executable
    here = [sys.executable, "-m", f"jobs.{job}"]
    done = call(*here, "--help", cwd=tmp_path / "elsewhere")
    assert done.returncode == 0 and "--config" in done.stdout, done.stderr
    for command in (here, [submit, file]):
        done = call(*command, "--colour", "red", cwd=tmp_path / "elsewhere")
        assert done.returncode == 2, done.stderr
        told = done.stdout + done.stderr  # spark-submit joins the two
        error = told[told.index("error: ") :].splitlines()
        assert [line.split(":")[0].strip() for line in error[1:4]] == ["got", "allowed", "next"]
        assert "Traceback" not in told
