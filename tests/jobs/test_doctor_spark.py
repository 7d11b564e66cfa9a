"""lockstep doctor on executors of a real standalone master: what a job would meet there, one line each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.standalone import standalone

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "tests" / "spark" / "spark_checks.py")
SUBMIT = str(Path(sys.executable).with_name("spark-submit"))


def lines_of(*command: str, cwd: Path, code: int) -> dict[str, str]:
    """Run a command that prints checks; each check's name and line, with its next step."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stdout + done.stderr[-4000:]
    found = done.stdout.replace("\n     next: ", " | ").splitlines()
    return {line[5:].partition(":")[0]: f"{line[:5]}{line.partition(': ')[2]}" for line in found}


@pytest.mark.soak
def test_on_executors_foreign_modules_wrong_clocks_and_dynamic_allocation_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executors' Python reads the real clock with 100 s added; the GPU is that of a fake nvidia-smi."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-1)'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    (tmp_path / "lockstep.py").write_text("")
    (tmp_path / "site").mkdir()
    shift = "import time\nnow = time.time\ntime.time = lambda: now() + 100\n"
    (tmp_path / "site" / "sitecustomize.py").write_text(shift)
    with standalone(tmp_path) as master:
        settings = ["spark.dynamicAllocation.enabled=true", "spark.dynamicAllocation.shuffleTracking.enabled=true"]
        settings += [f"spark.executorEnv.PYTHONPATH={tmp_path / 'site'}", "spark.ui.enabled=false"]
        flags = [word for setting in settings for word in ("--conf", setting)]
        files = str(tmp_path / "lockstep.py")
        found = lines_of(SUBMIT, "--master", master, "--files", files, *flags, SCRIPT, cwd=tmp_path / "site", code=1)
    assert found["spark"].startswith("OK   Spark 4") and found["executors"].startswith("OK   Python 3.")
    assert found["java there"].startswith("OK   Java ") and found["glibc there"].startswith("OK   glibc ")
    assert found["modules there"].startswith("FAIL lockstep on ") and "lockstep.py | Rename" in found["modules there"]
    assert found["clocks"].startswith("WARN the clock of ") and " by 100 s or more | Run NTP" in found["clocks"]
    assert found["gpus there"].startswith("WARN Spark gives none of the GPUs of ")
    assert found["slots"].startswith("FAIL a barrier stage cannot run under dynamic allocation")
    assert "spark.dynamicAllocation.enabled=false" in found["slots"]
    assert found["barrier"] == "SKIP two ranks have no slots"


@pytest.mark.slow
def test_executors_without_python_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "./python/bin/python")
    found = lines_of(sys.executable, SCRIPT, "local[2]", cwd=tmp_path, code=1)
    assert found["spark"].startswith('FAIL the executors cannot start Python: Cannot run program "./python/bin/python"')
    assert "--archives" in found["spark"] and found["clocks"].startswith("SKIP ")


@pytest.mark.soak
def test_every_check_passes_on_a_standalone_master(tmp_path: Path) -> None:
    with standalone(tmp_path) as master:
        found = lines_of(sys.executable, SCRIPT, master, cwd=tmp_path, code=0)
    assert all(line.startswith("OK ") for line in found.values()), found
    assert found["slots"] == "OK   2 task slots, as many ranks at once"


@pytest.mark.soak
def test_a_master_without_workers_is_named_at_the_limit(tmp_path: Path) -> None:
    with standalone(tmp_path, memories=()) as master:
        found = lines_of(sys.executable, SCRIPT, master, "20", cwd=tmp_path, code=1)
    assert found["spark"].startswith(f"FAIL Spark on {master} gave no task slot within 20 s"), found
    assert found["executors"] == "SKIP Spark gave no executors to look at"
