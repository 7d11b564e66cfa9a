"""TensorFlow's collective operations on NumPy arrays: one call of one group, and the bytes that it can move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

MERGE = {"sum": "Add", "mean": "Add", "min": "Min", "max": "Max"}
WORD = np.dtype(np.float32)  # as which bytes travel: TensorFlow gathers no uint8; nothing is computed with them
NARROW = np.dtype(np.uint8)  # TensorFlow reduces none: it is widened, and wraps when it is narrowed again


@dataclass(frozen=True, slots=True)
class Call:
    """What the members of a group must give alike."""

    key: int
    """Of the group."""
    size: int
    """Members."""
    instance: int
    """Of the call within the group."""
    hint: str
    """`ring` or `nccl`."""
    timeout_s: float


Operation = Callable[[Call], Any]
"""Makes TensorFlow's call; returns its tensor."""


def summing(values: NDArray[Any], op: str) -> Operation:
    """The reduction of `values` (n,) over the group."""
    given = values.astype(np.int32) if values.dtype == NARROW else values

    def make(call: Call) -> Any:
        import tensorflow as tf
        from tensorflow.python.ops import collective_ops

        return collective_ops.all_reduce_v2(
            tf.constant(given),
            call.size,
            call.key,
            call.instance,
            MERGE[op],
            communication_hint=call.hint,
            timeout=call.timeout_s,
        )

    return make


def gathering(words: NDArray[Any]) -> Operation:
    """The `words` (n,) of every member, one after the other in TensorFlow's order of them."""

    def make(call: Call) -> Any:
        from tensorflow.python.ops import collective_ops

        return collective_ops.all_gather_v2(words, call.size, call.key, call.instance, call.hint, call.timeout_s)

    return make


def giving(words: NDArray[Any]) -> Operation:
    """Hand `words` (n,) to the other members."""

    def make(call: Call) -> Any:
        from tensorflow.python.ops import collective_ops

        return collective_ops.broadcast_send_v2(words, call.size, call.key, call.instance, call.hint, call.timeout_s)

    return make


def taking(words: NDArray[Any]) -> Operation:
    """The words of the one member that gives, as many as `words`."""

    def make(call: Call) -> Any:
        from tensorflow.python.ops import collective_ops

        options = (call.size, call.key, call.instance, call.hint, call.timeout_s)
        return collective_ops.broadcast_recv_v2([words.size], WORD.name, *options)

    return make


def words_of(buf: NDArray[Any]) -> NDArray[Any]:
    """The bytes of `buf` (n,) as 32-bit words, zeros behind them."""
    words = np.zeros(-(-buf.nbytes // WORD.itemsize), WORD)
    words.view(np.uint8)[: buf.nbytes] = buf.view(np.uint8)
    return words


def from_words(words: NDArray[Any], like: NDArray[Any]) -> NDArray[Any]:
    """The inverse: (..., words) as (..., n) of the size and dtype of `like` (n,)."""
    return words.view(np.uint8)[..., : like.nbytes].view(like.dtype)


def key_of(parent: int, *parts: object) -> int:
    """A group's key from its parent's and what makes it: equal on its members, who cannot ask anybody else."""
    digest = sha256(repr((parent, *parts)).encode()).digest()
    return int.from_bytes(digest[:4], "little") & 0x7FFF_FFFF or 1
