"""`ShardedEmbedding`: a Keras layer whose rows are divided over the ranks, and the tables of a model on one rank.

The rows are no Keras variables: each rank holds 1 / num_ranks of them in host memory (sharded_table.py). The layer has
one trainable number, which never changes: its gradient is 0, or NaN if a row's gradient is not finite. So the ranks
agree on rows as on all gradients, and a step that they skip changes no row.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import keras
import numpy as np
import psutil
import tensorflow as tf
from numpy.typing import NDArray

from lockstep.features.schema.signature import Signature
from lockstep.storage.errors import ConfigError, LockstepError
from lockstep.training.comm.base import Communicator
from lockstep.training.config import TrainConfig
from lockstep.training.embeddings.growing_table import GrowingTable
from lockstep.training.embeddings.sharded_table import CHANGED, SHARDS, ShardedTable, TableOptions
from lockstep.training.run.checkpoint import Tensors, TensorSpec
from lockstep.training.run.checkpoint_division import Piece, deal, held
from lockstep.training.run.late_copy import LateCopy
from lockstep.training.steps.distribute import exchange_of, skipped_of
from lockstep.training.steps.optimizers import without_loss_scale
from lockstep.training.steps.ordered import Calls
from lockstep.training.steps.patching import swapped_class
from lockstep.training.ways import EveryStep

log = logging.getLogger(__name__)
Array = NDArray[Any]
Table = ShardedTable | GrowingTable
TABLES = "tables"
"""The kind of a table's tensors in a checkpoint: tables/LAYER/rows (padded, width), and a name for each part of the
optimizer's state, such as tables/LAYER/squares (padded,). Of a table without a number of rows: `rows` and the state for
each of `ids` (n,), `seen`, `totals` (256, 3), and `waiting_ids`, `waiting_times`, `waiting_seen` (m,). A difference
to a whole checkpoint has positions `changed` (k,) and `changed_rows`, ..., and the same names of fewer ids."""
ANCHOR = "rows_are_finite"
LEAST_BYTES = 64 << 20  # smaller tables, all ranks' together, are written whole each time
MOST_DIFFERENCES = 8  # between two whole checkpoints: what a restart reads in addition is at most half of one
PLAIN_ROWS = "rows"
_PLAIN: ContextVar[Mapping[str, Array] | None] = ContextVar("plain tables", default=None)
COPIES = 4  # of all tables, at once: as they were read, by id, as a variable, and in the file that Keras saves


@keras.saving.register_keras_serializable("lockstep")
class ShardedEmbedding(keras.layers.Layer):
    """A learned row of `width` numbers for each id from 0 to rows - 1: (n, ...) integers -> (n, ..., width).

    With `rows` None ids are any int64: an id reads zeros and learns nothing until it was seen `admit_after` times in
    training, and loses its row if it was not seen for `evict_after_steps` (None: never; growing_table.py). Rows are
    learned by `optimizer`, adagrad (row-wise) or adam (lazy), with `learning_rate`, whatever the model's optimizer is.
    Their first values are from -spread to spread, a function of seed, the layer's name and the id. Raises ConfigError
    for invalid arguments. Within `plain_tables` it is a plain layer of Keras.
    """

    def __new__(cls, rows: int | None, width: int, **options: Any) -> Any:
        known = _PLAIN.get()
        return super().__new__(cls) if known is None else _plain_layer(rows, width, known, **options)

    def __init__(
        self,
        rows: int | None,
        width: int,
        *,
        seed: int = 0,
        spread: float = 0.05,
        learning_rate: float = 0.05,
        optimizer: str = "adagrad",
        admit_after: int = 1,
        evict_after_steps: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._options: dict[str, Any] = {
            "rows": rows, "width": width, "seed": seed, "spread": spread, "learning_rate": learning_rate,
            "optimizer": optimizer, "admit_after": admit_after, "evict_after_steps": evict_after_steps,
        }  # fmt: skip
        self.options = TableOptions(name=self.name, dtype=self.variable_dtype, **self._options)
        self._calls = Calls()
        self._table: Table | None = None

    def open(self, communicator: Communicator, scale: float) -> Table:
        """Allocate this rank's rows; see RowExchange."""
        kind = GrowingTable if self.options.rows is None else ShardedTable
        self._table = kind(self.options, communicator, scale)
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

    def _opened(self) -> Table:
        if self._table is None:
            raise LockstepError(
                f"the rows of the layer {self.name} are not on this rank",
                got="a call before Tables.of(model, ...)",
                allowed="a model that lockstep train trains",
                next_step="Train the model with lockstep train; its export has plain Embedding layers.",
            )
        return self._table

    def _look_up(self, keep: bool, ids: Array) -> tuple[Array, Any]:
        rows, number = self._opened().look_up(ids, keep=keep)
        return rows, np.int64(number)

    def _take(self, number: Any, gradient: Array) -> Any:
        finite = self._opened().take_gradient(int(number), gradient)
        return gradient.dtype.type(0.0 if finite else np.nan)


