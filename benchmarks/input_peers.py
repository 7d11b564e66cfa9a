"""Shuffled training batches of a rank on one core, against plain reading, tf.data with a shuffle buffer and Petastorm.

    python -m benchmarks.input_peers [--tab N] [--images N] [--repeats N] [--no-peers]

Two shapes of benchmarks.shapes: 40 columns (26 int64, 13 float32, a label), images of 3,072 bytes; each as TFRecord and
as Parquet (zstd, page checksums, row groups of 2 MiB), in four shards, in memory. All works of a shape and format run
in turn in one process; the first round is dropped; ratios are taken round by round.

- `plain`: the blocks in file order through the same reader and encoder: no lanes, no windows, no batches; and the same
  cut into batches, as an evaluation reads. Every work of ours opens the dataset anew.
- `feed, G`: global batches of G rows through the whole plan, lanes and windows at their defaults, with all checksums.
- `tf.data`: records of all files through `shuffle` with as many records as the plan's windows hold together, batches of
  512, tf.io.parse_example; the fastest of three forms counts. Nothing is encoded there: integers stay integers and
  images bytes, while the feed's are float32 and (n, 32, 32, 3) arrays. Checksums are looked at by both.
- `petastorm`: make_batch_reader in a shuffled order of row groups, through make_petastorm_dataset; rebatched is
  .unbatch().batch(512). No record is shuffled, no page checksum looked at. The faster of its two pools counts.

tf.data's autotuner is off but in the form that needs it, since it holds up the end of an iteration; works of TensorFlow
count to their last batch. Wall and CPU seconds are both told: where other work shares the machine, CPU tells more.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.petastorm_read import write as write_parquet
from benchmarks.shapes import image_rows, image_schema, machine, spread, tab_rows, tab_schema
from features.schema import Schema
from tests.training._tiny import write_rows
from training.batches import RankFeed, eval_batches
from training.open_split import OpenSplit
from training.plan import EpochPlan
from training.world import World

BATCHES = (64, 512, 1024)
PEER_BATCH = 512
BLOCK_BYTES = 2 << 20
SHARDS = 4
PLAIN = "plain"
Works = dict[str, Callable[[], int]]
Spent = dict[str, tuple[list[float], list[float]]]  # wall and CPU seconds of each round, by work


def feed_works(root: str) -> tuple[Works, int]:
    """Plain reading and the feed at each global batch; and how many records the plan's windows hold together."""
    opened = OpenSplit.at(root, "train")
    plans = {size: EpochPlan.for_dataset(opened.manifest, "train", seed=0, global_batch=size) for size in BATCHES}

    def blocks() -> int:
        split = OpenSplit.at(root, "train")  # a reader of its own: the feed's holds blocks
        runs = map(split.reader.table.run, range(split.reader.table.num_blocks))
        return sum(len(split.encoder.encode(split.reader.read(run))) for run in runs)

    def batched(size: int) -> int:
        split = OpenSplit.at(root, "train")
        return sum(len(batch) for batch in eval_batches(split.reader, split.encoder, 0, 1, size))

    def fed(plan: EpochPlan) -> int:
        split = OpenSplit.at(root, "train")
        feed = RankFeed(plan, split.reader, split.encoder, World.local(0, 1))
        return sum(len(batch.sample_ids) for batch in feed.batches(0, plan.steps(1)))

    works: Works = {PLAIN: blocks, f"plain, batches of {PEER_BATCH}": partial(batched, PEER_BATCH)}
    works |= {f"feed, G {size}": partial(fed, plan) for size, plan in plans.items()}
    return works, plans[PEER_BATCH].lanes * plans[PEER_BATCH].window_records


