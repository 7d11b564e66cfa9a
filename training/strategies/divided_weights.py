"""Weights of which each rank holds its part: the third stage of --zero.

A variable's memory is this rank's elements. Where a step's graph reads the variable, ranks gather the weights of its
bucket, while the layers before it compute; TensorFlow frees them after the last operation that reads them. Gradients
read weights again, much later: before they are exchanged, `gather_again` gives them weights of a second gathering, so
that no layer is computed twice. docs/decisions/085-divided-weights.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from numpy.typing import NDArray
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

from lockstep.features.schema.signature import Signature
from lockstep.storage.errors import ConfigError
from lockstep.training.comm.base import Communicator
from lockstep.training.exchange.buckets import Layout
from lockstep.training.exchange.exchange import LentBuffer, Reducer
from lockstep.training.steps.model_state import PART, WHOLE, Part
from lockstep.training.steps.ordered import put_last, tail

Array = NDArray[Any]
BACKWARD = "gradient_tape"  # in the names of TensorFlow's operations of a backward pass


class _Divided(keras.Variable):
    """Mixed in before a variable's own class: its memory is a part, its value in a graph is the whole."""

    lockstep_weights: DividedWeights
    lockstep_number: int

    @property
    def handle(self) -> Any:
        return self._value.handle

    @property
    def value(self) -> Any:
        """This rank's part outside of layers, where the code of a rank saves and loads it; else the whole."""
        if tf.executing_eagerly() and global_state.get_global_attribute("current_call_ctx") is None:
            return self._value
        return self._maybe_autocast(self.lockstep_weights.whole(self.lockstep_number))

    def assign(self, value: Any) -> Any:
        """Take this rank's part of `value`, which may be the part already."""
        part: Part = getattr(self, PART)
        value = tf.convert_to_tensor(value, self._dtype)
        flat = tf.reshape(value, [-1])
        if tuple(value.shape) == part.shape:
            flat = flat[part.first : part.last]
        self._value.assign(flat)
        return value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if (whole_of := WHOLE.get()) is not None:
            return whole_of(self)
        raise ConfigError(
            f"this rank has only a part of {self.path}",
            got="a callback, or other code, that reads a weight outside of a step",
            allowed="weights read by layers; the run's checkpoints and its model have the whole",
            next_step="Read weights from a checkpoint, or use --zero 2.",
        )

    def numpy(self) -> Array:
        return self.__array__()


