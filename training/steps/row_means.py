"""A check before the first step: whether a training step is a mean over rows, as ranks compute it from their parts.

Ranks apply the sum of (n_r / G) g_r, where g_r is the gradient of rank r's rows. That is the gradient of the global
batch only if a row adds the same to it whatever the other rows are. Losses that compare rows of a batch, that sum over
it, or that are no linear function of its means do not; nor do gradients that a train_step clips itself, or a step that
changes weights before it computes them.

The model's own train_step runs a few times on some rows, in eager mode, without applying anything. Of rows `a` and `b`,
those of `a` are replaced by others. The gradient of both must change by a's share of the change in the gradient of `a`
alone. What does not depend on rows (a penalty on weights) cancels, and what is drawn for a row (dropout) is the same
each time, since `a` comes first in both. Batch normalisations use their moving averages meanwhile: over which rows
their statistics are is a choice of the run.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.eager import context

from lockstep.storage.errors import ConfigError, LockstepError
from lockstep.training.comm.base import Communicator, SoloCommunicator
from lockstep.training.exchange.compare_ranks import view_of
from lockstep.training.steps.batchnorm import normalisations
from lockstep.training.steps.draws import draws_of_step
from lockstep.training.steps.losses import Denominators, Divides
from lockstep.training.steps.model_state import SEEDS, unchanged, variables_of
from lockstep.training.steps.ordered import OrderedCalls
from lockstep.training.steps.over_ranks import StepOverRanks, step_over_ranks
from lockstep.training.steps.patching import swapped, swapped_class

log = logging.getLogger(__name__)
Array = NDArray[Any]
_OF_PROCESS = threading.RLock()  # seeds of a process: its ranks may be threads
MOST_ROWS = (8, 12)
"""The most rows of `a` and of `b`: at most as much work as one batch of 56 rows, and enough for losses of pairs and
triplets."""
ROUNDING = 200.0  # times epsilon, relative to a variable's gradient: ResNet-56 and the transformer are off by 10
SMALLEST = 2.0  # times epsilon, relative to the step's largest gradient: some are zero but for rounding (0.04 seen)
MOST_TOLERANCE = 0.2  # of layers of 16 bits
MOST_ELEMENTS = 1 << 16  # of one gradient: rows that see each other do so in all of it
GATHER = "Take the rows of all ranks where rows are compared, `on_ranks.gather(x)`"
TOTAL = "give a sum over rows to `on_ranks.total(loss)`"
MEAN = "average what a step computes from its own gradients, `on_ranks.mean(gradients)`"
PAGE = "docs/models.md, `Losses that are no means over rows`."


@dataclass(slots=True)
class Seen:
    """What a step did on some rows. Arrays by (number of the call of `apply`, path of the variable)."""

    gradients: dict[tuple[int, str], Array] = field(default_factory=dict)
    applied: list[tuple[Any, list[Any]]] = field(default_factory=list)
    """Each call of `apply`: the optimizer, and the variables."""
    early: dict[str, Array] = field(default_factory=dict)
    """Trained weights that had changed when an optimizer was to apply gradients."""
    late: dict[str, Array] = field(default_factory=dict)
    """Variables that were changed by no optimizer of the model, at the end of the step."""
    added: dict[str, float] = field(default_factory=dict)
    """What each layer added to the loss by `add_loss`."""
    reaches: bool = False
    """Whether it called functions that see all ranks' rows."""


