"""Turns the features of a signature into the tensors that the ready models begin with."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.config import floatx
from keras.src.utils.naming import to_snake_case

from lockstep.features.schema.signature import Signature, TensorSpec
from lockstep.storage.errors import ConfigError
from lockstep.training.embeddings.sharded_embedding import ShardedEmbedding
from lockstep.training.models import ModelOptions
from lockstep.training.models.outputs import NAMED

_PLAIN = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Sharding:
    """Which tables are divided over the ranks, and how they learn."""

    from_bytes: float
    """Tables of at least so many bytes, and all without a number of rows."""
    options: Mapping[str, Any]
    """Arguments of ShardedEmbedding."""
    growing: Mapping[str, Any]
    """More arguments of ShardedEmbedding, for tables without a number of rows."""

    @classmethod
    def of(cls, options: ModelOptions, chosen: Mapping[str, Any]) -> Sharding:
        """What the run's options and a ready model's settings ask for."""
        least = math.inf if options.shard_embeddings is None else options.shard_embeddings
        same = {"seed": options.seed, "learning_rate": chosen["table_rate"], "optimizer": chosen["table_optimizer"]}
        steps = chosen["evict_after_steps"] or None
        return cls(least, same, {"admit_after": chosen["admit_after"], "evict_after_steps": steps})


def table_of(
    name: str, rows: int | None, width: int, decay: float, start: Any = "uniform", sharding: Sharding | None = None
) -> Any:
    """The layer of a table: Keras' Embedding, or a table in shards whose first values have the variance of `start`.

    Raises ConfigError for a `decay` of a table in shards.
    """
    nbytes = (rows or 0) * width * np.dtype(keras.config.floatx()).itemsize
    if rows is not None and (sharding is None or nbytes < sharding.from_bytes):
        penalty = penalty_of(decay)
        return keras.layers.Embedding(
            rows, width, embeddings_initializer=start, embeddings_regularizer=penalty, name=name
        )
    assert sharding is not None
    if decay:
        raise ConfigError(
            f"the table {name} cannot have a penalty and be in shards",
            got=f"decay={decay} and {'a table that grows' if rows is None else f'{nbytes} bytes'}",
            allowed="decay=0: a penalty would touch every row in each step",
            next_step="Add --set decay=0.",
        )
    known = {"uniform": 0.05, "zeros": 0.0}
    spread = known[start] if isinstance(start, str) else math.sqrt(3) * start.stddev
    more = sharding.growing if rows is None else {}
    return ShardedEmbedding(rows, width, spread=spread, name=name, **sharding.options, **more)


def scope_name(column: str) -> str:
    """The name of a column as part of a layer's name: itself if TensorFlow takes it, else `-` and it with `-` and two
    hexadecimal digits for each other byte. Different for different columns: no name that stays begins with `-`.
    """
    return column if _PLAIN.fullmatch(column) else _escaped(column)


def _escaped(column: str) -> str:
    return "-" + re.sub(r"[^A-Za-z0-9_.]", lambda found: "".join(f"-{byte:02x}" for byte in found[0].encode()), column)


def inputs_of(signature: Signature) -> dict[str, Any]:
    """An input of each feature by its name."""
    return {name: input_of(name, spec) for name, spec in signature.features.items()}


def input_of(name: str, spec: TensorSpec) -> Any:
    """An input that a model is fed by the column's name, whatever the layer's name is.

    No field can have a name that begins with `_`, as layers have here: an input and a layer must not share one.
    """
    is_taken = re.sub(r"_[0-9]+$", "", name) in _names_of_layers()
    tensor = keras.Input(spec.shape, dtype=spec.dtype, name=_escaped(name) if is_taken else scope_name(name))
    tensor.name = name  # Keras warns if it is not the key
    return tensor


@cache
def _names_of_layers() -> frozenset[str]:
    """What Keras calls layers and operations without a name, before a number, and the names of outputs."""
    kinds = [keras.Operation]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return frozenset({to_snake_case(kind.__name__) for kind in kinds} | {name for name, _ in NAMED.values()})


def ids_of(signature: Signature) -> dict[str, int]:
    """The features that are ids, with the number of their ids; id 0 is nothing (null, padding, unknown)."""
    return {name: spec.ids for name, spec in signature.features.items() if spec.ids is not None}


def ids_and_any_of(signature: Signature, chosen: Mapping[str, Any]) -> dict[str, int | None]:
    """Return what `ids_of` returns, and the columns that the setting `any_ids` names, without a number; id 0 is nothing
    in these too.

    Raises ConfigError for a column that is not of int64, or is of ids with a number.
    """
    ids: dict[str, int | None] = {**ids_of(signature)}
    fit = [name for name, spec in signature.features.items() if spec.dtype == "int64" and name not in ids]
    for name in filter(None, chosen["any_ids"].split(",")):
        if name not in fit:
            raise ConfigError(
                f"the column {name} has no ids without a bound",
                got=f"--set any_ids={chosen['any_ids']}",
                allowed=f"columns of int64 with the encoding `number`: {', '.join(fit) or 'this dataset has none'}",
                next_step="Correct --set any_ids, or declare encoding = number with dtype = int64 (docs/schema.md).",
            )
        ids[name] = None
    return ids


def numbers_of(inputs: Mapping[str, Any], ids: Mapping[str, int | None]) -> list[Any]:
    """Each feature that is not ids as (n, size) floats."""
    return [_flat(tensor) for name, tensor in inputs.items() if name not in ids]


def _flat(tensor: Any) -> Any:
    flat = keras.layers.Reshape((math.prod(tensor.shape[1:]),))(tensor)
    return flat if "float" in tensor.dtype else ops.cast(flat, keras.config.floatx())


def joined(parts: list[Any]) -> Any:
    """Join tensors (n, k) to one of (n, sum of k)."""
    return keras.layers.Concatenate()(parts) if len(parts) > 1 else parts[0]


def weighted_sum(
    inputs: Mapping[str, Any],
    ids: Mapping[str, int | None],
    *,
    name: str,
    activation: str | None,
    decay: float,
    sharding: Sharding | None = None,
) -> Any:
    """A bias and a weight for each number and each id but id 0, which begin at zero: (n, 1), after `activation`.

    All ids below a bound have one table: the same model as one-hot columns, without the columns.
    """
    penalty, floatx = penalty_of(decay), keras.config.floatx()
    numbers = numbers_of(inputs, ids)
    if not ids:
        last = keras.layers.Dense(
            1, activation=activation, kernel_initializer="zeros", kernel_regularizer=penalty, name=name, dtype=floatx
        )
        return last(joined(numbers))
    together = joined(numbers) if numbers else None
    bounded = {name: size for name, size in ids.items() if size is not None}
    always = ops.zeros_like(inputs[next(iter(ids))][:, :1])
    parts = [_sum_of_ids({one: inputs[one] for one in bounded}, always, bounded, decay, sharding)]
    for one in (one for one in ids if one not in bounded):
        table = table_of(f"_{scope_name(one)}_weights", None, 1, decay, "zeros", sharding)
        parts.append(ops.sum(vectors(inputs[one], table), axis=1))
    if together is not None:
        plain = keras.layers.Dense(
            1, use_bias=False, kernel_initializer="zeros", kernel_regularizer=penalty, name="_numbers"
        )
        parts.append(plain(together))
    total = keras.layers.Add()(parts) if len(parts) > 1 else parts[0]
    return keras.layers.Activation(activation or "linear", name=name, dtype=floatx)(total)


def _sum_of_ids(
    tensors: dict[str, Any], always: Any, sizes: Mapping[str, int], decay: float, sharding: Sharding | None
) -> Any:
    """The sum of the weights of all ids of a row, and of a bias that all rows have: (n, k) int64 each -> (n, 1).

    `always`: zeros (n, 1) int64.
    """
    indices, counted, start = [], [], 0
    for name, tensor in tensors.items():
        indices.append(tensor + start)
        counted.append(ops.cast(tensor > 0, keras.config.floatx()))
        start += sizes[name]
    indices.append(always + start)
    counted.append(ops.ones_like(ops.cast(always, keras.config.floatx())))
    table = table_of("_ids", start + 1, 1, decay, "zeros", sharding)
    weights = ops.squeeze(table(ops.concatenate(indices, axis=1)), axis=-1)  # (n, k, 1) -> (n, k)
    return ops.sum(weights * ops.concatenate(counted, axis=1), axis=1, keepdims=True)


def embedded(
    inputs: Mapping[str, Any],
    ids: Mapping[str, int | None],
    width: int,
    decay: float,
    sharding: Sharding | None = None,
) -> Any:
    """All features as (n, k) floats: numbers unchanged, pixels (uint8) from 0 to 1, and for each feature of ids a
    learned vector of `width` numbers, of several ids their mean.
    """
    scaled = {
        name: keras.layers.Rescaling(1 / 255)(tensor) if tensor.dtype == "uint8" else tensor
        for name, tensor in inputs.items()
    }
    parts = numbers_of(scaled, ids)
    for name, size in ids.items():
        there = ops.cast(ops.not_equal(inputs[name], 0), keras.config.floatx())  # (n, length)
        count = ops.maximum(ops.sum(there, axis=1, keepdims=True), 1)
        table = table_of(f"_{scope_name(name)}_vectors", size, width, decay, sharding=sharding)
        parts.append(ops.sum(vectors(inputs[name], table), axis=1) / count)
    return joined(parts)


def vectors(tensor: Any, table: Any) -> Any:
    """The learned vector of each id in a layer of `table_of`, zeros for id 0: (n, k) int64 -> (n, k, width)."""
    found = table(tensor)
    return found * ops.expand_dims(ops.cast(ops.not_equal(tensor, 0), found.dtype), -1)


def last_of(x: Any, ids: Any) -> Any:
    """The vector of the last id of each row, zeros for a row without ids: (n, length, k), (n, length) -> (n, k)."""
    there = ops.cast(ids > 0, x.dtype)
    later = ops.sum(there, axis=1, keepdims=True) - ops.cumsum(there, axis=1)
    last = there * ops.cast(ops.equal(later, 0), x.dtype)
    return ops.sum(x * ops.expand_dims(last, -1), axis=1)


def pairs_of(ids: Any, size: int, units: int) -> Any:
    """What each id alone says of the next: a learned row of `units` numbers, first 0, of the last of (n, length) ids.

    (n, units), in floatx. `size`: ids are below it. A table of pairs, as counts of what follows what would be.
    """
    last = last_of(ops.expand_dims(ids, -1), ids)[:, 0]
    table = keras.layers.Embedding(size, units, embeddings_initializer="zeros", name="_pairs", dtype=floatx())
    return table(last)


def dense_layers(x: Any, chosen: Mapping[str, Any]) -> Any:
    """Hidden layers as the settings `layers`, `width`, `dropout` and `decay` say: (n, k) -> (n, width)."""
    for number in range(chosen["layers"]):
        penalty = penalty_of(chosen["decay"])
        x = keras.layers.Dense(chosen["width"], activation="relu", kernel_regularizer=penalty, name=f"_dense{number}")(
            x
        )
        x = keras.layers.Dropout(chosen["dropout"], name=f"_dropout{number}")(x)
    return x


def penalty_of(decay: float) -> Any:
    """Keras' L2 regulariser; None without a decay."""
    return keras.regularizers.L2(decay) if decay else None


def column_of(model: str, setting: str, wanted: str, candidates: list[str], kind: str) -> str:
    """The feature that the setting names or, if it names none, the only candidate.

    Raises ConfigError if it is none of `candidates`, or if there is not exactly one; `kind` says what they are.
    """
    if wanted in candidates or (not wanted and len(candidates) == 1):
        return wanted or candidates[0]
    raise ConfigError(
        f"the model {model} needs its `{setting}`",
        got=f"{setting}={wanted}" if wanted else f"no --set {setting}, and {len(candidates) or 'no'} candidates",
        allowed=f"{kind}: {', '.join(candidates)}" if candidates else f"{kind}, which this dataset has not",
        next_step=f"Give --set {setting}=COLUMN." if candidates else "Declare such a column (docs/schema.md).",
    )


def sequence_of(model: str, signature: Signature, wanted: str) -> str:
    """The feature of several ids in order that `--set sequence` names, or the only one. Raises ConfigError."""
    candidates = [name for name in ids_of(signature) if math.prod(signature.features[name].shape) > 1]
    return column_of(model, "sequence", wanted, candidates, "a column with the encoding `sequence` of ids")
