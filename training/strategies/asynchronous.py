"""Asynchronous SGD without a server: each rank applies its own gradient at once, and those of others as they arrive.

Ranks are at most `staleness` steps apart: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
Parameter Server" (NIPS 2013). Gradients travel in partial sums, as in Li et al., "Taming Unbalanced Training
Workloads in Deep Learning with Partial Collective Operations" (PPoPP 2020): a round adds up what each rank has produced
since the round before, one step or several. Each gradient is applied once on every rank, in an order that depends on
the clock: equal runs do not give equal bits. docs/strategies.md.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np

from lockstep.storage.errors import CommunicationError, ConfigError
from lockstep.training import ways
from lockstep.training.comm.base import Communicator
from lockstep.training.exchange.agreement import Agreement, NonFinitePolicy
from lockstep.training.exchange.buckets import all_finite
from lockstep.training.exchange.exchange import GRACE_S, Array, Exchange
from lockstep.training.rules import CheckpointEvery
from lockstep.training.strategies.every_step import EveryStep, Exchanging
from lockstep.training.strategies.local_steps import LocalExchange, average_state


class Rounds:
    """Adds up flat buffers of all ranks in a thread, round by round, while ranks compute their next steps.

    A rank enters a round if it has added a step since its last one, or if it waits for others. So a round begins when
    the slowest rank ends a step, and none begins while no rank has a new step.
    """

    def __init__(self, communicator: Communicator, like: Sequence[Array], steps: int) -> None:
        """Only the thread uses `communicator`. Buffers have shapes (n,) and dtypes of `like`; all ranks have done
        `steps` steps."""
        self._communicator = communicator
        self._changed = threading.Condition()
        self._mine = [np.zeros_like(flat) for flat in like]  # of this rank's steps since its last round
        self._arrived = [np.zeros_like(flat) for flat in like]  # of other ranks' steps, not taken yet
        self._steps = self._sent = steps
        self._counts = np.full(communicator.num_ranks, steps, np.int64)  # of each rank's steps that are here
        self._asks = self._waits = self._closed = False
        self._asked_at: int | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="rounds", daemon=True)
        self._thread.start()

    def add(self, flats: Sequence[Array], *, asks: bool) -> int | None:
        """Add this rank's next step; `asks`: for a meeting.

        Returns the least number of steps of any rank in the first round in which one asked, the same on all ranks;
        None before. Raises the error of a round.
        """
        with self._changed:
            self._raise()
            for mine, flat in zip(self._mine, flats, strict=True):
                mine += flat
            self._steps += 1
            self._asks = asks
            self._changed.notify_all()
            return self._asked_at

    def wait(self, least: int) -> None:
        """Wait until the first `least` steps of all ranks are here. Raises CommunicationError naming a late rank."""
        patience_s = min(self._communicator.deadline_s + GRACE_S, threading.TIMEOUT_MAX)
        with self._changed:
            self._waits = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error is not None or self._counts.min() >= least, patience_s)
            self._waits = False
            self._raise()
            if (found := int(self._counts.min())) < least:
                raise CommunicationError(
                    f"rank {int(self._counts.argmin())} is late: rank {self._communicator.rank} waits after step "
                    f"{self._steps}",
                    got=f"its gradients up to step {found}, for {patience_s:.0f} s",
                    allowed=f"those up to step {least}",
                    next_step="Look at that rank's log and host; --stall-limit sets how long ranks wait.",
                )

    def take(self, flats: Sequence[Array]) -> None:
        """Add what other ranks have sent to `flats`, in place."""
        with self._changed:
            for flat, arrived in zip(flats, self._arrived, strict=True):
                flat += arrived
                arrived[:] = 0

    def met(self) -> None:
        """All ranks' steps are here: a later meeting needs another request."""
        with self._changed:
            self._asked_at, self._asks = None, False

    def close(self) -> None:
        """End the thread; the communicator stays open."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(GRACE_S)

    def _work(self) -> None:
        sent = [np.zeros_like(flat) for flat in self._mine]
        sums = [self._communicator.allocate(flat.size, flat.dtype) for flat in self._mine]
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(self._enters)
                    if self._closed:
                        return
                    self._mine, sent = sent, self._mine
                    for mine in self._mine:
                        mine[:] = 0
                    self._sent = self._steps
                    words = np.array([self._steps, self._asks], np.int64)
                table = self._communicator.all_gather(words)  # (ranks, 2)
                for flat, total in zip(sent, sums, strict=True):
                    total[:] = flat
                    self._communicator.all_reduce(total)
                    total -= flat
                with self._changed:
                    for arrived, total in zip(self._arrived, sums, strict=True):
                        arrived += total
                    self._counts = table[:, 0]
                    if table[:, 1].any() and self._asked_at is None:
                        self._asked_at = int(self._counts.min())
                    self._changed.notify_all()
        except BaseException as error:  # raised again in the step
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _enters(self) -> bool:
        behind = self._counts.min() < self._steps  # a rank that waits joins others' rounds, until it has all steps
        return self._closed or self._steps > self._sent or (self._waits and bool(behind))

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


@dataclass(frozen=True, slots=True)
class Noise:
    """A rank's part of the Gaussian noise on a gradient, of variance eta / (1 + step)**0.55 over all ranks.

    Neelakantan et al., "Adding Gradient Noise Improves Learning for Very Deep Networks" (2015).
    """

    eta: float
    seed: int
    rank: int

    def add(self, flats: Sequence[Array], step: int, share: float) -> None:
        """Add it to `flats` in place: a function of seed, rank and step. `share`: of the variance, 1 over all ranks."""
        if not self.eta:
            return
        draws = np.random.Generator(np.random.Philox(key=[self.seed, self.rank], counter=[0, 0, 0, step]))
        deviation = math.sqrt(share * self.eta / (1 + step) ** 0.55)
        for flat in flats:
            flat += (deviation * draws.standard_normal(flat.size)).astype(flat.dtype)


class ApartExchange(LocalExchange):
    """An exchange whose ranks are up to `staleness` steps apart, and meet to write checkpoints.

    At a meeting a step waits for all gradients of all ranks up to it: at the end of an epoch, at each multiple of
    `every` (None: only there), and soon after a rank asks for a stop or a checkpoint.
    """

    takes_rows = False  # rows of several steps have no fixed shape
    divides_tail = True

    def __init__(
        self,
        communicator: Communicator,
        scale: float | None = None,
        *,
        staleness: int,
        every: int | None,
        scaled_loss: bool,
        non_finite: NonFinitePolicy,
    ) -> None:
        """Raises ConfigError for an optimizer that scales the loss."""
        if scaled_loss:
            raise ConfigError(
                "gradients of several steps cannot have a scaled loss: the scale may change between them",
                got=f"a LossScaleOptimizer and --staleness {staleness}",
                allowed="an optimizer without loss scaling",
                next_step="Use --strategy sync, or another precision than mixed_float16.",
            )
        super().__init__(communicator, scale, scaled_loss=False, non_finite=non_finite)
        self.apart = True
        self._staleness, self._every = staleness, every
        self.last = 0
        """The last step of this epoch."""
        self.met = False
        """Whether the last step was a meeting."""

    @property
    def alone(self) -> bool:
        """Whether gradients stay in the graph: never, since gradients of other ranks arrive."""
        return False

    def finish(self, loss: Array, *statistics: Array) -> list[Array]:
        """The gradients to apply in this step, and the rank's own statistics, which ranks average when they meet."""
        try:
            layout = self._of_layout()
            self.agree_alone(loss, self._here, ())
            if not all(map(all_finite, self._trade([bucket.data for bucket in self._current]))):
                raise self._not_finite(["what it has of other ranks"])
            return [*(self._current[slot.bucket].lend(slot) for slot in layout.gradients), *map(np.copy, statistics)]
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._current, self._safe, self._here = [], True, []

    @property
    def _asks(self) -> bool:
        """Whether this rank asks for a meeting."""
        return bool(self._wanted & {"stop", "checkpoint", "leave"})

    @property
    def _scheduled(self) -> bool:
        """Whether ranks meet after this step without being asked."""
        return self.step == self.last or (self._every is not None and self.step % self._every == 0)

    def _trade(self, flats: list[Array]) -> list[Array]:
        """Send this step's gradients `flats`, and take what is here of other ranks; sets `met` and `waited_s`.

        Returns the arrays that were taken, which must be finite.
        """
        raise NotImplementedError

    def _send(self, bucket: int, flat: Array) -> None:
        """Send nothing: buckets are sent after the step."""


