"""What fewer or later meetings cost in quality, and what they save between hosts.

    python -m benchmarks.strategies quality DATASET [--model mlp --ranks 4 --epochs 3 --seeds 3 --set width=64]
    python -m benchmarks.strategies seconds DATASET [--model mlp --steps 60 --mbit 200]    (as root, with `ip` and `tc`)
    python -m benchmarks.strategies straggler DATASET [--ranks 2 --epochs 3 --seeds 3 --set width=64]

`quality`: each way to exchange trains the same batches from the same first weights, and is scored on split `test`. The
table has mean and standard deviation over seeds, and the messages of model size that a rank takes part in. Ranks are
threads of one process, so it says nothing about time.

`seconds`: two hosts, network namespaces of this machine with a link of --mbit Mbit/s, one rank each. Exposed is what a
step waits for the exchange by the run's own clock (`exchange_s`): median of the runs, and its share of one sum a step.

`straggler`: accuracy against seconds while one rank has half speed. The last rank sleeps before each step for as long
as a step computes (rank 0's median in a run without sleep, the same for all ways). Model `mlp`, ranks are processes of
this host, a parameter server is one more. Accuracy is that of split `test` after each epoch; seconds begin after the
first step, which traces, and leave validations out. Ways take turns; means over seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

WAYS: dict[str, dict[str, Any]] = {
    "one sum a step": {},
    "--delay 1": {"delay": 1},
    "--delay 4": {"delay": 4},
    "--sync-every 8": {"sync_every": 8},
    "--sync-every 64": {"sync_every": 64},
    "--sync-every 64 --sync-until-epoch 1": {"sync_every": 64, "sync_until_epoch": 1},
    "--sync-every 64, outer 0.7 and 0.9": {"sync_every": 64, "outer_learning_rate": 0.7, "outer_momentum": 0.9},
    "--sync-every 0": {"sync_every": 0},
    **{f"--strategy async --staleness {s}": {"strategy": "async", "staleness": s} for s in (1, 4, 16)},
    "--strategy parameter-server --staleness 4": {"strategy": "parameter-server", "servers": 1, "staleness": 4},
    "async, S 4, --gradient-noise 1e-6": {"strategy": "async", "staleness": 4, "gradient_noise": 1e-6},
}

STRAGGLER = ("one sum a step", "--delay 1", "--sync-every 8", "--sync-every 64, outer 0.7 and 0.9",
             *(way for way in WAYS if way.startswith("--strategy")))  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("quality", "seconds", "straggler"))
    parser.add_argument("dataset")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--global-batch", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", default="", help="only ways whose name has this text (default all)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mbit", type=int, default=200)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    ranks = 2 if args.what == "seconds" else args.ranks
    print(f"{args.model} on {Path(args.dataset).name}, G {args.global_batch}, {ranks} ranks, {args.epochs} epochs")
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, load {load:.1f}", flush=True)
    {"quality": quality, "seconds": seconds, "straggler": straggler}[args.what](args)


def quality(args: argparse.Namespace) -> None:
    """The table of scores."""
    from lockstep.training.results.evaluate import EvaluateRequest, evaluate
    from tests.training._threads import run, run_threads

    for way, options in ((way, options) for way, options in WAYS.items() if args.ways in way):
        scores: dict[str, list[float]] = {}
        steps = 0
        for seed in range(args.seeds):
            with tempfile.TemporaryDirectory() as folder:
                config = _config(args, f"{folder}/run", seed=seed, num_ranks=args.ranks, **options)
                steps = run(config).steps
                found = evaluate(EvaluateRequest((config.run,), args.dataset, "test", batch=1000), run_threads)
            for name, value in found["metrics"].items():
                if isinstance(value, float):
                    scores.setdefault(name, []).append(value)
        shown = ", ".join(
            f"{name} {statistics.mean(values):.4f} ({statistics.stdev(values) if len(values) > 1 else 0:.4f})"
            for name, values in scores.items()
        )
        print(f"{way:<40}{meetings(steps, args.epochs, options):>6} meetings  {shown}", flush=True)


def meetings(steps: int, epochs: int, options: dict[str, Any]) -> int:
    """How often a rank sends what has the size of the model."""
    every, until = options.get("sync_every", 1), options.get("sync_until_epoch", 0)
    if "strategy" in options:
        return epochs  # and rounds or pushes of gradients
    if every == 1:
        return steps
    before = steps * until // epochs
    return before + ((steps - before) // every + epochs - until if every else 1)


def seconds(args: argparse.Namespace) -> None:
    """The table of waiting times between two hosts."""
    from tests.network.hosts import Hosts, why_not

    if (reason := why_not()) is not None:
        raise SystemExit(f"not measured: {reason}")
    ways = ("one sum a step", "--delay 1", "--delay 4", "--sync-every 8")
    exposed: dict[str, list[float]] = {way: [] for way in ways}
    steps: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(args.rounds):
        for way in ways:
            with Hosts(2, rate_bits_s=args.mbit * 10**6) as hosts, tempfile.TemporaryDirectory() as folder:
                row = _timed(hosts, args, WAYS[way], folder)
            exposed[way].append(row[0])
            steps[way].append(row[1])
    first = statistics.median(exposed[ways[0]])
    for way in ways:
        waits, whole = statistics.median(exposed[way]), statistics.median(steps[way])
        spread = f"({min(exposed[way]) * 1e3:.1f} to {max(exposed[way]) * 1e3:.1f})"
        print(f"{way:<20}waits {waits * 1e3:6.1f} ms a step {spread}, {waits / first:.2f} of one sum a step; "
              f"a step {whole * 1e3:.1f} ms")  # fmt: skip


def _timed(hosts: Any, args: argparse.Namespace, options: dict[str, Any], folder: str) -> tuple[float, float]:
    """Seconds a step that rank 0 waited, and seconds a step; without the first row, which has the tracing."""
    from lockstep.training.driver.train import Hooks, train
    from lockstep.training.run.metrics import read_history
    from tests.network.run_hosts import run_hosts

    steps = args.steps // 8 * 8  # whole rounds of --sync-every 8
    config = _config(args, f"{folder}/run", num_ranks=2, max_steps=steps, **options)
    train(config, partial(run_hosts, hosts), hooks=Hooks(lease_watch_s=0.1))
    rows = [row for row in read_history(config.run).times if row["rank"] == 0][1:]
    count = sum(row["steps"] for row in rows)
    whole = sum(row[part] for row in rows for part in ("data_s", "compute_s", "exchange_s"))
    return sum(row["exchange_s"] for row in rows) / count, whole / count


def straggler(args: argparse.Namespace) -> None:
    """The table of accuracy against seconds."""
    ways = [way for way in STRAGGLER if args.ways in way]
    found: dict[str, list[list[dict[str, float]]]] = {way: [] for way in ways}
    hold_s = _held_run(args, 0.0, 0, epochs=1)[-1]["compute_s"]
    print(f"the last rank sleeps {hold_s * 1e3:.2f} ms before each step", flush=True)
    for seed in range(args.seeds):
        for way in ways:
            found[way].append(_held_run(args, hold_s, seed, **WAYS[way]))
    for way in ways:
        shown = [
            f"{statistics.mean(run[i]['accuracy'] for run in found[way]):.4f} after "
            f"{statistics.mean(run[i]['seconds'] for run in found[way]):.1f} s"
            for i in range(args.epochs)
        ]
        print(f"{way:<42}{', '.join(shown)}", flush=True)


def _held_run(args: argparse.Namespace, hold_s: float, seed: int, **options: Any) -> list[dict[str, float]]:
    """After each epoch: accuracy, seconds, and the median seconds that a step of rank 0 has computed."""
    from lockstep.training.driver.train import Hooks, train
    from lockstep.training.launch.local import run_local

    with tempfile.TemporaryDirectory() as folder:
        config = _config(args, f"{folder}/run", seed=seed, num_ranks=args.ranks, validate="test", **options)
        extra = {**config.model.extra, "hold_s": hold_s, "marks": f"{folder}/marks"}
        config = config.but(model="benchmarks.strategies:held", extra=extra, max_restarts=0)  # seconds of one go
        train(config, run_local, hooks=Hooks(lease_watch_s=0.1))
        return [json.loads(line) for line in Path(folder, "marks").read_text().splitlines()]


def held(signature: Any, options: Any) -> Any:
    """`mlp`, whose last rank sleeps before each step, and whose first one notes what `_held_run` returns."""
    import keras

    from lockstep.training.models.mlp import mlp
    from lockstep.training.steps.distribute import exchange_of

    extra = dict(options.extra)
    hold_s, marks = float(extra.pop("hold_s")), Path(str(extra.pop("marks")))

    class Held(keras.callbacks.Callback):
        began, left_out_s, test_began, step_began = 0.0, 0.0, 0.0, 0.0
        computed: ClassVar[list[float]] = []

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            comm = exchange_of(self.model.optimizer).communicator
            if comm.rank == comm.num_ranks - 1:
                time.sleep(hold_s)
            self.step_began = time.monotonic()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            now = time.monotonic()
            self.computed.append(now - self.step_began - exchange_of(self.model.optimizer).waited_s)
            self.began = self.began or now

        def on_test_begin(self, logs: Any = None) -> None:
            self.test_began = time.monotonic()

        def on_test_end(self, logs: Any = None) -> None:
            self.left_out_s += time.monotonic() - self.test_began

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if exchange_of(self.model.optimizer).communicator.rank == 0:
                seconds = time.monotonic() - self.began - self.left_out_s
                with marks.open("a") as file:
                    row = {"seconds": seconds, "accuracy": logs["val_accuracy"]}
                    print(json.dumps(row | {"compute_s": statistics.median(self.computed)}), file=file)

    return mlp(signature, replace(options, extra=extra)), [Held()]


def _config(args: argparse.Namespace, run: str, **options: Any) -> Any:
    from lockstep.training.config import TrainConfig

    extra = {name: float(value) if "." in value else int(value) for name, value in (s.split("=") for s in args.set)}
    return TrainConfig(
        datasets=(args.dataset,),
        run=run,
        model=args.model,
        global_batch=args.global_batch,
        launcher="local",
        checkpoint_every=10**6,
        extra=extra,
        **{"epochs": args.epochs, **options},
    )


if __name__ == "__main__":
    main()
