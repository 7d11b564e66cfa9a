"""What --zero saves of a rank's memory, what it sends and how long its steps take, next to PyTorch's ZeRO.

    python -m benchmarks.zero memory [--layers 3 6 9]
    python -m benchmarks.zero seconds [--layers 8] [--rounds 9] [--steps 6] [--torch-python .venv-torch/bin/python]

Two ranks over TCP, one thread and one core each, train dense layers with Adam.

`memory`: bytes a parameter, layers of 4,096 units (16.8 M parameters each) and batches of 16 rows a rank. Resident
memory is the slope, by least squares, over the sizes of --layers, in the third step, when a rank has its gradients'
sums and not yet applied them. Large blocks are returned to the system when they are freed, for which oneDNN is off:
else TensorFlow keeps a pool. Sent are the bytes of a step, by those of the weights.

`seconds`: layers of 1,024 units (1.05 M parameters each), batches of 128 rows a rank. Contestants make steps in turns;
a figure is that of the slower rank by that of one sum in each step in the same round: median (lowest to highest).
PyTorch's are DistributedDataParallel over gloo with Adam, that with Adam in ZeroRedundancyOptimizer, and fully_shard
of each layer, all by the first of them.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
from importlib.metadata import version
from typing import Any

import numpy as np

from benchmarks.shared.step_worker import KEY, Control, clock, hear, say  # sets the threads
from benchmarks.train_step import RANKS, Contestant

CLASSES = 10
SHAPES = {"memory": (4096, 16), "seconds": (1024, 128)}
"""Units of a layer, rows of a batch."""
STAGES = {"one sum a step": 0, "--zero 1": 1, "--zero 2": 2, "--zero 3": 3}
EXPECTED = {0: 16.0, 1: 8 + 8 / RANKS, 2: 4 + 12 / RANKS, 3: 16 / RANKS}
"""Bytes a parameter: weights, gradients, and Adam's two numbers."""
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "TF_ENABLE_ONEDNN_OPTS": "0"}
"""With oneDNN TensorFlow keeps freed memory in a pool of its own."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("memory", "seconds"))
    parser.add_argument("--layers", type=int, nargs="+")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--torch-python")
    args = parser.parse_args()
    print(
        f"{RANKS} ranks over TCP, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, "
        f"TensorFlow {version('tensorflow')}, Keras {version('keras')}"
    )
    {"memory": memory, "seconds": seconds}[args.what](args)


def contestant(name: str, what: str, layers: int, environment: dict[str, str]) -> Contestant:
    """Ranks that train so many layers of SHAPES[what] by one of STAGES."""
    units, rows = SHAPES[what]
    numbers = map(str, (STAGES[name], units, rows, layers))
    command = [sys.executable, "-m", "benchmarks.zero", "worker", *numbers, "RANK"]
    return Contestant(name, command, environment, needs_places=True)


def memory(args: argparse.Namespace) -> None:
    """The table of bytes a parameter."""
    sizes = args.layers or [3, 6, 9]
    for name, stage in STAGES.items():
        found = []
        for layers in sizes:
            ranks = contestant(name, "memory", layers, RETURNED)
            found.append(ranks.about)
            ranks.close()
        parameters = [one["parameters"] for one in found]
        slope = float(np.polyfit(parameters, [one["resident"] for one in found], 1)[0])
        sent = found[-1]["sent"] / (4 * parameters[-1])
        print(
            f"{name:<16}resident {slope:.2f} of {EXPECTED[stage]:.2f} bytes a parameter "
            f"({slope / EXPECTED[stage] - 1:+.1%}), sent {sent:.3f} of the weights",
            flush=True,
        )


def seconds(args: argparse.Namespace) -> None:
    """The table of ratios."""
    (layers,) = args.layers or [8]
    racing = [contestant(name, "seconds", layers, {}) for name in STAGES]
    if args.torch_python:
        for name in ("DDP, Adam", "DDP, ZeRO", "fully_shard"):
            command = [
                args.torch_python,
                "benchmarks/peers/zero_torch.py",
                name.rpartition(" ")[2],
                str(layers),
                "RANK",
            ]
            racing.append(Contestant(name, command, {"OMP_NUM_THREADS": "1"}, needs_places=True))
    else:
        print("not measured: PyTorch's ZeroRedundancyOptimizer over gloo (give --torch-python)")
    taken: dict[str, list[float]] = {one.name: [] for one in racing}
    for number in range(args.rounds + 1):
        for one in racing[number % len(racing) :] + racing[: number % len(racing)]:
            took = one.seconds_a_step(args.steps)
            if number:  # the first round warms up
                taken[one.name].append(took)
    print(f"{racing[0].about['parameters'] / 1e6:.1f} M parameters, {args.rounds} rounds of {args.steps} steps")
    for one in racing:
        base = taken["one sum a step" if one.name in STAGES else "DDP, Adam"]
        ratios = [mine / other for mine, other in zip(taken[one.name], base, strict=True)]
        print(
            f"{one.name:<16}{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), "
            f"{statistics.median(taken[one.name]) * 1e3:.0f} ms a step, "
            f"{one.about['state'] / one.about['parameters']:.2f} bytes of state a parameter"
        )
        one.close()


def worker(stage: int, units: int, batch_rows: int, layers: int, rank: int, ranks: int) -> None:
    """One rank: build, three steps, then answer as benchmarks.shared.step_worker until stdin ends."""
    import keras
    import psutil
    import tensorflow as tf

    from lockstep.training.comm import connect
    from lockstep.training.comm.options import CommOptions
    from lockstep.training.steps.distribute import distribute, exchange_of
    from lockstep.training.steps.patching import swapped
    from lockstep.training.steps.rank_step import RankStep
    from lockstep.training.strategies.zero import ZeroExchange
    from lockstep.training.world import World

    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((units,))
    for _ in range(layers):
        x = keras.layers.Dense(units, activation="relu")(x)
    model = keras.Model(inputs, keras.layers.Dense(CLASSES)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-4), loss, jit_compile=False)
    options = CommOptions(backend="tcp", algorithm="ring")
    comm = connect(World.local(rank, ranks), Control("127.0.0.1"), KEY, 60.0, 120.0, options)
    more: dict[str, Any] = {"make_exchange": lambda *a, **k: ZeroExchange(*a, stage=stage, **k)} if stage else {}
    distribute(model.optimizer, comm, scale=1.0 / ranks, **more)
    exchange = exchange_of(model.optimizer)
    if isinstance(exchange, ZeroExchange):
        exchange.divide(model.optimizer, model.trainable_variables)
    else:
        model.optimizer.build(model.trainable_variables)
    RankStep(1.0 / ranks).install(model, comm.group(range(ranks)))
    if isinstance(exchange, ZeroExchange) and exchange.weights is not None:
        exchange.weights.install(model)
    rng = np.random.default_rng(rank)
    batch = rng.standard_normal((batch_rows, units), dtype=np.float32), rng.integers(0, CLASSES, batch_rows)
    settings = tf.data.Options()
    settings.autotune.enabled = False
    data = tf.data.Dataset.from_tensors(batch).repeat().with_options(settings)
    model.fit(data, steps_per_epoch=2, verbose=0)
    before, resident, finish = exchange.sent_bytes, [], exchange.finish

    def watched(*inputs: Any) -> Any:
        sums = finish(*inputs)
        resident.append(psutil.Process().memory_info().rss)
        return sums

    with swapped(exchange, "finish", watched):
        model.fit(data, steps_per_epoch=1, verbose=0)
    say(
        {
            "ready": stage,
            "parameters": int(model.count_params()),
            "state": sum(one.value.numpy().nbytes for one in model.optimizer.variables),
            "resident": resident[-1],
            "sent": exchange.sent_bytes - before,
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
        worker(*map(int, sys.argv[2:8]))
    else:
        main()
