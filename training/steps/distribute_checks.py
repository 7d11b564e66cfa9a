"""Checks of `distribute`: its arguments, each traced step, and that all ranks start equal."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
from tensorflow.python.ops.control_flow_v2_func_graphs import CondBranchFuncGraph

from lockstep.storage.documents import canonical_bytes
from lockstep.storage.errors import ConfigError, DataError, require
from lockstep.training.comm.base import FLOATS, Communicator
from lockstep.training.exchange.compare_ranks import everyones, view_of

SHARES_WITHIN = 1e-4  # a user may have written a share with few digits
SHOWN = 500  # characters of an optimizer's settings


def check_wish(
    optimizer: Any, communicator: Any, scale: Any, statistics: Sequence[Any], bucket_bytes: Any, rows_from_bytes: Any
) -> None:
    """Raise ConfigError for an invalid argument of `distribute`."""
    _check("optimizer", isinstance(optimizer, keras.optimizers.Optimizer), optimizer, "one of keras.optimizers")
    _check("communicator", isinstance(communicator, Communicator), communicator, "a communicator of all ranks")
    number = isinstance(scale, int | float | np.number) and bool(math.isfinite(scale) and scale >= 0)
    _check("scale", scale is None or number, scale, "this rank's rows divided by all rows of a step, or None")
    for one in statistics:
        right = isinstance(one, keras.Variable) and tf.as_dtype(one.dtype).as_numpy_dtype in FLOATS
        _check("statistics", right, one, "float variables of Keras")
    _check("bucket_bytes", isinstance(bucket_bytes, int) and bucket_bytes > 0, bucket_bytes, "bytes above 0")
    _check("rows_from_bytes", isinstance(rows_from_bytes, int) and rows_from_bytes >= 0, rows_from_bytes, "bytes")


def check_step(variables: Sequence[Any], num_ranks: int) -> None:
    """Raise ConfigError, while a step is traced, if N ranks would compute other results than one process."""
    graph = tf.compat.v1.get_default_graph() if not tf.executing_eagerly() else None
    if graph is not None and GraphOrParentsInXlaContext(graph):
        raise ConfigError(
            "a step that calls other ranks cannot be compiled by XLA",
            got="a model or a tf.function with jit_compile (Keras' default on a GPU)",
            allowed="jit_compile=False",
            next_step="Call model.compile(..., jit_compile=False).",
        )
    while graph is not None:
        if isinstance(graph, CondBranchFuncGraph):
            raise ConfigError(
                "gradients are applied under a condition",
                got=f"optimizer.apply in the branch {graph.name} of a tf.cond",
                allowed="every rank applies in every step: the others would wait for one that does not take the branch",
                next_step="Apply outside of conditions; compile with steps_per_execution=1.",
            )
        graph = getattr(graph, "outer_graph", None)
    raw = [getattr(variable, "path", "?") for variable in variables if getattr(variable, "overwrite_with_gradient", 0)]
    if raw and num_ranks > 1:
        raise ConfigError(
            "float8 scales cannot be trained on several ranks",
            got=f"variables that their gradients overwrite: {', '.join(raw[:10])}",
            allowed="gradients that are means over rows",
            next_step="Use another dtype policy than float8.",
        )


def compare_start(
    communicator: Communicator, scale: float, optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]
) -> None:
    """Raise ConfigError on every rank unless all ranks start with equal weights and the same optimizer.

    Otherwise each rank would apply the same sums to weights of its own, which never become equal. The `scale`s, ranks'
    shares of a batch, must add up to 1. A collective. docs/models.md.
    """
    if communicator.num_ranks == 1:
        return
    with tf.init_scope():  # values, also while a step is traced
        weights = [_digest(one) for one in variables]
        settings = settings_of(optimizer)
    everyone = everyones(communicator, {"optimizer": settings, "weights": weights, "scale": float(scale)})
    scales = [other["scale"] for other in everyone]
    if abs(sum(scales) - 1.0) > SHARES_WITHIN:
        raise ConfigError(
            "the ranks' shares of a step's rows do not add up to 1, so their sums would not be means",
            got=f"{sum(scales):g} = {' + '.join(f'{one:g}' for one in scales[:20])}",
            allowed="n_r / G on each rank: its rows of a step, divided by those of all ranks",
            next_step="Correct `scale` of distribute on every rank; leave it out if all batches have one size.",
        )
    first, what = everyone[0], type(optimizer).__name__
    for rank, other in enumerate(everyone):
        if other["optimizer"] != first["optimizer"]:
            there, here = _where_they_differ(other["optimizer"], first["optimizer"])
            raise ConfigError(
                f"rank {rank} has another optimizer than rank 0, so their weights would differ",
                got=f"on rank {rank}: {there}",
                allowed=f"as on rank 0: {here}",
                next_step=f"Make {what} with the same settings on every rank.",
            )
        # If ranks have different variables, the exchange reports which.
        if len(other["weights"]) == len(weights) and other["weights"] != first["weights"]:
            pairs = zip(variables, first["weights"], other["weights"], strict=True)
            paths = [_path(variable) for variable, one, another in pairs if one != another]
            raise ConfigError(
                f"rank {rank} begins with other weights than rank 0",
                got=f"{', '.join(paths[:10])}{', ...' if len(paths) > 10 else ''} ({len(paths)} of {len(weights)})",
                allowed="the same weights on every rank, bit for bit",
                next_step="Call keras.utils.set_random_seed(7) on every rank before the model is built, or load one "
                "file of weights on all.",
            )


def _path(variable: Any) -> str:
    return str(getattr(variable, "path", variable.name))  # Keras' variables have a path, TensorFlow's a name


def _where_they_differ(*texts: str) -> list[str]:
    equal = next((i for i, pair in enumerate(zip(*texts, strict=False)) if len(set(pair)) > 1), 0)
    return [text[max(0, equal - SHOWN // 2) :][:SHOWN] for text in texts]


def _digest(variable: Any) -> str:
    value = np.ascontiguousarray(view_of(variable))
    return hashlib.sha256(value.reshape(-1).view(np.uint8).data).hexdigest()  # no second copy: tables may be gigabytes


def settings_of(optimizer: keras.optimizers.Optimizer) -> str:
    """An optimizer's settings in canonical JSON; its class's name if Keras cannot serialize them."""
    try:
        with warnings.catch_warnings(action="ignore"):  # that a lambda cannot be loaded: this is not saved
            config = keras.saving.serialize_keras_object(optimizer)
        return canonical_bytes(_of_all_ranks(config)).decode()
    except (TypeError, ValueError, NotImplementedError, OSError, DataError):  # an own class, or code without a source
        return type(optimizer).__name__


def _of_all_ranks(config: Any) -> Any:
    """Leave out what depends on the process: Keras' numbers in names, the file that a lambda is in."""
    if isinstance(config, dict):
        if config.get("class_name") == "__lambda__":
            return "a lambda"
        return {key: _of_all_ranks(value) for key, value in config.items() if key != "name"}
    return [_of_all_ranks(value) for value in config] if isinstance(config, list | tuple) else config


def _check(name: str, right: bool, got: Any, allowed: str) -> None:
    next_step = "Correct the call: distribute(keras.optimizers.Adam(), context().communicator())."
    require(right, f"the argument `{name}` of distribute", "" if right else f"{got!r}"[:200], allowed, next_step)
