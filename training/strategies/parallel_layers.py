"""Layers of which each rank of a tensor group computes a part: columns or rows of a Dense, heads, rows of an Embedding.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (2019). The
layers are the model's own, of Keras' classes: `divide_layers` leaves each rank its slices of their weights, and their
class changes until `undivide_layers`. A pair of columns and rows, or heads, costs one sum over the ranks forward and
one backward. docs/decisions/083-tensor.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import keras
import numpy as np
import tensorflow as tf
from keras import ops
from keras.src.backend import get_keras_mask, set_keras_mask
from numpy.typing import NDArray

from lockstep.storage.errors import ConfigError
from lockstep.training.comm.base import Communicator, part_bounds
from lockstep.training.exchange.compare_ranks import view_of
from lockstep.training.steps.model_state import PART, set_value
from lockstep.training.steps.ordered import Calls

DECLARED = "parallel_layers"
"""The attribute of a model that says which of its layers are divided, and how: name -> Kind."""
Kind = Literal["columns", "rows", "heads", "table"]
CLASSES: dict[str, type[keras.Layer]] = {
    "columns": keras.layers.Dense,
    "rows": keras.layers.Dense,
    "heads": keras.layers.MultiHeadAttention,
    "table": keras.layers.Embedding,
}
ELEMENTWISE = {"linear", "relu", "relu6", "leaky_relu", "gelu", "silu", "tanh", "sigmoid", "elu", "selu", "softplus"}
"""Activations that compute each number from itself alone."""
BETWEEN = (keras.layers.ReLU, keras.layers.LeakyReLU, keras.layers.ELU)
Array = NDArray[Any]


@dataclass(frozen=True, eq=False, slots=True)
class Slice:
    """This rank's part of a tensor of `shape` along `axis`; the ranks of `data` hold the same.

    In checkpoints tensors are whole, in C order. Where elements of the part are no neighbours there, the ranks of the
    tensor group exchange them, so that each writes and reads a range.
    """

    shape: tuple[int, ...]
    axis: int
    tensor: Communicator
    data: Communicator

    @property
    def bounds(self) -> tuple[int, int]:
        """Start and stop of the part along the axis."""
        return part_bounds(self.shape[self.axis], self.tensor.num_ranks)[self.tensor.rank]

    @property
    def loaded(self) -> tuple[int, int]:
        """Start and stop of the elements that this rank reads from a checkpoint."""
        if self._before == 1:
            return self.bounds[0] * self._after, self.bounds[1] * self._after
        first, last = self._rows[self.tensor.rank]
        each = self.shape[self.axis] * self._after
        return first * each, last * each

    @property
    def saved(self) -> tuple[int, int]:
        """The part of `loaded` that this rank writes: each data rank another one."""
        first, last = self.loaded
        start, stop = part_bounds(last - first, self.data.num_ranks)[self.data.rank]
        return first + start, first + stop

    def own(self, held: Array) -> Array:
        """The elements `saved` of this rank's part `held`, flat. A collective of the tensor group."""
        flat = np.ascontiguousarray(held).reshape(-1)
        if self._before > 1:
            mine = flat.reshape(self._before, -1)
            found = self.tensor.all_to_all_ragged([mine[start:stop].reshape(-1) for start, stop in self._rows])
            rows = [part.reshape(-1, width * self._after) for part, width in zip(found, self._widths, strict=True)]
            flat = np.concatenate(rows, axis=1).reshape(-1)
        first, (start, stop) = self.loaded[0], self.saved
        return flat[start - first : stop - first]

    def filled(self, held: Array, values: Array) -> Array:
        """The part whose elements `loaded` are `values`; `held` is that before. A collective of the tensor group."""
        if self._before == 1:
            return values.reshape(held.shape)
        rows = values.reshape(-1, self.shape[self.axis] * self._after)
        cuts = np.cumsum(self._widths)[:-1] * self._after
        parts = [np.ascontiguousarray(part).reshape(-1) for part in np.split(rows, cuts, axis=1)]
        return np.concatenate(self.tensor.all_to_all_ragged(parts)).reshape(held.shape)

    def cut(self, whole: Array) -> Array:
        """This rank's part of the whole tensor."""
        start, stop = self.bounds
        return np.ascontiguousarray(np.take(whole, np.arange(start, stop), axis=self.axis))

    @property
    def _before(self) -> int:
        return math.prod(self.shape[: self.axis])

    @property
    def _after(self) -> int:
        return math.prod(self.shape[self.axis + 1 :])

    @property
    def _rows(self) -> list[tuple[int, int]]:
        return part_bounds(self._before, self.tensor.num_ranks)

    @property
    def _widths(self) -> list[int]:
        return [stop - start for start, stop in part_bounds(self.shape[self.axis], self.tensor.num_ranks)]


