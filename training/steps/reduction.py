"""The exchange as operations of the step's graph: gradients in, their sums over all ranks out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.ops import collective_ops

from lockstep.storage.errors import CommunicationError, ConfigError
from lockstep.training.comm.base import Communicator
from lockstep.training.comm.tf.cluster import RESTART
from lockstep.training.comm.tf.communicator import TensorflowCommunicator
from lockstep.training.compression.method import NONE, Compression
from lockstep.training.exchange.agreement import CONTROL_WORDS, NonFinitePolicy
from lockstep.training.exchange.buckets import BUCKET_BYTES, Layout, lay_out
from lockstep.training.exchange.exchange import Exchange, SoloExchange
from lockstep.training.exchange.sparse import ROWS_FROM_BYTES, Table, added_up
from lockstep.training.steps.ordered import put_last, tail

Array = NDArray[Any]


def exchange_for(
    communicator: Communicator,
    scale: float | None,
    *,
    scaled_loss: bool,
    non_finite: NonFinitePolicy,
    compression: Compression = NONE,
) -> Exchange:
    """The exchange that fits the communicator: in the graph over TensorFlow's, else through host memory.

    Raises ConfigError for a `compression` that cannot be combined with them.
    """
    kind = GraphExchange if isinstance(communicator, TensorflowCommunicator) else Exchange
    wrong = "the backends tensorflow and nccl" if compression and kind is GraphExchange else ""
    if compression.keeps and scaled_loss:
        wrong = "a scaled loss (mixed_float16), whose scale changes between steps"
    if compression.keeps and non_finite.skips:
        wrong = "skipped steps (--non-finite skip)"
    if wrong:
        raise ConfigError(
            f"the compression {compression.name} cannot be combined with {wrong}",
            got=compression.name,
            allowed="any compression over TCP or shared memory; bf16, fp16, int8, qsgd and terngrad with a scaled loss "
            "or skipped steps",
            next_step="Choose another --compression, or none.",
        )
    return kind(communicator, scale, scaled_loss=scaled_loss, non_finite=non_finite, compression=compression)


class GraphExchange(Exchange):
    """An `Exchange` whose sums never leave the device.

    Instance keys are the buckets' numbers, in every step and in every trace of the graph: a rank that traces again for
    a batch of another size still meets the others. The deadline is the communicator's when the graph is traced.
    """

    takes_rows = False  # TensorFlow's collectives only take whole tensors

    def __init__(self, communicator: Communicator, scale: float | None = None, **options: Any) -> None:
        """`communicator` is TensorFlow's; `options` are those of `Exchange`."""
        assert isinstance(communicator, TensorflowCommunicator)
        super().__init__(communicator, scale, **options)
        self._cluster, self._key, self._ordinary = communicator.cluster, communicator.graph_key(), communicator.ordinary
        with tf.init_scope(), tf.device(self._cluster.device):
            self._token = tf.Variable(0.0, trainable=False, name="collective_order")

    def fault(self) -> BaseException | None:
        """Return the failure, as `Exchange.fault` does. TensorFlow's own error for a sum that another rank ended names
        no rank.
        """
        reason = self._cluster.reason() if self.error is None else None
        if reason is not None:
            self.error = CommunicationError(
                f"rank {self.communicator.rank}, step {self.step + 1}: the sums of gradients were ended: {reason}",
                next_step=RESTART,
            )
        return self.error

    def _sums(self, layout: Layout, gradients: Sequence[Any], after: Sequence[Any]) -> list[Any]:
        found: list[Any] = [None] * len(gradients)
        with tf.device(self._cluster.device), tf.control_dependencies(after):
            for bucket in range(len(layout.sizes)):
                numbers = layout.posted(bucket)
                if not numbers:
                    continue
                flat = [tf.reshape(gradients[i], [-1]) for i in numbers]
                flat = tf.concat([_scaled(part, self.scale) for part in flat], axis=0)
                total = collective_ops.all_reduce_v2(
                    flat,
                    self.communicator.num_ranks,
                    self._key,
                    bucket + 1,
                    communication_hint=self._cluster.hint,
                    timeout=self.communicator.deadline_s,
                    ordering_token=self._token.handle,
                    name=f"sum_bucket_{bucket}",
                )
                for i, part in zip(numbers, tf.split(total, [layout.gradients[i].size for i in numbers]), strict=True):
                    found[i] = tf.reshape(part, layout.gradients[i].shape)
        return found

    def reduce(
        self, layout: Layout, gradients: Sequence[Any], loss: Any, statistics: Sequence[Any], after: Sequence[Any]
    ) -> tuple[list[Any], list[Any], Any]:
        """The scaled sums of `gradients` and `statistics` over all ranks, and whether the ranks skip the step (int32).

        Begins after `after`. Sets the agreement of the step; raises the errors of `Exchange.finish`.
        """
        if self.meet is not None:
            with tf.control_dependencies(after):  # nothing but the sums waits for it
                after = [tf.numpy_function(self._met, [], tf.int32, name="meet")]
        sums = self._sums(layout, gradients, after)
        wrong = [tf.logical_not(tf.reduce_all(tf.math.is_finite(total))) for total in sums]
        inputs = [tf.stack(wrong) if wrong else tf.zeros([0], tf.bool), loss, *statistics]
        with tf.control_dependencies(after):
            dtypes = [tf.int32, *(value.dtype for value in statistics)]
            agreed, *means = tf.nest.flatten(tf.numpy_function(self._finish, inputs, dtypes, name="agree"))
        put_last(agreed)  # another optimizer's sums come after it on every rank
        with tf.control_dependencies([agreed]):  # nothing is applied before the ranks have agreed
            return [tf.identity(total) for total in sums], means, agreed

    def _met(self) -> np.int32:
        try:
            self._meet()
        except BaseException as error:
            self._fail(error)
            raise
        return np.int32(0)

    def _finish(self, wrong: Array, loss: Array, *statistics: Array) -> list[Array]:
        """`wrong` (gradients,) says which sums are not finite, the same on every rank. Raises NonFiniteError."""
        try:
            if self.error is not None:
                raise self.error
            words = np.array(self._words(loss))
            words[0] *= self.scale
            parts = [words, *(np.multiply(value, self.scale, dtype=np.float64).reshape(-1) for value in statistics)]
            flat = np.concatenate(parts)  # one message
            began = time.perf_counter()
            self._ordinary.deadline_s = self.communicator.deadline_s
            self._ordinary.all_reduce(flat)
            self.waited_s = time.perf_counter() - began
            sums, start = [], words.size
            for value in statistics:
                sums.append(flat[start : start + value.size].reshape(value.shape).astype(value.dtype))
                start += value.size
            judged = [*wrong.tolist(), *(not np.isfinite(value).all() for value in sums)]
            names = [name for name, bad in zip(self._names, judged, strict=True) if bad]
            # Gradients stay on the device: a rank cannot say which of its own were not finite.
            self._agree(flat[: words.size].tolist(), names, self._names[: wrong.size], loss)
        except BaseException as error:
            self._fail(error)
            raise
        assert self.agreement is not None
        return [np.array(self.agreement.skipped, np.int32), *sums]


