"""A model's state as named tensors: weights, optimizer, metrics and seed generators, saved and loaded."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, Protocol

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from lockstep.features.schema.signature import Signature
from lockstep.storage.documents import canonical_bytes, sha256_hex
from lockstep.storage.errors import ConfigError
from lockstep.training.comm.base import Communicator
from lockstep.training.exchange.compare_ranks import view_of
from lockstep.training.run.checkpoint import Tensors, TensorSpec, take
from lockstep.training.run.checkpoint_division import Piece, deal
from lockstep.training.steps.other_optimizers import others_of

WEIGHTS, OPTIMIZER, METRICS, SEEDS = "weights", "optimizer", "metrics", "seeds"
WHOLE: ContextVar[Callable[[keras.Variable], NDArray[Any]] | None] = ContextVar("whole of a part", default=None)
"""What gets all elements of a divided variable, while a model is saved (lockstep.training.rank.export)."""
PART = "lockstep_part"
"""The attribute of a variable that holds this rank's `Held` part of a larger one."""


class Held(Protocol):
    """What a variable has of a tensor of `shape`. Elements are in C order.

    Every rank has such a part of the same variables, in one order; the methods may be collectives.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""

    @property
    def saved(self) -> tuple[int, int]:
        """Start and stop of the elements that this rank writes to checkpoints: each is one rank's."""

    @property
    def loaded(self) -> tuple[int, int]:
        """Start and stop of the elements that this rank reads from checkpoints."""

    def own(self, held: Any) -> Any:
        """The elements `saved` of the variable's value `held`, flat."""

    def filled(self, held: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
        """The variable's value after the elements `loaded` are `values`, flat; it was `held`."""


class Part(NamedTuple):
    """Elements `start` to `stop` of a tensor of `shape`, in C order; the variable has those from `first` to `last`."""

    first: int
    start: int
    stop: int
    last: int
    shape: tuple[int, ...]

    def own(self, held: Any) -> Any:
        """The part itself, of the elements `held` (last - first,)."""
        return held[self.start - self.first : self.stop - self.first]

    @property
    def saved(self) -> tuple[int, int]:
        """The part, which no other rank has."""
        return self.start, self.stop

    @property
    def loaded(self) -> tuple[int, int]:
        """The part."""
        return self.start, self.stop

    def filled(self, held: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
        """A copy of `held` (last - first,) whose part is `values`."""
        found = held.copy()
        self.own(found)[:] = values
        return found


def show_labels_as_columns(model: keras.Model) -> None:
    """Make Keras' own compiled metrics of `model`, built or not, see labels (n,) as columns (n, 1) from now on."""
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

    object.__setattr__(metrics, "build", build)  # bypasses Keras' tracking


def _change(metrics: Any) -> None:
    for metric in metrics.metrics:
        plain = metric.update_state
        if _is_of_keras(metric) and getattr(plain, "func", None) is not _update:
            object.__setattr__(metric, "update_state", partial(_update, plain))


def _is_of_keras(metric: Any) -> bool:
    function = getattr(metric, "_fn", None)  # of a MeanMetricWrapper: a function or a loss, whose mean it takes
    parts = [type(metric).update_state, *([] if function is None else [function])]
    return all(str(part.__module__).startswith("keras.") for part in parts)


def _update(plain: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    if len(y_true.shape) == 1 and len(y_pred.shape) == 2 and y_pred.shape[-1] == 1:
        y_true = keras.ops.expand_dims(y_true, -1)  # (n,) -> (n, 1)
    return plain(y_true, y_pred, sample_weight=sample_weight)


def build_all(model: keras.Model, signature: Signature, rows: int, *, optimizer: bool = True) -> None:
    """Create every variable that training will need, so that a checkpoint can be loaded before the first step.

    Without `optimizer` those of an optimizer that is not built yet are left to the caller.
    """
    show_labels_as_columns(model)
    built = model.optimizer.built
    model.optimizer.built = built or not optimizer  # else Keras builds it here
    # Keras has no public way to build metrics and loss; its JAX and PyTorch trainers use this one.
    model._symbolic_build(data_batch=zeros_of(signature, rows))
    if not optimizer:
        model.optimizer.built = built
    elif not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def zeros_of(signature: Signature, rows: int) -> Any:
    """A batch of zeros, as fit takes it."""
    x = {name: np.zeros((rows, *spec.shape), spec.dtype) for name, spec in signature.features.items()}
    specs = [spec for spec in (signature.label, signature.weight) if spec is not None]
    others = [np.zeros((rows, *spec.shape), spec.dtype) for spec in specs]
    return (x, *others) if others else x


def variables_of(model: keras.Model, kind: str) -> list[keras.Variable]:
    """The variables of one kind, in Keras' order, which is the order of construction."""
    if kind == WEIGHTS:
        return list(model.weights)
    if kind == OPTIMIZER:
        return [variable for one in (model.optimizer, *others_of(model)) for variable in one.variables]
    if kind == METRICS:
        return list(model.metrics_variables)
    others = {id(variable) for other in (WEIGHTS, METRICS) for variable in variables_of(model, other)}
    return [variable for variable in model.variables if id(variable) not in others]


@contextmanager
def unchanged(model: keras.Model) -> Iterator[list[tuple[keras.Variable, tf.Tensor]]]:
    """Restore all variables of `model`, weights, metrics and seeds, at the end; yields them with their values now."""
    # No copies: TensorFlow copies what is assigned to while it is held.
    before = [(one, tf.identity(one.value)) for one in model.variables if not one.dtype.startswith("string")]
    try:
        yield before
    finally:
        for variable, value in before:
            variable.assign(value)


def tensors_of(model: keras.Model, *kinds: str) -> Tensors:
    """Name -> array of every variable of these kinds; names are kind, number and Keras path."""
    return {name: np.asarray(variable.numpy()) for kind in kinds for name, variable in _named(model, kind).items()}


def views_of(model: keras.Model, *kinds: str, only: Container[str] | None = None) -> Tensors:
    """Return what `tensors_of` does, of these names only, as views of host memory where possible: read them at once."""
    named = {name: variable for kind in kinds for name, variable in _named(model, kind).items()}
    return {name: _own(variable) for name, variable in named.items() if only is None or name in only}


def _own(variable: keras.Variable) -> NDArray[Any]:
    """The values of a variable, or of what this rank writes of a larger one."""
    part: Held | None = getattr(variable, PART, None)
    return view_of(variable) if part is None else part.own(view_of(variable))


def specs_of(model: keras.Model, *kinds: str) -> dict[str, TensorSpec]:
    """Name -> shape and dtype of every variable of these kinds."""
    return {name: _spec(variable) for kind in kinds for name, variable in _named(model, kind).items()}


def pieces_of(model: keras.Model) -> dict[str, Piece]:
    """Name -> what this rank writes of each variable that is divided over the ranks, also if it has no elements; empty
    if each rank has all.
    """
    parts = {name: getattr(variable, PART, None) for name, variable in _of_checkpoints(model).items()}
    return {name: Piece(name, *part.saved) for name, part in parts.items() if part is not None}


def divided_kinds(model: keras.Model) -> tuple[str, ...]:
    """The kinds of variables of which some are divided over the ranks."""
    return tuple(dict.fromkeys(name.split("/")[0] for name in pieces_of(model)))


def undivided(variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    """The ones of `variables` that each rank has whole."""
    return [variable for variable in variables if getattr(variable, PART, None) is None]


def load_pieces(
    model: keras.Model, url: str, manifest: Mapping[str, Any], own: Mapping[int, Tensors], communicator: Communicator
) -> None:
    """Load the variables of `divided_kinds`: this rank's parts, and what all ranks have.

    `own` is what `read_parts_and_own` has read of these kinds. A collective, with the errors of `deal`.
    """
    kinds = divided_kinds(model)
    variables = {name: one for kind in kinds for name, one in _named(model, kind).items()}
    wanted: dict[Piece, NDArray[Any]] = {}
    for name, one in variables.items():
        part: Held | None = getattr(one, PART, None)
        start, stop = (0, math.prod(one.shape)) if part is None else part.loaded
        wanted[Piece(name, start, stop)] = np.empty(stop - start, view_of(one).dtype)
    deal(url, manifest, own, communicator, wanted, specs_of(model, *kinds))
    for values, variable in zip(wanted.values(), variables.values(), strict=True):
        part = getattr(variable, PART, None)
        if part is not None and part.loaded[0] == part.loaded[1]:
            continue  # this rank has nothing of it
        held = view_of(variable)
        variable.assign(values.reshape(held.shape) if part is None else part.filled(held, values))


def divided_variables(model: keras.Model) -> dict[str, keras.Variable]:
    """Name -> variable of each variable that is divided over the ranks, in the same order on each."""
    return {name: one for name, one in _of_checkpoints(model).items() if hasattr(one, PART)}


def gathered_on_first(variable: keras.Variable, communicator: Communicator) -> NDArray[Any]:
    """All elements of a divided variable, of its whole shape, on rank 0; (0,) on others. A collective."""
    part: Held = getattr(variable, PART)
    sent = np.ascontiguousarray(_own(variable)).reshape(-1)
    parts = communicator.all_to_all_ragged([sent, *[sent[:0]] * (communicator.num_ranks - 1)])
    starts = communicator.all_gather(np.array([part.saved[0]]))[:, 0]
    if communicator.rank:
        return sent[:0]
    # Ranks without elements have any start.
    order = sorted((rank for rank, one in enumerate(parts) if one.size), key=lambda rank: int(starts[rank]))
    return np.concatenate([sent[:0], *(parts[rank] for rank in order)]).reshape(part.shape)


def whole_state(model: keras.Model, communicator: Communicator, *kinds: str) -> Tensors | None:
    """The whole tensors of these kinds on rank 0, None on others. A collective."""
    named = {name: one for kind in kinds for name, one in _named(model, kind).items()}
    found = {
        name: gathered_on_first(one, communicator) if hasattr(one, PART) else np.array(_own(one))
        for name, one in named.items()
    }
    return found if communicator.rank == 0 else None


def set_value(variable: keras.Variable, value: NDArray[Any], part: Held | None = None) -> None:
    """Make `variable`, of the same name, hold an array of any shape: a `part` of a tensor, or the whole one (None)."""
    raw = variable._value
    variable._value = tf.Variable(value, trainable=raw.trainable, dtype=raw.dtype, name=raw.name.partition(":")[0])
    variable._shape = tuple(value.shape)
    if part is not None:
        setattr(variable, PART, part)
    elif hasattr(variable, PART):
        delattr(variable, PART)


def build_on_parts(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> None:
    """Build `optimizer` on variables of which some are divided: its own ones are divided likewise."""
    plain = optimizer.add_variable_from_reference

    def noted(reference_variable: keras.Variable, *args: Any, **options: Any) -> keras.Variable:
        made = plain(reference_variable, *args, **options)
        if (part := getattr(reference_variable, PART, None)) is not None:
            setattr(made, PART, part)
        return made

    object.__setattr__(optimizer, "add_variable_from_reference", noted)  # bypasses Keras' tracking
    try:
        optimizer.build(variables)
    finally:
        object.__delattr__(optimizer, "add_variable_from_reference")


def make_whole(model: keras.Model, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Give the weights that are divided the whole values in `tensors`."""
    for name, variable in _named(model, WEIGHTS).items():
        if hasattr(variable, PART):
            set_value(variable, tensors[name])


def load(model: keras.Model, tensors: Tensors, kinds: Sequence[str], where: str) -> None:
    """Assign the tensors of `tensors_of`. Raises DataError, and changes nothing, if a name, shape or dtype differs."""
    variables = {name: variable for kind in kinds for name, variable in _named(model, kind).items()}
    expected = {name: _spec(variable) for name, variable in variables.items()}
    for variable, value in zip(variables.values(), take(tensors, expected, where), strict=True):
        _fill(variable, value)


def load_weights(variables: Sequence[keras.Variable], tensors: Tensors, where: str) -> None:
    """Do what `load` does for the weights of a model of which `variables` are all, in their order."""
    expected = {_name(WEIGHTS, number, one): _spec(one) for number, one in enumerate(variables)}
    for variable, value in zip(variables, take(tensors, expected, where), strict=True):
        _fill(variable, value)


def _fill(variable: keras.Variable, value: NDArray[Any]) -> None:
    """Assign the whole `value`, or this rank's part of it."""
    part: Held | None = getattr(variable, PART, None)
    if part is not None:
        value = part.filled(view_of(variable), value.reshape(-1)[slice(*part.loaded)])
    variable.assign(value)


def load_metrics(model: keras.Model, parts: Sequence[Tensors], where: str, *, takes_sums: bool) -> None:
    """Set metric states to those that the ranks of `parts` had together, for a run that resumes with other ranks.

    The one rank that `takes_sums` gets the sums, and the others start at zero; all ranks get a state whose
    `aggregation` is the mean or rank 0's value.
    """
    expected = {name: _spec(variable) for name, variable in _named(model, METRICS).items()}
    columns = list(zip(*(take(part, expected, where) for part in parts), strict=True))
    if not takes_sums:
        model.reset_metrics()
    for variable, values in zip(variables_of(model, METRICS), columns, strict=True):
        dtype, wide = values[0].dtype, _wide(values[0].dtype)
        if variable.aggregation == "only_first_replica":
            variable.assign(values[0])
        elif variable.aggregation == "mean":
            variable.assign(np.mean(np.stack(values), axis=0, dtype=np.float64).astype(dtype))
        elif takes_sums:
            variable.assign(np.sum(np.stack(values), axis=0, dtype=wide).astype(dtype))


def derive_seeds(model: keras.Model, seed: int, step: int, rank: int) -> None:
    """Give each seed generator a state for this rank, derived from (seed, step, rank, the generator's number).

    Ranks that drew equal dropout masks for different samples would train with less randomness than one rank.

    >>> import keras
    >>> from lockstep import on_ranks
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    >>> on_ranks.derive_seeds(model, 7, 0, on_ranks.communicator().rank)
    """
    for number, variable in enumerate(variables_of(model, SEEDS)):
        digest = hashlib.sha256(f"seed generator {seed} {step} {rank} {number}".encode()).digest()
        state = np.frombuffer(digest, np.uint32)[: int(np.prod(variable.shape))]
        variable.assign(state.reshape(variable.shape).astype(variable.dtype))


def summed_metrics(model: keras.Model, communicator: Communicator) -> None:
    """Replace metric states by their sums over ranks: AUC or R2 of all samples is not the mean of the ranks' values."""
    sum_variables(variables_of(model, METRICS), communicator)


def sum_variables(variables: Sequence[keras.Variable], communicator: Communicator) -> None:
    """Replace each variable by its sum over ranks, computed in float64 or int64.

    Variables made with another `aggregation` in Keras' add_variable follow it: `mean`, or `only_first_replica`, rank
    0's value. Raises ConfigError naming a variable with `none`.
    """
    shares = {"sum": 1.0, "mean": 1.0 / communicator.num_ranks, "only_first_replica": float(communicator.rank == 0)}
    for variable in variables:
        if (variable.aggregation or "none") not in shares and communicator.num_ranks > 1:
            raise ConfigError(
                f"the state {variable.path} of a metric cannot be combined over ranks",
                got=f"aggregation {variable.aggregation}",
                allowed=", ".join(shares),
                next_step="Make the metric's variables with add_variable(..., aggregation='sum'), if they are sums.",
            )
    values = [_times(variable.numpy(), shares.get(variable.aggregation, 1.0)) for variable in variables]
    for dtype in sorted({_wide(value.dtype) for value in values}, key=str):
        chosen = [i for i, value in enumerate(values) if _wide(value.dtype) == dtype]
        flat = np.concatenate([values[i].reshape(-1).astype(dtype) for i in chosen])
        communicator.all_reduce(flat)
        start = 0
        for i in chosen:
            part = flat[start : start + values[i].size].reshape(values[i].shape)
            variables[i].assign(part.astype(values[i].dtype))
            start += values[i].size


def _times(value: Any, factor: float) -> NDArray[Any]:
    """An array times a factor, of its own dtype; times 0 it is 0, even if it is not finite."""
    array: NDArray[Any] = np.asarray(value)
    if factor == 1.0:
        return array
    return np.zeros_like(array) if factor == 0.0 else (array * factor).astype(array.dtype)


def model_identity(model: keras.Model, signature: Signature) -> str:
    """Compute sha256 over names, shapes and dtypes of weights and optimizer state, and over the input signature."""
    variables = {name: list(_spec(v)) for kind in (WEIGHTS, OPTIMIZER) for name, v in _named(model, kind).items()}
    document: dict[str, Any] = {"variables": variables, "signature": signature.to_json()}
    return sha256_hex(canonical_bytes(document))


def _named(model: keras.Model, kind: str) -> dict[str, keras.Variable]:
    return {_name(kind, i, variable): variable for i, variable in enumerate(variables_of(model, kind))}


def _name(kind: str, number: int, variable: keras.Variable) -> str:
    return f"{kind}/{number:04d}/{variable.path}"


def _of_checkpoints(model: keras.Model) -> dict[str, keras.Variable]:
    return {name: variable for kind in (WEIGHTS, OPTIMIZER) for name, variable in _named(model, kind).items()}


def _spec(variable: keras.Variable) -> TensorSpec:
    part: Held | None = getattr(variable, PART, None)
    return TensorSpec(tuple(variable.shape) if part is None else tuple(part.shape), str(variable.dtype))


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float64 if np.issubdtype(dtype, np.floating) else np.int64)


def as_floats(logs: dict[str, Any]) -> dict[str, Any]:
    """Logs with NumPy and TensorFlow scalars as Python numbers, and arrays (one value per output) as lists."""

    def plain(value: Any) -> Any:
        array: NDArray[Any] = np.asarray(value)
        return array.item() if array.size == 1 else array.tolist()

    return {name: plain(value) for name, value in logs.items()}