class TensorGroup:
    """The sums of a step over the ranks that compute parts of the same layers."""

    def __init__(self, communicator: Communicator, failed: Callable[[BaseException], None]) -> None:
        """`failed` takes the error of a sum, before the step ends with it."""
        self.communicator, self._failed = communicator.on_host, failed
        self._calls, self._alone = Calls(), False
        self._buffers: dict[tuple[int, np.dtype[Any]], Array] = {}

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While this is open, a sum is this rank's part: a function of a row that is none of other rows' either."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    def sum_forward(self, x: Any) -> Any:
        """The sum of `x` over the ranks, each of which has the whole gradient of the sum: Megatron's g."""

        @tf.custom_gradient
        def summed(x: Any) -> Any:
            return self._sum(x), lambda gradient: gradient

        return summed(x)

    def sum_backward(self, x: Any) -> Any:
        """Return `x` itself, equal on all ranks, each of which has a part of its gradient: Megatron's f."""

        @tf.custom_gradient
        def same(x: Any) -> Any:
            return tf.identity(x), self._sum

        copy = same(x)
        set_keras_mask(copy, get_keras_mask(x))
        return copy

    def _sum(self, x: Any) -> Any:
        if self._alone:
            return tf.identity(x)
        (total,) = self._calls.call(self._all_reduce, [x], [x.dtype])
        total.set_shape(x.shape)
        return total

    def _all_reduce(self, x: Array) -> Array:
        try:
            key = (x.size, x.dtype)
            if key not in self._buffers:
                self._buffers[key] = self.communicator.allocate(x.size, x.dtype)
            flat = self._buffers[key]
            flat[:] = x.reshape(-1)
            self.communicator.all_reduce(flat)
            return flat.reshape(x.shape).copy()
        except BaseException as error:
            self._failed(error)
            raise


class _Divided:
    """Mixed in before a layer's own class, to which `super()` refers."""

    lockstep_group: TensorGroup
    lockstep_plain: type
    lockstep_spec: Any
    input_spec: Any


class _Columns(_Divided, keras.layers.Dense):
    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Compute this rank's columns (n, ..., units / ranks) of inputs (n, ..., width), which all ranks have."""
        return super().call(self.lockstep_group.sum_backward(inputs), training=training)


class _Rows(_Divided, keras.layers.Dense):
    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Compute the whole output (n, ..., units) of this rank's part of the inputs (n, ..., width / ranks)."""
        x = self.lockstep_group.sum_forward(ops.matmul(inputs, self.kernel))
        x = x if self.bias is None else ops.add(x, self.bias)
        return x if self.activation is None else self.activation(x)


class _OutputOfHeads(_Divided, keras.layers.EinsumDense):
    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Compute the whole output (n, ..., width) of this rank's heads (n, ..., heads / ranks, size)."""
        x = self.lockstep_group.sum_forward(ops.einsum(self.equation, inputs, self.kernel))
        return x if self.bias is None else ops.add(x, self.bias)


