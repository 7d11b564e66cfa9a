"""Evaluates a run's model on a split: the caller's side, the baseline, and the entry of each rank."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lockstep.features.schema.sampled import sampled_of
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest import DatasetManifest, load_dataset
from lockstep.storage.documents import parse_canonical
from lockstep.storage.errors import ConfigError, DataError
from lockstep.storage.fs import filesystem
from lockstep.storage.settings import hadoop_settings
from lockstep.storage.urls import absolute, join
from training.comm.base import Communicator
from training.config import TrainConfig
from training.control.context import RankContext
from training.control.task import RankTask
from training.launch.session import Launch
from training.plan.datasets import open_mixture, open_parts, split_of
from training.rank import runtime
from training.reading.reader import SplitReader
from training.run import notes
from training.run.paths import RunPaths
from training.run.result import find_result
from training.run.run_json import read_run
from training.run.weights_source import SCHEMA_FILE, checked_file, newest_of

SMOOTHING = 10  # rows of the global mean that are added to each value's rate
KINDS = "rate:COLUMN or majority"
WEIGHT_BITS = 149  # below one: the smallest float32 is 2^-149


def check_baseline(name: str, schema: Schema) -> str | None:
    """The column of `rate:COLUMN`, None for `majority`. Raises ConfigError for anything else."""
    if name == "majority" and schema.label is not None:
        return None
    kind, _, column = name.partition(":")
    names = [
        field.name for field in schema.features if field.dtype in ("string", "int64", "bool") and field.shape == ()
    ]
    if kind != "rate" or column not in names or schema.label is None or schema.label.num_classes is not None:
        raise ConfigError(
            f"the baseline {name} cannot be computed",
            got=name,
            allowed=f"{KINDS}, where COLUMN is one of {', '.join(names) or '(none)'}; rate needs a yes-or-no label",
            next_step="Correct --baseline.",
        )
    return column


class Baseline:
    """Class shares of a run's training rows, overall and (for `rate`) for each value of one column.

    If the schema has a weight, rows count by their weights, as in the training loss.
    """

    def __init__(self, name: str, schema: Schema) -> None:
        assert schema.label is not None
        self.name, self._label, self._weight = name, schema.label, schema.weight
        self._column = check_baseline(name, schema)
        self.classes = schema.label.num_classes or 2
        self.class_counts = [0] * self.classes
        """Rows of each class that `fit` has counted, whatever their weights."""
        self._prior: NDArray[np.float64] = np.full(self.classes, 1.0 / self.classes)
        self._rates: dict[str, float] = {}

    def fit(self, readers: Sequence[SplitReader], ratios: Sequence[int] | None, communicator: Communicator) -> None:
        """Count the training rows, each rank its share; every rank gets the same rates.

        `readers` is one reader of all datasets end to end or, with `ratios`, one for each dataset of a mixture, whose
        rows count in proportion to their frequency in the mixture's batches.
        """
        counted = [self._count(reader, communicator.rank, communicator.num_ranks) for reader in readers]
        everyone = [json.loads(part) for part in communicator.all_gather_bytes(json.dumps(counted).encode())]
        rows = [sum(sum(part[i]["rows"]) for part in everyone) for i in range(len(readers))]
        shares = [Fraction(1)] * len(rows) if ratios is None else _of_mixture(ratios, rows)
        classes = [Fraction(0)] * self.classes
        values: dict[str, list[Fraction]] = {}
        self.class_counts = [0] * self.classes
        for part in everyone:
            for share, found in zip(shares, part, strict=True):
                self.class_counts = [sum(pair) for pair in zip(self.class_counts, found["rows"], strict=True)]
                classes = [total + share * units for total, units in zip(classes, found["classes"], strict=True)]
                for value, (yes, units) in found["values"].items():
                    total = values.setdefault(value, [Fraction(0), Fraction(0)])
                    total[0] += share * yes
                    total[1] += share * units
        whole = sum(classes)
        if not whole:
            return  # no row counts: all classes are equally likely
        self._prior = np.array([float(units / whole) for units in classes])
        smoothing, mean = SMOOTHING * whole / sum(self.class_counts), classes[-1] / whole
        self._rates = {
            value: float((yes + smoothing * mean) / (units + smoothing)) for value, (yes, units) in values.items()
        }

    def predict(self, rows: pa.RecordBatch) -> NDArray[np.float32]:
        """Probabilities of the classes, (n, classes), or of no and yes, (n, 2); read-only."""
        if self._column is None:
            return np.broadcast_to(self._prior.astype(np.float32), (len(rows), self.classes))
        mean = float(self._prior[-1])
        rates = np.array([self._rates.get(value, mean) for value in _values(rows.column(self._column))])
        return np.stack([1 - rates, rates], axis=1).astype(np.float32)

    def _count(self, reader: SplitReader, rank: int, num_ranks: int) -> dict[str, Any]:
        """This rank's share of a split: rows and units of weight of each class; [yes, all] units of each value."""
        blocks = reader.table.num_blocks
        rows, classes = [0] * self.classes, [0] * self.classes
        values: dict[str, list[int]] = {}
        for block in range(rank * blocks // num_ranks, (rank + 1) * blocks // num_ranks):
            batch = reader.read(reader.table.run(block))
            labels, units = self._labels(batch).tolist(), self._units(batch)
            for label, unit in zip(labels, units, strict=True):
                rows[label] += 1
                classes[label] += unit
            if self._column is not None:
                column = _values(batch.column(self._column))
                for value, label, unit in zip(column, labels, units, strict=True):
                    found = values.setdefault(value, [0, 0])
                    found[0] += label * unit
                    found[1] += unit
        return {"rows": rows, "classes": classes, "values": values}

    def _labels(self, rows: pa.RecordBatch) -> NDArray[np.int64]:
        column: Any = rows.column(self._label.name)
        labels = np.asarray(column.cast(pa.float64()) if pa.types.is_floating(column.type) else column.cast(pa.int64()))
        wrong = (labels != np.floor(labels)) | (labels < 0) | (labels >= self.classes)
        if wrong.any():
            raise DataError(
                f"the baseline {self.name} cannot count the label `{self._label.name}`",
                got=str(labels[wrong][0]),
                allowed=f"whole numbers from 0 to {self.classes - 1}",
                next_step="Leave --baseline out: it needs classes or a yes-or-no label.",
            )
        return labels.astype(np.int64)

    def _units(self, rows: pa.RecordBatch) -> Iterable[int]:
        """Each row's weight as a whole number, in units of 2^-149."""
        if self._weight is None:
            return [1] * len(rows)
        weights = np.asarray(rows.column(self._weight.name)).astype(np.float32)  # as a model is fed
        return [int(unit) for unit in np.ldexp(weights.astype(np.float64), WEIGHT_BITS).tolist()]


def _of_mixture(ratios: Sequence[int], rows: Sequence[int]) -> list[Fraction]:
    """How much a row of each dataset counts: datasets count by their ratios; the total stays that of all rows."""
    return [
        Fraction(ratio * sum(rows), sum(ratios) * count) if count else Fraction(0)
        for ratio, count in zip(ratios, rows, strict=True)
    ]


def _values(column: pa.Array) -> list[str]:
    """A column's values as texts; null counts as a value."""
    return ["\0null" if value is None else str(value) for value in column.to_pylist()]


ENTRY = "training.results.evaluate:main"
SHOWN_CLASSES = 10  # in the line above the table


def evaluate(
    run: str,
    dataset: str,
    split: str,
    launch: Launch,
    *,
    num_ranks: int = 1,
    batch: int = 512,
    baseline: str | None = None,
) -> dict[str, Any]:
    """Evaluate the run's model (its newest claim's, else the weights of the last checkpoint) on `split` of `dataset`.

    `baseline` is `rate:COLUMN` (the mean label for each value of a column, smoothed) or `majority` (the class shares),
    counted on the training rows and applied to the same rows as the model. Returns {run, dataset, split, model,
    samples, metrics, intervals (95 %, of metrics that have one), class_counts (None if labels are not classes),
    baseline: None or {name, metrics, intervals, class_counts}, difference (model less baseline, {metric: {value,
    interval}}), compared_by (the metric that decides, None without a baseline)}. Prints notes on doubtful numbers to
    standard error. Raises ConfigError and NotFoundError, where possible before any rank is started.
    """
    if batch < 1 or num_ranks < 1:
        raise ConfigError(
            "an evaluation needs rows and ranks",
            got=f"batch={batch}, num_ranks={num_ranks}",
            allowed="integers from 1 up",
            next_step="Correct --batch or --num-ranks.",
        )
    run, dataset = absolute(run), absolute(dataset)
    fs, paths = filesystem(run), RunPaths(run)
    document = read_run(fs, paths)
    config = TrainConfig.from_json(document["config"])
    manifest = load_dataset(dataset)
    split_of(manifest, split)
    if baseline is not None:
        check_baseline(baseline, Schema.from_json(manifest.schema))
        _check_trained_on(config, document["dataset_digest"], baseline)
    model, checkpoint = newest_of(run)
    kept = _kept(model, manifest, document["dataset_digest"])
    payload = {
        "config": config.to_json(),
        "dataset": dataset,
        "split": split,
        "batch": batch,
        "baseline": baseline,
        "kept": kept,
        "model": model,
        "checkpoint": checkpoint,
    }
    task = RankTask(ENTRY, payload, hadoop=hadoop_settings(), tls=config.tls == "on")  # as the run was trained
    found = launch(task, num_ranks)[0]
    result = {"run": run, "dataset": dataset, "split": split, "model": model or checkpoint, **found}
    notes.show(_doubts(result, find_result(fs, paths), kept))
    return result


def _kept(model: str | None, evaluated: DatasetManifest, digest: str) -> tuple[float, ...] | None:
    """The share of each class that --sample kept for training: from the exported model, else from the evaluated dataset
    if its digest is the run's. None if all rows were kept, or if a whole class was left out.
    """
    schema = Schema.from_json(evaluated.schema)
    if model is not None:
        file = join(model, SCHEMA_FILE)
        sampled = Schema.from_json(parse_canonical(checked_file(model, SCHEMA_FILE), file=file)).sampled
    else:
        sampled = sampled_of(evaluated) if evaluated.digest == digest else None
    shares = None if sampled is None or schema.label is None else sampled.of_classes(schema.label)
    return shares if shares is not None and all(shares) else None


def _check_trained_on(config: TrainConfig, digest: str, baseline: str) -> None:
    """Raise ConfigError if the run's datasets have changed, or lack what `baseline` needs."""
    trained_on = (open_parts if config.mix is None else open_mixture)(config.datasets, config.split)[1]
    if trained_on.digest != digest:
        raise ConfigError(
            f"the baseline {baseline} cannot be counted on the run's training rows",
            got=f"datasets {', '.join(config.datasets)} of digest {trained_on.digest}",
            allowed=f"digest {digest}",
            next_step="Put the run's datasets back in their places, or leave --baseline out.",
        )
    check_baseline(baseline, Schema.from_json(trained_on.schema))


def _doubts(result: Mapping[str, Any], trained: Mapping[str, Any] | None, kept: Sequence[float] | None) -> list[str]:
    baseline, split = result["baseline"], result["split"]
    trained_on = baseline["class_counts"] if baseline else (trained or {}).get("class_counts")
    if trained_on and kept:  # the counts before --sample
        trained_on = [round(rows / share) for rows, share in zip(trained_on, kept, strict=True)]
    return [
        *notes.of_classes(result["class_counts"], f"split `{split}`"),
        *notes.of_classes(trained_on, "what the run was trained on"),
        *notes.of_base_rates(trained_on, result["class_counts"], split),
        *notes.of_metrics(result["metrics"], f"the metrics of split `{split}`"),
        *notes.of_baseline(result),
    ]


def summary(result: Mapping[str, Any]) -> str:
    """A small table of a result."""
    baseline, counts = result["baseline"], result["class_counts"]
    head = f"{result['split']} of {PurePosixPath(result['dataset']).name}: {result['samples']} samples"
    if counts is not None:
        classes = ", ".join(f"{rows} of {number}" for number, rows in enumerate(counts[:SHOWN_CLASSES]))
        head += f", {classes}" + (", ..." if len(counts) > SHOWN_CLASSES else "")
    table = [["metric", "model", "95 % interval"]]
    if baseline:
        table[0] += [baseline["name"], "difference", "95 % interval"]
    for name, value in sorted(result["metrics"].items()):
        row = [name, number(value), span(result["intervals"].get(name))]
        if baseline:
            difference = result["difference"].get(name, {"value": None, "interval": None})
            row += [number(baseline["metrics"].get(name)), number(difference["value"]), span(difference["interval"])]
        table.append(row)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([head, *lines])


def main(context: RankContext) -> dict[str, Any]:
    """Evaluate this rank's share; rank 0 returns a result of `evaluate` from `samples` on, other ranks {}."""
    config = TrainConfig.from_json(context.payload["config"])
    runtime.configure(context.world, precision=config.precision, seed=config.seed)
    from training.results.evaluate_rank import run  # here, since it imports TensorFlow, which is set up now

    return run(context, config)


def number(value: Any) -> str:
    """A metric's value in a table; - if there is none."""
    return "-" if value is None else f"{value:.4f}" if isinstance(value, int | float) else str(value)


def span(interval: Sequence[float] | None) -> str:
    """An interval in a table; - if there is none."""
    return "-" if interval is None else f"{interval[0]:.4f} to {interval[1]:.4f}"
