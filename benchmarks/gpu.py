"""ResNet-20 by ranks on a GPU: are the losses right, and how fast are the steps against plain Keras?

    python -m benchmarks.gpu FOLDER [--steps 400] [--batches 128 1024] [--precisions float32 mixed_bfloat16 ...]

FOLDER/dataset is CIFAR-10 as `python -m benchmarks.cifar10` makes it. Needs one GPU, which two ranks share (`--backend
auto`, gradients through host memory). First the losses of 20 steps of each way in float64 are compared with
those of the CPU, and with themselves after a stop at step 10. Then each contestant makes `steps` steps by
itself; its figure is the median of windows of 20 steps in the second half.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from benchmarks.cifar10 import TRAIN_IMAGES, plain_fit

CHECKED = 20
WAYS = {
    "1 rank": ("--num-ranks", "1"),
    "1 rank, nccl": ("--num-ranks", "1", "--backend", "nccl", "--trust-network", "lo"),
    "2 ranks on one GPU": ("--num-ranks", "2"),
}


def main() -> None:
    """Check, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batches", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--precisions", nargs="+", default=["float32", "mixed_bfloat16", "mixed_float16"])
    args = parser.parse_args()
    show_machine()
    check(args.folder)
    for batch in args.batches:
        for precision in args.precisions:
            plain = plain_step_s(args.folder, batch, precision, args.steps)
            print(f"batch {batch:5} {precision:15} plain Keras          {1000 * plain:7.2f} ms a step", flush=True)
            for way, flags in WAYS.items():
                name = f"{way} {batch} {precision}"
                rows = train(args.folder, name, args.steps, batch, (*flags, "--precision", precision))
                seconds = step_s([row["seconds"] for row in rows])
                print(f"batch {batch:5} {precision:15} {way:20} {1000 * seconds:7.2f} ms a step", end="")
                print(f", {batch / seconds:8.0f} samples/s, {plain / seconds:.2f} of plain Keras", flush=True)


def show_machine() -> None:
    """Print GPU, driver and versions."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    versions = ", ".join(f"{name} {version(name)}" for name in ("tensorflow", "keras", "numpy"))
    print(f"{gpu}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}", flush=True)


def check(folder: Path) -> None:
    """Compare losses of each way with the CPU's, and those of a stopped and resumed run with its own."""
    exact = ("--precision", "float64")
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    cpu = losses(train(folder, "check CPU", CHECKED, 128, ("--num-ranks", "1", *exact), hidden))
    for way, flags in WAYS.items():
        whole = losses(train(folder, f"check {way}", CHECKED, 128, (*flags, *exact)))
        furthest = max(abs(one - other) / other for one, other in zip(whole, cpu, strict=True))
        print(f"{way}: losses of {CHECKED} steps within {furthest:.1e} of the CPU's, ", end="")
        train(folder, f"check {way}, stopped", CHECKED // 2, 128, (*flags, *exact))
        resumed = losses(train(folder, f"check {way}, stopped", CHECKED, 128, (*flags, *exact)))
        print("equal bit for bit after a stop" if resumed == whole else "DIFFERENT AFTER A STOP", flush=True)


def losses(rows: list[dict[str, float]]) -> list[float]:
    """The loss of each step."""
    return [row["loss"] for row in rows]


def train(
    folder: Path, name: str, steps: int, batch: int, flags: tuple[str, ...], environment: dict[str, str] | None = None
) -> list[dict[str, float]]:
    """Rows {step, loss, seconds} of a run of this project."""
    from lockstep.training.run.metrics import read_history

    run = folder / name.replace(" ", "-").replace(",", "")
    command = [sys.executable, "-m", "lockstep.jobs.train", "--dataset", str(folder / "dataset"), "--run", str(run)]
    command += ["--model", "resnet20", "--launcher", "local", "--global-batch", str(batch), "--epochs", "30"]
    command += ["--augment", "crop:4", "flip", "--batchnorm", "sync", "--max-steps", str(steps), *flags]
    with (folder / f"{run.name}.log").open("a") as log:
        done = subprocess.run(command, env={**os.environ, **(environment or {})}, stdout=log, stderr=log, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: rc {done.returncode}\n{Path(log.name).read_text()[-3000:]}")
    return read_history(str(run)).steps


def plain_step_s(folder: Path, batch: int, precision: str, steps: int) -> float:
    """Seconds of a step of Keras' own `fit`, in a process of its own."""
    code = f"from benchmarks.gpu import time_plain; time_plain({str(folder)!r}, {batch}, {precision!r}, {steps})"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def time_plain(folder: str, batch: int, precision: str, steps: int) -> None:
    """Print the seconds of a step of Keras' own `fit`, with the same settings of TensorFlow as a rank."""
    import keras
    import tensorflow as tf

    tf.config.experimental.enable_op_determinism()
    keras.config.set_dtype_policy(precision)
    ends: list[float] = []

    def end(batch: int, logs: dict[str, float]) -> None:
        ends.append(time.monotonic())

    plain_fit(
        *(Path(folder) / "dataset", 0, batch, math.ceil(steps * batch / TRAIN_IMAGES)),
        callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=end)],
        verbose=0,
    )
    print(step_s(ends[:steps]))


def step_s(ends: list[float]) -> float:
    """Seconds of a step: the median of windows of 20 steps in the second half."""
    half = ends[len(ends) // 2 :]
    return statistics.median((after - before) / 20 for before, after in zip(half, half[20:], strict=False))


if __name__ == "__main__":
    main()