class _Heads(_Divided, keras.layers.MultiHeadAttention):
    def call(self, query: Any, value: Any, key: Any = None, **options: Any) -> Any:
        """Attend with this rank's heads; inputs and output are whole."""
        given = [query, value, value if key is None else key]
        copies = {id(one): self.lockstep_group.sum_backward(one) for one in given}
        return super().call(*(copies[id(one)] for one in given), **options)


class _Table(_Divided, keras.layers.Embedding):
    lockstep_first: int

    def call(self, inputs: Any) -> Any:
        """Look up ids (n, ...) in this rank's rows: zeros for others', then the sum (n, ..., width) over the ranks."""
        ids = ops.cast(inputs, "int64") - self.lockstep_first
        rows = self.embeddings.shape[0]
        mine = ops.logical_and(ids >= 0, ids < rows)
        found = ops.take(self.embeddings, ops.where(mine, ids, ops.zeros_like(ids)), axis=0)
        found = ops.where(ops.expand_dims(mine, -1), found, ops.zeros_like(found))
        return ops.cast(self.lockstep_group.sum_forward(found), dtype=self.compute_dtype)


MIXINS: dict[str, type] = {"columns": _Columns, "rows": _Rows, "heads": _Heads, "table": _Table}


def divide_layers(model: keras.Model, group: TensorGroup, data: Communicator) -> None:
    """Divide the layers that `model` declares over the ranks of `group`; those of `data` have the same parts.

    Raises ConfigError for a model that declares none, and for a layer that cannot be divided so.
    """
    declared, layers = declared_of(model), {layer.name: layer for layer in model._flatten_layers()}
    ranks = group.communicator
    for name, kind in declared.items():
        _check(layers.get(name), name, kind, ranks.num_ranks)
    _check_pairs(layers, declared)
    for name, kind in declared.items():
        layer = layers[name]
        for variable, axis in _divided_variables(layer, kind):
            part = Slice(tuple(variable.shape), axis, ranks, data)
            set_value(variable, part.cut(np.asarray(view_of(variable))), part)
        more = {}
        if kind == "table":
            more["lockstep_first"] = getattr(layer.embeddings, PART).bounds[0]
        if kind == "heads":
            _mix_in(layer._output_dense, _OutputOfHeads, lockstep_group=group)
        _mix_in(layer, MIXINS[kind], lockstep_group=group, **more)


def undivide_layers(model: keras.Model) -> None:
    """Give all layers their own classes again; their weights are whole again."""
    for layer in model._flatten_layers():
        for one in (layer, getattr(layer, "_output_dense", None)):
            if isinstance(one, _Divided):
                one.input_spec = one.lockstep_spec
                object.__setattr__(one, "__class__", one.lockstep_plain)


def declared_of(model: keras.Model) -> Mapping[str, Kind]:
    """Name of a layer -> how it is divided. Raises ConfigError if the model does not say it."""
    declared = dict(getattr(model, DECLARED, None) or {})
    if not declared or not set(declared.values()) <= set(get_args(Kind)):
        raise ConfigError(
            "--tensor-parallel divides the layers that a model declares",
            got=f"{model.name}.{DECLARED} = {declared}" if declared else f"a model {model.name} without {DECLARED}",
            allowed=f"a dict of layers' names, each with one of {', '.join(get_args(Kind))}",
            next_step=f'Set model.{DECLARED} = {{"wide": "columns", "narrow": "rows"}} in the model\'s function, use '
            "--model transformer, or leave out --tensor-parallel.",
        )
    return declared


def _mix_in(layer: keras.Layer, mixin: type, **attributes: Any) -> None:
    """Make `layer` an instance of (mixin, its own class) with class attributes, past Keras' tracking."""
    plain = type(layer)
    names = {"__module__": plain.__module__, "__doc__": plain.__doc__, **attributes}
    names |= {"lockstep_plain": plain, "lockstep_spec": layer.input_spec}
    layer.input_spec = None  # which has the width of the whole
    object.__setattr__(layer, "__class__", type(plain.__name__, (mixin, plain), names))


