"""Labels (n,) as Keras' own metrics want them next to outputs (n, 1): as (n, 1) too.

Losses bring the two to one shape by themselves, most metrics too. F1Score and BinaryCrossentropy refuse them; Hinge,
Poisson and KLDivergence compare each label with each output, n * n, in silence. Metrics and functions of a user's own
get labels as they are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import keras


def show_labels_as_columns(model: keras.Model) -> None:
    """Have the compiled metrics of Keras' own that `model` has, or is going to build, see labels so from now on."""
    metrics = model._compile_metrics  # Keras has no public way to it
    if metrics is None:
        return
    if metrics.built:
        _change(metrics)
        return
    plain = metrics.build

    def build(*args: Any) -> None:
        plain(*args)
        _change(metrics)

    object.__setattr__(metrics, "build", build)  # past Keras' tracking


def _change(metrics: Any) -> None:
    for metric in metrics.metrics:
        plain = metric.update_state
        if _is_of_keras(metric) and getattr(plain, "func", None) is not _update:
            object.__setattr__(metric, "update_state", partial(_update, plain))


def _is_of_keras(metric: Any) -> bool:
    function = getattr(metric, "_fn", None)  # what a MeanMetricWrapper takes the mean of: a function, or a loss
    parts = [type(metric).update_state, *([] if function is None else [function])]
    return all(str(part.__module__).startswith("keras.") for part in parts)


def _update(plain: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    if len(y_true.shape) == 1 and len(y_pred.shape) == 2 and y_pred.shape[-1] == 1:
        y_true = keras.ops.expand_dims(y_true, -1)  # (n,) -> (n, 1)
    return plain(y_true, y_pred, sample_weight=sample_weight)
