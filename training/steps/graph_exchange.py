"""The exchange that leaves gradients on the device: TensorFlow's collectives as operations of the step's own graph.

For NCCL, where a copy to the host and back would cost more than the sum. Buckets are reduced one after another in
reverse order of the variables, while backpropagation goes on; an ordering token keeps their order equal on all ranks.
What the ranks agree on (loss, flags, what is not finite) and the statistics are few bytes: these take the ordinary,
authenticated communicator at the end of the step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.ops import collective_ops

from lockstep.storage.errors import CommunicationError
from training.comm.base import Communicator
from training.comm.tf.cluster import RESTART
from training.comm.tf.communicator import TensorflowCommunicator
from training.exchange.buckets import Layout
from training.exchange.exchange import Exchange
from training.steps.ordered import put_last

Array = NDArray[Any]


def exchange_for(communicator: Communicator, scale: float | None) -> Exchange:
    """The exchange that fits the communicator: in the graph over TensorFlow's, else through the host's memory."""
    if isinstance(communicator, TensorflowCommunicator):
        return GraphExchange(communicator, scale)
    return Exchange(communicator, scale)


class GraphExchange(Exchange):
    """As `Exchange`, but its sums never leave the device.

    Instance keys are the buckets' numbers, in every step and in every trace of the graph: a rank that traces again for
    a batch of another size still meets the others. A deadline is that of the communicator when the graph is traced.
    """

    def __init__(self, communicator: TensorflowCommunicator, scale: float | None = None) -> None:
        super().__init__(communicator, scale)
        self._cluster, self._key, self._ordinary = communicator.cluster, communicator.graph_key(), communicator.ordinary
        with tf.init_scope(), tf.device(self._cluster.device):
            self._token = tf.Variable(0.0, trainable=False, name="collective_order")

    def fault(self) -> BaseException | None:
        """As `Exchange.fault`. TensorFlow's own error of a sum that was ended elsewhere names no rank."""
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

        Begins after `after`. Sets the agreement of the step; raises what `Exchange.finish` raises.
        """
        sums = self._sums(layout, gradients, after)
        wrong = [tf.logical_not(tf.reduce_all(tf.math.is_finite(total))) for total in sums]
        inputs = [tf.stack(wrong) if wrong else tf.zeros([0], tf.bool), loss, *statistics]
        with tf.control_dependencies(after):
            dtypes = [tf.int32, *(value.dtype for value in statistics)]
            agreed, *means = tf.nest.flatten(tf.numpy_function(self._finish, inputs, dtypes, name="agree"))
        put_last(agreed)  # another optimizer's sums come after it on every rank
        with tf.control_dependencies([agreed]):  # nothing is applied before all is known to be finite
            return [tf.identity(total) for total in sums], means, agreed

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
            self.waited_s = self.reduced_s = time.perf_counter() - began
            sums, start = [], words.size
            for value in statistics:
                sums.append(flat[start : start + value.size].reshape(value.shape).astype(value.dtype))
                start += value.size
            judged = [*wrong.tolist(), *(not np.isfinite(value).all() for value in sums)]
            names = [name for name, bad in zip(self._names, judged, strict=True) if bad]
            # Gradients never came here: of these, ranks can tell nothing of their own.
            self._agree(flat[: words.size].tolist(), names, self._names[: wrong.size], self._where(loss))
        except BaseException as error:
            self._fail(error)
            raise
        assert self.agreement is not None
        return [np.array(self.agreement.skipped, np.int32), *sums]


def _scaled(part: Any, factor: float) -> Any:
    """Times a factor that keeps its digits where `part` has two bytes a number."""
    if part.dtype.size >= 4:
        return part * tf.cast(factor, part.dtype)
    return tf.cast(tf.cast(part, tf.float32) * factor, part.dtype)
