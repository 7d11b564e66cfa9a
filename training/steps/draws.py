"""Random numbers of a step as functions of (seed, step, rank), so that a restart draws the same ones.

`keras.random` without a seed draws from a generator of the process, which is not part of the model: a run resumed from
a checkpoint would draw other numbers than one that never stopped. While a step is traced, such draws depend on the step
instead. TensorFlow's own random operations keep their state in the process; a warning names them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Not public; it is separate for each thread, so that ranks in one process do not share it.
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

from lockstep.training.steps.optimizers import without_loss_scale

STATEFUL = {"RandomStandardNormal", "RandomUniform", "RandomUniformInt", "TruncatedNormal", "RandomShuffle"}
STATEFUL |= {"Multinomial", "RandomGammaV2", "RandomPoissonV2", "ParameterizedTruncatedNormal"}
log = logging.getLogger(__name__)


def step_of(optimizer: keras.optimizers.Optimizer) -> tf.Tensor:
    """The optimizer's count of steps, which every checkpoint stores; int64 ()."""
    return tf.cast(without_loss_scale(optimizer)._iterations.value, tf.int64)


def drawn_from(seed: int, name: str, words: Sequence[tf.Tensor], dtype: Any) -> tf.Tensor:
    """The state of a seed generator, (2,): a function only of `seed`, `name` and the int64 tensors `words` ()."""
    digest = hashlib.sha256(f"{name} {seed}".encode()).digest()
    state = tf.constant(np.frombuffer(digest, np.int64)[:2])
    for word in words:
        state = tf.random.experimental.stateless_fold_in(state, word, alg="philox")
    return tf.cast(tf.bitwise.bitwise_and(state, np.int64(0xFFFFFFFF)), dtype)


@contextmanager
def draws_of_step(seed: int, words: Sequence[tf.Tensor]) -> Iterator[None]:
    """While a step is traced, draws of keras.random without a seed depend on `seed`, `words` and their order in it.

    A warning names draws by TensorFlow's own operations, whose numbers differ after a restart.
    """
    before = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, _Draws(seed, words))
    try:
        yield
    finally:
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, before)
    if not tf.executing_eagerly():
        _warn_of_stateful(tf.compat.v1.get_default_graph())


class _Draws:
    """The part of Keras' SeedGenerator that a draw uses."""

    def __init__(self, seed: int, words: Sequence[tf.Tensor]) -> None:
        self._seed, self._words, self._count = seed, words, 0

    def next(self, ordered: bool = True) -> tf.Tensor:
        """A new state for each draw of the step; uint32 (2,)."""
        self._count += 1
        return drawn_from(self._seed, f"draw {self._count} of a step", self._words, tf.uint32)


def _warn_of_stateful(graph: Any) -> None:
    found = sorted(op.name for op in graph.get_operations() if op.type in STATEFUL)
    if found:
        log.warning(
            "%s: random operations of TensorFlow, whose state no checkpoint stores: after a restart the run draws "
            "other numbers (use keras.random, or tf.random.stateless_*)",
            ", ".join(found[:5]),
        )
