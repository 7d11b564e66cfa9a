"""Predictions without a model, to hold a model against: from the training split's labels alone."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from features.schema import Schema
from storage.errors import ConfigError
from training.comm.base import Communicator
from training.reader import SplitReader

SMOOTHING = 10.0  # rows of the global mean that each value's rate begins with
KINDS = "rate:COLUMN or majority"


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
    """Class shares of the training split, overall and (for `rate`) for each value of one column."""

    def __init__(self, name: str, schema: Schema) -> None:
        assert schema.label is not None
        self.name, self._label = name, schema.label
        self._column = check_baseline(name, schema)
        self.classes = schema.label.num_classes or 2
        self._prior: NDArray[np.float64] = np.full(self.classes, 1.0 / self.classes)
        self._rates: dict[str, float] = {}

    def fit(self, reader: SplitReader, communicator: Communicator) -> None:
        """Count the training split, each rank its share; every rank gets the same rates."""
        blocks, rank, ranks = reader.table.num_blocks, communicator.rank, communicator.num_ranks
        classes = np.zeros(self.classes, np.int64)
        counts: dict[str, list[int]] = {}
        for block in range(rank * blocks // ranks, (rank + 1) * blocks // ranks):
            rows = reader.read(reader.table.run(block))
            labels = self._labels(rows)
            classes += np.bincount(labels, minlength=self.classes)
            if self._column is not None:
                for value, label in zip(_values(rows.column(self._column)), labels.tolist(), strict=True):
                    found = counts.setdefault(value, [0, 0])
                    found[0] += label
                    found[1] += 1
        communicator.all_reduce(classes)
        self._prior = classes / max(int(classes.sum()), 1)
        everyone = communicator.all_gather_bytes(json.dumps(counts).encode())
        total: dict[str, list[int]] = {}
        for part in everyone:
            for value, (ones, rows_of_value) in json.loads(part).items():
                found = total.setdefault(value, [0, 0])
                found[0] += ones
                found[1] += rows_of_value
        mean = float(self._prior[-1])
        self._rates = {v: (ones + SMOOTHING * mean) / (n + SMOOTHING) for v, (ones, n) in total.items()}

    def predict(self, rows: pa.RecordBatch, *, binary: bool) -> NDArray[np.float32]:
        """Probabilities: (n, 1) of yes where `binary`, else (n, classes)."""
        if not binary:
            return np.tile(self._prior.astype(np.float32), (len(rows), 1))
        mean = float(self._prior[-1])
        if self._column is None:
            return np.full((len(rows), 1), mean, np.float32)
        rates = [self._rates.get(value, mean) for value in _values(rows.column(self._column))]
        return np.array(rates, np.float32).reshape(-1, 1)

    def _labels(self, rows: pa.RecordBatch) -> NDArray[np.int64]:
        column: Any = rows.column(self._label.name)
        return np.asarray(column.cast(pa.int64()), np.int64)


def _values(column: pa.Array) -> list[str]:
    """A column's values as texts; a null is a value of its own."""
    return ["\0null" if value is None else str(value) for value in column.to_pylist()]
