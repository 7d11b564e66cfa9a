"""Delayed sums: step t applies the sum of step t - D, so that ranks add gradients while they compute the next ones.

Langford, Smola and Zinkevich, "Slow Learners are Fast" (NIPS 2009), prove convergence for gradients that are D steps
late. All ranks apply the same sums in the same order, so results are the same in every run, unlike those of an
asynchronous parameter server. Only gradients are late: at the end of step t ranks agree on its loss, flags and batch
statistics, over a group of their own. docs/strategies.md.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from lockstep.storage.errors import ConfigError, DataError
from lockstep.training import ways
from lockstep.training.comm.base import Communicator
from lockstep.training.exchange.agreement import Inquiry, NonFiniteError, NonFinitePolicy
from lockstep.training.exchange.exchange import Array, Exchange
from lockstep.training.exchange.sparse import Rows
from lockstep.training.run.checkpoint import Tensors
from lockstep.training.steps.distribute import apply_sums
from lockstep.training.strategies.every_step import EveryStep, Exchanging

KIND = "delayed"
GRADIENT = "the gradient of "


@dataclass(slots=True)
class LateSum:
    """The sums of one step, while they are under way and until they are applied."""

    step: int
    names: tuple[str, ...]
    """The names of the gradients of `values`, then of `rows`."""
    values: list[Array]
    """Whole gradients; views, so that the buffers under them are not reused."""
    rows: dict[int, Rows]
    """The gradients by rows, by number of the table."""
    posts: int = 0
    """Results that the exchange's thread owes."""
    finite: bool = False
    """Whether every rank's part was finite, so that sums need no check."""
    here: list[str] = field(default_factory=list)
    """This rank's gradients that were not finite."""

    def flat(self) -> list[Array]:
        """Whole gradients, then indices and values of each table, in order."""
        pairs = [self.rows[number] for number in range(len(self.rows))]
        return [*self.values, *(array for rows in pairs for array in (rows.indices, rows.values))]

    def wrong(self) -> list[str]:
        """The names of the sums that are not finite."""
        sums = [*self.values, *(self.rows[number].values for number in range(len(self.rows)))]
        return [name for name, value in zip(self.names, sums, strict=True) if not np.isfinite(value).all()]


class DelayedExchange(Exchange):
    """An exchange whose `finish` returns the sums that were posted `delay` steps before.

    The first `delay` steps apply nothing. Collectives between steps use `prompt`, since gradients may be under way on
    `communicator`.
    """

    def __init__(
        self,
        communicator: Communicator,
        scale: float | None = None,
        *,
        delay: int,
        scaled_loss: bool,
        non_finite: NonFinitePolicy,
    ) -> None:
        """A collective. Raises ConfigError for an optimizer that scales the loss."""
        if scaled_loss:
            raise ConfigError(
                "late gradients cannot have a scaled loss: the scale may change before they are applied",
                got=f"a LossScaleOptimizer and --delay {delay}",
                allowed="an optimizer without loss scaling",
                next_step="Use --delay 0, or another precision than mixed_float16.",
            )
        super().__init__(communicator, scale, scaled_loss=False, non_finite=non_finite)
        self.delay = delay
        self.prompt = communicator.group(range(communicator.num_ranks))
        """All ranks, for calls that do not wait for the gradients under way."""
        self.prompt.deadline_s = communicator.deadline_s
        self._inquiry = Inquiry(self.prompt, non_finite)
        self._late: deque[LateSum] = deque()
        self._applies = False

    @property
    def alone(self) -> bool:
        """Whether gradients stay in the graph: never, since the sums of one rank are late too."""
        return False

    @property
    def applies(self) -> bool:
        """Whether a sum was old enough in the last step."""
        return self._applies

    def finish(self, loss: Array, *statistics: Array) -> list[Array]:
        """Finish the step as `Exchange.finish` does, with the statistics of this step and the gradients of `delay`
        steps before.
        """
        try:
            layout, began = self._of_layout(), time.perf_counter()
            if self.error is not None:
                raise self.error
            words, means = self._agreed_words(loss, statistics)
            names = self._names[len(layout.gradients) :]
            wrong = [name for name, mean in zip(names, means, strict=True) if not np.isfinite(mean).all()]
            values = [self._current[slot.bucket].lend(slot) for slot in layout.gradients]
            names = (*self._names[: len(values)], *(table.name for table in self._tables))
            posts = layout.first_tail + len(self._tables)
            self._late.append(LateSum(self.step + 1, names, values, self._rows, posts, words[1] == 0, self._here))
            self._agree(words, wrong, names, loss)
            self._applies = len(self._late) > self.delay
            sums = self._taken().flat() if self._applies else self._nothing()
            self.waited_s = time.perf_counter() - began
            return [*sums[: len(values)], *means, *sums[len(values) :]]
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._current, self._rows, self._safe, self._here = [], {}, True, []

    def under_way(self) -> list[LateSum]:
        """The sums that no step has applied, oldest first; waits for them."""
        try:
            for late in self._late:
                self._arrive(late)
        except BaseException as error:
            self._fail(error)
            raise
        return list(self._late)

    def resume_late(self, late: Sequence[LateSum]) -> None:
        """Continue with sums that `under_way` returned, before the first step."""
        self._late = deque(late)

    def taken(self) -> LateSum | None:
        """The oldest sum that no step has applied, None after the last; raises NonFiniteError naming its step."""
        try:
            return self._taken() if self._late else None
        except BaseException as error:
            self._fail(error)
            raise

    def _agreed_words(self, loss: Array, statistics: Sequence[Array]) -> tuple[list[float], list[Array]]:
        """The sums over ranks of this step's control words and statistics."""
        layout = self._of_layout()
        words = self._fill_rest(loss, statistics)
        for bucket in range(layout.first_tail, len(layout.sizes)):
            self.prompt.all_reduce(self._current[bucket].data)
        means = [self._current[slot.bucket].view(slot).reshape(slot.shape).copy() for slot in layout.statistics]
        return words.tolist(), means

    def _taken(self) -> LateSum:
        late = self._late.popleft()
        self._arrive(late)
        if not late.finite and (wrong := late.wrong()):
            where = self._inquiry.hold(late.step, late.here, skipped=False)
            raise NonFiniteError(
                f"step {late.step}: {wrong[0]} is not finite",
                got=f"its sum over {self.communicator.num_ranks} ranks, {self.step - late.step} steps later: {where}",
                allowed="finite numbers; all ranks stop here, and none has applied it",
                next_step="Lower the learning rate, clip gradients (clipnorm) or look at the data of this step.",
            )
        return late

    def _arrive(self, late: LateSum) -> None:
        if late.posts:
            posts, late.posts = late.posts, 0
            finite = self._reducer.wait(posts, f"the exchange of step {late.step}")
            late.finite = late.finite and finite

    def _nothing(self) -> list[Array]:
        layout = self._of_layout()
        found: list[Array] = [np.zeros(slot.shape, layout.dtypes[slot.bucket]) for slot in layout.gradients]
        for table in self._tables:
            found += [np.zeros(0, np.int64), np.zeros((0, *table.shape[1:]), table.dtype)]
        return found