class AsyncExchange(ApartExchange):
    """An exchange whose steps apply the rank's own gradient and what has arrived of others since the last step."""

    def __init__(self, communicator: Communicator, scale: float | None = None, *, noise: Noise, **options: Any) -> None:
        """Make the exchange; a collective."""
        super().__init__(communicator, scale, **options)
        self._noise = noise
        self._group = communicator.group(range(communicator.num_ranks))
        self._group.deadline_s = communicator.deadline_s
        self._rounds: Rounds | None = None

    def close(self, reason: BaseException | None = None) -> None:
        """End the exchange, as `Exchange.close` does."""
        super().close(reason)
        if self._rounds is not None:
            self._rounds.close()

    def _trade(self, flats: list[Array]) -> list[Array]:
        self._noise.add(flats, self.step, self.scale)
        if self._rounds is None:
            self._rounds = Rounds(self._group, flats, self.step - 1)
        asked_at = self._rounds.add(flats, asks=self._asks)
        # No rank has begun this step when it learns of a request: it could not be so far ahead.
        asked = asked_at is not None and self.step >= asked_at + self._staleness + 2
        self.met = asked or self._scheduled
        began = time.perf_counter()
        self._rounds.wait(self.step if self.met else self.step - self._staleness)
        if self.met:
            self._rounds.met()
        self._rounds.take(flats)
        self.waited_s = time.perf_counter() - began
        return flats


