"""A check before the first step: whether compiled metrics of all rows follow from the ranks' states, added up."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from lockstep.storage.errors import ConfigError
from lockstep.training.steps.model_state import as_floats, unchanged

WITHIN = 1e-3  # relative: states are sums in float32
SHARES = {"sum": (1.0, 1.0), "mean": (0.5, 0.5), "only_first_replica": (1.0, 0.0)}


def check_metric_sums(model: keras.Model, data: Any, name: str) -> None:
    """Raise ConfigError naming a compiled metric whose value of all rows is not that of two halves' states, combined.

    `data` is (x, y, weights) as of fit; `name` the model's. Metrics that a train_step of the user's updates are not
    judged. The metrics keep their states.
    """
    x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
    metrics, kind = model._compile_metrics, type(model)  # Keras has no public way to it
    own = kind.train_step is not keras.Model.train_step or kind.compute_metrics is not keras.Model.compute_metrics
    rows = 0 if y is None else len(keras.tree.flatten(y)[0])
    if metrics is None or own or rows < 4 or any((v.aggregation or "none") not in SHARES for v in metrics.variables):
        return
    half = rows // 2
    with unchanged(model):
        whole, halves = _results(metrics, (y, model(x, training=False), weights), half)
    for metric, value in whole.items():
        if not np.allclose(value, halves[metric], rtol=WITHIN, atol=WITHIN / 100, equal_nan=True):
            raise ConfigError(
                f"the metric {metric} of the model {name} is no sum over rows, so several ranks would report another "
                "number than one",
                got=f"{value} of {2 * half} rows, {halves[metric]} of the states of their halves, added up",
                allowed="metrics whose states are sums over rows, such as a total and a count, or combined as "
                "add_variable(..., aggregation='mean') says",
                next_step="Add up in update_state and divide in result, or train on one rank.",
            )


def _results(metrics: Any, outputs: Any, half: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metrics of 2 * half rows, and those of the combined states of both halves."""
    states = []
    for part in (slice(0, 2 * half), slice(0, half), slice(half, 2 * half)):
        metrics.reset_state()
        metrics.update_state(*keras.tree.map_structure(lambda a, part=part: None if a is None else a[part], outputs))
        states.append([np.asarray(variable.value) for variable in metrics.variables])
    combined = [_combined(variable, *parts) for variable, *parts in zip(metrics.variables, *states[1:], strict=True)]
    results = []
    for values in (states[0], combined):
        for variable, value in zip(metrics.variables, values, strict=True):
            variable.assign(value)
        results.append(as_floats(metrics.result()))
    return results[0], results[1]


def _combined(variable: keras.Variable, first: Any, second: Any) -> Any:
    shares = SHARES[variable.aggregation]
    return (first * shares[0] + second * shares[1]).astype(first.dtype)