class _Reached(StepOverRanks):
    """A step that is alone: notes that it asks for other ranks' rows."""

    def __init__(self, scale: float, seen: Seen) -> None:
        super().__init__(None, scale)
        self._seen = seen

    def gather(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        self._seen.reaches = True
        return x, tf.zeros((), tf.int64)

    def mean(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        self._seen.reaches = True
        return values


class _RowSums(Denominators):
    """Losses of Keras' reductions as sums over rows: what else divides them, ranks add up
    (lockstep.training.steps.losses).
    """

    def __init__(self, scale: float, rows: int) -> None:
        super().__init__(OrderedCalls(SoloCommunicator()), scale, checked=True)
        self._rows = rows

    def _check_whole(self, loss: Any, divides: Divides) -> None:
        pass

    def _corrected(self, local: Any, part: Any, name: str) -> Any:
        return local * tf.cast(part, local.dtype) / self._rows


class _Moving(keras.layers.BatchNormalization):
    """Mixed in before a layer's own class: by its moving averages, also in training."""

    def call(self, *args: Any, **options: Any) -> Any:
        """Normalise as an evaluation does."""
        return super().call(*args[:1], **{**options, "training": False})


@dataclass(frozen=True, slots=True)
class Steps:
    """Runs a model's train_step on some rows, and leaves the model as it was."""

    model: keras.Model
    train_step: Callable[[Any], Any]
    optimizers: Sequence[keras.optimizers.Optimizer]
    stand_ins: Callable[[keras.Model], Any]
    """A context in which layers that call other ranks do not."""
    seed: int = 0

    def see(self, data: Any, rows: Sequence[int], whole: int, draw: int = 0) -> Seen:
        """A step on these rows of `data`, as a part of `whole` rows; `draw` chooses what it draws."""
        seen = Seen()
        part = keras.tree.map_structure(lambda x: None if x is None else tf.gather(x, list(rows)), data)
        trained = {id(v) for v in self.model.trainable_variables}
        state = {id(v) for v in (*self.model.metrics_variables, *variables_of(self.model, SEEDS))}

        def changed(of: Callable[[int], bool]) -> dict[str, Array]:
            pairs = ((v, view_of(v), view_of(old)) for v, old in before if of(id(v)))
            return {v.path: now.copy() for v, now, old in pairs if _differ(now, old)}

        def apply(grads: Sequence[Any], trainable_variables: Any = None, *, optimizer: Any) -> None:
            given = optimizer._trainable_variables if trainable_variables is None else list(trainable_variables)
            number = len(seen.applied)
            seen.applied.append((optimizer, given))
            for variable, grad in zip(given, list(grads), strict=True):
                if grad is not None:
                    seen.gradients[number, variable.path] = _sample(grad)
            seen.early |= changed(trained.__contains__)

        with ExitStack() as stack:
            before = stack.enter_context(unchanged(self.model))
            stack.callback(self.model._clear_losses)
            stack.enter_context(_same_draws(self.seed + draw))
            for variable in variables_of(self.model, SEEDS) if draw else ():
                variable.assign(variable + draw)
            for one in self.optimizers:
                stack.enter_context(swapped(one, "apply", _bound(apply, one)))
                stack.enter_context(swapped(one, "scale_loss", lambda loss: loss))
            for layer in normalisations(self.model):
                stack.enter_context(swapped_class(layer, _Moving))
            stack.enter_context(self.stand_ins(self.model))
            scale = len(rows) / whole
            stack.enter_context(_RowSums(scale, len(rows)).of(self.model))
            stack.enter_context(step_over_ranks(_Reached(scale, seen)))
            self.train_step(part)
            seen.late = changed(lambda one: one not in state)
            terms = ((layer.name, layer._losses) for layer in self.model._flatten_layers())
            seen.added = {name: sum(float(tf.reduce_sum(term)) for term in own) for name, own in terms if own}
        return seen


def _differ(one: Array, other: Array) -> bool:
    return not np.shares_memory(one, other) and not np.array_equal(one, other)


def _bound(apply: Callable[..., None], optimizer: Any) -> Callable[..., None]:
    return lambda grads, trainable_variables=None: apply(grads, trainable_variables, optimizer=optimizer)


def _sample(grad: Any) -> Array:
    """A gradient in float64, flat: of a table its sums by id, of a large one an even part of its elements."""
    if isinstance(grad, tf.IndexedSlices):
        ids, rows = np.asarray(grad.indices).reshape(-1), np.asarray(grad.values, np.float64)
        rows = rows.reshape(len(ids), -1)
        size = MOST_ELEMENTS if grad.dense_shape is None else max(1, int(grad.dense_shape[0]))
        kept = max(1, MOST_ELEMENTS // size)
        hashed = np.zeros((min(size, MOST_ELEMENTS), min(kept, rows.shape[1])))
        np.add.at(hashed, ids % len(hashed), rows[:, : hashed.shape[1]])
        return hashed.reshape(-1)
    flat = np.asarray(grad).reshape(-1)
    return flat[:: -(-flat.size // MOST_ELEMENTS) or 1].astype(np.float64)


@contextmanager
def _same_draws(seed: int) -> Iterator[None]:
    """While this is open, random numbers of Keras, TensorFlow, NumPy and Python begin with `seed`, and shuffles leave
    their order: which other row a row is mixed with may depend on the rank.
    """
    with _OF_PROCESS, ExitStack() as stack:
        for module in (tf.random, keras.src.backend.random):
            stack.enter_context(swapped(module, "shuffle", lambda x, *_, **__: tf.convert_to_tensor(x)))
        stack.enter_context(_seeded(seed))
        yield


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    eager = context.context()  # TensorFlow has no public way to read its seed
    tensorflow = {name: getattr(eager, name) for name in ("_seed", "_rng") if hasattr(eager, name)}
    numpys, pythons = np.random.get_state(), random.getstate()
    tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)  # of a GPU: it has three digits
    try:
        tf.random.set_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        with draws_of_step(seed, [tf.zeros((), tf.int64)]):
            yield
    finally:
        for name, value in tensorflow.items():
            setattr(eager, name, value)
        np.random.set_state(numpys)
        random.setstate(pythons)
        tf.config.experimental.enable_tensor_float_32_execution(tf32)


def some_rows(data: Any, communicator: Communicator) -> Any:
    """Return as many rows of all ranks' `data` as a check needs, the same on each rank. A collective."""
    each = -(-2 * sum(MOST_ROWS) // communicator.num_ranks)

    def of_all(x: Any) -> Any:
        mine = np.ascontiguousarray(x)[:each]
        if mine.dtype == object:  # text: a rank's own
            return tf.convert_to_tensor(x)
        parts = communicator.all_gather_ragged(mine.reshape(-1).view(np.uint8))
        return tf.convert_to_tensor(np.concatenate(parts).view(mine.dtype).reshape(-1, *mine.shape[1:]))

    return keras.tree.map_structure(lambda x: None if x is None else of_all(x), data)


def check_row_means(steps: Steps, data: Any, name: str) -> None:
    """Raise ConfigError unless a step is a mean over the rows of `data`: (x, y, weights) as fit takes them, or x.

    `name` is the model's. A step that calls functions of lockstep.training.steps.over_ranks for other ranks' rows
    itself is not judged, nor one that cannot be repeated.
    """
    there = len(next(x for x in keras.tree.flatten(data) if x is not None))
    a, b = (max(1, min(most, there // part)) for most, part in zip(MOST_ROWS, (5, 3), strict=True))
    fault: _Fault | None = None
    for first in (0, a + b):  # whether one activation is above zero may hang on rounding, but not with other rows too
        order = [number % there for number in range(first, first + 2 * (a + b))]
        rows = (order[:a], order[a : 2 * a], order[2 * a : 2 * a + b], order[2 * a + b :])
        try:
            fault = _fault(steps, data, *rows)
        except LockstepError:
            raise
        except Exception as error:  # a step that runs in a graph only, or that fails there too and then ends the run
            log.warning("%s: not known to be a mean over rows: its step cannot run in eager mode: %s", name, error)
            return
        if fault is None:
            return
    assert fault is not None, "returned before"
    _refuse(fault, steps.model, name)


@dataclass(frozen=True, slots=True)
class _Fault:
    kind: str
    """How the step differs from a mean over rows: early, late, state, sum, or coupled."""
    path: str
    """The path of the variable that shows the difference most."""
    share: float = 0.0
    """How much that variable's gradient is off, relative to its size."""
    layers: tuple[str, ...] = ()
    """The layers whose add_loss is no mean over rows."""


def _fault(
    steps: Steps, data: Any, first: list[int], second: list[int], rest: list[int], others: list[int]
) -> _Fault | None:
    whole = len(first) + len(rest)
    share, tolerance = len(first) / whole, _tolerance(steps.model)
    both, changed = steps.see(data, [*first, *rest], whole=whole), steps.see(data, [*second, *rest], whole=whole)
    if both.reaches:
        return None
    if path := _by_rows(both.early, changed.early):
        return _Fault("early", path)
    if path := _by_rows(both.late, changed.late):
        trained = any(v.path == path for v in steps.model.trainable_variables)
        return _Fault("late" if trained else "state", path)
    alone, alone_changed = steps.see(data, first, whole=whole), steps.see(data, second, whole=whole)
    seen = [one.gradients for one in (both, changed, alone, alone_changed)]
    path, off = _worst(seen, (1.0, -1.0, -share, share), tolerance)
    if not path:
        return None
    again = steps.see(data, [*first, *rest], whole=whole).gradients
    if _worst([both.gradients, again], (1.0, -1.0), tolerance)[0]:
        log.warning("the step cannot be repeated: what it draws has no seed that is known, so it was not judged")
        return None
    ratio = _ratio(seen)
    if _worst(
        [both.gradients, steps.see(data, [*first, *rest], whole=whole, draw=1).gradients], (1.0, -1.0), tolerance
    )[0]:
        # It draws, perhaps others for `first` alone. With as many rows it draws the same: do these see each other?
        more = [steps.see(data, [*one, *others], whole=whole).gradients for one in (first, second)]
        path, off = _worst([seen[0], seen[1], *more], (1.0, -1.0, -1.0, 1.0), tolerance)
        if not path and abs(ratio - share) < (1 - share) / 2:
            return None
    layers = tuple(
        name
        for name, value in both.added.items()
        if abs(value - changed.added[name] - share * (alone.added[name] - alone_changed.added[name]))
        > tolerance * max(abs(one.added[name]) for one in (both, changed, alone, alone_changed))
    )
    is_sum = not _worst(seen, (1.0, -1.0, -1.0, 1.0), tolerance)[0]
    return _Fault("sum" if is_sum else "coupled", path or next(iter(seen[0]))[1], off, layers)


def _tolerance(model: keras.Model) -> float:
    dtypes = {tf.as_dtype(layer.compute_dtype) for layer in model._flatten_layers() if layer.compute_dtype}
    epsilons = [float(ml_dtypes.finfo(one.as_numpy_dtype).eps) for one in dtypes if one.is_floating]
    return min(MOST_TOLERANCE, ROUNDING * max([float(np.finfo(np.float32).eps), *epsilons]))  # users cast to float32


def _worst(
    seen: Sequence[dict[tuple[int, str], Array]], factors: Sequence[float], tolerance: float
) -> tuple[str, float]:
    """The path of the variable whose gradients, times `factors`, add up to most, relative to their size; and how much.

    "" if all add up to zero within `tolerance`, or if they are not finite, which the step itself reports.
    """
    keys = {key for one in seen for key in one}
    sizes = {key: max(float(np.linalg.norm(one[key])) for one in seen if key in one) for key in keys}
    largest = max(sizes.values(), default=0.0)
    if not np.isfinite(largest):
        return "", 0.0
    worst = ("", 0.0)
    for key in sorted(keys):
        total = sum(factor * one[key] for one, factor in zip(seen, factors, strict=True) if key in one)
        off = float(np.linalg.norm(total))
        if off > tolerance * sizes[key] + tolerance * SMALLEST / ROUNDING * largest:
            worst = max(worst, (key[1], off / sizes[key]), key=lambda one: one[1])
    return worst


def _ratio(seen: Sequence[dict[tuple[int, str], Array]]) -> float:
    """How much of the change of `first` alone is in the change of all rows: its share for means, 1 for sums."""
    both, changed, alone, alone_changed = seen
    keys = set.intersection(*(set(one) for one in seen))
    parts = [(both[key] - changed[key], alone[key] - alone_changed[key]) for key in keys]
    below = sum(float(part @ part) for _, part in parts)
    return sum(float(part @ other) for part, other in parts) / below if below else 1.0


def _by_rows(one: dict[str, Array], other: dict[str, Array]) -> str:
    """The first variable that the step changes in another way for other rows; "" if there is none."""
    paths = (path for path in {**one, **other} if path not in one or path not in other)
    differ = (path for path in one if path in other and not np.array_equal(one[path], other[path], equal_nan=True))
    return next((path for found in (paths, differ) for path in found), "")


def _refuse(fault: _Fault, model: keras.Model, name: str) -> None:
    kind = type(model)
    own = [
        f"{kind.__name__}.{part}"
        for part in ("train_step", "compute_loss")
        if getattr(kind, part) is not getattr(keras.Model, part)
    ]
    loss = "" if model._compile_loss is None else f"the loss {getattr(model.loss, 'name', None) or _name(model.loss)}"
    source = " and ".join([f"add_loss of the layer {layer}" for layer in fault.layers] or own or [loss or "the loss"])
    if fault.kind in ("early", "late", "state"):
        when = {
            "early": "before the optimizer applies gradients",
            "late": "by no optimizer that is an attribute of the model",
            "state": "by its own rows",
        }
        raise ConfigError(
            f"the model {name} changes weights within a step, each rank by its own rows, so ranks would part",
            got=f"{fault.path}, changed {when[fault.kind]} ({' and '.join(own) or kind.__name__})",
            allowed="weights that optimizers of the model change, and changes that are the same on all ranks",
            next_step=f"{MEAN[0].upper()}{MEAN[1:]}, before they change weights; make each optimizer an attribute of "
            f"the model; or train on one rank. {PAGE}",
        )
    how = "it is a sum over rows" if fault.kind == "sum" else "it depends on which rows are together"
    raise ConfigError(
        f"the loss of the model {name} is no mean over rows, so several ranks would train another model than one",
        got=f"{source}: {how}; the gradient of {fault.path} is {fault.share:.1%} off the mean of its parts'",
        allowed="losses to which each row adds the same whatever the other rows are, divided by the number of rows",
        next_step=f"{GATHER}, {TOTAL}, or {MEAN}; or train on one rank. {PAGE}",
    )


def _name(loss: Any) -> str:
    return loss if isinstance(loss, str) else str(getattr(loss, "__name__", type(loss).__name__))
