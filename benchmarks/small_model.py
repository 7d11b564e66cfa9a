"""Samples a second of a small model on one and two ranks, against plain Keras with all rows in memory.

    python -m benchmarks.small_model [--batches 256 1024] [--formats tfrecord parquet] [--ranks 1 2] [--repeats 5]

The model is a deep and cross network of 229,572 weights over 13 numbers and 26 ids (shared/dcn.py), compiled without
XLA for each contestant. Plain Keras gets all rows as NumPy arrays, and as a tf.data.Dataset of tensors in memory, both
shuffled again in each epoch; in each round the faster one counts. Lockstep reads a dataset on the local disk with its
own defaults. All contestants run in turns, each in new processes; ratios are taken round by round.

Figures are of the epochs after the first one, in which the step is traced: Keras' from the beginning of each epoch to
the end of its last step, since tf.data's autotuner holds up the end of an iteration; Lockstep's from the end of the
first epoch to that of the last, with all that is done between epochs. `waits` is the part of a step in which a rank
waits for its batch, and CPU is of all ranks' processes, which other work on a shared machine disturbs less than wall.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

import lockstep
from benchmarks.shared import dcn
from benchmarks.shared.shapes import machine, spread
from lockstep.storage.dataset.layout import Format

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


@dataclass(frozen=True, slots=True)
class Figures:
    """What a contestant reached in the epochs after the first."""

    samples_per_s: float
    cpu_us: float
    """CPU microseconds a sample."""
    waits: float
    """The part of a step in which ranks wait for their batches."""


def write(folder: Path, rows: int, formats: list[Format]) -> None:
    """Write the rows as a dataset in each format that is not there yet."""
    import pandas as pd

    if not (missing := [fmt for fmt in formats if not (folder / fmt).exists()]):
        return
    table, schema = pd.DataFrame(dcn.rows(rows)), lockstep.load_schema(dcn.SCHEMA)
    with lockstep.spark_session("small model", "local[2]"):
        for fmt in missing:
            lockstep.write_dataset(table, folder / fmt, schema=schema, id_columns="row", split="90/10", fmt=fmt)


def plain(folder: str, batch: int, epochs: int, *, as_dataset: bool) -> Figures:
    """Keras' `fit` on whole batches of all rows, encoded as ranks get them."""
    import keras
    import tensorflow as tf

    read = list(lockstep.data.numpy_batches(folder, global_batch=batch, epochs=1))
    x = {name: np.concatenate([one.x[name] for one in read]) for name in read[0].x}
    y = np.concatenate([one.y for one in read if one.y is not None])
    spent: list[tuple[float, float]] = []

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.began = self.ended = time.perf_counter(), time.process_time()

        def on_train_batch_end(self, number: int, logs: Any = None) -> None:
            self.ended = time.perf_counter(), time.process_time()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            spent.append((self.ended[0] - self.began[0], self.ended[1] - self.began[1]))

    options: dict[str, Any] = {"epochs": epochs, "verbose": 0, "callbacks": [Clock()]}
    if as_dataset:
        rows = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(y)).batch(batch)
        dcn.dcn().fit(rows.prefetch(tf.data.AUTOTUNE), **options)
    else:
        dcn.dcn().fit(x, y, batch_size=batch, **options)
    wall, cpu = np.sum(spent[1:], axis=0)
    samples = len(y) * (epochs - 1)
    return Figures(samples / wall, 1e6 * cpu / samples, 0.0)


def trained(folder: str, batch: int, epochs: int, ranks: int) -> Figures:
    """`lockstep.train`."""
    with tempfile.TemporaryDirectory() as name:
        run, clocks = Path(name, "run"), Path(name, "clocks")
        clocks.mkdir()
        lockstep.train(
            folder,
            run,
            "benchmarks.shared.dcn:timed",
            global_batch=batch,
            epochs=epochs,
            num_ranks=ranks,
            extra={"clocks": f"{clocks}"},
        )
        history = lockstep.read_history(run)
        ends = np.array([np.loadtxt(clock) for clock in clocks.iterdir()])  # (ranks, epochs, 2)
    samples = (history.epochs[-1]["step"] - history.epochs[0]["step"]) * batch
    steps = [row for row in history.times if not row["starting_s"]]
    waited = sum(row["data_s"] for row in steps)
    whole = waited + sum(row["compute_s"] + row["exchange_s"] for row in steps)
    took = ends[:, -1] - ends[:, 0]
    return Figures(samples / took[:, 0].max(), 1e6 * took[:, 1].sum() / samples, waited / whole)


def in_process(work: Callable[[], Figures]) -> Figures:
    """What `work` returns in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work).result()


def race(args: argparse.Namespace, batch: int) -> dict[str, list[Figures]]:
    """The figures of each contestant in each round; `Keras` is the faster one of its two."""
    folder = str(args.folder / args.formats[0])
    keras = [partial(plain, folder, batch, args.epochs, as_dataset=as_dataset) for as_dataset in (False, True)]
    ours = {
        f"{ranks} rank{'s' * (ranks > 1)}, {fmt}": partial(trained, str(args.folder / fmt), batch, args.epochs, ranks)
        for fmt in args.formats
        for ranks in args.ranks
    }
    found: dict[str, list[Figures]] = {name: [] for name in ("Keras, NumPy", "Keras, tf.data", "Keras", *ours)}
    for _ in range(args.repeats):
        both = [in_process(work) for work in keras]
        best = max(both, key=lambda one: one.samples_per_s)
        for name, figures in zip(found, [*both, best, *(work() for work in ours.values())], strict=True):
            found[name].append(figures)
    return found


def main() -> None:
    """Write the datasets, race, and print a table for each batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=80_000, help="nine in ten are trained on")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--formats", nargs="+", default=["tfrecord", "parquet"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--folder", type=Path, help="keeps the datasets (default: a temporary folder)")
    args = parser.parse_args()
    print(f"{machine('tensorflow', 'keras')}; {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as temporary:
        args.folder = args.folder or Path(temporary)
        write(args.folder, args.rows, args.formats)
        for batch in args.batches:
            found = race(args, batch)
            print(f"\nbatch {batch}, {args.rows} rows, {args.epochs - 1} epochs after the first, {args.repeats} rounds")
            print(
                "| | samples/s | of Keras | CPU us a sample | of Keras' | waits |\n"
                "| --- | --- | --- | --- | --- | --- |"
            )
            for name, rounds in found.items():
                pairs = list(zip(rounds, found["Keras"], strict=True))
                cells = [
                    f"{statistics.median(one.samples_per_s for one in rounds):,.0f}",
                    spread(one.samples_per_s / keras.samples_per_s for one, keras in pairs),
                    f"{statistics.median(one.cpu_us for one in rounds):.1f}",
                    spread(one.cpu_us / keras.cpu_us for one, keras in pairs),
                    f"{statistics.median(one.waits for one in rounds):.1%}",
                ]
                print(f"| {name} | {' | '.join(cells)} |", flush=True)
        print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