def _scaled(part: Any, factor: float) -> Any:
    """Return `part` times a factor, which keeps its digits if `part` has a dtype of two bytes."""
    if part.dtype.size >= 4:
        return part * tf.cast(factor, part.dtype)
    return tf.cast(tf.cast(part, tf.float32) * factor, part.dtype)


Gradient = Any  # tf.Tensor, tf.IndexedSlices or None


@dataclass(eq=False, slots=True)
class Reduction:
    """The path of one optimizer's gradients through the exchange.

    `statistics` are averaged with the last bucket; a tensor of at least `rows_from_bytes` whose gradient has rows is
    exchanged by rows. `compression` has `compress(tensor)` -> (tensor, context) and `decompress(tensor, context)`, like
    lockstep.horovod.Compression; ranks sum and check the compressed gradients.
    """

    exchange: Exchange
    statistics: tuple[keras.Variable, ...] = ()
    bucket_bytes: int = BUCKET_BYTES
    rows_from_bytes: int = ROWS_FROM_BYTES
    compression: Any = None
    skipped: Any = None
    """What the step traced (or run, in eager mode) last has decided: int32 (), 1 if it applies nothing."""

    def __call__(
        self, grads: Sequence[Gradient], variables: Sequence[Any], loss: tf.Tensor, *, rows: bool = True
    ) -> list[Gradient]:
        """Sums over all ranks, scaled, None for None; `rows`: whether the optimizer takes gradients by rows.

        Operations have one order on every rank: a chain of posts, then the await, which also comes after all other
        operations of the step that wait for other ranks.
        """
        present = [i for i, grad in enumerate(grads) if grad is not None]
        slices = [i for i in present if isinstance(grads[i], tf.IndexedSlices)]
        by_rows = [i for i in slices if self._is_large(variables[i], _dtype(grads[i].values))]
        if not self.exchange.takes_rows:
            by_rows = []
        whole = [i for i in present if i not in by_rows]
        dense = [tf.convert_to_tensor(grads[i]) for i in whole]  # a small table's rows become a whole tensor
        contexts: list[Any] = []
        alone = self.exchange.alone
        if self.compression is not None and not alone:
            packed = [self.compression.compress(grad) for grad in dense]
            dense, contexts = [grad for grad, _ in packed], [context for _, context in packed]
        sparse = [grads[i] for i in by_rows]
        values = [variable.value for variable in self.statistics]  # read after the forward pass assigned them
        names = [f"the gradient of {_path(variables[i])}" for i in whole]
        statistics = [f"the statistic {variable.path}" for variable in self.statistics]
        tables = [
            Table(f"the gradient of {_path(variables[i])}", _shape(variables[i]), _dtype(grads[i].values))
            for i in by_rows
        ]
        layout = self.layout_of(dense)
        self.exchange.use(layout, names + statistics, tables)
        if not present:
            return list(grads)
        if alone:
            judge = SoloExchange(self.exchange, [*names, *(table.name for table in tables)], statistics)
            summed, pairs = self._alone(judge, layout, dense, sparse, [loss, *values])
        elif isinstance(self.exchange, GraphExchange):
            summed, means, self.skipped = self.exchange.reduce(layout, dense, loss, values, tail())
            for variable, value in zip(self.statistics, means, strict=True):
                value.set_shape(variable.shape)
                variable.assign(value)
            pairs = []
        else:
            summed, pairs = self._over_ranks(layout, dense, sparse, [loss, *values])
        if contexts:
            summed = [self.compression.decompress(*pair) for pair in zip(summed, contexts, strict=True)]
        result: list[Gradient] = [None] * len(grads)
        for i, total in zip(whole, summed, strict=True):
            result[i] = total
        for i, (indices, totals), table in zip(by_rows, pairs, tables, strict=True):
            indices.set_shape((None,))
            totals.set_shape((None, *table.shape[1:]))
            total = tf.IndexedSlices(totals, indices, tf.constant(table.shape, indices.dtype))
            result[i] = total if rows else tf.convert_to_tensor(total)
        return result

    def layout_of(self, dense: Sequence[Any]) -> Layout:
        """The buckets of these whole gradients, or of the gradients of these variables."""
        return lay_out(
            [(_shape(one), _dtype(one)) for one in dense],
            [(_shape(one.value), _dtype(one.value)) for one in self.statistics],
            CONTROL_WORDS,
            self.bucket_bytes,
            apart=self.exchange.divides_tail,
        )

    def _over_ranks(
        self, layout: Layout, dense: list[Any], sparse: list[Any], rest: list[Any]
    ) -> tuple[list[Any], list[tuple[Any, Any]]]:
        chain: list[Any] = []
        for bucket in range(len(layout.sizes)):
            if posted := [dense[i] for i in layout.posted(bucket)]:
                chain = _then(chain, _posting(self.exchange.post, bucket), posted, f"post_{bucket}")
        for number, grad in enumerate(sparse):
            pair = [grad.indices, grad.values]
            chain = _then(chain, _posting(self.exchange.post_rows, number), pair, f"post_rows_{number}")
        statistics = rest[1:]
        dtypes = [tf.int32, *(tensor.dtype for tensor in (*dense, *statistics))]
        for grad in sparse:
            dtypes += [tf.int64, grad.values.dtype]
        with tf.control_dependencies([*chain, *tail()]):
            # Flattened, since in eager mode a single result comes without its list.
            found = tf.nest.flatten(tf.numpy_function(self._await, rest, dtypes, name="await"))
        self.skipped, *sums = found
        put_last(found[0])  # another optimizer's await comes after it on every rank
        shapes = [*self.exchange.sum_shapes(layout), *(tensor.shape for tensor in statistics)]
        for shape, total in zip(shapes, sums, strict=False):
            total.set_shape(shape)
        for variable, value in zip(self.statistics, sums[len(dense) :], strict=False):
            variable.assign(value)
        pairs = sums[len(dense) + len(statistics) :]
        return sums[: len(dense)], list(zip(pairs[::2], pairs[1::2], strict=True))

    def _await(self, *rest: np.ndarray) -> list[np.ndarray]:
        try:
            sums = self.exchange.finish(*rest)
        except CommunicationError as error:
            raise error.with_traceback(None) from None  # TensorFlow prints the trace, twice
        return [_skipped(self.exchange), *sums]

    def _alone(
        self, judge: SoloExchange, layout: Layout, dense: list[Any], sparse: list[Any], rest: list[Any]
    ) -> tuple[list[Any], list[tuple[Any, Any]]]:
        chain: list[Any] = []
        for bucket in range(len(layout.sizes)):
            if numbers := layout.posted(bucket):
                chain = _then(chain, judge.look_at(numbers), [dense[i] for i in numbers], f"look_{bucket}")
        pairs = []
        for number, grad in enumerate(sparse):
            dtypes = [tf.int64, grad.values.dtype]
            indices, values = tf.numpy_function(_added_up, [grad.indices, grad.values], dtypes, stateful=False)
            chain = _then(chain, judge.look_at([len(dense) + number]), [values], f"look_at_rows_{number}")
            pairs.append((indices, values))
        chain = _then([*chain, *tail()], judge.finish, rest, "agree")
        (self.skipped,) = chain
        with tf.control_dependencies(chain):  # nothing is applied before all values have been checked
            factors = [self.exchange.kept_factor(name) for name in judge.gradients[: len(dense)]]
            kept = [grad if one == 1.0 else _scaled(grad, one) for grad, one in zip(dense, factors, strict=True)]
            return [tf.identity(grad) for grad in kept], [(tf.identity(i), tf.identity(v)) for i, v in pairs]

    def _is_large(self, variable: Any, dtype: np.dtype[Any]) -> bool:
        return math.prod(_shape(variable)) * dtype.itemsize >= self.rows_from_bytes


