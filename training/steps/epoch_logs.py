"""An epoch's logs over all ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from training.comm.base import Communicator
from training.steps.model_state import as_floats, summed_metrics


def of_all_ranks(model: keras.Model, communicator: Communicator, scale: float, logs: dict[str, Any]) -> dict[str, Any]:
    """Metrics over all ranks, the same on each; `logs` are this rank's, `scale` its share of the rows. A collective."""
    summed_metrics(model, communicator)
    result = as_floats(model.get_metrics_result())
    if set(result) == set(logs):
        return result
    # A train_step of the user's that returns other values: their mean, weighted by the ranks' rows.
    names = sorted(logs)
    values = np.array([float(logs[name]) for name in names]) * scale
    communicator.all_reduce(values)
    return dict(zip(names, values.tolist(), strict=True))