class DividedWeights:
    """Trainable variables of which this rank holds its parts. All ranks read them in the same order."""

    def __init__(
        self,
        communicator: Communicator,
        layout: Layout,
        variables: Sequence[keras.Variable],
        parts: Sequence[Part],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Divide `variables`: whole before, `parts` of them after. `communicator` is for this object only; `fail` takes
        the error of a gathering.
        """
        self._communicator, self._layout, self._variables, self._parts = communicator, layout, variables, parts
        self._fail, self._reducer = fail, Reducer(communicator)
        self._traces: WeakKeyDictionary[Any, _Trace] = WeakKeyDictionary()
        self._pools: dict[np.dtype[Any], list[LentBuffer]] = {}
        self._under_way: deque[LentBuffer] = deque()
        self._whole: list[Array] | None = None
        for number, (variable, part) in enumerate(zip(variables, parts, strict=True)):
            self._divide(variable, number, part)

    def _divide(self, variable: keras.Variable, number: int, part: Part) -> None:
        held = np.array(variable.numpy().reshape(-1)[part.first : part.last])
        name = variable._value.name.partition(":")[0]
        variable._value = tf.Variable(held, shape=tf.TensorShape([None]), trainable=True, name=name)
        setattr(variable, PART, part)
        plain = type(variable)
        names = {"__module__": plain.__module__, "lockstep_weights": self, "lockstep_number": number}
        object.__setattr__(variable, "__class__", type(plain.__name__, (_Divided, plain), names))

    def whole(self, number: int) -> tf.Tensor:
        """A variable's elements, of its shape, in the step that is traced. A collective when it runs."""
        if self._whole is not None:
            return self._checked(number)
        bucket = self._layout.gradients[number].bucket
        graph, trace = self._step()
        with graph.as_default():
            if bucket not in trace.wholes:
                trace.wholes[bucket] = self._gathered(bucket, trace)
            return trace.wholes[bucket][number]

    def _gathered(self, bucket: int, trace: _Trace) -> dict[int, tf.Tensor]:
        numbers = self._layout.posted(bucket)

        @tf.custom_gradient
        def gathered(*parts: tf.Tensor) -> Any:
            trace.parts[bucket] = list(parts)
            wholes = self._gather(trace, bucket, parts, trace.layer_input)
            # The gradient of a part is that of the whole: ranks scatter its sum.
            return wholes, lambda *upstream: [tf.convert_to_tensor(one) for one in upstream]

        wholes = tf.nest.flatten(gathered(*(self._variables[i]._value.read_value() for i in numbers)))
        return dict(zip(numbers, wholes, strict=True))

    def _gather(
        self, trace: _Trace, bucket: int, parts: Sequence[tf.Tensor], reached: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """The weights of a bucket that the step needs when the tensors `reached` are computed.

        They are sent when those are computed for which the bucket before was needed.
        """
        numbers = self._layout.posted(bucket)
        # Inputs, no control dependencies: with these, TensorFlow's optimizer of graphs would join other operations.
        inputs = [*parts, *trace.reached]
        with tf.control_dependencies(trace.posts):
            post = tf.numpy_function(partial(self._post, bucket), inputs, tf.int32, name="post_weights")
        trace.posts, trace.reached = [post.op], list(reached)
        dtypes = [tf.as_dtype(self._variables[i]._dtype) for i in numbers]
        with tf.control_dependencies([post, *tail()]):
            wholes = tf.nest.flatten(tf.numpy_function(partial(self._await, bucket), [], dtypes, name="await_weights"))
        put_last(wholes[0])
        # A shape that TensorFlow's optimizer of graphs sees too: else it would join other operations than one rank's.
        return [tf.ensure_shape(whole, self._parts[i].shape) for i, whole in zip(numbers, wholes, strict=True)]

    def gather_again(self) -> None:
        """Give the backward pass of the step that is traced weights of its own, and forget those of the forward pass.

        Call it after the last gradient was traced, and before operations that wait for other ranks.
        """
        graph, trace = self._step()
        self._traces[graph] = _Trace()  # what is read after the update is gathered then
        order = {id(op): place for place, op in enumerate(graph.get_operations())}
        again = []
        for bucket, wholes in trace.wholes.items():
            made = _of_weights_only(list(wholes.values()))
            readers = [
                op for tensor in made.values() for op in tensor.consumers() if BACKWARD in op.name and id(op) in order
            ]
            if readers:
                first = min(readers, key=lambda op: order[id(op)])
                again.append((order[id(first)], bucket, first, made, {id(op): op for op in readers}))
        trace.reached = []
        for _, bucket, first, made, readers_of in sorted(again, key=lambda one: one[0]):
            reached = [one for one in first.inputs if one.ref() not in made and one.dtype.is_floating]
            numbers = self._layout.posted(bucket)
            fresh = self._gather(trace, bucket, trace.parts[bucket], reached)
            copies = {trace.wholes[bucket][i].ref(): whole for i, whole in zip(numbers, fresh, strict=True)}
            for op in readers_of.values():
                for place, tensor in enumerate(op.inputs):
                    if tensor.ref() in made:
                        op._update_input(place, _copied(graph, tensor, copies))

    def _post(self, bucket: int, *held: Array) -> np.int32:
        """Begin to gather a bucket's weights, of which `held` are this rank's parts."""
        try:
            layout = self._layout
            buffer = self._free_buffer(layout.dtypes[bucket])
            flat = buffer.data[: layout.sizes[bucket]]
            for i, value in zip(layout.posted(bucket), held, strict=False):  # what a step has reached follows
                part, start = self._parts[i], layout.gradients[i].start
                flat[start + part.start : start + part.stop] = part.own(value)
            self._under_way.append(buffer)
            self._run(partial(self._communicator.all_gather_parts, flat))
        except BaseException as error:
            self._fail(error)
            raise
        return np.int32(0)

    def _await(self, bucket: int) -> list[Array]:
        self._wait("the gathering of weights")
        buffer, layout = self._under_way.popleft(), self._layout
        return [buffer.lend(layout.gradients[i]) for i in layout.posted(bucket)]

    def _run(self, collective: Callable[[], None]) -> None:
        def task() -> bool:
            collective()
            return True

        self._reducer.run(task)

    def _wait(self, what: str) -> None:
        try:
            self._reducer.wait(1, what)
        except BaseException as error:
            self._fail(error)
            raise

    def _free_buffer(self, dtype: np.dtype[Any]) -> LentBuffer:
        """A buffer, for any bucket of this dtype, that TensorFlow does not read any more."""
        pool = self._pools.setdefault(dtype, [])
        busy = {id(buffer) for buffer in self._under_way}
        found = next((one for one in pool if id(one) not in busy and not one.is_lent()), None)
        if found is None:
            sizes = [size for size, of in zip(self._layout.sizes, self._layout.dtypes, strict=True) if of == dtype]
            found = LentBuffer(self._communicator.allocate(max(sizes), dtype))
            pool.append(found)
        return found

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """While this is open, each rank has all weights, and steps call no other rank. A collective."""
        self._whole = []
        for variable, part in zip(self._variables, self._parts, strict=True):
            mine = part.own(variable._value.numpy())
            self._whole.append(np.concatenate(self._communicator.all_gather_ragged(mine)).reshape(part.shape))
        try:
            yield
        finally:
            self._whole = None

    def _checked(self, number: int) -> tf.Tensor:
        assert self._whole is not None
        value = self._whole[number]

        @tf.custom_gradient
        def whole(_part: tf.Tensor) -> Any:
            return tf.constant(value), lambda upstream: tf.convert_to_tensor(upstream)

        return whole(self._variables[number]._value.read_value())

    def _watch(self, model: keras.Model) -> None:
        """Note what each layer with weights is called with, since its weights are needed from then on."""
        for layer in model._flatten_layers(include_self=False):
            if layer.trainable_variables:
                object.__setattr__(layer, "call", partial(self._called, layer))  # bypasses Keras' tracking

    def _called(self, layer: keras.layers.Layer, *args: Any, **options: Any) -> Any:
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if (trace := self._traces.get(graph) if graph is not None else None) is not None:
            tensors = [one for one in tf.nest.flatten(args) if getattr(one, "graph", None) is graph]
            trace.layer_input = tensors[:1] or trace.layer_input
        return type(layer).call(layer, *args, **options)

    def install(self, model: keras.Model) -> None:
        """Let steps of `model` gather weights, and each batch of a test begin with a round of `serve`: ranks have
        unequal numbers of batches.
        """
        self._watch(model)
        train_step, test_step = model.train_step, model.test_step

        def train(data: Any) -> Any:
            self._begin()
            return train_step(data)

        def test(data: Any) -> Any:
            trace = self._begin()
            with tf.control_dependencies(tail()):
                begun = tf.numpy_function(lambda: np.int32(self._round(active=True)), [], tf.int32, name="round")
            put_last(begun)
            trace.posts = [begun.op]
            return test_step(data)

        object.__setattr__(model, "train_step", train)  # bypasses Keras' tracking
        object.__setattr__(model, "test_step", test)

    def _begin(self) -> _Trace:
        graph = tf.compat.v1.get_default_graph()
        self._traces[graph] = trace = _Trace()
        return trace

    def _step(self) -> tuple[Any, _Trace]:
        """The step's graph, also in a loop or a branch of it. Raises ConfigError in a function of its own, or none."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        while isinstance(graph, ControlFlowFuncGraph):
            graph = graph.outer_graph
        trace = None if graph is None else self._traces.get(graph)
        if trace is None:
            raise ConfigError(
                "--zero 3 gathers weights in the order of the step's graph",
                got="a layer called in eager mode, or in a tf.function within the step",
                allowed="layers called in the model's train_step and test_step",
                next_step="Compile without run_eagerly, call layers outside of nested tf.functions, or use --zero 2.",
            )
        return graph, trace

    def serve(self, model: keras.Model, signature: Signature) -> None:
        """Take part in the batches of ranks that have more of them, after this rank's last one. A collective."""
        nothing = {name: tf.zeros((0, *spec.shape), spec.dtype) for name, spec in signature.features.items()}

        @tf.function(autograph=False)
        def step() -> Any:
            self._begin()
            return model(nothing, training=False)

        while self._round(active=False):
            step()

    def _round(self, *, active: bool) -> bool:
        flag = np.array([active], np.uint8)
        self._run(partial(self._communicator.all_reduce, flag, "max"))
        self._wait("the rounds of a test")
        return bool(flag[0])

    def close(self) -> None:
        """End the thread."""
        self._reducer.close()


class _Trace:
    """What was gathered in one graph."""

    def __init__(self) -> None:
        self.wholes: dict[int, dict[int, tf.Tensor]] = {}
        self.parts: dict[int, list[tf.Tensor]] = {}
        self.posts: list[Any] = []
        self.reached: list[tf.Tensor] = []
        self.layer_input: list[tf.Tensor] = []


def _of_weights_only(wholes: Sequence[tf.Tensor]) -> dict[Any, tf.Tensor]:
    """Tensors of the forward pass that depend on `wholes` and constants only, these among them."""
    found = {whole.ref(): whole for whole in wholes}
    queue = list(found.values())
    while queue:
        for op in queue.pop().consumers():
            if BACKWARD in op.name or op.type in ("While", "StatelessWhile", "If", "StatelessIf", "PyFunc"):
                continue
            if all(one.ref() in found or one.op.type == "Const" for one in op.inputs):
                fresh = [one for one in op.outputs if one.ref() not in found]
                found |= {one.ref(): one for one in fresh}
                queue += fresh
    return found


def _copied(graph: Any, tensor: tf.Tensor, copies: dict[Any, tf.Tensor]) -> tf.Tensor:
    """`tensor`, computed from other weights: `copies` has what replaces which, and is extended."""
    if tensor.ref() not in copies:
        op = tensor.op
        inputs = [one if one.op.type == "Const" else _copied(graph, one, copies) for one in op.inputs]
        attributes: Mapping[str, Any] = {name: value for name, value in op.node_def.attr.items() if name[0] != "_"}
        twin = graph._create_op_internal(
            op.type, inputs, [one.dtype for one in op.outputs], attrs=dict(attributes), op_def=op.op_def
        )
        copies |= {one.ref(): other for one, other in zip(op.outputs, twin.outputs, strict=True)}
    return copies[tensor.ref()]
