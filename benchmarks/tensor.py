"""What --tensor-parallel saves of a rank's memory, what it sends and how long its steps take, next to PyTorch's.

    python -m benchmarks.tensor [--pairs 4] [--rounds 9] [--steps 6] [--torch-python .venv-torch/bin/python]

Two ranks over TCP, one thread and one core each, train pairs of dense layers (1,024 to 4,096 units and back) with Adam
on the same rows, each with half of both. Contestants make steps in turns; a figure is that of the slower rank: median
(lowest to highest), and the ratio to PyTorch's in the same round. PyTorch's is `parallelize_module` with
ColwiseParallel and RowwiseParallel over gloo.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
from functools import partial
from importlib.metadata import version

import numpy as np

from benchmarks.shared.step_worker import KEY, Control, clock, hear, say  # sets the threads
from benchmarks.train_step import RANKS, Contestant

UNITS, ROWS, CLASSES = 1024, 128, 10


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--torch-python")
    args = parser.parse_args()
    print(
        f"{RANKS} ranks over TCP, {args.pairs} pairs, batches of {ROWS} rows, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, "
        f"TensorFlow {version('tensorflow')}, Keras {version('keras')}"
    )
    command = [sys.executable, "-m", "benchmarks.tensor", "worker", str(args.pairs), "RANK"]
    racing = [Contestant("--tensor-parallel 2", command, {}, needs_places=True)]
    if args.torch_python:
        command = [args.torch_python, "benchmarks/peers/tensor_torch.py", str(args.pairs), "RANK"]
        racing.append(Contestant("PyTorch", command, {"OMP_NUM_THREADS": "1"}, needs_places=True))
    else:
        print("not measured: PyTorch's tensor parallel over gloo (give --torch-python)")
    taken: dict[str, list[float]] = {one.name: [] for one in racing}
    for number in range(args.rounds + 1):
        for one in racing[number % len(racing) :] + racing[: number % len(racing)]:
            took = one.seconds_a_step(args.steps)
            if number:  # the first round warms up
                taken[one.name].append(took)
    about = racing[0].about
    print(
        f"{about['parameters'] / 1e6:.1f} M parameters; a rank holds {about['held'] / about['parameters']:.2f} bytes "
        f"of weights and state for each; sums of layers send {about['sent'] / about['activations']:.3f} of what a ring "
        f"sends for {2 * args.pairs - 1} activations"
    )
    for one in racing:
        times = taken[one.name]
        ratios = [mine / other for mine, other in zip(times, taken[racing[-1].name], strict=True)]
        print(
            f"{one.name:<20}{statistics.median(times) * 1e3:.0f} ms a step ({min(times) * 1e3:.0f} to "
            f"{max(times) * 1e3:.0f}), {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) of "
            f"{racing[-1].name}"
        )
        one.close()


def worker(pairs: int, rank: int, ranks: int) -> None:
    """One rank: build, three steps, then answer as benchmarks.shared.step_worker until stdin ends."""
    import keras
    import tensorflow as tf

    from lockstep.training.comm import connect
    from lockstep.training.comm.options import CommOptions
    from lockstep.training.exchange.grid_exchange import GridExchange
    from lockstep.training.steps.distribute import distribute, exchange_of
    from lockstep.training.steps.model_state import build_on_parts
    from lockstep.training.steps.rank_step import RankStep
    from lockstep.training.strategies.parallel_layers import TensorGroup, divide_layers
    from lockstep.training.world import Grid, World

    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((UNITS,))
    declared: dict[str, str] = {}
    for number in range(pairs):
        x = keras.layers.Dense(4 * UNITS, activation="relu", name=f"wide_{number}")(x)
        x = keras.layers.Dense(UNITS, name=f"narrow_{number}")(x)
        declared |= {f"wide_{number}": "columns", f"narrow_{number}": "rows"}
    model = keras.Model(inputs, keras.layers.Dense(CLASSES)(x))
    model.parallel_layers = declared
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-4), loss, jit_compile=False)
    parameters = int(model.count_params())
    options = CommOptions(backend="tcp", algorithm="ring")
    comm = connect(World.local(rank, ranks), Control("127.0.0.1"), KEY, 60.0, 120.0, options)
    make = partial(GridExchange, grid=Grid(1, tensor=ranks))
    distribute(model.optimizer, comm, scale=1.0, same_start=False, make_exchange=make)
    exchange = exchange_of(model.optimizer)
    assert isinstance(exchange, GridExchange)
    group = TensorGroup(comm.group(range(ranks)), exchange.failed)
    divide_layers(model, group, exchange.data)
    build_on_parts(model.optimizer, model.trainable_variables)
    RankStep(1.0).install(model, exchange.data.group([0]))
    rng = np.random.default_rng(0)
    batch = rng.standard_normal((ROWS, UNITS), dtype=np.float32), rng.integers(0, CLASSES, ROWS)
    settings = tf.data.Options()
    settings.autotune.enabled = False
    data = tf.data.Dataset.from_tensors(batch).repeat().with_options(settings)
    model.fit(data, steps_per_epoch=2, verbose=0)
    before = group.communicator.sent_bytes
    model.fit(data, steps_per_epoch=1, verbose=0)
    # The first pair's input has no gradient, so a step has one sum fewer than two a pair.
    say(
        {
            "ready": pairs,
            "parameters": parameters,
            "held": sum(one.numpy().nbytes for one in (*model.weights, *model.optimizer.variables)),
            "sent": group.communicator.sent_bytes - before,
            "activations": (2 * pairs - 1) * 2 * (ranks - 1) / ranks * 4 * ROWS * UNITS,
        }
    )
    while True:
        ((_, steps),) = hear().items()
        watch = clock(keras)
        model.fit(data, steps_per_epoch=steps, verbose=0, callbacks=[watch])
        wall, cpu = ((last - first) / (steps - 1) for first, last in zip(watch.first, watch.last, strict=True))
        say({"seconds_a_step": wall, "cpu_s_a_step": cpu})


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(*map(int, sys.argv[2:5]))
    else:
        main()
