"""Shuffled training batches of a rank on one core, against plain reading, tf.data with a shuffle buffer and Petastorm.

    python -m benchmarks.input_peers [--tab N] [--images N] [--epochs E] [--repeats N] [--no-peers]

Two shapes of shared/shapes.py: 40 columns (26 int64, 13 float32, a label), images of 3,072 bytes; each as TFRecord and
as Parquet (zstd, page checksums, row groups of 2 MiB), in four shards, in memory. All contestants of a shape and format
run in turn in one process; the first round, of one epoch, is dropped; ratios are taken round by round.

A training run reads its data many times, so every contestant opens the dataset again and reads it E times; by default
that is half a second to a second for this project. Printed are all epochs together, opening included, and the first
epoch separately, which gets most of its memory fresh from the system; in it the feed also loads the data that it holds
ahead, part of the second epoch.

- `plain`: the blocks in file order through the same reader and encoder, without lanes, windows and batches; also
  cut into batches, as an evaluation reads.
- `feed, G`: global batches of G rows through the whole plan, lanes and windows at their defaults, with all checksums.
- `tf.data`: records of all files through `shuffle` with as many records as the plan's windows hold together, batches of
  512, tf.io.parse_example; the fastest of three forms counts. It encodes nothing: integers stay integers and images
  bytes, while the feed's are float32 and (n, 32, 32, 3) arrays. Both check checksums.
- `petastorm`: make_batch_reader in a shuffled order of row groups, through make_petastorm_dataset; rebatched is
  .unbatch().batch(512). It shuffles no records and checks no page checksums. The faster of its two pools counts.

Peers repeat by `repeat` after their shuffle, and by num_epochs. tf.data's autotuner is off except in the form that
needs it, since it delays the end of an iteration; TensorFlow's contestants are timed to their last batch. Both wall and
CPU seconds are printed: on a shared machine, CPU seconds are more reliable. Takes about six minutes.
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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.petastorm_read import write as write_parquet
from benchmarks.shared.shapes import image_rows, image_schema, machine, spread, tab_rows, tab_schema
from lockstep.features.schema.schema import Schema
from lockstep.training.batches.feed import RankFeed, eval_batches
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.reading.open import OpenSplit
from lockstep.training.world import World
from tests.training._tiny import write_rows

BATCHES = (64, 512, 1024)
PEER_BATCH = 512
BLOCK_BYTES = 2 << 20
SHARDS = 4
PLAIN = "plain"
EPOCHS = {"tab": 8, "images": 5}
WALL, CPU, FIRST = "wall", "CPU", "CPU of the first epoch"
Work = Callable[[int], Iterator[int]]  # from a number of epochs to the rows of each batch, as it comes
Works = dict[str, Work]
Spent = dict[str, dict[str, list[float]]]  # seconds a row of each round, by work and by the clocks above


def feed_works(root: str) -> tuple[Works, int]:
    """Plain reading and the feed at each global batch; and how many records the plan's windows hold together."""
    opened = OpenSplit.at(root, "train")
    plans = {size: EpochPlan.for_dataset(opened.manifest, "train", seed=0, global_batch=size) for size in BATCHES}

    def blocks(epochs: int) -> Iterator[int]:
        split = OpenSplit.at(root, "train")  # a reader of its own: the feed's holds blocks
        for number in list(range(split.reader.table.num_blocks)) * epochs:
            yield len(split.encoder.encode(split.reader.read(split.reader.table.run(number))))

    def batched(size: int, epochs: int) -> Iterator[int]:
        split = OpenSplit.at(root, "train")
        for _ in range(epochs):
            yield from map(len, eval_batches(split.reader, split.encoder, 0, 1, size))

    def fed(plan: EpochPlan, epochs: int) -> Iterator[int]:
        split = OpenSplit.at(root, "train")
        feed = RankFeed(plan, split.reader, split.encoder, World.local(0, 1))
        for batch in feed.batches(0, plan.steps(epochs)):
            yield len(batch.sample_ids)

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
        "serial": shuffled(files, buffer, None),
        "map AUTOTUNE": shuffled(files, buffer, auto),
        "interleave": tf.data.Dataset.from_tensor_slices(files)
        .shuffle(SHARDS)
        .interleave(lambda name: shuffled(name, buffer // SHARDS, None), num_parallel_calls=auto),
    }

    def rows(name: str, epochs: int) -> Iterator[int]:
        dataset = forms[name].repeat(epochs)
        for batch in dataset.with_options(plain) if name == "serial" else dataset.prefetch(auto):
            yield int(batch["label"].shape[0])

    return {f"tf.data, {name}": partial(rows, name) for name in forms}


def petastorm_works(root: str) -> Works:
    """make_petastorm_dataset with both pools, as row groups come and cut into batches."""
    import tensorflow as tf
    from petastorm import make_batch_reader
    from petastorm.tf_utils import make_petastorm_dataset

    plain = tf.data.Options()
    plain.autotune.enabled = False

    def rows(pool: str, rebatched: bool, epochs: int) -> Iterator[int]:
        url = f"file://{root}/split=train"
        with make_batch_reader(
            url, reader_pool_type=pool, workers_count=1, shuffle_row_groups=True, num_epochs=epochs
        ) as reader:
            dataset = make_petastorm_dataset(reader)
            if rebatched:
                dataset = dataset.unbatch().batch(PEER_BATCH)
            for batch in dataset.with_options(plain):
                yield int(batch.label.shape[0])

    works: Works = {}
    for rebatched in (False, True):
        for pool in ("thread", "dummy"):
            works[f"petastorm{', rebatched' if rebatched else ''}, {pool}"] = partial(rows, pool, rebatched)
    return works


def compare(title: str, rows: int, epochs: int, works: Works, repeats: int) -> Spent:
    """Run all works in turn; print rates and how they compare with plain reading; seconds a row of each."""
    spent: Spent = {name: {clock: [] for clock in (WALL, CPU, FIRST)} for name in works}
    for number in range(repeats + 1):
        for name, work in works.items():
            gc.collect()
            times = timed(work, rows, epochs if number else 1)
            if number:
                for clock, value in times.items():
                    spent[name][clock].append(value)
    print(f"\n{title}: {epochs} epochs of {rows} rows, {repeats} rounds; median (min - max)")
    for name, clocks in spent.items():
        wall, cpu, first = (1 / statistics.median(clocks[clock]) for clock in (WALL, CPU, FIRST))
        shares = ", ".join(f"{times_faster(spent, name, (PLAIN,), clock)} {clock}" for clock in clocks)
        print(f"  {name:28}{wall:11,.0f} rows/s by wall {cpu:11,.0f} by CPU, first epoch {first:11,.0f}")
        print(f"  {'':28}x plain: {shares}", flush=True)
    return spent


def timed(work: Work, rows: int, epochs: int) -> dict[str, float]:
    """Seconds a row that a work takes for some epochs of `rows`, by each clock."""
    found, first = 0, None
    wall, cpu = time.perf_counter(), time.process_time()
    for count in work(epochs):
        found += count
        # The batch that ends the first epoch may hold some of the second, or the last one may be less than full.
        if first is None and found > rows - max(BATCHES):
            first = (time.process_time() - cpu) / found
    spent = time.perf_counter() - wall, time.process_time() - cpu
    # A run of whole global batches leaves fewer than one.
    assert first is not None and epochs * rows - max(BATCHES) < found <= epochs * rows, found
    return {WALL: spent[0] / found, CPU: spent[1] / found, FIRST: first}


def times_faster(spent: Spent, ours: str, peers: Sequence[str], clock: str) -> str:
    """How many times as fast as the fastest of `peers` (by its median), round by round."""
    best = min(peers, key=lambda name: statistics.median(spent[name][clock]))
    return spread(peer / own for own, peer in zip(spent[ours][clock], spent[best][clock], strict=True))


def print_ratios(title: str, spent: Spent, prefix: str) -> None:
    """Print how many times as fast as the fastest peer whose name begins with `prefix` each feed is."""
    peers = tuple(name for name in spent if name.startswith(prefix))
    for size in BATCHES:
        ratios = [f"{times_faster(spent, f'feed, G {size}', peers, clock)} {clock}" for clock in (WALL, CPU, FIRST)]
        print(f"  RATIO {title}, G {size}: {', '.join(ratios)}", flush=True)


def main(argv: list[str]) -> int:
    """Print tables and ratios; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tab", type=int, default=100_000, help="rows of 40 columns")
    parser.add_argument("--images", type=int, default=40_000, help="rows with an image of 3,072 bytes")
    parser.add_argument("--epochs", type=int, help=f"how often each work reads all rows (default {EPOCHS})")
    parser.add_argument("--repeats", type=int, default=5, help="counted rounds, after a dropped one")
    parser.add_argument("--no-peers", action="store_true", help="only plain reading and the feed")
    args = parser.parse_args(argv)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    pa.set_cpu_count(1)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    warnings.simplefilter("ignore")
    if not args.no_peers:
        from lockstep.petastorm import enable

        enable()
    print(machine("pyarrow", "numpy", "numba", "tensorflow", "petastorm"), "one core")
    shapes = [("tab", tab_schema(False), tab_rows(args.tab, 0.0))] if args.tab else []
    shapes += [("images", image_schema(), image_rows(args.images))] if args.images else []
    for name, schema, rows in shapes:
        count, epochs = len(rows), args.epochs or EPOCHS[name]
        block_records = max(1, BLOCK_BYTES * count // rows.nbytes)
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
            root = f"{folder}/tfrecord"
            write_rows(root, schema, rows, {"train": count}, "tfrecord", SHARDS, block_records, 0)
            works, buffer = feed_works(root)
            if not args.no_peers:
                works |= tf_works(root, schema, buffer)
            title = f"{name}, TFRecord (shuffle buffers of {buffer} records)"
            spent = compare(title, count, epochs, works, args.repeats)
            if not args.no_peers:
                print_ratios(f"{name}, TFRecord: feed over the fastest tf.data", spent, "tf.data")
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
            write_parquet(Path(folder, "parquet"), schema, rows, block_records)
            root = f"{folder}/parquet"
            works, buffer = feed_works(root)
            if not args.no_peers:
                works |= petastorm_works(root)
            title = f"{name}, Parquet (windows of {buffer} records together)"
            spent = compare(title, count, epochs, works, args.repeats)
            if not args.no_peers:
                print_ratios(f"{name}, Parquet: feed over make_petastorm_dataset", spent, "petastorm, thread")
                print_ratios(f"{name}, Parquet: feed over it rebatched", spent, "petastorm, rebatched")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