def _divided_variables(layer: Any, kind: Kind) -> Iterator[tuple[keras.Variable, int]]:
    """The variables of a layer that are divided, and along which axis."""
    if kind == "table":
        yield layer._embeddings, 0
    elif kind == "rows":
        yield layer._kernel, 0
    elif kind == "columns":
        yield layer._kernel, 1
        if layer.bias is not None:
            yield layer.bias, 0
    else:
        for name in ("_query_dense", "_key_dense", "_value_dense", "_gate_dense"):
            if (dense := getattr(layer, name, None)) is not None:
                yield dense._kernel, 1
                if dense.bias is not None:
                    yield dense.bias, 0
        yield layer._output_dense._kernel, 0


def _check(layer: Any, name: str, kind: Kind, ranks: int) -> None:
    """Raise ConfigError unless the layer can be divided over so many ranks."""
    wanted = CLASSES[kind]
    got = "no such layer" if layer is None else ""
    if layer is not None and type(layer) is not wanted:
        got = f"a {type(layer).__name__}"
    elif layer is not None:
        variables = list(_divided_variables(layer, kind))
        sizes = [variable.shape[axis] for variable, axis in variables]
        extras = [(one, what) for one, _ in variables for what in ("regularizer", "constraint")]
        faults = [f"a {what} of its {one.name}" for one, what in extras if getattr(one, what, None) is not None]
        faults += [f"{min(sizes)} parts for {ranks} ranks"] if min(sizes) < ranks else []
        faults += ["dropout of attention"] if kind == "heads" and layer.dropout > 0 else []
        activation = getattr(getattr(layer, "activation", None), "__name__", "linear")
        faults += [f"activation {activation}"] if kind == "columns" and activation not in ELEMENTWISE else []
        got = ", ".join(faults)
    if got:
        raise ConfigError(
            f"--tensor-parallel cannot divide `{name}` by {kind}",
            got=got,
            allowed=f"a keras.layers.{wanted.__name__} of the model, of {ranks} {kind} or more, without regularizers, "
            f"constraints and dropout of its own; columns with an activation of {', '.join(sorted(ELEMENTWISE))}",
            next_step=f"Correct {DECLARED} of the model, or use a smaller --tensor-parallel.",
        )


def _check_pairs(layers: Mapping[str, Any], declared: Mapping[str, Kind]) -> None:
    """Raise ConfigError unless columns lead to rows, with nothing between them but activations."""
    reached: set[str] = set()
    for name in (name for name, kind in declared.items() if kind == "columns"):
        walk = [layers[name]]
        while walk:
            consumers = [node.operation for node in walk.pop()._outbound_nodes]
            if not consumers:
                raise _unpaired(f"the columns of `{name}` are an output of the model")
            for one in consumers:
                if declared.get(one.name) == "rows":
                    reached.add(one.name)
                elif _is_elementwise(one):
                    walk.append(one)
                else:
                    raise _unpaired(f"the columns of `{name}` go to `{one.name}`, a {type(one).__name__}")
    for name, kind in declared.items():
        if kind == "rows" and name not in reached:
            raise _unpaired(f"the rows of `{name}` follow no columns")


def _is_elementwise(operation: Any) -> bool:
    if type(operation) is keras.layers.Activation:
        return getattr(operation.activation, "__name__", "") in ELEMENTWISE
    return type(operation) in BETWEEN


def _unpaired(got: str) -> ConfigError:
    return ConfigError(
        "--tensor-parallel needs pairs of layers: columns, then rows",
        got=got,
        allowed="columns whose output goes to rows, directly or through activations that compute each number from "
        "itself; dropout before the columns or after the rows",
        next_step=f"Correct {DECLARED} of the model.",
    )
