"""Where the rules for large global batches end: accuracy against the batch for none, linear, sqrt, LARS and LAMB.

    python -m benchmarks.scaling_rules FASHION FOLDER [--seeds 2]

FASHION is the folder of Fashion-MNIST's four files. The layers of `resnet8` train on its first 20,000 pictures, reduced
to 14 x 14 so that a core needs an hour and not a day: 2 epochs at each global batch from 64 to 8,192, scored on the
10,000 test pictures. `--learning-rate-scaling` {none, linear, sqrt} from a base batch of 64, with and without half an
epoch of `--warm-up-epochs`, are those of the product, for SGD with Nesterov's momentum 0.9. LARS (You et al., 2017) has
the linear rule and LAMB (You et al., 2020) the square root, both with warm-up, as their authors use them. Larger
batches are `--micro-batches` of 64 rows, and batch normalisation is over these rows, so that the batch changes the
gradient's mean and the number of steps, nothing else. All rates fall along half a cosine.

The base rate of each optimizer is first chosen at a batch of 64 from RATES, by the accuracy on the next 5,000 pictures
of the training set with another seed, never on the test pictures. Each run adds a line to FOLDER/results.jsonl; a call
makes what is not there yet, seed by seed, then prints the table and draws FOLDER/scaling_rules.svg. A run that meets a
number that is not finite has no accuracy, and is drawn at 0.1, that of guessing. Memory grows by some 50 MB a run: stop
the call where that is too much, and make it again.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    import keras

    from lockstep.features.schema.signature import Signature
    from lockstep.training.models import ModelOptions

Rule = Literal["none", "linear", "sqrt"]
Way = tuple[str, Rule, bool]
"""An optimizer, its rule, and whether it warms up."""

RUNS_OF_A_PROCESS = 8
BASE, BATCHES, EPOCHS = 64, tuple(64 * 2**power for power in range(8)), 2
WARM_UP, TRAIN, HELD_OUT, SIDE = 0.5, 20_000, 5_000, "14x14"
RATES = {"sgd": (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4), "lars": (1.0, 3.0, 10.0), "lamb": (0.003, 0.01, 0.03)}
WAYS: tuple[Way, ...] = (
    *(("sgd", rule, warm) for rule in ("none", "linear", "sqrt") for warm in (False, True)),
    ("lars", "linear", True),
    ("lamb", "sqrt", True),
)
TUNING_SEED, GUESSING = 100, 0.1


@dataclass(frozen=True, slots=True)
class Run:
    """A training: what a line of results is found by."""

    optimizer: str
    rule: Rule
    warm_up: bool
    batch: int
    seed: int
    rate: float
    """The rate at a batch of 64."""


def main() -> None:
    """Measure what is not measured yet, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fashion", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    versions = ", ".join(f"{name} {version(name)}" for name in ("tensorflow", "keras", "numpy"))
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, {versions}", flush=True)
    args.folder.mkdir(parents=True, exist_ok=True)
    results = Results(args.folder / "results.jsonl")
    held_out, test = (dataset(args.fashion, args.folder, name) for name in ("held-out", "test"))
    rates: dict[str, float] = {}
    for name, candidates in RATES.items():
        tried = {rate: results.of(Run(name, "none", False, BASE, TUNING_SEED, rate), held_out) for rate in candidates}
        rates[name] = max(candidates, key=lambda rate: tried[rate] or 0.0)
        shown = ", ".join(f"{rate:g}: {accuracy or GUESSING:.4f}" for rate, accuracy in tried.items())
        print(f"{name}: base rate {rates[name]:g} (held-out accuracy {shown})", flush=True)
    for run in grid(rates, args.seeds):
        results.of(run, test)
    found = {way: [[results.of(run, test) for run in row] for row in rows_of(way, rates, args.seeds)] for way in WAYS}
    print("\n".join(table(found)))
    (args.folder / "scaling_rules.svg").write_text(picture(found) + "\n")


def dataset(fashion: Path, folder: Path, name: str) -> str:
    """A dataset of the first pictures with the split `test` of the held-out or the test pictures; made once."""
    output = folder / name
    if not (output / "_manifest.json").exists():
        with tempfile.TemporaryDirectory() as files:
            for kind, head, size in (("images-idx3", 16, 784), ("labels-idx1", 8, 1)):
                train, test = (
                    np.frombuffer(gzip.decompress((fashion / f"{split}-{kind}-ubyte.gz").read_bytes()), np.uint8)[head:]
                    for split in ("train", "t10k")
                )
                scored = test if name == "test" else train[TRAIN * size : (TRAIN + HELD_OUT) * size]
                for split, values in (("train", train[: TRAIN * size]), ("t10k", scored)):
                    _write_idx(Path(files, f"{split}-{kind}-ubyte"), values, head)
            flags = ["--split", "given", "--format", "parquet", "--master", "local[2]", "--image-size", SIDE]
            places = ["--input", *map(str, sorted(Path(files).iterdir())), "--output", str(output)]
            subprocess.run([sys.executable, "-m", "lockstep", "etl_images", *flags, *places], check=True)
    return str(output)