class Delayed(EveryStep):
    """Keeps the sums under way in checkpoints, and applies the last ones at the end of the run.

    Checkpoints store them rather than applying them: else the weights would depend on when checkpoints are written.
    They are sums over all ranks, so any number of ranks can continue with them. Their names are
    delayed/STEP/NUMBER/VARIABLE, for a sum by rows followed by /indices and /values.
    """

    def __init__(self, model: keras.Model, exchange: DelayedExchange) -> None:
        super().__init__(exchange.prompt)
        self._model, self._exchange = model, exchange

    def state(self) -> Tensors:
        found: Tensors = {}
        for late in self._exchange.under_way():
            for i, name in enumerate(late.names):
                key = f"{KIND}/{late.step}/{i:06d}/{name.removeprefix(GRADIENT)}"
                if i < len(late.values):
                    found[key] = late.values[i]
                else:
                    rows = late.rows[i - len(late.values)]
                    found |= {f"{key}/indices": rows.indices, f"{key}/values": rows.values}
        return found

    def load(self, tensors: Tensors, where: str) -> None:
        mine = sorted(name for name in tensors if name.startswith(f"{KIND}/"))
        late = []
        for step in sorted({int(name.split("/")[1]) for name in mine}):
            keys = [name for name in mine if name.startswith(f"{KIND}/{step}/")]
            whole = [key for key in keys if not key.endswith(("/indices", "/values"))]
            tables = [key.removesuffix("/indices") for key in keys if key.endswith("/indices")]
            names = tuple(GRADIENT + key.split("/", 3)[3] for key in (*whole, *tables))
            # Copies: the file's memory is freed.
            rows = [Rows(tensors[f"{key}/indices"].copy(), tensors[f"{key}/values"].copy()) for key in tables]
            late.append(LateSum(step, names, [tensors[key].copy() for key in whole], dict(enumerate(rows))))
        self._exchange.resume_late(late)

    def finish(self) -> None:
        while (late := self._exchange.taken()) is not None:
            variables: dict[str, deque[Any]] = defaultdict(deque)
            for variable in self._model.trainable_variables:
                variables[variable.path].append(variable)
            names = [name.removeprefix(GRADIENT) for name in late.names]
            if lost := [name for name in names if not variables[name]]:
                raise DataError(
                    f"the sums of step {late.step} do not fit the model",
                    got=f"a sum for {lost[0]}",
                    allowed=", ".join(variables)[:500],
                    next_step="Resume with the model that the run began with.",
                )
            chosen = [variables[name].popleft() for name in names]
            sums: list[Any] = [tf.convert_to_tensor(value) for value in late.values]
            for rows, variable in zip(late.rows.values(), chosen[len(sums) :], strict=True):
                shape = tf.constant(tuple(variable.shape), tf.int64)
                sums.append(tf.IndexedSlices(tf.convert_to_tensor(rows.values), rows.indices, shape))
            apply_sums(self._model.optimizer, sums, chosen)


class DelayedSums(Exchanging):
    """The way of --delay."""

    def exchange_maker(self, whole: Communicator) -> Callable[..., Exchange]:
        way = self._config.way
        assert isinstance(way, ways.Delay)
        return partial(DelayedExchange, delay=way.delay)

    def between_steps(self, model: keras.Model, exchange: Exchange) -> EveryStep:
        assert isinstance(exchange, DelayedExchange)
        return Delayed(model, exchange)


WAY = DelayedSums
