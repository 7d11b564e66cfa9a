"""Small datasets of tasks: the same features `a` and `b`, and a label for each dataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from lockstep.features.sample_id import sample_id
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema
from lockstep.features.schema.signature import Signature
from lockstep.training.models import ModelOptions
from tests.training._tiny import write_rows

CLASSES = {"kinds": 3, "sides": 2}


def write_task(
    root: Path, name: str, *, rows: int = 96, seed: int = 0, records: Mapping[str, int] | None = None
) -> str:
    """Write the dataset `name` in `root`: `kinds` has three classes of a + b, `sides` two of a - b. Returns its URL."""
    records = records or {"train": rows, "test": 30}
    rng, total = np.random.default_rng(seed), sum(records.values())
    a, b = rng.standard_normal((2, total)).astype(np.float32)
    label = np.digitize(a + b, [-0.7, 0.7]) if name == "kinds" else (a > b).astype(np.int64)
    schema = Schema(
        (
            Field(name="sample_id", dtype="int64", kind="id"),
            Field(name="a", dtype="float32"),
            Field(name="b", dtype="float32"),
            Field(name=name, dtype="int64", kind="label", num_classes=CLASSES[name]),
        )
    )
    ids = pa.array([sample_id([f"{seed}-{row}".encode()], 0) for row in range(total)], type=pa.int64())
    columns = [ids, pa.array(a), pa.array(b), pa.array(label, type=pa.int64())]
    batch = pa.RecordBatch.from_arrays(columns, schema=schema.arrow_schema())
    write_rows(str(root / name), schema, batch, records, "parquet", 2, 8, seed)
    return str(root / name)


def seeded(signature: Signature, options: ModelOptions) -> Any:
    """The model mlp with weights that depend on nothing, trained by SGD with momentum."""
    import keras

    from lockstep.training.models.mlp import mlp
    from lockstep.training.models.outputs import CLASSES as KIND
    from lockstep.training.models.outputs import compile_for

    model = mlp(signature, replace(options, extra={"width": 8, "dropout": 0.0}))
    rng = np.random.default_rng(3)
    for weight in model.weights:
        weight.assign(rng.normal(0, 0.4, weight.shape))
    optimizer = keras.optimizers.SGD(options.learning_rate or 0.1, momentum=0.9)
    return compile_for(model, KIND, signature, optimizer)


def failing(signature: Signature, options: ModelOptions) -> Any:
    """The model mlp with dropout, and a rank that fails at the step in _models.FAIL_AT."""
    from lockstep.training.models.mlp import mlp
    from tests.training._models import FailOnce

    return mlp(signature, replace(options, extra={"width": 8})), [FailOnce()]