def _write_idx(path: Path, values: np.ndarray, head: int) -> None:
    """Write an IDX file of bytes: pictures of 28 x 28 with a head of 16, labels with one of 8."""
    shape = (len(values) // 784, 28, 28) if head == 16 else (len(values),)
    magic = np.array([0x800 + len(shape), *shape], ">u4")
    path.write_bytes(magic.tobytes() + values.tobytes())


class Results:
    """The lines of a file of results, and the trainings that add to them."""

    def __init__(self, path: Path) -> None:
        self._path, self._found = path, dict[Run, float | None]()
        # TensorFlow keeps each run's traced steps, some 50 MB of a process that trains again and again.
        self._pool = multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=RUNS_OF_A_PROCESS)
        for line in path.read_text().splitlines() if path.exists() else []:
            row = json.loads(line)
            accuracy = row.pop("accuracy")
            row.pop("seconds")
            self._found[Run(**row)] = accuracy

    def of(self, run: Run, dataset: str) -> float | None:
        """The accuracy on the split `test`, trained now if it is not known; None if a number was not finite."""
        if run not in self._found:
            began = time.perf_counter()
            self._found[run] = accuracy = self._pool.apply(trained, (run, dataset))
            row = {**asdict(run), "accuracy": accuracy, "seconds": round(time.perf_counter() - began, 1)}
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(row, flush=True)
        return self._found[run]


def trained(run: Run, dataset: str) -> float | None:
    """The accuracy of a run of this project, one rank in a thread of the process that calls this."""
    from lockstep.training.config import TrainConfig
    from lockstep.training.exchange.agreement import NonFiniteError
    from lockstep.training.run.metrics import read_history
    from tests.training._threads import run as run_threads

    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            datasets=(dataset,),
            run=f"{folder}/run",
            model="benchmarks.scaling_rules:resnet8",
            extra={"optimizer": run.optimizer},
            num_ranks=1,
            launcher="local",
            epochs=EPOCHS,
            global_batch=run.batch,
            micro_batches=run.batch // BASE,
            batchnorm="local",
            learning_rate=run.rate,
            learning_rate_scaling=run.rule,
            base_batch=BASE if run.rule != "none" else None,
            warm_up_epochs=WARM_UP if run.warm_up else 0.0,
            checkpoint_every=10**6,
            validate="test",
            validate_every=EPOCHS,
            seed=run.seed,
        )
        try:
            run_threads(config)
        except NonFiniteError:
            return None
        return float(read_history(config.run).epochs[-1]["metrics"]["val_accuracy"])


def resnet8(signature: Signature, options: ModelOptions) -> keras.Model:
    """The ready model's layers with an optimizer whose rate falls along half a cosine; the product scales it."""
    import keras

    from lockstep.optimizers import LARS
    from lockstep.training.models.resnet import resnet

    model = resnet(signature, replace(options, extra={"decay": 0.0}), depth=8)
    assert options.learning_rate is not None
    rate = keras.optimizers.schedules.CosineDecay(options.learning_rate, options.steps)
    make = {
        "sgd": lambda: keras.optimizers.SGD(rate, momentum=0.9, nesterov=True),
        "lars": lambda: LARS(rate, momentum=0.9),
        "lamb": lambda: keras.optimizers.Lamb(rate),
    }
    model.compile(make[str(options.extra["optimizer"])](), loss=model.loss, metrics=["accuracy"])
    return model


def rows_of(way: Way, rates: dict[str, float], seeds: int) -> Iterator[list[Run]]:
    """The runs of a way, all seeds of a batch together. At the base batch a rule changes nothing: one run for all."""
    optimizer, rule, warm = way
    for batch in BATCHES:
        same = batch == BASE and rule != "none"
        here: Rule = "none" if same else rule
        warms = warm and not same
        yield [Run(optimizer, here, warms, batch, seed, rates[optimizer]) for seed in range(seeds)]


def grid(rates: dict[str, float], seeds: int) -> Iterator[Run]:
    """All runs, seed by seed, so that a call that is stopped has whole seeds."""
    for seed in range(seeds):
        for way in WAYS:
            for row in rows_of(way, rates, seeds):
                yield row[seed]


Found = dict[Way, list[list[float | None]]]


def title(way: Way) -> str:
    """The name of a way in the table and the picture."""
    optimizer, rule, warm = way
    return f"{optimizer.upper()}, {rule}{', warm-up' if warm else ''}"


def table(found: Found) -> Iterator[str]:
    """A row for each way: mean accuracy in percent, and half of its range over seeds."""
    yield "| way | " + " | ".join(f"{batch:,}" for batch in BATCHES) + " |"
    yield "| --- |" + " --- |" * len(BATCHES)
    for way, rows in found.items():
        cells = []
        for row in rows:
            values = [100 * (GUESSING if one is None else one) for one in row]
            cells.append(f"{statistics.mean(values):.1f} ±{(max(values) - min(values)) / 2:.1f}")
        yield f"| {title(way)} | " + " | ".join(cells) + " |"


def picture(found: Found) -> str:
    """Draw the table as an SVG: a line for each way through the means, a bar over seeds."""
    from matplotlib.figure import Figure

    from lockstep.training.results.pages import svg

    colours = {"none": "#888888", "linear": "#1f77b4", "sqrt": "#2ca02c", "lars": "#d62728", "lamb": "#9467bd"}
    figure = Figure(figsize=(7.5, 4.5))
    axes = figure.add_subplot()
    for way, rows in found.items():
        optimizer, rule, warm = way
        values = [[GUESSING if one is None else one for one in row] for row in rows]
        means = [statistics.mean(row) for row in values]
        spread = [[mean - min(row) for mean, row in zip(means, values, strict=True)],
                  [max(row) - mean for mean, row in zip(means, values, strict=True)]]  # fmt: skip
        colour = colours[rule if optimizer == "sgd" else optimizer]
        axes.errorbar(BATCHES, means, spread, color=colour, linestyle="-" if warm else ":", marker=".", capsize=2,
                      label=title(way))  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(BATCHES, [f"{batch:,}" for batch in BATCHES])
    axes.set_xlabel(f"global batch, {EPOCHS} epochs of {TRAIN:,} pictures")
    axes.set_ylabel("test accuracy")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return str(svg(figure))


if __name__ == "__main__":
    main()
