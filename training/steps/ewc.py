"""--ewc: a run holds on to what earlier runs have learned, each weight by how much it mattered there.

Elastic weight consolidation: Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks" (PNAS 2017).
The loss gains LAMBDA / 2 * sum of F (w - w_old)^2, where F is the diagonal of the Fisher information. For many days it
is the online form: Schwarz et al., "Progress & Compress" (ICML 2018): one pair (w_old, F) in place of one a day, where
w_old are the last run's weights and F = DECAY * F of the earlier days + F of the last one.

F is the mean over rows of the squared gradient of log p(y | x), row by row, with y drawn from the model's own
prediction: the Fisher information itself, not the "empirical" one of the stored labels (Kunstner et al., "Limitations
of the empirical Fisher approximation", NeurIPS 2019). docs/decisions/090-days.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from lockstep.features.encode.encoder import Encoded
from lockstep.features.images.random_numbers import Draws
from lockstep.features.schema.signature import Signature
from lockstep.storage.errors import ConfigError, DataError
from lockstep.training.comm.base import Communicator
from lockstep.training.exchange.compare_ranks import view_of
from lockstep.training.run.checkpoint import HostBuffer, Tensors, TensorSpec, take, tensors_in

Array = NDArray[Any]
FISHER, OLD = "fisher", "old"
"""The kinds of the two tensors of a trained weight, by which a checkpoint names them."""
DECAY = 0.9
"""The share of an earlier day's information that counts after another day: a third after ten. Without it the sum grows
day by day until no weight moves."""
BATCH_ROWS = 256
GRADIENT_BYTES = 64 << 20
"""Memory for the gradients of single rows, of which as many are computed at a time as it holds."""
SLOT = 1 << 20
"""Keeps the draws of labels apart from those of augmentation, which have the same seed."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """What earlier runs have learned: for each trained weight, in the model's order."""

    fisher: tuple[Array, ...]
    old: tuple[Array, ...]

    @classmethod
    def begun(cls, model: keras.Model, stored: bytes, where: str) -> Earlier:
        """The information in the file `where` of an exported model, whose weights `model` has now.

        Raises CorruptionError for another kind of file, DataError for that of another model.
        """
        tensors = tensors_in(np.frombuffer(stored, np.uint8), where)
        fisher = take(tensors, _specs(model, FISHER), where)
        return cls(tuple(fisher), tuple(np.array(view_of(one)) for one in model.trainable_variables))

    @classmethod
    def resumed(cls, model: keras.Model, tensors: Tensors, where: str) -> Earlier:
        """What `tensors` of the checkpoint `where` hold. Raises DataError for tensors of another model."""
        found = ([np.array(one) for one in take(tensors, _specs(model, kind), where)] for kind in (FISHER, OLD))
        return cls(*map(tuple, found))

    def tensors(self, model: keras.Model) -> Tensors:
        """What a checkpoint needs, so that a run resumes without the earlier run."""
        kinds = ((FISHER, self.fisher), (OLD, self.old))
        return {name: one for kind, values in kinds for name, one in zip(_specs(model, kind), values, strict=True)}

    def pull(self, model: keras.Model, strength: float) -> None:
        """Add strength / 2 * F (w - w_old)^2 to the loss of the steps that are traced from now on, next to the model's
        own penalties: so it takes part in whatever ranks do with a loss.
        """
        with tf.init_scope():
            for variable, fisher, old in zip(model.trainable_variables, self.fisher, self.old, strict=True):
                own = variable.regularizer
                variable.regularizer = _Pull(strength, tf.constant(fisher), tf.constant(old), own)


class _Pull(keras.regularizers.Regularizer):
    """The penalty of one weight, added to its own one."""

    def __init__(self, strength: float, fisher: tf.Tensor, old: tf.Tensor, own: Any) -> None:
        self._strength, self._fisher, self._old, self._own = strength, fisher, old, own

    def __call__(self, x: Any) -> tf.Tensor:
        gap = tf.convert_to_tensor(x) - self._old
        penalty = 0.5 * self._strength * tf.reduce_sum(self._fisher * gap * gap)
        return penalty if self._own is None else penalty + self._own(x)


def stored_fisher(model: keras.Model, fisher: Sequence[Array]) -> bytes:
    """The file of this information, safetensors with a tensor fisher/NUMBER/PATH for each trained weight."""
    named = zip(_specs(model, FISHER).items(), fisher, strict=True)
    return HostBuffer().fill({name: value.astype(spec.dtype) for (name, spec), value in named}).tobytes()


def fisher_of(
    model: keras.Model,
    batches: Iterable[Encoded],
    seed: int,
    communicator: Communicator,
    *,
    logits: bool,
    report: Callable[[int], None] = lambda number: None,
) -> list[Array]:
    """The Fisher information of each trained weight, the mean over all ranks' rows: float64 of the weight's shape.

    `batches` are this rank's rows, each of which counts by its weight. `logits`: whether the model's outputs are
    log-odds or logarithms, not probabilities. Dropout is off, and penalties do not count. `report` is called with the
    number of each batch. A collective. Raises DataError if all rows have the weight 0.
    """
    squares: Callable[..., list[tf.Tensor]] | None = None
    part = _rows_at_once(model)
    sums = [np.zeros(variable.shape) for variable in model.trainable_variables]
    total = np.zeros(1)
    for number, rows in enumerate(batches):
        report(number)
        weights = np.ones(len(rows.sample_id)) if rows.weight is None else rows.weight.astype(np.float64)
        labels = drawn_labels(probabilities(model, rows.x, logits), seed, rows.sample_id)
        squares = squares or _squares(model, logits, rows.x)
        for start in range(0, len(labels), part):
            cut = slice(start, start + part)
            found = squares({name: value[cut] for name, value in rows.x.items()}, labels[cut])
            for one, square in zip(sums, found, strict=True):
                one += np.tensordot(weights[cut], square.numpy().astype(np.float64), 1)
        total += weights.sum()
    flat = np.concatenate([total, *(one.reshape(-1) for one in sums)])
    communicator.all_reduce(flat)
    if not flat[0]:
        raise DataError(
            "no row says how much a weight matters",
            got="rows of weight 0 only",
            allowed="a training split with a row that counts",
            next_step="Build the dataset again, or train without --ewc.",
        )
    ends = np.cumsum([one.size for one in sums])
    parts = np.split(flat[1:] / flat[0], ends[:-1])
    return [one.reshape(variable.shape) for one, variable in zip(parts, model.trainable_variables, strict=True)]