def _plain_layer(
    rows: int | None, width: int, known: Mapping[str, Array], *, name: str | None = None, dtype: Any = None, **_: Any
) -> Any:
    """The layer of Keras with the rows of a ShardedEmbedding; without `rows`, row 0 is for ids that have none."""
    if rows is not None:
        return keras.layers.Embedding(rows, width, name=name, dtype=dtype)
    ids = known.get(name or "", np.empty(0, np.int64))
    chosen = ids if ids.size else np.zeros(1, np.int64)  # Keras has no look-up without ids
    unused = next(one for one in range(-1, -len(chosen) - 2, -1) if one not in chosen)
    look_up = keras.layers.IntegerLookup(num_oov_indices=1, oov_token=unused)
    look_up.set_vocabulary(chosen)
    return keras.Sequential([look_up, keras.layers.Embedding(len(chosen) + 1, width, name=PLAIN_ROWS)], name=name)


@contextmanager
def plain_tables(tensors: Mapping[str, Array]) -> Iterator[None]:
    """While this is open, ShardedEmbedding makes plain layers of Keras, for the ids of the tables in `tensors`."""
    names = [name.split("/", 1)[1] for name in tensors if name.startswith(f"{TABLES}/") and name.endswith("/ids")]
    before = _PLAIN.set({name.removesuffix("/ids"): np.sort(tensors[f"{TABLES}/{name}"]) for name in names})
    try:
        yield
    finally:
        _PLAIN.reset(before)


class _PlainLookup(ShardedEmbedding):
    """Mixed in before a layer's own class: numbers of each id instead of its row, without other ranks."""

    def call(self, ids: Any, training: bool | None = None) -> Any:
        places = tf.range(1, self.options.width + 1, dtype=tf.float32)
        numbers = tf.sin(tf.cast(ids, tf.float32)[..., tf.newaxis] * places)
        return tf.cast(numbers, self.compute_dtype) * (1 + tf.cast(self.anchor, self.compute_dtype))


@contextmanager
def plain_lookups(model: keras.Model) -> Iterator[None]:
    """While this is open, tables in shards call no other rank: rows are functions of ids, times 1 + the anchor."""
    with ExitStack() as stack:
        for layer in sharded_layers(model):
            stack.enter_context(swapped_class(layer, _PlainLookup))
        yield


