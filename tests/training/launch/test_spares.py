"""A spare executor: its process becomes the rank whose executor was killed. Real executors, in a driver of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from lockstep.storage.errors import ConfigError
from lockstep.storage.fs import filesystem
from tests.training._tiny import write_table
from tests.waiting import until
from training.config import TrainConfig
from training.results.audit import check_run_audit
from training.run.paths import RunPaths
from training.run.result import find_result

ROOT = Path(__file__).resolve().parents[3]
TOLD = "this process was a spare"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_whose_executor_is_killed_goes_on_in_the_spare(tmp_path: Path) -> None:
    write_table(tmp_path / "data", records={"train": 2000, "test": 8})
    run = tmp_path / "run"
    call = [sys.executable, "-m", "jobs.train", "--dataset", str(tmp_path / "data"), "--run", str(run), "--audit"]
    call += ["--model", "tests.training._models:sleeps_by_row", "--global-batch", "8", "--epochs", "2"]
    call += ["--num-ranks", "2", "--checkpoint-every", "20", "--master", "local-cluster[3,1,1024]"]
    call += ["--spare-executors", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
    driver = subprocess.Popen(call, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        found: list[psutil.Process] = []

        def executor_of_a_rank() -> bool:
            """Java of an executor whose rank trains, once the spare waits too."""
            assert driver.poll() is None, driver.communicate()[1]
            ranks = {one: words for one, words in below(driver.pid).items() if "training.rank" in words}
            spare = [one for one, words in ranks.items() if words[-1] == ""]
            with contextlib.suppress(psutil.Error):  # a process has ended in the meantime
                found[:] = [one.parents()[2] for one in ranks if one not in spare]
            return len(spare) == 1 and len(found) == 2 and len([*run.glob("checkpoints/*")]) > 1

        until(executor_of_a_rank)
        assert "CoarseGrainedExecutorBackend" in " ".join(found[0].cmdline())
        found[0].kill()
        _, said = driver.communicate(timeout=240)
    finally:
        driver.kill()
    assert driver.returncode == 0, said
    print(said)
    result = find_result(filesystem(str(run)), RunPaths(str(run)))
    assert result is not None and [restart["level"] for restart in result["restart_log"]] == [2]
    logs = {path: path.read_text() for path in run.glob("logs/*/*/*")}
    assert [path.parent.parent.name for path, text in logs.items() if TOLD in text] == ["g0002"], [*logs]
    assert check_run_audit(str(run)).ok


def below(pid: int) -> dict[psutil.Process, list[str]]:
    """The descendants of a process that live, and their command lines."""
    found = {}
    for one in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found[one] = one.cmdline()
    return found


@pytest.mark.parametrize(
    "wrong",
    [
        {"spare_executors": -1},
        {"launcher": "local", "min_ranks": None},  # ranks are processes of this host
        {"max_ranks": 3},  # such a run uses every slot
    ],
)
def test_spare_executors_need_slots_that_no_rank_uses(wrong: dict[str, object]) -> None:
    right = {"spare_executors": 1, "launcher": "barrier", "num_ranks": 2, "min_ranks": 1}
    given = {"datasets": ("data",), "run": "run", "model": "logistic", "global_batch": 8, "epochs": 1}
    TrainConfig(**given | right)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="spare_executors"):
        TrainConfig(**given | right | wrong)  # type: ignore[arg-type]