def _then(chain: list[Any], function: Callable[..., Any], inputs: list[Any], name: str) -> list[Any]:
    """The chain with one more operation."""
    if tf.executing_eagerly():  # where TensorFlow converts no scalar of bfloat16 to an array
        inputs = [tf.reshape(x, [1]) if x.dtype == tf.bfloat16 and x.shape.rank == 0 else x for x in inputs]
    with tf.control_dependencies(chain):
        return [tf.numpy_function(function, inputs, tf.int32, name=name)]


def _posting(post: Callable[..., None], number: int) -> Callable[..., np.int32]:
    """Return `post` as a function for the graph, which orders operations by their values: it returns one."""

    def posting(*gradients: np.ndarray) -> np.int32:
        post(number, *gradients)
        return np.int32(0)

    return posting


def _skipped(exchange: Exchange) -> np.ndarray:
    assert exchange.agreement is not None
    return np.array(not exchange.applies, np.int32)


def _added_up(indices: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return added_up(indices.astype(np.int64, copy=False), values)


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _dtype(tensor: Any) -> np.dtype[Any]:
    return np.dtype(tf.as_dtype(tensor.dtype).as_numpy_dtype)


def _path(variable: Any) -> str:
    return str(getattr(variable, "path", variable.name))  # Keras' variables have a path, TensorFlow's a name