def with_earlier(fisher: Sequence[Array], earlier: Earlier | None) -> list[Array]:
    """This run's information and the share of that of the earlier ones that still counts."""
    if earlier is None:
        return list(fisher)
    return [DECAY * before + now for before, now in zip(earlier.fisher, fisher, strict=True)]


def probabilities(model: keras.Model, x: dict[str, Array], logits: bool) -> Array:
    """The model's prediction of each class, (n, classes) float64; a yes-or-no model has two classes."""
    output: Array = np.asarray(keras.ops.convert_to_numpy(model(x, training=False)), np.float64)
    output = output.reshape(len(output), -1)
    if output.shape[1] == 1:
        yes = 1 / (1 + np.exp(-output)) if logits else output
        return np.concatenate([1 - yes, yes], axis=1)
    if logits:
        output = np.exp(output - output.max(axis=1, keepdims=True))
    return output / output.sum(axis=1, keepdims=True)


def drawn_labels(predicted: Array, seed: int, sample_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """A class for each row of `predicted` (n, classes), drawn with these probabilities: (n,) int64.

    It is a function of the seed and the row's sample id, the same on any rank and after any restart.
    """
    bits = Draws.of(seed, np.zeros(len(sample_ids), np.int64), sample_ids).at(SLOT).bits(0)
    chance = (bits >> np.uint64(11)) * 2.0**-53  # (n,) float64 in [0, 1)
    below = chance[:, None] >= np.cumsum(predicted, axis=1)
    return np.minimum(below.sum(axis=1), predicted.shape[1] - 1)


def check_model(model: keras.Model, signature: Signature) -> None:
    """Raise ConfigError for a model whose predictions are no probabilities of classes, or which computes its loss
    itself.
    """
    own = [n for n in ("train_step", "compute_loss") if getattr(type(model), n) is not getattr(keras.Model, n)]
    classes = signature.num_classes or (None if signature.label is None or signature.label_is_number else 2)
    outputs = [one.shape for one in keras.tree.flatten(model.output)]
    widths = (1, 2) if classes == 2 else (classes,)
    if own or classes is None or len(outputs) != 1 or math.prod(outputs[0][1:]) not in widths:
        got = [f"its own {name}" for name in own]
        got += ["a label that is not yes or no, or a class"] if classes is None else [f"outputs {outputs}"]
        raise ConfigError(
            "--ewc cannot say how much each weight of this model matters",
            got=", ".join(got),
            allowed="Keras' own train_step and loss, and one output: the probabilities or log-odds of the classes",
            next_step="Leave out --ewc; --replay works with any model.",
        )


def _specs(model: keras.Model, kind: str) -> dict[str, TensorSpec]:
    """Name -> shape and dtype of the tensor of this kind of each trained weight."""
    return {
        f"{kind}/{number:04d}/{one.path}": TensorSpec(tuple(one.shape), str(one.dtype))
        for number, one in enumerate(model.trainable_variables)
    }


def _rows_at_once(model: keras.Model) -> int:
    size = sum(math.prod(one.shape) for one in model.trainable_variables) * 8
    return max(1, min(BATCH_ROWS, GRADIENT_BYTES // max(1, size)))


def _squares(model: keras.Model, logits: bool, like: dict[str, Array]) -> Callable[..., list[tf.Tensor]]:
    """Return a function of rows (x by name, as `like`, labels (n,)): the squared gradients of each, (n, *shape of a
    weight).
    """
    specs = {name: tf.TensorSpec((None, *value.shape[1:]), value.dtype) for name, value in like.items()}
    variables = list(model.trainable_variables)

    def loss_of(label: tf.Tensor, output: tf.Tensor) -> tf.Tensor:
        output = tf.reshape(output, (1, -1))
        if output.shape[1] == 1:
            wanted = tf.reshape(tf.cast(label, output.dtype), (1, 1))
            return tf.reduce_sum(keras.ops.binary_crossentropy(wanted, output, from_logits=logits))
        return tf.reduce_sum(keras.ops.sparse_categorical_crossentropy([label], output, from_logits=logits))

    def of_row(row: tuple[dict[str, tf.Tensor], tf.Tensor]) -> list[tf.Tensor]:
        x, label = row
        with tf.GradientTape() as tape:
            output = model({name: value[None] for name, value in x.items()}, training=False)
            loss = loss_of(label, output)
        grads = tape.gradient(loss, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return [tf.square(tf.convert_to_tensor(grad)) for grad in grads]

    @tf.function(input_signature=(specs, tf.TensorSpec((None,), tf.int64)), jit_compile=False)
    def of_rows(x: dict[str, tf.Tensor], labels: tf.Tensor) -> list[tf.Tensor]:
        found: list[tf.Tensor] = tf.vectorized_map(of_row, (x, labels))
        return found

    return of_rows
