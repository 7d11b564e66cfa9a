"""One trunk with an output layer for each of two datasets, next to a model for each: accuracy on the test rows.

    python -m benchmarks.tasks SHARED [--only kinds|halves|adult] [--seeds 3] [--epochs 3] [--ranks 2] [--way TEXT]

SHARED has the folders `fashion-mnist` and `adult`. Three pairs of tasks:

kinds   The first 30,000 training pictures of Fashion-MNIST with their 10 classes; the other 30,000 with 5 kinds: top,
        trouser, dress, shoe, bag. Both are tested on all 10,000 test pictures.
halves  The pictures of classes 0 to 4, and those of classes 5 to 9, 30,000 each; tested on their 5,000 test pictures.
adult   All rows of UCI Adult, twice: income above 50,000, and more than 40 hours a week. The other 12 columns are the
        features; the last fifth of the rows is for the test.

Each task alone is the ready `mlp` on its dataset, with half of the rows of a batch and as many steps. Both together are
one `mlp` with `--tasks`. All have the same width, rate and epochs, none of them tuned; ranks are threads.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.federated import read
from benchmarks.shared.shapes import machine
from lockstep.features.sample_id import sample_id
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema
from lockstep.training.config import TrainConfig
from tests.training._threads import run
from tests.training._tiny import write_rows

WAYS: dict[str, dict[str, Any]] = {
    "--tasks equal": {},
    "--tasks uncertainty": {"tasks": "uncertainty"},
    "--strategy tasks": {"strategy": "tasks"},
    "--strategy tasks --sync-every 16": {"strategy": "tasks", "sync_every": 16},
}
KIND_OF_CLASS = np.array([0, 1, 0, 2, 0, 3, 0, 3, 4, 3])  # top, trouser, dress, shoe, bag
Split = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Features and labels of train and test."""


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path)
    parser.add_argument("--only", nargs="+", default=list(PAIRS), choices=PAIRS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--way", default="")
    args = parser.parse_args()
    print(f"{machine('tensorflow', 'keras', 'numpy')}, {os.cpu_count()} cores, seeds 0 to {args.seeds - 1}", flush=True)
    for name in args.only:
        with tempfile.TemporaryDirectory() as folder:
            tasks = PAIRS[name](args.shared)
            urls = [write(f"{folder}/{task}", split, number) for number, (task, split) in enumerate(tasks.items())]
            measure(name, list(tasks), urls, Path(folder), args)


def measure(name: str, tasks: list[str], urls: list[str], folder: Path, args: argparse.Namespace) -> None:
    """Print one row a way: the accuracy of each task, mean and standard deviation, and the points above it alone."""
    ways = {"each alone": None, **{way: more for way, more in WAYS.items() if args.way in way}}
    found: dict[str, list[list[float]]] = {way: [] for way in ways}
    for seed in range(args.seeds):
        for way, more in ways.items():  # in turns
            found[way].append(accuracies(urls, str(folder / f"{seed} {way}"), seed, more, args))
    for way, seeds in found.items():
        cells = []
        for number, task in enumerate(tasks):
            values = [one[number] for one in seeds]
            gaps = [100 * (one[number] - alone[number]) for one, alone in zip(seeds, found["each alone"], strict=True)]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{task} {statistics.mean(values):.4f} ({spread:.4f}), {statistics.mean(gaps):+.2f} points")
        print(f"{name:<7} {way:<33} {'; '.join(cells)}", flush=True)


def accuracies(
    urls: list[str], place: str, seed: int, more: dict[str, Any] | None, args: argparse.Namespace
) -> list[float]:
    """The test accuracy of each task after the last epoch."""
    options: dict[str, Any] = {
        "model": "mlp", "epochs": args.epochs, "seed": seed, "validate": "test", "validate_every": args.epochs,
        "num_ranks": args.ranks, "checkpoint_every": 10**6, "launcher": "local",
    }  # fmt: skip
    if more is None:
        return [
            run(TrainConfig(datasets=(url,), run=f"{place} {number}", global_batch=128, **options)).metrics[
                "val_accuracy"
            ]
            for number, url in enumerate(urls)
        ]
    mixed = options | {"mix": (1,) * len(urls), "tasks": "equal", "global_batch": 128 * len(urls)} | more
    metrics = run(TrainConfig(datasets=urls, run=place, **mixed)).metrics
    return [metrics[f"val_accuracy_{number}"] for number in range(len(urls))]


def kinds(shared: Path) -> dict[str, Split]:
    """Two labelings of disjoint pictures."""
    (x, y), (test_x, test_y) = (read(shared / "fashion-mnist")[split] for split in ("train", "test"))
    half = len(y) // 2
    return {
        "classes": {"train": (x[:half], y[:half]), "test": (test_x, test_y)},
        "kinds": {"train": (x[half:], KIND_OF_CLASS[y[half:]]), "test": (test_x, KIND_OF_CLASS[test_y])},
    }


def halves(shared: Path) -> dict[str, Split]:
    """Five classes each."""
    found = read(shared / "fashion-mnist")
    parts = {"classes 0-4": 0, "classes 5-9": 5}
    return {
        name: {split: (x[y // 5 * 5 == first], y[y // 5 * 5 == first] - first) for split, (x, y) in found.items()}
        for name, first in parts.items()
    }


def adult(shared: Path) -> dict[str, Split]:
    """Two labels of the same people."""
    with gzip.open(shared / "adult" / "adult.data.gz", "rt") as text:
        rows = [[cell.strip() for cell in row] for row in csv.reader(text) if len(row) == 15]
    cells = [np.array(column) for column in zip(*rows, strict=True)]
    train, columns = len(rows) - len(rows) // 5, []
    for number in (0, 2, 4, 10, 11):  # age, fnlwgt, education-num, capital gain and loss
        values = np.log1p(cells[number].astype(float)) if number > 4 else cells[number].astype(float)
        columns.append((values - values[:train].mean()) / values[:train].std())
    for number in (1, 3, 5, 6, 7, 8, 9, 13):
        columns += [cells[number] == value for value in np.unique(cells[number])]
    x = np.stack(columns, axis=1).astype(np.float32)
    labels = {"income": cells[14] == ">50K", "hours": cells[12].astype(int) > 40}
    return {name: {"train": (x[:train], y[:train]), "test": (x[train:], y[train:])} for name, y in labels.items()}


PAIRS: dict[str, Callable[[Path], dict[str, Split]]] = {"kinds": kinds, "halves": halves, "adult": adult}


def write(url: str, split: Split, number: int) -> str:
    """Write the dataset of a task, in an order that is drawn once, so that shards are alike."""
    x, y = (np.concatenate([split[name][which] for name in ("train", "test")]) for which in (0, 1))
    cut = len(split["train"][1])
    order = np.concatenate([np.random.default_rng(number).permutation(cut), np.arange(cut, len(y))])
    classes = None if y.dtype == bool else int(y.max()) + 1
    schema = Schema(
        (
            Field(name="sample_id", dtype="int64", kind="id"),
            Field(name="x", dtype=str(x.dtype), shape=x.shape[1:]),
            Field(name="y", dtype="bool" if classes is None else "int64", kind="label", num_classes=classes),
        )
    )
    ids = [sample_id([f"{number} {row}".encode()], 0) for row in order]
    labels = pa.array(y[order] if classes is None else y[order].astype(np.int64))
    arrays = [pa.array(ids), column(x[order], schema), labels]
    rows = pa.RecordBatch.from_arrays(arrays, schema=schema.arrow_schema())
    write_rows(url, schema, rows, {"train": cut, "test": len(y) - cut}, "tfrecord", 4, 64, 0)
    return url


def column(x: np.ndarray, schema: Schema) -> pa.Array:
    """Rows (n, k) as the schema stores them."""
    kind = schema.arrow_schema().field("x").type
    if pa.types.is_binary(kind):
        return pa.array([row.tobytes() for row in x], type=kind)
    return pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), x.shape[1]).cast(kind)


if __name__ == "__main__":
    main()
