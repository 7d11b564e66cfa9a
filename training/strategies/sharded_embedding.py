"""`ShardedEmbedding`: a Keras layer whose rows are divided over the ranks, and the tables of a model on one rank.

The rows are no Keras variables: each rank holds 1 / num_ranks of them in host memory (sharded_table.py). The layer has
one trainable number, which never changes: its gradient is 0, or NaN if a row's gradient is not finite. So the ranks
agree on rows as on all gradients, and a step that they skip changes no row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import psutil
import tensorflow as tf
from numpy.typing import NDArray

from lockstep.features.schema.signature import Signature
from lockstep.storage.errors import ConfigError, LockstepError
from training.comm.base import Communicator
from training.config import TrainConfig
from training.run.checkpoint import Tensors, TensorSpec
from training.run.checkpoint_division import Piece
from training.steps.distribute import exchange_of, skipped_of
from training.steps.ordered import put_last, tail
from training.strategies.sharded_table import SHARDS, ShardedTable, TableOptions

Array = NDArray[Any]
TABLES = "tables"
"""The kind of a table's tensors in a checkpoint: tables/LAYER/rows (padded, width), tables/LAYER/squares (padded,)."""
ANCHOR = "rows_are_finite"


class _Calls:
    """Functions of arrays that wait for other ranks, called from a step's graph in the order of the trace."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        """The exception that a function raised: TensorFlow repeats only its text."""

    def call(self, function: Callable[..., Any], inputs: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
        """The results of `function(*arrays)`, after all collectives of this graph that were traced before."""

        def guarded(*arrays: Any) -> Any:
            try:
                return function(*arrays)
            except BaseException as error:
                self.error = error
                raise

        with tf.control_dependencies(tail()):
            found: list[Any] = tf.nest.flatten(tf.numpy_function(guarded, list(inputs), dtypes, name="table"))
        put_last(found[0])
        return found


@keras.saving.register_keras_serializable("lockstep")
class ShardedEmbedding(keras.layers.Layer):
    """A learned row of `width` numbers for each id from 0 to rows - 1: (n, ...) integers -> (n, ..., width).

    Rows are learned by row-wise Adagrad with `learning_rate`, whatever the model's optimizer is. Their first values are
    from -spread to spread, a function of seed, the layer's name and the id. Raises ConfigError for invalid arguments.
    """

    def __init__(
        self,
        rows: int,
        width: int,
        *,
        seed: int = 0,
        spread: float = 0.05,
        learning_rate: float = 0.05,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._options: dict[str, Any] = {
            "rows": rows, "width": width, "seed": seed, "spread": spread, "learning_rate": learning_rate,
        }  # fmt: skip
        self.options = TableOptions(name=self.name, dtype=self.variable_dtype, **self._options)
        self._calls = _Calls()
        self._table: ShardedTable | None = None

    def open(self, communicator: Communicator, scale: float) -> ShardedTable:
        """Allocate this rank's rows; see ShardedTable."""
        self._table = ShardedTable(self.options, communicator, scale)
        return self._table

    @property
    def error(self) -> BaseException | None:
        """The exception that ended a call."""
        return self._calls.error

    def build(self, input_shape: Any) -> None:
        self.anchor = self.add_weight(shape=(), initializer="zeros", name=ANCHOR, autocast=False)
        self.built = True

    def call(self, ids: Any, training: bool | None = None) -> Any:
        """The rows of `ids`, in the layer's compute dtype. A collective when it runs."""

        @tf.custom_gradient
        def rows_of(anchor: tf.Tensor) -> Any:
            dtypes = [tf.as_dtype(self.variable_dtype), tf.int64]
            rows, number = self._calls.call(partial(self._look_up, bool(training)), [ids], dtypes)
            rows.set_shape((*ids.shape, self.options.width))

            def backward(upstream: tf.Tensor) -> tf.Tensor:
                (finite,) = self._calls.call(self._take, [number, upstream], [anchor.dtype])
                return tf.reshape(finite, ())

            return rows, backward

        return tf.cast(rows_of(tf.convert_to_tensor(self.anchor)), self.compute_dtype)

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        return (*input_shape, self.options.width)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | self._options

    def _opened(self) -> ShardedTable:
        if self._table is None:
            raise LockstepError(
                f"the rows of the layer {self.name} are not on this rank",
                got="a call before Tables.of(model, ...)",
                allowed="a model that jobs.train trains",
                next_step="Train the model with jobs.train; its export has plain Embedding layers.",
            )
        return self._table

    def _look_up(self, keep: bool, ids: Array) -> tuple[Array, Any]:
        rows, number = self._opened().look_up(ids, keep=keep)
        return rows, np.int64(number)

    def _take(self, number: Any, gradient: Array) -> Any:
        finite = self._opened().take_gradient(int(number), gradient)
        return gradient.dtype.type(0.0 if finite else np.nan)


