"""Unchanged scripts of PyTorch and TensorFlow, which know nothing of Lockstep, on the ranks of jobs.launch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.training.horovod.test_horovod import DATA, launch
from tests.training.horovod.test_horovod_torch import ROOT, SCRIPTS, launch_torch, run_torch

pytestmark = pytest.mark.slow

COMPARE = """
import sys, torch
ranks = [[torch.load(f"{sys.argv[1]}/{how}-{rank}.pt") for rank in range(2)] for how in ("ddp", "horovod")]
for name in ranks[0][0]:
    (ddp, other), (hvd, second) = ([state[name] for state in states] for states in ranks)
    assert torch.equal(ddp, other) and torch.equal(hvd, second), name
    torch.testing.assert_close(hvd, ddp, rtol=0, atol=1e-6)
print(len(ranks[0][0]), "tensors agree")
"""


def test_ddp_and_hvd_torch_train_the_same_weights(tmp_path: Path) -> None:
    lines = []
    for script in ("torch_ddp.py", "torch_horovod.py"):
        done = launch_torch(script, "--data", str(DATA), "--out", str(tmp_path))
        assert done.returncode == 0, done.stdout + done.stderr
        lines.append([line for line in done.stdout.splitlines() if "loss" in line])
    assert lines[0] == lines[1] and len(lines[0]) == 2
    done = run_torch("-c", COMPARE, str(tmp_path))
    assert "6 tensors agree" in done.stdout, done.stderr


def losses(strategy: str, folder: Path) -> list[float]:
    """Those that mirrored.py has written, the same on all ranks, whose weights are equal too."""
    ranks = [np.load(path) for path in sorted(folder.glob(f"{strategy}-*.npz"))]
    assert len(ranks) == (2 if strategy == "multi" else 1)
    for found in ranks:
        for name in found.files:
            np.testing.assert_array_equal(found[name], ranks[0][name], err_msg=name)
    return [float(one) for one in ranks[0]["loss"]]


def test_multi_worker_mirrored_strategy_finds_its_cluster(tmp_path: Path) -> None:
    done = launch(2, "mirrored.py", "--strategy", "multi", "--data", str(DATA), "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = losses("multi", tmp_path)
    assert len(found) == 12 and found[-1] < found[0] / 1.5


@pytest.mark.soak
def test_mirrored_strategy_trains_as_the_processes_do(tmp_path: Path) -> None:
    one = [sys.executable, "-m", "jobs.launch", "--num-ranks", "1", "--launcher", "local", str(SCRIPTS / "mirrored.py")]
    flags = ["--strategy", "mirrored", "--data", str(DATA), "--out", str(tmp_path)]
    subprocess.run([*one, *flags], cwd=ROOT, check=True, timeout=300)
    launch(2, "mirrored.py", "--strategy", "multi", "--data", str(DATA), "--out", str(tmp_path))
    np.testing.assert_allclose(losses("mirrored", tmp_path), losses("multi", tmp_path), rtol=1e-5)