def sharded_layers(model: keras.Model) -> list[ShardedEmbedding]:
    """The layers of `model` whose rows are in shards, in Keras' order."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, ShardedEmbedding)]


def check_combination(config: TrainConfig, model: keras.Model) -> None:
    """Raise ConfigError if the run cannot have tables in shards, or asks for them and the model has none."""
    layers = sharded_layers(model)
    if not layers:
        if config.step.shard_embeddings is not None:
            raise ConfigError(
                f"the model {config.model.model} has no table to divide over the ranks",
                got=f"--shard-embeddings {config.step.shard_embeddings}",
                allowed="two-tower or wide-deep with a table of at least so many bytes, or layers ShardedEmbedding",
                next_step="Leave out --shard-embeddings, or give fewer bytes.",
            )
        return
    loss_scale = without_loss_scale(model.optimizer) is not model.optimizer
    clipping = [name for name in ("clipnorm", "clipvalue", "global_clipnorm") if getattr(model.optimizer, name, None)]
    reasons = {
        "--init-from": config.model.init_from is not None and "first rows are drawn by the ranks that own them",
        config.way.flag: not isinstance(config.way, EveryStep) and "a row, on one rank only, is updated in its step",
        "--compression": config.step.compression != "none"
        and "the word of a row that is not finite must arrive as it is",
        "--micro-batches": config.step.micro_batches > 1 and "rows are updated once a step",
        "--canonical": config.exactness.canonical
        and "gradients of rows are added in the order of ranks, not in one tree",
        "--precision mixed_float16": loss_scale and "gradients of rows have no loss scale",
        f"--backend {config.ranks.backend}": config.ranks.backend in ("tensorflow", "nccl")
        and "rows are in host memory",
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
        self._layers, self._calls = layers, Calls()
        self._tables = {layer.name: layer.open(communicator, scale) for layer in layers}
        self._base: int | None = None
        self._differences = 0
        self._growing = {name: table for name, table in self._tables.items() if isinstance(table, GrowingTable)}
        for table in self._growing.values():
            log.info(table.describe())

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
        """Answer the look-ups of ranks that have more batches, after this rank's last batch of a test. A collective."""
        nothing = {name: np.zeros((0, *spec.shape), spec.dtype) for name, spec in signature.features.items()}
        while self._round(active=False):
            self._model(nothing, training=False)

    def state(self, since: int | None = None) -> tuple[dict[str, TensorSpec], dict[Piece, Array]]:
        """Name -> shape and dtype of each whole tensor of the tables in a checkpoint, and this rank's parts of them,
        flat: views, where they can be. With `since` only what has changed since the whole checkpoint of that step. A
        collective."""
        parts: dict[str, Array] = {}
        for name, table in self._tables.items():
            if isinstance(table, GrowingTable):
                found = {"totals": table.totals, **table.columns(since or 0)}
            else:
                found = table.columns() if since is None else table.changed_rows()
            parts |= {f"{TABLES}/{name}/{part}": values for part, values in found.items()}
        lengths = self._comm.all_gather(np.array([len(values) for values in parts.values()]))  # (num_ranks, tensors)
        lengths = lengths.reshape(self._comm.num_ranks, -1)
        specs: dict[str, TensorSpec] = {}
        pieces: dict[Piece, Array] = {}
        before, totals = lengths[: self._comm.rank].sum(0).tolist(), lengths.sum(0).tolist()
        for (name, values), first, total in zip(parts.items(), before, totals, strict=True):
            each = math.prod(values.shape[1:])
            specs[name] = TensorSpec((total, *values.shape[1:]), values.dtype.name)
            pieces[Piece(name, first * each, (first + len(values)) * each)] = values.reshape(-1)
        return specs, pieces

    def to_save(self, step: int) -> tuple[int | None, dict[str, TensorSpec], dict[Piece, Array]]:
        """What the checkpoint of `step` holds: `state`, or the difference to the whole checkpoint of an earlier step of
        this process, whose step comes first, if that is small. A collective."""
        whole = self.state()
        if self._base is not None and self._differences < MOST_DIFFERENCES and _bytes_of(whole[0]) >= LEAST_BYTES:
            difference = self.state(self._base)
            if _bytes_of(difference[0]) <= _bytes_of(whole[0]) / 2:
                self._differences += 1
                return (self._base, *difference)
        self._base, self._differences = step, 0
        for table in self._tables.values():
            if isinstance(table, ShardedTable):
                table.touched[:] = False
        return (None, *whole)

    def copies(self, targets: Mapping[str, Array]) -> list[LateCopy]:
        """Copies of the whole tables of a number of rows into `targets`, this rank's parts by the name of the tensor;
        the caller has each `run`, while steps continue to change rows.
        """
        found = []
        for name, table in self._tables.items():
            if isinstance(table, ShardedTable):
                columns = table.columns()
                table.copy = LateCopy(columns, {part: targets[f"{TABLES}/{name}/{part}"] for part in columns})
                found.append(table.copy)
        return found

    @property
    def copied_later(self) -> set[str]:
        """The names of the tensors that `copies` copies."""
        return {
            f"{TABLES}/{name}/{part}"
            for name, table in self._tables.items()
            if isinstance(table, ShardedTable)
            for part in table.columns()
        }

    def restore(self, url: str, manifest: Mapping[str, Any], own: Mapping[int, Tensors]) -> None:
        """Take this rank's rows from a checkpoint, of which `read_parts_and_own` has read `own`. If it holds a
        difference, restore the whole one first. A collective, with the errors of `deal`."""
        whole = manifest.get("base") is None
        specs, pieces = self.state(None if whole else 0)
        alike = {p: v for p, v in pieces.items() if p.name.endswith("/totals")}
        if whole:
            fixed = tuple(f"{TABLES}/{name}/" for name in self._tables if name not in self._growing)
            alike |= {p: v for p, v in pieces.items() if p.name.startswith(fixed)}
        deal(url, manifest, own, self._comm, alike, specs)
        for name, table in self._tables.items():
            named = {one.rpartition("/")[2]: one for one in specs if one.rpartition("/")[0] == f"{TABLES}/{name}"}
            if isinstance(table, ShardedTable) and whole:
                continue
            columns = {part: held(url, manifest, own, one, specs[one]) for part, one in named.items()}
            if isinstance(table, GrowingTable):
                table.load(columns, whole=whole)
            else:
                table.load_changed(columns)
        for each in self._tables.values():
            each.step = int(manifest["step"])

    def whole(self) -> Tensors | None:
        """Return the whole tensors on rank 0, None on others. A collective."""
        found: Tensors = {}
        specs, pieces = self.state()
        for piece, part in pieces.items():
            nothing, leads = part[:0], self._comm.rank == 0
            parts = self._comm.all_to_all_ragged([part, *[nothing] * (self._comm.num_ranks - 1)])
            if leads:
                found[piece.name] = np.concatenate(parts).reshape(specs[piece.name].shape)
        return found if self._comm.rank == 0 else None

    def figures(self) -> dict[str, dict[str, int]]:
        """Return the figures of each table without a number of rows, over all ranks: {rows, waiting, admitted, evicted,
        bytes}. A collective."""
        found = {}
        for name, table in self._growing.items():
            numbers = table.figures()
            self._comm.all_reduce(numbers)
            found[name] = dict(zip(("rows", "waiting", "admitted", "evicted", "bytes"), numbers.tolist(), strict=True))
        return found

    def _commit(self, skipped: Any) -> Any:
        for table in self._tables.values():
            table.commit(skipped=bool(skipped))
        return np.int32(0)

    def _round(self, *, active: bool) -> bool:
        """Whether a rank has a batch to test now."""
        flag = np.array([active], np.uint8)
        self._comm.all_reduce(flag, "max")
        return bool(flag[0])


