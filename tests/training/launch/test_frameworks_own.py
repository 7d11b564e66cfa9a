"""Unchanged scripts of PyTorch and TensorFlow, which know nothing of Lockstep, on the ranks of lockstep launch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.horovod.test_horovod import DATA, EXAMPLES, launch
from tests.horovod.test_horovod_torch import ROOT, SCRIPTS, launch_torch, run_torch
from tests.training._tiny import write_images

pytestmark = pytest.mark.slow
FIT = str(SCRIPTS / "keras_strategies.py")

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
        done = launch_torch(EXAMPLES / "pytorch_script" / script, "--data", str(DATA), "--out", str(tmp_path))
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


@pytest.mark.soak  # `fit` under it is the short form
def test_multi_worker_mirrored_strategy_finds_its_cluster(tmp_path: Path) -> None:
    done = launch(
        2, EXAMPLES / "keras_script" / "mirrored.py", "--strategy", "multi", "--data", str(DATA), "--out", str(tmp_path)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = losses("multi", tmp_path)
    assert len(found) == 12 and found[-1] < found[0] / 1.5


@pytest.mark.soak
def test_mirrored_strategy_trains_as_the_processes_do(tmp_path: Path) -> None:
    one = [
        sys.executable,
        "-m",
        "lockstep.jobs.launch",
        "--num-ranks",
        "1",
        "--launcher",
        "local",
        str(EXAMPLES / "keras_script" / "mirrored.py"),
    ]
    flags = ["--strategy", "mirrored", "--data", str(DATA), "--out", str(tmp_path)]
    subprocess.run([*one, *flags], cwd=ROOT, check=True, timeout=300)
    launch(
        2, EXAMPLES / "keras_script" / "mirrored.py", "--strategy", "multi", "--data", str(DATA), "--out", str(tmp_path)
    )
    np.testing.assert_allclose(losses("mirrored", tmp_path), losses("multi", tmp_path), rtol=1e-5)


SAME_WEIGHTS = """
import sys, torch
one, other = (torch.load(f"{folder}/checkpoint.pt") for folder in sys.argv[1:])
for part in (one["model"], other["model"]):
    assert sum(value.numel() for value in part.values()) > 500
for name, value in one["model"].items():
    torch.testing.assert_close(other["model"][name], value, rtol=1e-10, atol=1e-12)
assert one["batches"] == other["batches"] and one["batches"]["next_step"] == 10
"""


@pytest.mark.soak
def test_a_script_of_pytorch_resumes_the_plan_at_other_ranks(tmp_path: Path) -> None:
    write_images(tmp_path / "data")
    for folder, ranks in (("whole", ("1",)), ("parts", ("2", "1", "3"))):
        (tmp_path / folder).mkdir()
        for number, count in enumerate(ranks):
            stop = 10 if number + 1 == len(ranks) else 3 * (number + 1)
            launched = ["-m", "lockstep.jobs.launch", "--num-ranks", count, "--launcher", "local"]
            flags = ["--dataset", str(tmp_path / "data"), "--out", str(tmp_path / folder), "--stop", str(stop)]
            done = run_torch(*launched, str(EXAMPLES / "pytorch_script" / "torch_planned.py"), *flags)
            assert done.returncode == 0, done.stdout + done.stderr
    done = run_torch("-c", SAME_WEIGHTS, str(tmp_path / "whole"), str(tmp_path / "parts"))
    assert done.returncode == 0, done.stderr
    seen = [
        sorted(line for path in (tmp_path / folder).glob("samples-*.txt") for line in path.read_text().splitlines())
        for folder in ("whole", "parts")
    ]
    assert seen[0] == seen[1] and len(seen[0]) == 200


@pytest.mark.soak
def test_the_loader_gives_the_same_batches_to_the_real_pytorch() -> None:
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "torch"]
    done = run_torch(*command, "tests/training/batches/test_iterate.py", "tests/lockstep/test_face.py", limit_s=600)
    assert done.returncode == 0 and "7 passed" in done.stdout, done.stdout


@pytest.mark.soak
def test_fit_of_keras_under_mirrored_strategy_gives_what_one_process_gives() -> None:
    found = {how: run_fit(1, how) for how in ("none", "mirrored")}
    np.testing.assert_allclose(json.loads(found["mirrored"][1]), json.loads(found["none"][1]), rtol=1e-5)


# Each of Keras' faults with the other one mended: if one of these trains, Keras has mended it.
FAULTS = {
    ("multi", "build"): "Invalid reduction dimension 0",
    ("multi", "reduce"): "Attempt to convert a value (PerReplica",
    ("server",): "ClusterCoordinator.create_per_worker_dataset",
}


@pytest.mark.soak
@pytest.mark.parametrize("how", FAULTS, ids="-".join)
def test_canary_faults_of_keras_under_strategies_of_tensorflow(how: tuple[str, ...]) -> None:
    code, printed = run_workers(*how) if "multi" in how else run_fit(1, *how)
    mended = f" once {how[1]} is mended" if how[1:] else ""
    news = f"Keras now can: fit under the strategy `{how[0]}`{mended}: its part of training/launch/keras_fit.py can go"
    assert code == 1, news
    assert FAULTS[how] in printed, "it fails otherwise than docs/decisions/071-pytorch.md says"


def test_fit_of_keras_under_several_workers_gives_what_one_process_gives() -> None:
    """A model that is not built, `validation_data`, `evaluate` and `predict`; without a change of the script."""
    one = subprocess.run([sys.executable, FIT, "none"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    code, several = run_fit(2, "multi")
    assert code == 0, several[-2000:]
    alone = one.stdout.partition("losses ")[2]
    np.testing.assert_allclose(json.loads(several), json.loads(alone), rtol=1e-6)
    assert len(json.loads(several)) == 6


def run_workers(*how: str) -> tuple[int, str]:
    """The same script in two processes that know each other by TF_CONFIG alone."""
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(f"127.0.0.1:{free.getsockname()[1]}")
    workers = []
    for index in range(2):
        config = {"cluster": {"worker": ports}, "task": {"type": "worker", "index": index}}
        workers.append(
            subprocess.Popen(
                [sys.executable, FIT, *how], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env=os.environ | {"TF_CONFIG": json.dumps(config)},
            )
        )  # fmt: skip
    try:
        printed = [one.communicate(timeout=300)[0] for one in workers]
    finally:
        for one in workers:
            one.kill()
    return max(one.returncode for one in workers), "".join(printed)


def run_fit(ranks: int, *how: str) -> tuple[int, str]:
    """Exit code and the losses that keras_strategies.py prints; all of its output if it prints none."""
    launched = [sys.executable, "-m", "lockstep.jobs.launch", "--num-ranks", str(ranks), "--launcher", "local"]
    done = subprocess.run([*launched, FIT, *how], cwd=ROOT, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("[rank 0] losses ")]
    return done.returncode, lines[0].removeprefix("[rank 0] losses ") if lines else done.stdout + done.stderr
