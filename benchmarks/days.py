"""What a model forgets when it trains day by day, and what --ewc and --replay keep, next to avalanche-lib.

    python -m benchmarks.days FASHION --folder DIR [--avalanche PYTHON] [--seeds 0 1 2] [--strengths 20 40 80]

FASHION is the folder of the four files of Fashion-MNIST. Five days have the classes 0 1, 2 3, 4 5, 6 7 and 8 9, 2,500
training pictures each, and the label says which of the two: always the same question, about other pictures
(domain-incremental, as van de Ven and Tolias, "Three scenarios for continual learning", 2019, call it: there naive <
EWC < replay on MNIST, 59, 64 and 91 to 97 %). 784 - 100 - 2 with ReLU, SGD, batches of 50, two epochs a day. Each day
begins with the weights of the day before. Replay takes 3 rows of 10 from all earlier days. The strength of EWC is the
best of `--strengths` on seeds that are not reported, for each side its own: avalanche's information is that of batches.

One rank, a thread. A row is the mean of the seeds, +- their standard deviation; accuracies are those of
`lockstep evaluate --earlier` on 2,000 pictures a day.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa

from benchmarks.shared.shapes import machine
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema
from lockstep.features.schema.signature import Signature
from lockstep.training.config import TrainConfig
from lockstep.training.models import ModelOptions
from lockstep.training.results.evaluate import EvaluateRequest, evaluate
from lockstep.training.steps.ewc import DECAY
from tests.training._threads import run, run_threads
from tests.training._tiny import write_rows

DAYS, TRAIN, TEST, WIDTH, BATCH, RATE, EPOCHS, SHARE, MEMORY = 5, 2500, 2000, 100, 50, 0.1, 2, 0.3, 5000
TUNING = (100,)  # seeds
AVALANCHE_PER_OURS = 2 / BATCH
"""Ours is LAMBDA / 2 times squares of rows, avalanche's lambda times squares of means of BATCH rows."""
SCHEMA = Schema(
    (
        Field(name="sample_id", dtype="int64", kind="id"),
        Field(name="image", dtype="uint8", shape=(28, 28, 1)),
        Field(name="label", dtype="int64", kind="label", num_classes=2),
    )
)
Matrix = list[list[float]]


def small(signature: Signature, options: ModelOptions) -> keras.Model:
    """784 - 100 - 2."""
    image = keras.Input((28, 28, 1), dtype="uint8", name="image")
    x = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(image))
    x = keras.layers.Dense(2, activation="softmax")(keras.layers.Dense(WIDTH, activation="relu")(x))
    model = keras.Model({"image": image}, x)
    model.compile(
        keras.optimizers.SGD(RATE), "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False
    )
    return model