def sharded_layers(model: keras.Model) -> list[ShardedEmbedding]:
    """The layers of `model` whose rows are in shards, in Keras' order."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, ShardedEmbedding)]


def check_combination(config: TrainConfig, model: keras.Model) -> None:
    """Raise ConfigError if the run cannot have tables in shards, or asks for them and the model has none."""
    layers = sharded_layers(model)
    if not layers:
        if config.shard_embeddings is not None:
            raise ConfigError(
                f"the model {config.model} has no table to divide over the ranks",
                got=f"--shard-embeddings {config.shard_embeddings}",
                allowed="two-tower or wide-deep with a table of at least so many bytes, or layers ShardedEmbedding",
                next_step="Leave out --shard-embeddings, or give fewer bytes.",
            )
        return
    inner = getattr(model.optimizer, "inner_optimizer", None)
    clipping = [name for name in ("clipnorm", "clipvalue", "global_clipnorm") if getattr(model.optimizer, name, None)]
    reasons = {
        "--init-from": config.init_from is not None and "first rows are drawn by the ranks that own them",
        "--delay": config.delay and "rows are updated in the step of their gradients",
        "--sync-every": config.sync_every != 1 and "a row is on one rank only, so no copies can drift apart",
        "--strategy async": config.strategy != "sync" and "rows are updated in the step of their gradients",
        "--compression": config.compression != "none" and "the word of a row that is not finite must arrive as it is",
        "--micro-batches": config.micro_batches > 1 and "rows are updated once a step",
        "--canonical": config.canonical and "gradients of rows are added in the order of ranks, not in one tree",
        "--precision mixed_float16": inner is not None and "gradients of rows have no loss scale",
        f"--backend {config.backend}": config.backend in ("tensorflow", "nccl") and "rows are in host memory",
        f"an optimizer with {', '.join(clipping)}": clipping and "its norm would not count gradients of rows",
    }
    for what, why in reasons.items():
        if why:
            raise ConfigError(
                f"{what} cannot be combined with tables in shards",
                got=f"the layer {layers[0].name} and {what}",
                allowed=f"one of them: {why}",
                next_step=f"Leave out {what}, or --shard-embeddings.",
            )


class Tables:
    """The tables of a model on this rank. Every rank makes the same calls."""

    def __init__(self, model: keras.Model, layers: Sequence[ShardedEmbedding], communicator: Communicator) -> None:
        """Allocate this rank's rows. `communicator` is a group for the tables only; `model` is compiled with a
        distributed optimizer."""
        self._model, self._comm = model, communicator
        scale = exchange_of(model.optimizer).scale
        self._layers, self._calls = layers, _Calls()
        self._tables = {layer.name: layer.open(communicator, scale) for layer in layers}

    @classmethod
    def of(cls, model: keras.Model, communicator: Communicator) -> Tables | None:
        """The tables of `model`, with a group of `communicator`; None if it has none. A collective."""
        layers = sharded_layers(model)
        if not layers:
            return None
        group = communicator.group(range(communicator.num_ranks))
        group.deadline_s = communicator.deadline_s
        return cls(model, layers, group)

    @property
    def error(self) -> BaseException | None:
        """The exception that ended a look-up or an update."""
        errors = [self._calls.error, *(layer.error for layer in self._layers)]
        return next((error for error in errors if error is not None), None)

    def install(self) -> None:
        """Make each step of the model's `fit` end with the update of rows, each batch of a test begin with a round of
        `serve`; after the model has its step (RankStep.install)."""
        train_step, test_step = self._model.train_step, self._model.test_step

        def train(data: Any) -> Any:
            logs = train_step(data)
            self._calls.call(self._commit, [skipped_of(self._model.optimizer)], [tf.int32])
            return logs

        def test(data: Any) -> Any:
            self._calls.call(lambda: np.int32(self._round(active=True)), [], [tf.int32])
            return test_step(data)

        object.__setattr__(self._model, "train_step", train)  # bypasses Keras' tracking
        object.__setattr__(self._model, "test_step", test)

    def serve(self, signature: Signature) -> None:
        """After this rank's last batch of a test: answer the look-ups of ranks that have more. A collective."""
        nothing = {name: np.zeros((0, *spec.shape), spec.dtype) for name, spec in signature.features.items()}
        while self._round(active=False):
            self._model(nothing, training=False)

    def specs(self) -> dict[str, TensorSpec]:
        """Name -> shape and dtype of each whole tensor of the tables in a checkpoint."""
        found = {}
        for name, table in self._tables.items():
            padded, width, dtype = table.options.padded, table.options.width, table.options.dtype
            found[f"{TABLES}/{name}/rows"] = TensorSpec((padded, width), dtype)
            found[f"{TABLES}/{name}/squares"] = TensorSpec((padded,), dtype)
        return found

    def parts(self) -> dict[Piece, Array]:
        """This rank's part of each tensor, flat: views, not copies."""
        found: dict[Piece, Array] = {}
        for name, table in self._tables.items():
            width, first, stop = table.options.width, table.first, table.stop
            found[Piece(f"{TABLES}/{name}/rows", first * width, stop * width)] = table.rows.reshape(-1)
            found[Piece(f"{TABLES}/{name}/squares", first, stop)] = table.squares
        return found

    def whole(self) -> Tensors | None:
        """On rank 0 the whole tensors, on others None. A collective."""
        found: Tensors = {}
        for piece, part in self.parts().items():
            nothing, leads = part[:0], self._comm.rank == 0
            parts = self._comm.all_to_all_ragged([part, *[nothing] * (self._comm.num_ranks - 1)])
            if leads:
                spec = self.specs()[piece.name]
                found[piece.name] = np.concatenate(parts).reshape(spec.shape)
        return found if self._comm.rank == 0 else None

    def _commit(self, skipped: Any) -> Any:
        for table in self._tables.values():
            table.commit(skipped=bool(skipped))
        return np.int32(0)

    def _round(self, *, active: bool) -> bool:
        """Whether a rank has a batch to test now."""
        flag = np.array([active], np.uint8)
        self._comm.all_reduce(flag, "max")
        return bool(flag[0])