class AsyncSteps(EveryStep):
    """Ranks average their models when they meet, with the optimizer's state, and then agree on losses and flags.

    All gradients have arrived by then, so a checkpoint needs nothing else, and any number of ranks can continue.
    """

    def __init__(self, model: keras.Model, exchange: ApartExchange) -> None:
        super().__init__(exchange.communicator)
        self._model, self._exchange = model, exchange

    def begin_epoch(self, epoch: int, last: int) -> None:
        self._exchange.last = last

    def step_ends(self, agreement: Agreement, *, epoch_ends: bool) -> Agreement:
        if not self._exchange.met:
            return agreement
        began = time.perf_counter()
        agreement = self._exchange.agree(equal=True)
        self._average()
        self._exchange.waited_s += time.perf_counter() - began
        return agreement

    def _average(self) -> None:
        average_state(self._model, self.communicator, self._exchange.scale)


class Asynchronous(Exchanging):
    """The way of --strategy async."""

    sums_gradients = False

    def exchange_maker(self, whole: Communicator) -> Callable[..., Exchange]:
        config, way = self._config, self._config.way
        assert isinstance(way, ways.Asynchronous)
        noise = Noise(way.gradient_noise, config.data.seed, self._context.world.rank)
        every = CheckpointEvery.parse(config.checkpoints.checkpoint_every).steps
        return partial(AsyncExchange, staleness=way.staleness or 0, every=every, noise=noise)

    def between_steps(self, model: keras.Model, exchange: Exchange) -> EveryStep:
        assert isinstance(exchange, ApartExchange)
        return AsyncSteps(model, exchange)


WAY: type[Exchanging] = Asynchronous
