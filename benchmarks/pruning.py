"""How many steps median pruning saves a search, and what it costs of the best value, on a day of a web server.

    python -m benchmarks.pruning --folder DIR [--trials 30] [--epochs 6] [--seeds 0 1 2] [--samplers random tpe]

Trials of `mlp` differ in learning rate, width and dropout; each visitor is in one of three splits, and `validation`
judges. A row is two searches with the same space and seed, without and with `--pruner median`. With `random` both
have the same trials, so that only the pruner differs; with `tpe` each learns from its own, and luck is in the figures.

Ranks are threads. Each trial is trained to its end once, and both searches read its epochs: a trial does not depend on
the pruner. Steps are those of the epochs up to the judgement; ending a run takes up to a second more, which is not
counted. The same call resumes.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import lockstep
from benchmarks.shared.shapes import machine
from lockstep.storage.documents import canonical_bytes, sha256_hex
from lockstep.training.config import TrainConfig
from lockstep.training.driver.train import Hooks
from lockstep.training.run.metrics import read_history
from lockstep.training.run.result import RunResult
from lockstep.training.search.config import SearchConfig
from lockstep.training.search.space import space_of
from lockstep.training.search.tune import run_trials, trials_of
from tests.training._threads import run

LOG = Path(__file__).resolve().parent.parent / "data/weblogs/nasa_access_log_1995-07-09.log.gz"
SPACE: dict[str, Any] = {
    "learning_rate": {"low": 1e-4, "high": 1e-1, "log": True},
    "set.width": {"choices": [8, 32, 128]},
    "set.dropout": {"low": 0.0, "high": 0.5},
}


def search(folder: Path, args: argparse.Namespace, sampler: Any, pruner: Any, seed: int) -> tuple[float, int, int]:
    """The best val_auc, the epochs of all trials, and how many were pruned."""
    base = TrainConfig(
        datasets=(str(folder / "data"),), run=str(folder / f"{sampler}-{pruner}-{seed}"), model="mlp", num_ranks=1,
        global_batch=256, epochs=args.epochs, seed=seed, validate="validation", launcher="local",
    )  # fmt: skip
    options: dict[str, Any] = {"metric": "val_auc:max", "trials": args.trials, "sampler": sampler, "pruner": pruner}
    config = SearchConfig(base=base, space=space_of(SPACE, "the benchmark"), **options)

    def trained(trial: TrainConfig, hooks: Hooks) -> RunResult:
        asked = [trial.step.learning_rate, trial.model.extra, trial.data.epochs, seed]
        whole = run(trial.but(run=f"{folder}/runs/{sha256_hex(canonical_bytes(asked))[:16]}"))
        for row in read_history(whole.run).epochs:
            hooks.on_epoch(row)
        return whole

    best = run_trials(config, trained, take_over=False, hooks=Hooks(lease_watch_s=0.1))
    trials = trials_of(config)
    return best["value"], sum(one["epochs"] for one in trials), sum(one["state"] == "pruned" for one in trials)


def main() -> None:
    """Search, print a row for each sampler and seed, and their means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--samplers", nargs="+", default=["random", "tpe"])
    args = parser.parse_args()
    print(machine("optuna", "tensorflow", "keras"))
    if not (args.folder / "data").exists():
        with lockstep.spark_session("pruning", "local[2]") as spark:
            lockstep.write_logs(spark, str(LOG), str(args.folder / "data"), split="group:visitor:60/20/20")
    rows = ["| sampler | seed | pruned | steps saved | val_auc | with the median | lost |", "| --- " * 7 + "|"]
    for sampler in args.samplers:
        saved, lost = [], []
        for seed in args.seeds:
            whole, all_epochs, _ = search(args.folder, args, sampler, "none", seed)
            best, epochs, pruned = search(args.folder, args, sampler, "median", seed)
            saved.append(1 - epochs / all_epochs)
            lost.append(whole - best)
            rows.append(
                f"| {sampler} | {seed} | {pruned} of {args.trials} | {saved[-1]:.1%} | {whole:.4f} | {best:.4f} | "
                f"{lost[-1]:.4f} |"
            )
            print(rows[-1], flush=True)
        rows.append(f"| {sampler} | mean | | {statistics.mean(saved):.1%} | | | {statistics.mean(lost):.4f} |")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
