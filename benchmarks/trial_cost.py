"""CPU seconds of a trial of `lockstep tune`: ranks forked by a zygote, and a new Python process for each.

    python -m benchmarks.trial_cost [--repeats 3] [--more 4] [--epochs 2]

A search of 1 and one of 1 + MORE trials of `logistic` on a day of NASA's web log, one rank, local launcher, in turn:
their difference over MORE is a trial after the first. The steps of its epochs, as the run counts them (samples over the
steady samples a second), are subtracted: the rest is starting, tracing, validating, checkpoints and the driver.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.shared.shapes import interleaved, machine
from lockstep.storage.fs import filesystem
from lockstep.training.launch.forked import IN_CONTAINER
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import find_result

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "data/weblogs/nasa_access_log_1995-07-09.log.gz"


def call(*arguments: str, **variables: str) -> float:
    """Run a job; returns the CPU seconds of it and of all processes that it waited for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, env={**os.environ, **variables}, check=True, capture_output=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


class Searches:
    """Searches in a folder, each in one of its own."""

    def __init__(self, folder: Path, epochs: int) -> None:
        self._folder, self._epochs, self._number = folder, epochs, 0

    def cost(self, trials: int, **variables: str) -> float:
        """CPU seconds of a search."""
        self._number += 1
        return call(
            "lockstep.jobs.tune", "--run", f"{self._folder}/{self._number}", "--space", f"{self._folder}/space.toml",
            "--metric", "val_auc:max", "--trials", str(trials), "--dataset", f"{self._folder}/data",
            "--model", "logistic", "--num-ranks", "1", "--global-batch", "256", "--epochs", str(self._epochs),
            "--validate", "test", "--launcher", "local", "--sampler", "random", **variables,
        )  # fmt: skip

    def trial(self, more: int, **variables: str) -> float:
        """CPU seconds of a trial after the first."""
        return (self.cost(1 + more, **variables) - self.cost(1, **variables)) / more

    def steps_s(self) -> float:
        """Seconds of a trial's steps, of the last search's first trial."""
        run = f"{self._folder}/{self._number}/trials/0000"
        result = find_result(filesystem(run), RunPaths(run))
        assert result is not None
        return float(result["samples"]) / float(result["samples_per_s"])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--more", type=int, default=4, help="trials after the first")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    print(f"{machine('tensorflow', 'keras', 'optuna')}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        call(
            "lockstep.jobs.etl_logs",
            "--input",
            str(LOG),
            "--output",
            f"{folder}/data",
            "--split",
            "group:visitor:80/20",
        )
        (folder / "space.toml").write_text("learning_rate = {low = 1e-3, high = 1.0, log = true}\n")
        searches = Searches(folder, args.epochs)
        apart = {IN_CONTAINER[0]: "a container that counts memory"}
        works = {
            "forked by a zygote": lambda: searches.trial(args.more),
            "a process for each": lambda: searches.trial(args.more, **apart),
        }
        for words, found in interleaved(works, args.repeats).items():
            print(f"{words}: {statistics.median(found):.2f} CPU s a trial ({min(found):.2f} to {max(found):.2f})")
        print(f"of these, its steps: {searches.steps_s():.2f} s")


if __name__ == "__main__":
    main()
