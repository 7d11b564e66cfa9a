"""--zero: each rank holds its part of the optimizer's state, of gradients from stage 2 on, and of weights in stage 3.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (SC 2020).
Buckets are those of one sum in each step. A bucket's sum is scattered, with the bits of an all-reduce; Keras' own
optimizer updates this rank's elements, as flat variables; then ranks gather the bucket's weights, while they update the
next one's. So weights are those of one sum in each step, bit for bit, if the update is elementwise. In stage 3 the
optimizer updates the parts that the model holds, and layers gather weights (divided_weights.py).
docs/decisions/082-zero.md, 085-divided-weights.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from lockstep.features.schema.signature import Signature
from lockstep.storage.errors import ConfigError
from lockstep.training import ways
from lockstep.training.comm.base import Communicator, part_bounds
from lockstep.training.exchange.agreement import NonFinitePolicy
from lockstep.training.exchange.buckets import Layout
from lockstep.training.exchange.exchange import Array, Exchange, LentBuffer
from lockstep.training.exchange.sparse import Table
from lockstep.training.steps.distribute import layout_of, own_class
from lockstep.training.steps.model_state import PART, Part, undivided
from lockstep.training.steps.optimizers import CorrectedSGD
from lockstep.training.strategies.divided_weights import DividedWeights
from lockstep.training.strategies.every_step import EveryStep, Exchanging

BUFFERS = 3  # of buckets in stage 2: one is filled, one is on its way, one waits for its turn
# Elements; any vector register has room for a divisor of it. TensorFlow rounds a root's inverse otherwise in the last
# elements of a tensor, which fill no register: so a part begins and ends where registers of the whole do.
REGISTER = 16
ELEMENTWISE = (
    CorrectedSGD,
    *(getattr(keras.optimizers, name) for name in ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Lion")),
)
"""Optimizers, exactly these classes, that compute each element of a weight from that element alone."""


class ZeroExchange(Exchange):
    """An exchange that gives this rank its part of each sum, and all ranks the weights that the parts' owners update.

    Call `divide` before the first step.
    """

    divides = True
    takes_rows = False

    def __init__(
        self,
        communicator: Communicator,
        scale: float | None = None,
        *,
        stage: int,
        scaled_loss: bool,
        non_finite: NonFinitePolicy,
    ) -> None:
        """`stage` is 1, 2 or 3; from 2 on only some buckets of gradients are in memory, and this rank's part of all."""
        super().__init__(communicator, scale, scaled_loss=scaled_loss, non_finite=non_finite)
        self._stage = stage
        self._clip_norm: float | None = None
        self._bounds: list[tuple[int, int]] = []
        self.parts: list[Part] = []
        """This rank's elements of each trainable variable; start and stop are equal where it has none."""
        self._pieces: list[keras.Variable] = []
        self._state_of: list[list[keras.Variable]] = []
        self._own: dict[int, Array] = {}
        self._memory: dict[int, Array] = {}
        self._collected = 0
        self._spare: list[Array] = []
        self.weights: DividedWeights | None = None
        """The weights in parts, in stage 3."""

    def divide(self, optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> None:
        """Build `optimizer` on this rank's parts of all trainable `variables`, in their order."""
        layout = layout_of(optimizer, variables)
        self._planned, self._variables = layout, list(variables)
        self._clip_norm = optimizer.global_clipnorm
        self._bounds = [part_bounds(size, self.communicator.num_ranks)[self.communicator.rank] for size in layout.sizes]
        for slot in layout.gradients:
            start, stop = (min(max(edge - slot.start, 0), slot.size) for edge in self._bounds[slot.bucket])
            if start >= stop:
                start = stop = 0
            self.parts.append(Part(_down(start), start, stop, min(_up(stop), slot.size), slot.shape))
        self._pieces = [_piece(one, part) for one, part in zip(variables, self.parts, strict=True)]
        if self._stage == 3:
            group = self.communicator.group(range(self.communicator.num_ranks))
            group.deadline_s = self.communicator.deadline_s
            self.weights = DividedWeights(group, layout, self._variables, self.parts, self._fail)
            for piece, variable in zip(self._pieces, self._variables, strict=True):
                piece._value = variable._value  # the optimizer updates the model's own memory
        numbers = {id(piece): number for number, piece in enumerate(self._pieces)}
        self._state_of = [[] for _ in self._pieces]
        plain = optimizer.add_variable_from_reference

        def noted(reference_variable: keras.Variable, *args: Any, **options: Any) -> keras.Variable:
            made = plain(reference_variable, *args, **options)
            number = numbers[id(reference_variable)]
            setattr(made, PART, self.parts[number])
            self._state_of[number].append(made)
            return made

        object.__setattr__(optimizer, "add_variable_from_reference", noted)  # bypasses Keras' tracking
        try:
            optimizer.build(self._pieces)
        finally:
            object.__delattr__(optimizer, "add_variable_from_reference")
        known: set[str] = getattr(optimizer, "_exclude_from_weight_decay", set())
        pairs = zip(variables, self._pieces, strict=True)
        known |= {optimizer._var_key(piece) for one, piece in pairs if optimizer._var_key(one) in known}

    def use(self, layout: Layout, names: Sequence[str], tables: Sequence[Table] = ()) -> None:
        """Do what `Exchange.use` does. Raises ConfigError unless each trainable variable has a gradient."""
        if layout != self._planned:
            every = [f"the gradient of {variable.path}" for variable in self._variables]
            without = [name for name in every if name not in names]
            raise ConfigError(
                "--zero divides the optimizer's state by the gradients of all trainable variables",
                got=f"no gradient: {', '.join(without[:10])}" if without else "gradients of other shapes or dtypes",
                allowed="a step whose loss depends on each trainable variable",
                next_step="Set trainable=False for layers that the loss does not use, or leave out --zero.",
            )
        super().use(layout, names, tables)
        if self.weights is not None and not tf.executing_eagerly():
            self.weights.gather_again()

    def close(self, reason: BaseException | None = None) -> None:
        super().close(reason)
        if self.weights is not None:
            self.weights.close()

    def finish(self, loss: Array, *statistics: Array) -> list[Array]:
        """Finish the step as `Exchange.finish` does, with this rank's part (n,) of each gradient's sum."""
        try:
            return super().finish(loss, *statistics)
        finally:
            self._collected = 0

    def sum_shapes(self, layout: Layout) -> list[tuple[int, ...]]:
        """The shapes of the variables for this rank's parts."""
        return [(part.last - part.first,) for part in self.parts]

    def update(self, optimizer: Any, sums: Sequence[Any], variables: Sequence[Any]) -> None:
        """Update this rank's parts in the step's graph, bucket by bucket, and gather the weights of all ranks' parts.

        A bucket's weights are gathered while the next bucket is updated. Only its pieces are in memory meanwhile.
        """
        if [id(one) for one in variables] != [id(one) for one in self._variables]:
            raise ConfigError(
                "--zero updates all trainable variables of the model in one call",
                got=f"optimizer.apply for {len(variables)} variables",
                allowed=f"the {len(self._variables)} of model.trainable_variables, in their order",
                next_step="Apply gradients of self.trainable_variables in train_step, or leave out --zero.",
            )
        optimizer.global_clipnorm = None  # `_summed` has clipped: here Keras would take the norm of a part
        try:
            if self.weights is not None:
                optimizer._backend_apply_gradients(list(sums), self._pieces)
            else:
                self._update_buckets(optimizer, sums)
        finally:
            optimizer.global_clipnorm = self._clip_norm
        optimizer._iterations.assign_add(1)

    def _update_buckets(self, optimizer: Any, sums: Sequence[Any]) -> None:
        layout = self._of_layout()
        chain: list[Any] = []
        under_way: list[int] = []
        for bucket in range(len(layout.sizes)):
            if not (numbers := layout.posted(bucket)):
                continue
            with tf.control_dependencies([*chain, *(sums[i] for i in numbers)]):
                for i in numbers:
                    part, flat = self.parts[i], tf.reshape(_raw(self._variables[i]), [-1])
                    _raw(self._pieces[i]).assign(flat[part.first : part.last])
                optimizer._backend_apply_gradients([sums[i] for i in numbers], [self._pieces[i] for i in numbers])
            # Reads: they come after the last update, which may still read the gradients' memory.
            states = [tf.identity(_raw(one)) for i in numbers for one in self._state_of[i]]
            weights = [tf.identity(_raw(self._pieces[i])) for i in numbers]
            with tf.control_dependencies([*chain, *states]):
                chain = [tf.numpy_function(partial(self._post_weights, bucket), weights, tf.int32, name="post_weights")]
            with tf.control_dependencies(chain):
                for i in numbers:
                    _raw(self._pieces[i]).assign(tf.zeros([0], self._pieces[i].dtype))
                under_way.append(bucket)
                if len(under_way) > 1:
                    chain = self._assign_weights(layout, under_way.pop(0))
        with tf.control_dependencies(chain):
            for bucket in under_way:
                self._assign_weights(layout, bucket)

    def _assign_weights(self, layout: Layout, bucket: int) -> list[Any]:
        """Operations that wait for a bucket's weights and copy them to the variables."""
        numbers = layout.posted(bucket)
        dtypes = [tf.as_dtype(self._variables[i].dtype) for i in numbers]
        await_weights = partial(self._await_weights, bucket)
        done = []
        for i, whole in zip(numbers, tf.nest.flatten(tf.numpy_function(await_weights, [], dtypes)), strict=True):
            shape = self._variables[i].shape
            whole.set_shape(shape)
            # Into the variable's own memory: `assign` would keep the buffer instead.
            begin, end, strides = (
                np.zeros(len(shape), np.int32),
                np.array(shape, np.int32),
                np.ones(len(shape), np.int32),
            )
            done.append(
                tf.raw_ops.ResourceStridedSliceAssign(
                    ref=_raw(self._variables[i]).handle, begin=begin, end=end, strides=strides, value=whole
                )
            )
        return done

    def _post_weights(self, bucket: int, *weights: Array) -> np.int32:
        """Begin to gather a bucket's weights, of which `weights` are this rank's parts."""
        try:
            layout, flat = self._of_layout(), self._buffer(bucket)
            for i, value in zip(layout.posted(bucket), weights, strict=True):
                part, start = self.parts[i], layout.gradients[i].start
                flat[start + part.start : start + part.stop] = part.own(value)
            self._reducer.run(partial(self._gather, flat))
        except BaseException as error:
            self._fail(error)
            raise
        return np.int32(0)

    def _await_weights(self, bucket: int) -> list[Array]:
        try:
            self._reducer.wait(1, f"the gathering of weights of step {self.step}")
        except BaseException as error:
            self._fail(error)
            raise
        layout, flat = self._of_layout(), self._buffer(bucket)
        slots = [layout.gradients[i] for i in layout.posted(bucket)]
        return [flat[slot.start : slot.start + slot.size].reshape(slot.shape) for slot in slots]

    def _gather(self, flat: Array) -> bool:
        self.communicator.all_gather_parts(flat)
        return True

    def _send(self, bucket: int, flat: Array) -> None:
        self._reducer.run(partial(self._scatter, bucket, flat))

    def _scatter(self, bucket: int, flat: Array) -> bool:
        """Sum a bucket, of which this rank keeps its part; all ranks get statistics and control words."""
        layout = self._of_layout()
        self.communicator.reduce_scatter(flat)
        first, last = self._bounds[bucket]
        mine = flat[_down(first) : _up(last)]
        if bucket >= layout.first_tail:
            slots = [layout.gradients[i] for i in layout.posted(bucket)]
            rest = max((slot.start + slot.size for slot in slots), default=0)
            own_rest = flat[max(first, rest) : max(last, rest)]
            flat[rest:] = np.concatenate(self.communicator.all_gather_ragged(own_rest))
        elif self._stage > 1:
            mine = mine.copy()  # another bucket takes the buffer
        self._own[bucket] = mine
        if self._stage == 3 and bucket < layout.first_tail:
            buffer = self._memory.pop(bucket)
            if len(self._spare) < BUFFERS:
                self._spare.append(buffer)
        return True

    def _summed(self, layout: Layout) -> list[Array]:
        found = self._parts_of_sums(layout)
        if self._clip_norm:
            self._clip(found, self._clip_norm)
        self._own = {}
        return found

    def _parts_of_sums(self, layout: Layout) -> list[Array]:
        """This rank's part of each gradient's sum, with zeros before and after it."""
        found = []
        for slot, part in zip(layout.gradients, self.parts, strict=True):
            at, size = slot.start + part.first - _down(self._bounds[slot.bucket][0]), part.last - part.first
            held = self._own[slot.bucket][at : at + size] if size else np.empty(0, layout.dtypes[slot.bucket])
            held[: part.start - part.first] = 0
            held[part.stop - part.first :] = 0
            found.append(held)
        return found

    def _clip(self, parts: Sequence[Array], most: float) -> None:
        """Scale this rank's parts as Keras' clip_by_global_norm scales the whole, with a norm in float64."""
        squares = [float(np.dot(part.astype(np.float64), part.astype(np.float64))) for part in parts]
        total = np.array([math.fsum(squares)])
        self.communicator.all_reduce(total)
        for part in parts:
            norm, clip = part.dtype.type(math.sqrt(total[0])), part.dtype.type(most)
            with np.errstate(divide="ignore"):
                part *= clip * np.minimum(1 / norm, 1 / clip)

    def _names_of_wrong(self) -> list[str]:
        """The names of all gradients and statistics whose sums are not finite: each rank judges its parts. A
        collective.
        """
        layout = self._of_layout()
        wrong = np.array([not np.isfinite(part).all() for part in self._parts_of_sums(layout)], np.uint8)
        self.communicator.all_reduce(wrong, "max")
        slots = layout.statistics
        means = [not np.isfinite(self._current[slot.bucket].view(slot)).all() for slot in slots]
        return [name for name, bad in zip(self._names, [*wrong.tolist(), *means], strict=True) if bad]

    def _free_buffer(self, bucket: int) -> LentBuffer:
        if self._shares(bucket) and bucket >= BUFFERS:
            self._reducer.wait(1, f"the exchange of step {self.step + 1}")  # for the bucket that has had the buffer
            self._collected += 1
        return LentBuffer(self._buffer(bucket))

    def _owed(self, layout: Layout) -> int:
        return super()._owed(layout) - self._collected

    def _shares(self, bucket: int) -> bool:
        """Whether a bucket's buffer is that of others too."""
        return self._stage == 2 and bucket < self._of_layout().first_tail

    def _buffer(self, bucket: int) -> Array:
        """The memory of a bucket, for its gradients and then for its weights."""
        layout = self._of_layout()
        nbytes = [size * dtype.itemsize for size, dtype in zip(layout.sizes, layout.dtypes, strict=True)]
        place, needed = bucket, nbytes[bucket]
        if self._stage == 3 and bucket < layout.first_tail and bucket not in self._memory:
            # No wait for a buffer: a rank that waits here might keep others from gathering weights.
            needed = max(nbytes[: layout.first_tail])
            if self._spare:
                self._memory[bucket] = self._spare.pop()
        if self._shares(bucket):
            place, needed = bucket % BUFFERS - BUFFERS, max(nbytes[bucket % BUFFERS : layout.first_tail : BUFFERS])
        if place not in self._memory:
            self._memory[place] = self.communicator.allocate(needed, np.uint8)
        return self._memory[place][: nbytes[bucket]].view(layout.dtypes[bucket])


def _piece(variable: keras.Variable, part: Part) -> keras.Variable:
    """A flat variable for a part of `variable`, with its names; it has no elements but while it is updated."""
    piece = keras.Variable(np.zeros(part.last - part.first), dtype=variable.dtype, name=variable.name)
    piece._path = variable.path
    name, empty = _raw(variable).name.partition(":")[0], tf.zeros([0], variable.dtype)
    piece._value = tf.Variable(empty, shape=tf.TensorShape([None]), trainable=True, name=name)
    return piece


def _down(number: int) -> int:
    return number // REGISTER * REGISTER


def _up(number: int) -> int:
    return -(-number // REGISTER) * REGISTER


def _raw(variable: Any) -> tf.Variable:
    """TensorFlow's own variable."""
    return variable._value if isinstance(variable, keras.Variable) else variable


def check_optimizer(model: keras.Model) -> None:
    """Raise ConfigError for an optimizer whose update of a part is not the part of its update."""
    optimizer, plain = model.optimizer, own_class(model.optimizer)
    wrong = [name for name in ("clipnorm", "use_ema") if getattr(optimizer, name, None)]
    wrong += [f"a constraint of {one.path}" for one in model.trainable_variables if one.constraint is not None][:1]
    if plain not in ELEMENTWISE or wrong:
        raise ConfigError(
            "--zero cannot divide this optimizer's update over the ranks",
            got=f"{plain.__name__}{' with ' if wrong else ''}{', '.join(wrong)}",
            allowed=f"{', '.join(one.__name__ for one in ELEMENTWISE[1:])} of keras.optimizers, without clipnorm, "
            "use_ema and constraints: each element is updated from itself alone",
            next_step="Compile the model with one of these (global_clipnorm for clipnorm), or leave out --zero.",
        )
    if optimizer.built:
        raise ConfigError(
            "--zero needs an optimizer that is not built yet",
            got=f"a {plain.__name__} with {len(optimizer.variables)} variables",
            allowed="an optimizer of a model that the model's function compiles",
            next_step="Compile the model with a new optimizer, or leave out --zero.",
        )


class Divided(Exchanging):
    """The way of --zero."""

    def exchange_maker(self, whole: Communicator) -> Callable[..., Exchange]:
        way = self._config.way
        assert isinstance(way, ways.Zero)
        return partial(ZeroExchange, stage=way.zero)

    def between_steps(self, model: keras.Model, exchange: Exchange) -> EveryStep:
        assert isinstance(exchange, ZeroExchange)
        check_optimizer(model)
        exchange.divide(model.optimizer, model.trainable_variables)
        return EveryStep(exchange.communicator) if exchange.weights is None else WithParts(exchange)


class WithParts(EveryStep):
    """What a run does between steps whose weights are divided."""

    def __init__(self, exchange: ZeroExchange) -> None:
        super().__init__(exchange.communicator)
        assert exchange.weights is not None
        self._weights = exchange.weights

    def alike(self, model: keras.Model) -> list[keras.Variable]:
        return undivided(model.weights)

    def install(self, model: keras.Model) -> None:
        self._weights.install(model)

    def serve(self, model: keras.Model, signature: Signature) -> None:
        self._weights.serve(model, signature)

    def whole_weights(self) -> AbstractContextManager[None]:
        return self._weights.gathered()


WAY = Divided
