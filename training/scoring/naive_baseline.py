"""What evaluate compares with, a baseline without training: class shares, the mean label of each value of a column, or
of labels that are numbers their mean or median.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError, DataError
from lockstep.training.comm.base import Communicator
from lockstep.training.reading.reader import SplitReader

SMOOTHING = 10  # rows of the global mean that are added to each value's rate
KINDS = "rate:COLUMN or majority for yes or no and classes, mean or median for numbers"
OF_NUMBERS = ("mean", "median")
WEIGHT_BITS = 149  # below one: the smallest float32 is 2^-149


def check_baseline(name: str, schema: Schema) -> str | None:
    """The column of `rate:COLUMN`, None for another baseline. Raises ConfigError if the label does not fit."""
    label = schema.label
    if name == "majority" and label is not None:
        return None
    is_number = label is not None and label.shape == () and label.num_classes is None
    if name in OF_NUMBERS and label is not None and is_number and label.dtype not in ("bool", "string", "bytes"):
        return None
    kind, _, column = name.partition(":")
    names = [
        field.name for field in schema.features if field.dtype in ("string", "int64", "bool") and field.shape == ()
    ]
    if kind != "rate" or column not in names or schema.label is None or schema.label.num_classes is not None:
        raise ConfigError(
            f"the baseline {name} cannot be computed",
            got=name,
            allowed=f"{KINDS}; COLUMN is one of {', '.join(names) or '(none)'}; rate needs a yes-or-no label",
            next_step="Correct --baseline.",
        )
    return column


def baseline_of(name: str, schema: Schema) -> Baseline | NumberBaseline:
    """The baseline of this name, not fitted. Raises ConfigError as `check_baseline` does."""
    return (NumberBaseline if name in OF_NUMBERS else Baseline)(name, schema)


class NumberBaseline:
    """The mean or median of the labels of a run's training rows, by their weights if the schema has one.

    Memory of a rank while it is fitted: 16 bytes a training row.
    """

    classes = 1
    class_counts = None

    def __init__(self, name: str, schema: Schema) -> None:
        check_baseline(name, schema)
        assert schema.label is not None
        self.name, self._label, self._weight = name, schema.label, schema.weight
        self._value = 0.0

    def fit(self, readers: Sequence[SplitReader], ratios: Sequence[int] | None, communicator: Communicator) -> None:
        """Fit the baseline, as Baseline.fit says."""
        parts: list[list[NDArray[np.float64]]] = [[] for _ in readers]  # (n, 2) each: label and weight
        for part, reader in zip(parts, readers, strict=True):
            blocks = reader.table.num_blocks
            for block in range(
                communicator.rank * blocks // communicator.num_ranks,
                (communicator.rank + 1) * blocks // communicator.num_ranks,
            ):
                rows = _not_skipped(reader, reader.read(reader.table.run(block)))
                labels = np.asarray(rows.column(self._label.name)).astype(np.float64)
                weights = np.ones(len(rows)) if self._weight is None else np.asarray(rows.column(self._weight.name))
                part.append(np.stack([labels, weights.astype(np.float64)], axis=1))
        mine = [np.concatenate([np.empty((0, 2)), *part]) for part in parts]
        of_ranks = [communicator.all_gather_bytes(one.tobytes()) for one in mine]
        everyone = [np.concatenate([np.frombuffer(data) for data in found]).reshape(-1, 2) for found in of_ranks]
        if ratios is not None:
            shares = _of_mixture(ratios, [len(rows) for rows in everyone])
            everyone = [rows * [1.0, float(share)] for rows, share in zip(everyone, shares, strict=True)]
        rows = np.concatenate(everyone)
        rows = rows[np.lexsort(rows.T[::-1])]
        self._value = _mean(rows) if self.name == "mean" else _median(rows)

    def predict(self, rows: pa.RecordBatch) -> NDArray[np.float32]:
        """The number for each row, (n, 1); read-only."""
        return np.broadcast_to(np.float32(self._value), (len(rows), 1))


def _mean(rows: NDArray[np.float64]) -> float:
    """The mean of labels by their weights; 0 if no row counts. Sums are exact, so no order of rows matters."""
    whole = math.fsum(rows[:, 1])
    return math.fsum(rows[:, 0] * rows[:, 1]) / whole if whole else 0.0


def _median(rows: NDArray[np.float64]) -> float:
    """Half of the weight of `rows`, sorted by label, is below and half above; between two labels their mean."""
    rows = rows[rows[:, 1] > 0]
    if not len(rows):
        return 0.0
    below = np.cumsum(rows[:, 1])
    first, last = np.searchsorted(below, below[-1] / 2), np.searchsorted(below, below[-1] / 2, side="right")
    return float((rows[first, 0] + rows[min(int(last), len(rows) - 1), 0]) / 2)


def _not_skipped(reader: SplitReader, batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows of a batch that the reader has not skipped as bad records."""
    if not reader.skipped:
        return batch
    ids = batch.column(reader.schema.id_field.name).to_pylist()
    return batch.filter(pa.array([one not in reader.skipped for one in ids]))


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
            batch = _not_skipped(reader, reader.read(reader.table.run(block)))
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