def tf_works(root: str, schema: Schema, buffer: int) -> Works:
    """Three forms of tf.data over the TFRecord shards, each with a shuffle buffer of `buffer` records in all."""
    import tensorflow as tf

    dtypes = {"int64": tf.int64, "float32": tf.float32, "uint8": tf.string}
    spec = {field.name: tf.io.FixedLenFeature([], dtypes[field.dtype]) for field in schema}
    files = sorted(str(path) for path in Path(root, "split=train").glob("*.tfrecord"))
    auto = tf.data.AUTOTUNE

    def shuffled(names: Any, records: int, parallel: int | None) -> Any:
        batches = tf.data.TFRecordDataset(names).shuffle(max(1, records)).batch(PEER_BATCH)
        return batches.map(lambda each: tf.io.parse_example(each, spec), num_parallel_calls=parallel)

    plain = tf.data.Options()
    plain.autotune.enabled = False
    forms = {
        "serial": shuffled(files, buffer, None).with_options(plain),
        "map AUTOTUNE": shuffled(files, buffer, auto).prefetch(auto),
        "interleave": tf.data.Dataset.from_tensor_slices(files)
        .shuffle(SHARDS)
        .interleave(lambda name: shuffled(name, buffer // SHARDS, None), num_parallel_calls=auto)
        .prefetch(auto),
    }

    def rows(dataset: Any) -> int:
        return sum(int(batch["label"].shape[0]) for batch in dataset)

    return {f"tf.data, {name}": partial(rows, dataset) for name, dataset in forms.items()}


def petastorm_works(root: str) -> Works:
    """make_petastorm_dataset with both pools, as row groups come and cut into batches."""
    import tensorflow as tf
    from petastorm import make_batch_reader
    from petastorm.tf_utils import make_petastorm_dataset

    plain = tf.data.Options()
    plain.autotune.enabled = False

    def rows(pool: str, rebatched: bool) -> int:
        url = f"file://{root}/split=train"
        with make_batch_reader(url, reader_pool_type=pool, workers_count=1, shuffle_row_groups=True) as reader:
            dataset = make_petastorm_dataset(reader)
            if rebatched:
                dataset = dataset.unbatch().batch(PEER_BATCH)
            return sum(int(batch.label.shape[0]) for batch in dataset.with_options(plain))

    works: Works = {}
    for rebatched in (False, True):
        for pool in ("thread", "dummy"):
            works[f"petastorm{', rebatched' if rebatched else ''}, {pool}"] = partial(rows, pool, rebatched)
    return works


def compare(title: str, rows: int, works: Works, repeats: int) -> Spent:
    """Run all works in turn; print rates and their share of plain reading; wall and CPU seconds of each."""
    spent: Spent = {name: ([], []) for name in works}
    for number in range(repeats + 1):
        for name, work in works.items():
            gc.collect()
            wall, cpu = time.perf_counter(), time.process_time()
            found = work()
            times = (time.perf_counter() - wall, time.process_time() - cpu)
            # A run of one epoch leaves fewer than a global batch.
            assert rows - max(BATCHES) < found <= rows, (name, found)
            if number:
                for clock, value in zip(spent[name], times, strict=True):
                    clock.append(value * rows / found)
    print(f"\n{title}: {rows} rows, {repeats} rounds; median (min - max)")
    for name, clocks in spent.items():
        by_wall, by_cpu = (rows / statistics.median(clock) for clock in clocks)
        rate = f"{by_wall:11,.0f} rows/s by wall {by_cpu:11,.0f} by CPU"
        shares = (times_faster(spent, name, (PLAIN,), clock) for clock in (0, 1))
        print(f"  {name:34}{rate}   x plain: {' wall, '.join(shares)} CPU", flush=True)
    return spent


def times_faster(spent: Spent, ours: str, peers: Sequence[str], clock: int) -> str:
    """How many times as fast as the fastest of `peers` (by its median), round by round."""
    best = min(peers, key=lambda name: statistics.median(spent[name][clock]))
    return spread(peer / own for own, peer in zip(spent[ours][clock], spent[best][clock], strict=True))


def told(title: str, spent: Spent, prefix: str) -> None:
    """Print how many times as fast as the fastest peer whose name begins with `prefix` each feed is."""
    peers = tuple(name for name in spent if name.startswith(prefix))
    for size in BATCHES:
        ratios = [times_faster(spent, f"feed, G {size}", peers, clock) for clock in (0, 1)]
        print(f"  RATIO {title}, G {size}: {ratios[0]} wall, {ratios[1]} CPU", flush=True)


def main(argv: list[str]) -> int:
    """Print tables and ratios; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tab", type=int, default=100_000, help="rows of 40 columns")
    parser.add_argument("--images", type=int, default=40_000, help="rows with an image of 3,072 bytes")
    parser.add_argument("--repeats", type=int, default=5, help="counted rounds, after one that is dropped")
    parser.add_argument("--no-peers", action="store_true", help="plain reading and the feed alone")
    args = parser.parse_args(argv)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    pa.set_cpu_count(1)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    warnings.simplefilter("ignore")
    if not args.no_peers:
        from etl.petastorm_compat import enable

        enable()
    print(machine("pyarrow", "numpy", "numba", "tensorflow", "petastorm"), "one core")
    shapes = [("tab", tab_schema(False), tab_rows(args.tab, 0.0))] if args.tab else []
    shapes += [("images", image_schema(), image_rows(args.images))] if args.images else []
    for name, schema, rows in shapes:
        count = len(rows)
        block_records = max(1, BLOCK_BYTES * count // rows.nbytes)
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
            root = f"{folder}/tfrecord"
            write_rows(root, schema, rows, {"train": count}, "tfrecord", SHARDS, block_records, 0)
            works, buffer = feed_works(root)
            if not args.no_peers:
                works |= tf_works(root, schema, buffer)
            spent = compare(f"{name}, TFRecord (shuffle buffers of {buffer} records)", count, works, args.repeats)
            if not args.no_peers:
                told(f"{name}, TFRecord: feed over the fastest tf.data", spent, "tf.data")
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
            write_parquet(Path(folder, "parquet"), schema, rows, block_records)
            root = f"{folder}/parquet"
            works, buffer = feed_works(root)
            if not args.no_peers:
                works |= petastorm_works(root)
            spent = compare(f"{name}, Parquet (windows of {buffer} records together)", count, works, args.repeats)
            if not args.no_peers:
                told(f"{name}, Parquet: feed over make_petastorm_dataset", spent, "petastorm, thread")
                told(f"{name}, Parquet: feed over it rebatched", spent, "petastorm, rebatched")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
