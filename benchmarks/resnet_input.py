"""ResNet-20 fed from a real HDFS, two ranks: how long steps wait for data, and what real data cost against synthetic.

    python -m benchmarks.resnet_input [--steps 84] [--rounds 4] [--run-steps 390] [--augment OP ...] [--hdfs URL]

Starts a NameNode and two DataNodes on this host (they share the ranks' cores), or uses the HDFS at `--hdfs`. The images
are the project's excerpt of Fashion-MNIST as 32 x 32 x 3, repeated as often as the steps need, in TFRecord. Before each
measurement the kernel drops the DataNodes' files from its page cache, so that blocks come from the disk.

First it measures like `lockstep profile_run`: the same compiled step on one kept batch (synthetic), on blocks from a
cache and on blocks from HDFS, in turns; tracing falls into a round that is dropped. Then it runs two epochs by
`lockstep.training.driver.train.train`, whose metrics report how long each rank's steps waited; its first steps are left
out. Two targets: blocked on input for less than 2 % of the steps' time, and steps within 3 % of those on synthetic
data. Takes six minutes on an idle machine with two cores.
"""

from __future__ import annotations

import argparse
import gzip
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.shared.shapes import image_schema, machine, pixels
from lockstep.storage.fs import filesystem
from lockstep.storage.progress import Progress
from lockstep.storage.urls import join
from lockstep.training.config import TrainConfig
from lockstep.training.driver.train import Hooks, train
from lockstep.training.launch.local import run_local
from lockstep.training.profiling.profile import Profile, profile, table
from lockstep.training.profiling.profile_rank import drop_pages
from lockstep.training.profiling.verdict import COLD, Spread
from lockstep.training.run.metrics import read_history
from tests.cluster.daemons import Cluster
from tests.training._tiny import write_rows

PICTURES = Path(__file__).resolve().parent.parent / "data" / "fashion-mnist"
RANKS, BATCH, EPOCHS = 2, 128, 2
FIRST_STEPS = 30  # of the real run, left out: tracing, the first reading, and what the ranks wait for each other then
SHARDS, BLOCK_RECORDS = 4, 512  # 1.6 MB a block
BLOCKED_BAR, LOSS_BAR = 0.02, 0.03
SCHEMA = image_schema(num_classes=10)


