"""Scripts written to Horovod's documented API, on two real ranks: what they compute, and what a wrong one is told."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "data" / "fashion-mnist"
SCRIPTS = ROOT / "tests" / "scripts"
EXAMPLES = ROOT / "examples"


def launch(threads: int, script: str | Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run an example, or a script of tests/scripts, on two ranks, with so many threads of TensorFlow's executor: calls
    wait in them for other ranks.
    """
    command = [
        sys.executable,
        "-m",
        "lockstep.jobs.launch",
        "--num-ranks",
        "2",
        "--launcher",
        "local",
        str(SCRIPTS / script),
    ]
    return subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, "TF_NUM_INTEROP_THREADS": str(threads), **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_keras_fit(tmp_path: Path) -> None:
    done = launch(1, EXAMPLES / "horovod_script" / "keras_fit.py", "--data", str(DATA), "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = np.load(tmp_path / "rank-0.npz"), np.load(tmp_path / "rank-1.npz")
    assert len(first.files) == 4 + 2
    for name in first.files:  # weights, and logs that are means over ranks
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
    assert first["loss"][2] < first["loss"][0] - 0.5
    # 16 batches an epoch, from 1/2 of the whole rate over two epochs: the last of an epoch stands in its logs.
    np.testing.assert_allclose(first["rate"], [0.04 * 0.75, 0.04, 0.04], rtol=1e-6)
    assert "[rank 0] Epoch 2: the learning rate has warmed up to 0.04." in done.stdout.splitlines()
    assert sorted(path.name for path in tmp_path.glob("*.keras")) == [f"checkpoint-{i}.keras" for i in (1, 2, 3)]


def check_loop(folder: Path) -> None:
    """What custom_loop.py wrote: ranks agree bit for bit, and with NumPy on the union of their batches.

    It runs in test_launch_barrier.py, which has a Spark session already.
    """
    first, second = np.load(folder / "loop-0.npz"), np.load(folder / "loop-1.npz")
    for name in first.files:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
    begin, end = ([first[f"arr_{i}"] for i in part] for part in (range(4), range(4, 8)))
    weights, losses = by_hand(begin, steps=20, batch=64, rate=0.1, momentum=0.875)
    np.testing.assert_allclose(first["loss"], losses, rtol=1e-12)
    for got, wanted in zip(end, weights, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-13)
    assert losses[-1] < losses[0] / 2


def by_hand(
    weights: list[np.ndarray], steps: int, batch: int, rate: float, momentum: float
) -> tuple[list[np.ndarray], list[float]]:
    """The script's model and optimizer in NumPy: tanh, softmax, cross-entropy, SGD with momentum."""
    with gzip.open(DATA / "train-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 784) / 255.0
    with gzip.open(DATA / "train-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    weights, losses = [w.copy() for w in weights], []
    gathered = [np.zeros_like(w) for w in weights]
    for step in range(steps):
        x, y = images[step * batch : (step + 1) * batch], np.eye(10)[labels[step * batch : (step + 1) * batch]]
        hidden = np.tanh(x @ weights[0] + weights[1])
        scores = hidden @ weights[2] + weights[3]
        scores -= scores.max(1, keepdims=True)
        logs = scores - np.log(np.exp(scores).sum(1, keepdims=True))
        losses.append(float(-(y * logs).sum(1).mean()))
        back = (np.exp(logs) - y) / batch
        inner = (back @ weights[2].T) * (1 - hidden**2)
        for w, v, g in zip(weights, gathered, (x.T @ inner, inner.sum(0), hidden.T @ back, back.sum(0)), strict=True):
            v[:] = momentum * v - rate * g
            w += v
    return weights, losses


def test_every_call_with_fake_gpus_and_a_script_whose_ranks_differ(tmp_path: Path) -> None:
    gpus = [f"GPU-{rank:08}" for rank in range(2)]  # no GPU has run this: the script's TensorFlow lists what is asked
    tool = tmp_path / "nvidia-smi"
    tool.write_text("".join(["#!/bin/sh\n", *(f"echo 'GPU {i}: none (UUID: {gpu})'\n" for i, gpu in enumerate(gpus))]))
    tool.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = launch(8, "horovod_calls.py", "0.5", CUDA_VISIBLE_DEVICES=",".join(gpus), PATH=path)
    said = done.stdout.splitlines()
    assert "[rank 0] every call is right" in said and "[rank 1] every call is right" in said, done.stdout + done.stderr
    assert done.returncode == 1
    assert "ranks 0 and 1 make different calls" in done.stderr
    assert "rank 0: allreduce odd of float32[3]" in done.stderr and "rank 1: broadcast" in done.stderr


def test_every_pair_of_different_calls_and_fewer_batches_end_with_both_calls_named() -> None:
    done = launch(2, "horovod_pairs.py")
    for rank in range(2):
        assert f"[rank {rank}] 90 pairs, wrong: []" in done.stdout.splitlines(), done.stdout + done.stderr
    assert done.returncode == 1
    assert "rank 0: the gradients of DistributedOptimizer 69" in done.stderr
    assert "rank 1: allreduce logs loss of float64[1]" in done.stderr
    assert "Rank 1 may have fewer batches" in done.stderr and " waited " not in done.stderr


def test_optimizers_that_differ_in_their_variables_name_the_h5_file() -> None:
    done = launch(2, "horovod_h5.py")
    assert done.returncode != 0
    assert "the optimizers of ranks 0 and 1 have different numbers of variables" in done.stderr
    assert "got: rank 0: 2; rank 1: 4" in done.stderr and "an .h5 file" in done.stderr