def table_bytes(model: keras.Model) -> int:
    """Bytes of all tables in shards of `model`, whole, with their accumulators."""
    return sum(layer.options.nbytes for layer in sharded_layers(model))


COPIES = 4  # of all tables, at once: as they were read, by id, as a variable, and in the file that Keras saves


def check_fits(specs: Mapping[str, TensorSpec], what: str) -> None:
    """Raise ConfigError if whole tensors of `specs`, of all ranks, do not fit into this process's free memory."""
    needed = COPIES * sum(math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in specs.values())
    free = psutil.virtual_memory().available
    if needed > free:
        raise ConfigError(
            f"{what} do not fit into one process",
            got=f"{needed >> 20} MiB for {COPIES} copies",
            allowed=f"{free >> 20} MiB, the free memory of this host",
            next_step="Use a host with more memory for export, evaluation and prediction.",
        )


def plain_weights(tensors: Mapping[str, Array], expected: Mapping[str, TensorSpec]) -> Tensors:
    """The weights of a model with Embedding layers, as `expected` of it, from those of a model with tables in shards.

    `tensors` are the whole weights and tables of a checkpoint; without tables they are returned unchanged.
    """
    found = dict(tensors)
    for name in tensors:
        if not name.startswith(f"{TABLES}/") or not name.endswith("/rows"):
            continue
        layer = name.split("/", 1)[1].rpartition("/")[0]
        (anchor,) = [one for one in tensors if one.endswith(f"/{layer}/{ANCHOR}")]
        target = anchor.removesuffix(ANCHOR) + "embeddings"
        spec = expected.get(target)
        if spec is not None and len(spec.shape) == 2 and -(-spec.shape[0] // SHARDS) * SHARDS == len(tensors[name]):
            table = TableOptions(layer, *spec.shape, dtype=spec.dtype)
            found[target] = tensors[name][table.positions(np.arange(table.rows))]
            del found[anchor]  # else the caller finds that the model is another one
    return {name: value for name, value in found.items() if not name.startswith(f"{TABLES}/")}
