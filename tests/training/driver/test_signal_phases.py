"""SIGTERM to driver or rank while a rank does something else than steps: real ranks, as lockstep train starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.storage.documents import unseal
from lockstep.storage.fs import filesystem
from lockstep.training.run.lineage import find_tip
from lockstep.training.run.paths import RunPaths
from tests.training._ranks import living_ranks
from tests.training._tiny import write_table
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.soak]
ROOT = Path(__file__).resolve().parents[3]
MODEL = """
import os, pathlib, time

def meet(phase):
    mark = pathlib.Path(os.environ["MARK"])
    if os.environ["PHASE"] == phase and not mark.exists():
        mark.touch()
        time.sleep(3.0)

def met(owner, name, phase):
    inner = getattr(owner, name)
    def outer(*arguments, **more):
        meet(phase)
        return inner(*arguments, **more)
    setattr(owner, name, outer)

meet("import")

def model(signature, options):
    from lockstep.training.models.logistic import logistic
    from lockstep.training.rank import fit, saver, validation

    met(saver.Saver, "restore", "restore")
    met(validation.Validation, "after", "evaluation")
    met(fit, "export_model", "export")
    made = logistic(signature, options)
    met(made, "train_step", "tracing")
    return made
"""
STEPS, BEFORE = 37, 4  # 100 rows in batches of 8, three epochs


def call(folder: Path, **more: Any) -> list[str]:
    flags = {
        "dataset": folder / "data",
        "run": folder / "run",
        "model": "phased:model",
        "num-ranks": 1,
        "global-batch": 8,
        "epochs": 3,
        "checkpoint-every": 1000,
        "launcher": "local",
        "validate": "test",
    }
    return [
        sys.executable,
        "-m",
        "lockstep.jobs.train",
        *(str(x) for k, v in (flags | more).items() for x in (f"--{k}", v)),
    ]


@pytest.mark.parametrize("whom", ["driver", "rank"])
@pytest.mark.parametrize("phase", ["import", "restore", "tracing", "evaluation", "export"])
def test_a_sigterm_in_any_phase_ends_the_run_as_the_page_says(tmp_path: Path, phase: str, whom: str) -> None:
    """The cause: a signal that meets no step. A run that has steps to save saves them; else the newest checkpoint
    counts; after the last step it ends as if there were none.
    """
    write_table(tmp_path / "data")
    (tmp_path / "phased.py").write_text(MODEL)
    mark, paths = tmp_path / "mark", RunPaths(str(tmp_path / "run"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "MARK": str(mark), "PHASE": phase}
    if phase == "restore":
        subprocess.run(call(tmp_path, **{"max-steps": BEFORE}), cwd=ROOT, env=environment, check=True)
    process = subprocess.Popen(call(tmp_path), cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: mark.exists() or process.poll() is not None)
        (rank,) = living_ranks(process.pid)
        os.kill(process.pid if whom == "driver" else rank, signal.SIGTERM)
        _, told = process.communicate(timeout=240)
    finally:
        process.kill()
        process.wait()
    tip = find_tip(filesystem(paths.root), paths)
    print(phase, whom, process.returncode, None if tip is None else tip.ref, Path(paths.stopped).exists(), told[-600:])
    if phase == "export":
        assert process.returncode == 0 and not Path(paths.stopped).exists()
        return
    assert process.returncode == 75, told
    found = unseal(filesystem(paths.root).read_bytes(paths.stopped), paths.stopped)
    assert "the same call" in told.splitlines()[-1]
    assert found["by"] == ("SIGTERM" if whom == "driver" else "SIGTERM to a rank")
    assert found["step"] == (0 if tip is None else tip.ref.step)
    again = subprocess.run(call(tmp_path), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert again.returncode == 0 and not Path(paths.stopped).exists(), again.stderr