def _bytes_of(specs: Mapping[str, TensorSpec]) -> int:
    return sum(math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in specs.values())


def with_base(tensors: Mapping[str, Array], base: Mapping[str, Array]) -> Tensors:
    """The whole tables of a checkpoint that holds the difference `tensors` to the checkpoint with the tables `base`."""
    found = dict(tensors)
    for table in {name.rpartition("/")[0] for name in base}:
        parts, older = (
            {name.rpartition("/")[2]: found[name] for name in found if name.rpartition("/")[0] == table}
            for found in (tensors, base)
        )
        if CHANGED in parts:
            for part, values in older.items():
                found[f"{table}/{part}"] = values.copy()
                found[f"{table}/{part}"][parts[CHANGED]] = found.pop(f"{table}/{CHANGED}_{part}")
            del found[f"{table}/{CHANGED}"]
            continue
        newer = np.concatenate([parts["ids"], parts["waiting_ids"]])
        for kind in ("", "waiting_"):
            stays = (older[f"{kind}seen"] > parts["totals"][0, 2]) & ~np.isin(older[f"{kind}ids"], newer)
            for part in (one for one in parts if one != "totals" and one.startswith("waiting_") == bool(kind)):
                found[f"{table}/{part}"] = np.concatenate([older[part][stays], parts[part]])
    return found


def table_bytes(model: keras.Model) -> int:
    """Bytes of all tables in shards of `model`, whole, with their accumulators."""
    return sum(layer.options.nbytes for layer in sharded_layers(model))


def check_fits(specs: Mapping[str, TensorSpec], what: str) -> None:
    """Raise ConfigError if whole tensors of `specs`, of all ranks, do not fit into this process's free memory."""
    needed = COPIES * _bytes_of(specs)
    free = psutil.virtual_memory().available
    if needed > free:
        raise ConfigError(
            f"{what} do not fit into one process",
            got=f"{needed >> 20} MiB for {COPIES} copies",
            allowed=f"{free >> 20} MiB, the free memory of this host",
            next_step="Use a host with more memory for export, evaluation and prediction.",
        )


def plain_weights(tensors: Mapping[str, Array], expected: Mapping[str, TensorSpec]) -> Tensors:
    """The weights of a model with plain layers, as `expected` of it, from those of a model with tables in shards.

    `tensors` are the whole weights and tables of a checkpoint; without tables they are returned unchanged.
    """
    found = dict(tensors)
    for name in tensors:
        if not name.startswith(f"{TABLES}/") or not name.endswith("/rows"):
            continue
        layer = name.split("/", 1)[1].rpartition("/")[0]
        (anchor,) = [one for one in tensors if one.endswith(f"/{layer}/{ANCHOR}")]
        ids = tensors.get(f"{TABLES}/{layer}/ids")
        target = anchor.removesuffix(ANCHOR) + ("embeddings" if ids is None else f"{PLAIN_ROWS}/embeddings")
        spec = expected.get(target)
        if spec is None or len(spec.shape) != 2:
            continue
        if ids is not None:
            found[target] = np.zeros(spec.shape, spec.dtype)
            found[target][1 : len(ids) + 1] = tensors[name][np.argsort(ids)]
        elif -(-spec.shape[0] // SHARDS) * SHARDS == len(tensors[name]):
            table = TableOptions(layer, *spec.shape, dtype=spec.dtype)
            found[target] = tensors[name][table.positions(np.arange(spec.shape[0]))]
        else:
            continue
        del found[anchor]  # else the caller finds that the model is another one
    return {name: value for name, value in found.items() if not name.startswith(f"{TABLES}/")}
