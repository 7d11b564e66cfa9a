"""How long a pipeline's stages wait, and how long its steps take, next to PyTorch's.

    python -m benchmarks.pipeline bubble [--micro 2 4 8] [--rounds 5] [--torch-python .venv-torch/bin/python]
    python -m benchmarks.pipeline seconds [--layers 8] [--micro 4] [--rounds 9] [--torch-python ...]

Two ranks over TCP, one thread and one core each, are the two stages.

`bubble`: each stage has one layer that sleeps 200 ms in a forward and 400 ms in a backward pass of a micro-batch, so
the stages are calibrated whatever else the machine does. The bubble is the part of a step in which a stage does not
sleep, 1 - m (forward + backward) / step; (p - 1) / (m + p - 1) is expected.

`seconds`: dense layers of 1,024 units, 128 rows a step, SGD. Contestants make steps in turns; a figure is the median of
the slower rank's milliseconds a step, and its ratio to PyTorch's with the same schedule in the same round: median
(lowest to highest). PyTorch's are GPipe and 1F1B of torch.distributed.pipelining over gloo.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from importlib.metadata import version
from typing import Any

import numpy as np

from benchmarks.shared.step_worker import KEY, Control, hear, say  # sets the threads
from benchmarks.train_step import RANKS, Contestant

UNITS, ROWS = 1024, 128
FORWARD_S, BACKWARD_S = 0.2, 0.4
SCHEDULES = ("gpipe", "1f1b")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("bubble", "seconds"))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--micro", type=int, nargs="+")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--torch-python")
    args = parser.parse_args()
    print(
        f"{RANKS} ranks over TCP, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, TensorFlow {version('tensorflow')}, Keras {version('keras')}"
    )
    {"bubble": bubble, "seconds": seconds}[args.what](args)


def contestants(args: argparse.Namespace, layers: int, micro: int) -> list[Contestant]:
    """Both schedules, by stages of so many dense layers in all, or with 0 by stages that sleep."""
    found = []
    for schedule in SCHEDULES:
        words = [schedule, str(layers), str(micro), "RANK"]
        found.append(
            Contestant(
                f"lockstep {schedule}", [sys.executable, "-m", "benchmarks.pipeline", "worker", *words], {}, True
            )
        )
        if args.torch_python:
            script = [args.torch_python, "benchmarks/peers/pipeline_torch.py", *words]
            found.append(Contestant(f"torch {schedule}", script, {"OMP_NUM_THREADS": "1"}, True))
    if not args.torch_python:
        print("not measured: torch.distributed.pipelining over gloo (give --torch-python)")
    return found


def taken(racing: list[Contestant], rounds: int, steps: int) -> dict[str, list[float]]:
    """The seconds a step of each contestant in each round, by turns."""
    found: dict[str, list[float]] = {one.name: [] for one in racing}
    for number in range(rounds + 1):
        for one in racing[number % len(racing) :] + racing[: number % len(racing)]:
            took = one.seconds_a_step(steps)
            if number:  # the first round warms up
                found[one.name].append(took)
    return found


def bubble(args: argparse.Namespace) -> None:
    """The table of waiting."""
    for micro in args.micro or [2, 4, 8]:
        racing = contestants(args, 0, micro)
        found = taken(racing, args.rounds or 5, 2)
        expected = (RANKS - 1) / (micro + RANKS - 1)
        for one in racing:
            waits = [1 - micro * (FORWARD_S + BACKWARD_S) / took for took in found[one.name]]
            print(
                f"{one.name:<16}{micro} micro-batches: {statistics.median(waits):.4f} ({min(waits):.4f} to "
                f"{max(waits):.4f}), expected {expected:.4f}, {statistics.median(waits) / expected - 1:+.1%}",
                flush=True,
            )
            one.close()


def seconds(args: argparse.Namespace) -> None:
    """The table of step times."""
    for micro in args.micro or [4]:
        racing = contestants(args, args.layers, micro)
        found = taken(racing, args.rounds or 9, args.steps)
        for one in racing:
            base = found.get(one.name.replace("lockstep", "torch"), found[one.name])
            ratios = [mine / other for mine, other in zip(found[one.name], base, strict=True)]
            print(
                f"{one.name:<16}{args.layers} layers, {micro} micro-batches: "
                f"{statistics.median(found[one.name]) * 1e3:.0f} ms a step, {statistics.median(ratios):.3f} "
                f"({min(ratios):.3f} to {max(ratios):.3f}) of torch's, "
                f"{one.cpu_s_a_step * 1e3:.0f} ms of CPU, most held {one.about['held']}",
                flush=True,
            )
            one.close()


def model_of(layers: int) -> Any:
    """Dense layers, or with 0 two layers that sleep."""
    import keras
    import tensorflow as tf

    def asleep(seconds: float) -> Any:
        def sleep(x: Any) -> Any:
            time.sleep(seconds)
            return x

        return lambda x: tf.reshape(tf.numpy_function(sleep, [x], x.dtype), tf.shape(x))

    class Sleeps(keras.layers.Dense):
        """A dense layer whose passes take a known time."""

        def call(self, x: Any, training: bool | None = None) -> Any:
            @tf.custom_gradient
            def slow(x: Any) -> Any:
                return asleep(FORWARD_S)(x), asleep(BACKWARD_S)

            y = slow(super().call(x))
            y.set_shape((None, self.units))
            return y

    units = UNITS if layers else 8
    inputs = x = keras.Input((units,))
    if layers:
        for _ in range(layers):
            x = keras.layers.Dense(units, activation="relu")(x)
    else:
        for _ in range(RANKS):
            x = Sleeps(units)(x)
    model = keras.Model(inputs, x)
    model.compile(keras.optimizers.SGD(1e-3), "mse", jit_compile=False)
    model.build((None, units))
    return model, units


def worker(schedule: str, layers: int, micro: int, rank: int, ranks: int) -> None:
    """One stage: build, two steps, then answer until stdin ends."""
    import keras
    import tensorflow as tf

    from lockstep.training.comm import connect
    from lockstep.training.comm.options import CommOptions
    from lockstep.training.strategies.pipeline import pipeline_step
    from lockstep.training.world import Grid, World

    keras.utils.set_random_seed(0)
    model, units = model_of(layers)
    rows = ROWS if layers else 4 * micro
    comm = connect(World.local(rank, ranks), Control("127.0.0.1"), KEY, 60.0, 120.0, CommOptions(backend="tcp"))
    rng = np.random.default_rng(0)
    batch = tuple(tf.constant(rng.standard_normal((rows, units), dtype=np.float32)) for _ in range(2))
    model.evaluate(*batch, verbose=0)  # builds losses and metrics
    how: Any = schedule
    step = pipeline_step(
        model, comm, Grid(1, ranks, 1), rows=rows, global_batch=rows, schedule=how, micro_batches=micro
    )
    step.train(batch)
    step.train(batch)
    say({"ready": schedule, "held": step.most_held})
    while True:
        ((_, steps),) = hear().items()
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step.train(batch)
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        say({"seconds_a_step": wall / steps, "cpu_s_a_step": cpu / steps})


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], *map(int, sys.argv[3:7]))
    else:
        main()