def read(fashion: Path) -> dict[str, Any]:
    """Pictures x_SPLIT_DAY (n, 28, 28, 1) uint8 and labels y_SPLIT_DAY (n,) int64, 0 or 1."""
    found: dict[str, Any] = {}
    for split, name, most in (("train", "train", TRAIN), ("test", "t10k", TEST)):
        pixels = gzip.decompress((fashion / f"{name}-images-idx3-ubyte.gz").read_bytes())[16:]
        labels = gzip.decompress((fashion / f"{name}-labels-idx1-ubyte.gz").read_bytes())[8:]
        x, y = np.frombuffer(pixels, np.uint8).reshape(-1, 28, 28, 1), np.frombuffer(labels, np.uint8).astype(np.int64)
        for day in range(DAYS):
            rows = np.flatnonzero(y // 2 == day)[:most]
            found[f"x_{split}_{day}"], found[f"y_{split}_{day}"] = x[rows], y[rows] % 2
    return found


def write_days(data: dict[str, np.ndarray], folder: Path) -> list[str]:
    """A dataset for each day, which continues the one before; returns their paths."""
    urls: list[str] = []
    parent: Any = None
    for day in range(DAYS):
        x, y = (np.concatenate([data[f"{kind}_{split}_{day}"] for split in ("train", "test")]) for kind in "xy")
        ids = pa.array(np.arange(len(y)) + 1_000_000 * day)
        images = pa.array([one.tobytes() for one in x], type=pa.binary())
        rows = pa.RecordBatch.from_arrays([ids, images, pa.array(y)], schema=SCHEMA.arrow_schema())
        counts = {split: len(data[f"y_{split}_{day}"]) for split in ("train", "test")}
        urls.append(str(folder / f"day-{day + 1}"))
        made = write_rows(urls[-1], SCHEMA, rows, counts, "parquet", 2, 250, 0, parent=parent)
        parent = (urls[-1], made)
    return urls


def ours(urls: list[str], folder: Path, method: str, strength: float, seed: int) -> Matrix:
    """Accuracies: a row after each day, a column for each day so far."""
    matrix: Matrix = []
    before: str | None = None
    for day, url in enumerate(urls):
        run_url = str(folder / f"{method}-{strength:g}-{seed}-{day}")
        more: dict[str, Any] = {"ewc": strength} if method == "ewc" else {}
        if method == "replay" and day:
            more = {"replay": SHARE}
        config = TrainConfig(
            datasets=(url,), run=run_url, model="benchmarks.days:small", num_ranks=1, global_batch=BATCH, lanes=5,
            batchnorm="local", epochs=EPOCHS, seed=seed, init_from=before, launcher="local", checkpoint_every=10_000,
            **more,
        )  # fmt: skip
        run(config.with_all_datasets())
        found = evaluate(EvaluateRequest((run_url,), url, "test", earlier=True), run_threads)
        each = {one["dataset"]: one["metrics"]["accuracy"] for one in found.get("by_dataset", [])}
        matrix.append([each[one] for one in urls[: day + 1]] if day else [found["metrics"]["accuracy"]])
        before = run_url
    return matrix


def theirs(python: str, file: Path, method: str, strength: float, seeds: list[int]) -> list[Matrix]:
    """The matrices of avalanche-lib, one a seed."""
    order = {
        "method": method, "strength": strength, "seeds": seeds, "days": DAYS, "width": WIDTH, "batch": BATCH,
        "rate": RATE, "epochs": EPOCHS, "decay": DECAY, "share": SHARE, "memory": MEMORY,
    }  # fmt: skip
    words = [python, "-W", "ignore", "-m", "benchmarks.peers.days_avalanche", str(file), json.dumps(order)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, text=True)
    found: list[Matrix] = json.loads(done.stdout.splitlines()[-1])
    return found


def average(matrix: Matrix) -> float:
    """The mean accuracy over all days after the last one."""
    return statistics.mean(matrix[-1])


def forgetting(matrix: Matrix) -> float:
    """The mean over earlier days of the best accuracy before the last day, less the last one."""
    last = len(matrix) - 1
    return statistics.mean(max(matrix[i][j] for i in range(j, last)) - matrix[last][j] for j in range(last))


def shown(side: str, method: str, strength: float | None, matrices: list[Matrix]) -> str:
    """A row of the table."""
    cells = [f"{side} | {method if strength is None else f'{method}, lambda {strength:g}'}"]
    for figure in (average, forgetting):
        values = [100 * figure(matrix) for matrix in matrices]
        cells.append(f"{statistics.mean(values):.1f} +- {statistics.stdev(values) if len(values) > 1 else 0.0:.1f}")
    after = [100 * statistics.mean(matrix[-1][day] for matrix in matrices) for day in range(DAYS)]
    return f"| {' | '.join(cells)} | {' '.join(f'{value:.1f}' for value in after)} |"


def main() -> None:
    """Train both sides in turns, print a row for each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fashion", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--avalanche", metavar="PYTHON")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--strengths", type=float, nargs="+", default=[20.0, 40.0, 80.0])
    args = parser.parse_args()
    print(machine("tensorflow", "keras"), f"seeds {args.seeds}, tuned on {TUNING}", flush=True)
    args.folder.mkdir(parents=True)
    data = read(args.fashion)
    np.savez(args.folder / "days.npz", **data)
    urls = write_days(data, args.folder)

    def sides(method: str, strength: float, seeds: list[int]) -> dict[str, list[Matrix]]:
        found = {"lockstep": [ours(urls, args.folder, method, strength, seed) for seed in seeds]}
        if args.avalanche:
            theirs_now = strength / AVALANCHE_PER_OURS
            found["avalanche"] = theirs(args.avalanche, args.folder / "days.npz", method, theirs_now, seeds)
        return found

    tuned: dict[str, dict[float, float]] = {}
    for strength in args.strengths:
        for side, matrices in sides("ewc", strength, list(TUNING)).items():
            tuned.setdefault(side, {})[strength] = statistics.mean(map(average, matrices))
        print(f"tuning: {strength:g}", {side: round(values[strength], 4) for side, values in tuned.items()}, flush=True)
    best = {side: max(values, key=lambda strength: values[strength]) for side, values in tuned.items()}
    print("| side | method | average accuracy | forgetting | on each day after the last |\n" + "| --- " * 5 + "|")
    for method in ("naive", "ewc", "replay"):
        strengths = set(best.values()) if method == "ewc" else {0.0}
        rows = {strength: sides(method, strength, args.seeds) for strength in strengths}
        for side in best:
            strength = best[side] if method == "ewc" else 0.0
            scale = 1.0 if side == "lockstep" else 1 / AVALANCHE_PER_OURS
            print(shown(side, method, strength * scale if method == "ewc" else None, rows[strength][side]), flush=True)


if __name__ == "__main__":
    main()
