"""Whether memory stays flat: resident bytes of a process after each of 20 epochs of batches, and of training ranks.

    python -m benchmarks.memory_flat [--epochs N] [--records N] [--train]

Reading: the whole feed (lanes, windows, read-ahead, encoding) over a table and over images, each form in its own
process, and once with a cache. `--train`: two ranks of lockstep train on the table, at the end of each epoch. The
growth compares the median of the last quarter with that of the epochs from the third to the middle; flat means within 2
%.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.feed_rate import write
from lockstep.training.batches.feed import RankFeed
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.rank.metrics import resident_bytes
from lockstep.training.reading.open import OpenSplit
from lockstep.training.reading.reader import ReadOptions
from lockstep.training.run.metrics import read_history
from lockstep.training.world import World
from tests.storage.repacked import repacked
from tests.training._tiny import write_images

CACHE_BYTES = 1 << 30


def read_epochs(root: str, epochs: int, cache: str | None) -> list[int]:
    """Resident bytes of this process after each epoch of one rank of one."""
    options = ReadOptions(cache=cache, cache_bytes=CACHE_BYTES) if cache else None
    opened = OpenSplit.at(root, "train", options=options)
    plan = EpochPlan.for_dataset(opened.manifest, "train", seed=0, global_batch=256)
    feed = RankFeed(plan, opened.reader, opened.encoder, World.local(0, 1))
    found = []
    for epoch in range(epochs):
        for batch in feed.batches(plan.first_step(epoch), plan.first_step(epoch + 1)):
            del batch
        gc.collect()
        found.append(resident_bytes())
    return found


def growth(values: list[int]) -> float:
    """How much more the last quarter holds than the epochs from the third up to the middle."""
    half, quarter = len(values) // 2, max(1, len(values) // 4)
    return statistics.median(values[-quarter:]) / statistics.median(values[min(2, half - 1) : half]) - 1


def report(name: str, values: list[int]) -> bool:
    """Print a line; whether it is flat."""
    more = growth(values)
    at = [1, len(values) // 4, len(values) // 2, 3 * len(values) // 4, len(values)]
    shown = ", ".join(f"{number}: {values[max(0, number - 1)] / 1e6:.1f}" for number in at)
    print(f"{name:34} MB after epoch {shown}   growth {100 * more:+.2f} %", flush=True)
    return abs(more) <= 0.02


def train(root: str, run: str, epochs: int) -> dict[str, list[int]]:
    """Resident bytes of each of two ranks at the end of each epoch, as the ranks report them."""
    command = [
        sys.executable, "-m", "lockstep.jobs.train", "--dataset", root, "--run", run, "--model", "logistic",
        "--num-ranks", "2", "--global-batch", "256", "--epochs", str(epochs),
        "--launcher", "local", "--checkpoint-every", "100000",
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    values: dict[str, list[int]] = {}
    for row in read_history(run).reading:
        values.setdefault(f"training, rank {row['rank']}", []).append(row["resident_bytes"])
    return values


def one(args: argparse.Namespace) -> int:
    """The child's part."""
    flat = report(args.name, read_epochs(args.root, args.epochs, args.cache))
    return 0 if flat else 3


def main(argv: list[str]) -> int:
    """Print the table; exit code 0 where all is flat, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--train", action="store_true", help="measure training ranks instead of reading")
    for name in ("root", "name", "cache"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.root:
        return one(args)
    print(f"python {platform.python_version()}, {os.cpu_count()} cores, {args.epochs} epochs of {args.records} records")
    flat = True
    with tempfile.TemporaryDirectory() as folder:
        for fmt in ("tfrecord", "parquet"):
            write(f"{folder}/{fmt}", args.records, fmt)
        if args.train:
            for name, values in train(f"{folder}/tfrecord", f"{folder}/run", args.epochs).items():
                flat &= report(name, values)
            return 0 if flat else 1
        repacked(Path(folder, "tfrecord"), Path(folder, "gzip"))
        write_images(f"{folder}/images", fmt="tfrecord", records={"train": args.records}, block_records=2048)
        for name in ("tfrecord", "parquet", "gzip", "images", "images, cache"):
            command = [sys.executable, "-m", "benchmarks.memory_flat", "--epochs", str(args.epochs), "--name", name]
            command += ["--root", f"{folder}/{name.partition(',')[0]}"]
            command += ["--cache", f"{folder}/cache"] if "cache" in name else []
            flat &= subprocess.run(command).returncode == 0
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