def pictures() -> tuple[np.ndarray, np.ndarray]:
    """Images (n, 32, 32, 3) uint8: grey ones with a black edge, thrice the same channel; and labels (n,) int64."""
    images = gzip.decompress((PICTURES / "train-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((PICTURES / "train-labels-idx1-ubyte.gz").read_bytes())
    grey = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 28, 28)
    wide = np.pad(grey, ((0, 0), (2, 2), (2, 2)))
    return np.repeat(wide[..., None], 3, axis=3), np.frombuffer(labels, np.uint8, offset=8).astype(np.int64)


def write_data(root: str, records: int) -> None:
    """The pictures, in turn, as a TFRecord dataset of so many records."""
    images, labels = pictures()
    chosen = np.arange(records) % len(images)
    columns = [pa.array(np.arange(records) * 7919), pixels(images[chosen]), pa.array(labels[chosen])]
    rows = pa.RecordBatch.from_arrays(columns, schema=SCHEMA.arrow_schema())
    write_rows(root, SCHEMA, rows, {"train": records}, "tfrecord", SHARDS, BLOCK_RECORDS, 0)


@contextmanager
def hdfs(url: str | None, folder: Path) -> Iterator[str]:
    """A folder's URL on the HDFS at `url`, or on one that is started under `folder` and ends with the block."""
    if url is not None:
        yield join(url, f"resnet-input-{os.getpid()}")
        return
    cluster = Cluster(folder)
    try:
        cluster.start_hdfs()
        os.environ.update(cluster.env)
        yield join(cluster.hdfs_url, "resnet-input")
    finally:
        cluster.stop()


def config_of(args: argparse.Namespace, data: str, run: str) -> TrainConfig:
    """Return the configuration of the profile and of the run."""
    return TrainConfig(
        datasets=(data,),
        run=run,
        model="resnet20",
        num_ranks=RANKS,
        global_batch=BATCH,
        epochs=EPOCHS,
        augment=" ".join(args.augment),
        checkpoint_every=10**6,
        launcher="local",
    )


def profiled(config: TrainConfig, args: argparse.Namespace, forget: Callable[[], None]) -> Profile:
    """Profile as lockstep profile_run does; before each round the kernel forgets its pages of the DataNodes' files."""
    with Progress("measuring", args.rounds + 1, "rounds") as progress:

        def on_round(done: int, _: int) -> None:
            forget()
            progress.set(done)

        forget()
        return profile(config, run_local, steps=args.steps, rounds=args.rounds, on_round=on_round)


def print_profile(found: Profile) -> tuple[float, float]:
    """Print the table; which share of a step on cold data waits for them, and how much longer than synthetic it is."""
    print(table(found), flush=True)
    measured = found.measured
    own, base = measured.by_data, measured.synthetic.median
    print(
        f"\nsteps on cold data against synthetic, round by round: {own.median / base:+.1%} "
        f"({own.low / base:+.1%} to {own.high / base:+.1%})"
    )
    return measured.waiting[COLD], own.median / base


def run_steps(config: TrainConfig) -> float:
    """Train; print the steps' time and each rank's wait for data by the run's own rows. The larger share of both."""
    train(config, run_local, hooks=Hooks(lease_watch_s=0.1))
    history = read_history(config.run)
    rows = [row for row in history.steps if row["step"] >= FIRST_STEPS]
    took = Spread.of([after["seconds"] - before["seconds"] for before, after in pairwise(rows)])
    shares = []
    for rank in range(RANKS):
        times = [row for row in history.times if row["rank"] == rank and row["step"] - row["steps"] >= FIRST_STEPS]
        inside = sum(row[part] for row in times for part in ("data_s", "compute_s", "exchange_s"))
        shares.append(sum(row["data_s"] for row in times) / inside)
    print(
        f"\na run: {rows[-1]['step']} steps, those from {FIRST_STEPS} on {took.median * 1e3:.0f} ms "
        f"(quartiles {took.low * 1e3:.0f} to {took.high * 1e3:.0f}), blocked on input "
        + ", ".join(f"rank {rank} {share:.2%}" for rank, share in enumerate(shares))
    )
    return max(shares)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=84, help="steps of each kind in a round")
    parser.add_argument("--rounds", type=int, default=4, help="counted rounds, after a dropped one")
    parser.add_argument("--run-steps", type=int, default=390, help=f"steps of the real run of {EPOCHS} epochs")
    parser.add_argument(
        "--augment", nargs="+", default=[], metavar="OP", help="as for lockstep train, such as crop:4 flip"
    )
    parser.add_argument("--hdfs", metavar="URL", help="a folder on an existing HDFS (default: start one)")
    args = parser.parse_args(argv)
    print(f"{machine('keras', 'tensorflow', 'hdfs-native')}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder, hdfs(args.hdfs, Path(folder, "hdfs")) as root:
        data, run = join(root, "data"), join(root, "run")
        write_data(data, BATCH * (args.run_steps // EPOCHS))
        config = config_of(args, data, run)

        def forget() -> None:
            for path in Path(folder).rglob("blk_*"):
                drop_pages(str(path))

        waits, longer = print_profile(profiled(config, args, forget))
        forget()
        blocked = run_steps(config)
        filesystem(root).delete(root, recursive=True)
    blocked = max(waits, blocked)
    print(f"blocked on input: {blocked:.2%} (bar {BLOCKED_BAR:.0%}); longer: {longer:+.1%} (bar {LOSS_BAR:.0%})")
    return 0 if blocked < BLOCKED_BAR and longer < LOSS_BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
