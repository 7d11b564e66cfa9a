"""How many epochs median pruning saves a search, and what it costs of the best value, on a day of a web server.

    python -m benchmarks.pruning [--trials 30] [--epochs 4] [--seeds 0 1 2] [--sampler tpe]

Trials of `mlp` differ in learning rate, width and dropout. Each visitor is in one of three splits; `validation` judges.
Two searches a seed, one without and one with `--pruner median`, have the same space and seed, one trial at a time, so
that they repeat exactly. With `--sampler random` both propose the same trials; with `tpe` each learns from its own.
Epochs are those that the pruner waited for; steps, from the runs' metrics, also those that a pruned trial made until it
ended. A run takes up to a second to end, which counts where an epoch is as short as here.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import lockstep
from benchmarks.shared.shapes import machine

LOG = Path(__file__).resolve().parent.parent / "data/weblogs/nasa_access_log_1995-07-09.log.gz"
SPACE: dict[str, Any] = {
    "learning_rate": {"low": 1e-4, "high": 1e-1, "log": True},
    "set.width": {"choices": [8, 32, 128]},
    "set.dropout": {"low": 0.0, "high": 0.5},
}


def search(folder: str, name: str, args: argparse.Namespace, seed: int, pruner: Any) -> tuple[float, int, int, int]:
    """The best val_auc, the epochs and steps of all trials, and how many were pruned."""
    found = lockstep.tune(
        f"{folder}/data", f"{folder}/{name}", "mlp", SPACE,
        metric="val_auc:max", validate="validation", global_batch=args.global_batch, epochs=args.epochs,
        trials=args.trials, sampler=args.sampler, pruner=pruner, seed=seed,
    )  # fmt: skip
    steps = sum(max(row["step"] for row in lockstep.read_history(trial["run"]).steps) for trial in found["trials"])
    epochs = sum(trial["epochs"] for trial in found["trials"])
    return found["value"], epochs, steps, sum(trial["state"] == "pruned" for trial in found["trials"])


def main() -> None:
    """Search, print a line for each seed, and their means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--global-batch", type=int, default=256)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sampler", choices=("tpe", "random"), default="tpe")
    args = parser.parse_args()
    print(machine("optuna", "tensorflow", "keras"))
    saved, lost = [], []
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        with lockstep.spark_session("pruning", "local[2]") as spark:
            lockstep.write_logs(spark, str(LOG), f"{folder}/data", split="group:visitor:60/20/20")
        for seed in args.seeds:
            whole, all_epochs, all_steps, _ = search(folder, f"none-{seed}", args, seed, "none")
            best, epochs, steps, pruned = search(folder, f"median-{seed}", args, seed, "median")
            saved.append(1 - epochs / all_epochs)
            lost.append(whole - best)
            print(
                f"seed {seed}, {args.trials} trials, {args.sampler}: {pruned} pruned, {saved[-1]:.1%} of {all_epochs} "
                f"epochs saved, {1 - steps / all_steps:.1%} of {all_steps} steps; val_auc {whole:.4f} and {best:.4f}, "
                f"{lost[-1]:+.4f} lost",
                flush=True,
            )
    print(
        f"{args.sampler}: {statistics.mean(saved):.1%} of the epochs saved ({min(saved):.1%} to {max(saved):.1%}), "
        f"val_auc lost {statistics.mean(lost):+.4f} ({min(lost):+.4f} to {max(lost):+.4f}), {len(saved)} seeds"
    )


if __name__ == "__main__":
    main()
