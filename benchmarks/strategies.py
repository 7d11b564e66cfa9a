"""What fewer or later meetings cost in quality, and what they save between hosts.

    python -m benchmarks.strategies quality DATASET [--model mlp --ranks 4 --epochs 3 --seeds 3 --set width=64]
    python -m benchmarks.strategies seconds DATASET [--model mlp --steps 60 --mbit 200]    (as root, with `ip` and `tc`)

`quality`: each way to exchange trains the same batches from the same first weights, and is scored on split `test`. The
table has mean and standard deviation over seeds, and the messages of model size that a rank takes part in. Ranks are
threads of one process, so it says nothing about time.

`seconds`: two hosts, network namespaces of this machine with a link of --mbit Mbit/s, one rank each. Exposed is what a
step waits for the exchange by the run's own clock (`exchange_s`): median of the runs, and its share of one sum a step.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

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
    "async, S 4, --gradient-noise 1e-6": {"strategy": "async", "staleness": 4, "gradient_noise": 1e-6},
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("quality", "seconds"))
    parser.add_argument("dataset")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--global-batch", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", default="", help="quality: only ways whose name has this text (default all)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mbit", type=int, default=200)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    ranks = args.ranks if args.what == "quality" else 2
    print(f"{args.model} on {Path(args.dataset).name}, G {args.global_batch}, {ranks} ranks, {args.epochs} epochs")
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, load {load:.1f}", flush=True)
    (quality if args.what == "quality" else seconds)(args)


def quality(args: argparse.Namespace) -> None:
    """The table of scores."""
    from tests.training._threads import run, run_threads
    from training.results.evaluate import evaluate

    for way, options in ((way, options) for way, options in WAYS.items() if args.ways in way):
        scores: dict[str, list[float]] = {}
        for seed in range(args.seeds):
            with tempfile.TemporaryDirectory() as folder:
                config = _config(args, f"{folder}/run", seed=seed, num_ranks=args.ranks, **options)
                result = run(config)
                found = evaluate(config.run, args.dataset, "test", run_threads, num_ranks=1, batch=1000)
            for name, value in found["metrics"].items():
                if isinstance(value, float):
                    scores.setdefault(name, []).append(value)
        shown = ", ".join(
            f"{name} {statistics.mean(values):.4f} ({statistics.stdev(values) if len(values) > 1 else 0:.4f})"
            for name, values in scores.items()
        )
        print(f"{way:<40}{meetings(result.steps, args.epochs, options):>6} meetings  {shown}", flush=True)


def meetings(steps: int, epochs: int, options: dict[str, Any]) -> int:
    """How often a rank sends what has the size of the model."""
    every, until = options.get("sync_every", 1), options.get("sync_until_epoch", 0)
    if options.get("strategy") == "async":
        return epochs  # and rounds of gradients, whose number depends on the clock
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
    from tests.network.run_hosts import run_hosts
    from training.driver.train import Hooks, train
    from training.run.metrics import read_history

    steps = args.steps // 8 * 8  # whole rounds of --sync-every 8
    config = _config(args, f"{folder}/run", num_ranks=2, max_steps=steps, **options)
    train(config, partial(run_hosts, hosts), hooks=Hooks(lease_watch_s=0.1))
    rows = [row for row in read_history(config.run).times if row["rank"] == 0][1:]
    count = sum(row["steps"] for row in rows)
    whole = sum(row[part] for row in rows for part in ("data_s", "compute_s", "exchange_s"))
    return sum(row["exchange_s"] for row in rows) / count, whole / count


def _config(args: argparse.Namespace, run: str, **options: Any) -> Any:
    from training.config import TrainConfig

    extra = {name: float(value) if "." in value else int(value) for name, value in (s.split("=") for s in args.set)}
    return TrainConfig(
        datasets=(args.dataset,),
        run=run,
        model=args.model,
        global_batch=args.global_batch,
        epochs=args.epochs,
        launcher="local",
        checkpoint_every=10**6,
        extra=extra,
        **options,
    )


if __name__ == "__main__":
    main()
