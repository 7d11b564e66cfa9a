"""A parameter server's process: it holds a part of all weights, applies gradients that ranks push, and sends weights.

Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014), with stale synchronous steps
(Ho et al., NIPS 2013): no rank is more than `staleness` steps ahead of the slowest. A gradient whose weights are tau
steps old is applied with the rate / max(1, tau): Zhang et al., "Staleness-Aware Async-SGD for Distributed Deep
Learning" (IJCAI 2016). A server is a process of its own, after the last rank; it reads no data, owns no lanes and loads
no TensorFlow. It keeps nothing: ranks write checkpoints, and rank 0 sends the weights when they start.

What a rank and a server send each other, over a connection of their own, is `Begin`, `Push` and `Reply`.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.storage.errors import CommunicationError
from lockstep.training.comm.base import Communicator

Array = NDArray[Any]
RANK, SERVER = 0, 1
"""The members of a link."""


def links_between(whole: Communicator, ranks: Sequence[int], servers: Sequence[int]) -> list[Communicator]:
    """A communicator for each pair of a rank and a server, one of which calls this; both are numbers in `whole`."""
    return [whole.group((rank, server)) for rank in ranks for server in servers]


@dataclass(frozen=True, slots=True)
class Rule:
    """An optimizer's update of flat arrays, which is that of Keras but for rounding."""

    name: Literal["sgd", "adam"]
    momentum: float = 0.0
    nesterov: bool = False
    beta_1: float = 0.0
    beta_2: float = 0.0
    epsilon: float = 0.0

    @property
    def slots(self) -> int:
        """Arrays of the optimizer's state for each array of weights."""
        return 2 if self.name == "adam" else int(self.momentum > 0)

    def apply(self, weights: Array, slots: Sequence[Array], gradient: Array, rate: float, updates: int) -> None:
        """Update `weights` and `slots`, all (n,), in place. `updates`: how many there are, this one included."""
        if self.name == "adam":
            mean, square = slots
            mean += (gradient - mean) * (1.0 - self.beta_1)
            square += (gradient * gradient - square) * (1.0 - self.beta_2)
            alpha = rate * math.sqrt(1.0 - self.beta_2**updates) / (1.0 - self.beta_1**updates)
            weights -= mean * alpha / (np.sqrt(square) + self.epsilon)
        elif slots:
            (velocity,) = slots
            velocity *= self.momentum
            velocity -= gradient * rate
            weights += velocity * self.momentum - gradient * rate if self.nesterov else velocity
        else:
            weights -= gradient * rate


class Push(NamedTuple):
    """What a rank sends with its gradient, as float64 (5,)."""

    step: int
    """The step of this gradient; 0: the rank has ended, and no gradient follows."""
    asks: bool
    """Whether the rank asks for a meeting."""
    meets: bool
    """Whether ranks meet after this step: then the reply waits for all of them, and has the optimizer's state too."""
    rate: float
    """The learning rate."""
    share: float
    """The rank's share of the global batch, by which its gradient is multiplied."""


@dataclass(frozen=True, slots=True)
class Begin:
    """What rank 0 sends first, as JSON; the server's parts of weights and of the optimizer's state follow."""

    rule: Rule
    sizes: tuple[int, ...]
    """Elements of each part: the server's share of each bucket."""
    dtypes: tuple[str, ...]
    step: int
    """Steps done."""
    updates: int
    """Gradients applied, in all steps."""

    def send(self, link: Communicator) -> None:
        """Send this to the server of `link`."""
        text = np.frombuffer(json.dumps(asdict(self)).encode(), np.uint8)
        link.send(np.array([text.size], np.int64), SERVER)
        link.send(text, SERVER)

    @classmethod
    def receive(cls, link: Communicator) -> Begin:
        """Receive what rank 0 sends first."""
        size = np.zeros(1, np.int64)
        link.recv(size, RANK)
        text = np.zeros(int(size[0]), np.uint8)
        link.recv(text, RANK)
        found = json.loads(text.tobytes())
        return cls(Rule(**found.pop("rule")), tuple(found.pop("sizes")), tuple(found.pop("dtypes")), **found)


class Server:
    """One server of a launch whose first `num_ranks` processes are ranks."""

    def __init__(self, whole: Communicator, num_ranks: int, staleness: int, beat: Callable[[int, str], None]) -> None:
        """`whole` is of all processes; its deadline is how long a rank may wait for others. `beat(step, phase)` reports
        the steps that all ranks have done."""
        self._whole, self._staleness, self._beat = whole, staleness, beat
        self._name = f"server {whole.rank - num_ranks}"
        self._links = links_between(whole, range(num_ranks), [whole.rank])
        for link in self._links:
            link.deadline_s = math.inf  # no rank waits for this wait; the driver watches the ranks' own progress
        self._changed = threading.Condition()
        self._counts = np.zeros(num_ranks, np.int64)  # steps of each rank
        self._seen = np.zeros(num_ranks, np.int64)  # pushes of the others that a rank's weights have
        self._begun: Begin | None = None
        self._arrays: list[list[Array]] = []  # of each part: weights, then the optimizer's state
        self._met: list[list[Array]] = []  # as `_arrays` was at the last meeting
        self._updates = self._meet_at = 0
        self._error: BaseException | None = None

    def run(self) -> dict[str, Any]:
        """Serve until all ranks have ended; returns the process' result. Raises CommunicationError naming the rank that
        is lost, or late while another one waits."""
        self._beat(0, self._name)
        begun = self._begun = Begin.receive(self._links[RANK])
        specs = list(zip(begun.sizes, begun.dtypes, strict=True))
        for size, dtype in specs:
            self._arrays.append([np.zeros(size, dtype) for _ in range(1 + begun.rule.slots)])
            for array in self._arrays[-1]:
                receive(self._links[RANK], array, RANK)
        self._counts[:] = begun.step
        self._seen[:] = self._counts.sum() - self._counts
        self._updates = begun.updates
        threads = [
            threading.Thread(target=self._serve, args=(rank,), name=f"serve-{rank}", daemon=True)
            for rank in range(len(self._links))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return {"steps": int(self._counts.min()), "updates": self._updates}

    def _serve(self, rank: int) -> None:
        link, words = self._links[rank], np.zeros(len(Push._fields))
        gradients = [np.zeros_like(arrays[0]) for arrays in self._arrays]
        copies = [[np.empty_like(weights)] for weights, *_ in self._arrays]
        try:
            while True:
                link.recv(words, RANK)
                step, asks, meets, rate, share = words.tolist()
                push = Push(int(step), bool(asks), bool(meets), rate, share)
                if not push.step:
                    return
                for gradient in gradients:
                    receive(link, gradient, RANK)
                with self._changed:
                    self._apply(rank, push, gradients)
                    self._wait(rank, push)
                    if push.meets:  # others may have pushed their next gradients since all met
                        reply = self._met
                        self._seen[rank] = push.step * (len(self._counts) - 1)
                    else:  # copies: others' gradients are applied while this rank receives them
                        reply = copies
                        for (weights, *_), (copy,) in zip(self._arrays, copies, strict=True):
                            copy[:] = weights
                        self._seen[rank] = self._counts.sum() - self._counts[rank]
                    meet_at = self._meet_at
                link.send(np.array([meet_at], np.int64), RANK)
                for arrays in reply:
                    for array in arrays:
                        send(link, array, RANK)
        except BaseException as error:  # raised by `run`
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
            self._whole.abort(f"{self._name}: {error.what if isinstance(error, CommunicationError) else error}")

    def _apply(self, rank: int, push: Push, gradients: Sequence[Array]) -> None:
        assert self._begun is not None
        others = int(self._counts.sum() - self._counts[rank] - self._seen[rank])
        rate = push.rate / max(1.0, others / max(1, len(self._counts) - 1))  # tau in steps: the others' on average
        rule = self._begun.rule
        self._updates += 1
        for (weights, *slots), gradient in zip(self._arrays, gradients, strict=True):
            if rule.name == "adam":  # the size of a gradient hardly changes its update
                gradient /= push.share
                rule.apply(weights, slots, gradient, rate * push.share, self._updates)
            else:
                rule.apply(weights, slots, gradient, rate, self._updates)
        self._counts[rank] = push.step
        done = int(self._counts.min())
        if push.asks and not push.meets and not self._meet_at:
            # Each rank learns it from a reply before it gets there: none has pushed more than the greatest count.
            self._meet_at = int(self._counts.max()) + 2
        if push.meets and done == push.step:
            self._meet_at = 0  # all ranks are here, and agree on all that was asked
            self._met = [[array.copy() for array in arrays] for arrays in self._arrays]
        self._beat(done, self._name)
        self._changed.notify_all()

    def _wait(self, rank: int, push: Push) -> None:
        """Wait until no rank is more than `staleness` steps behind this one; at a meeting, until all are here."""
        least = push.step if push.meets else push.step - self._staleness
        patience_s = min(self._whole.deadline_s, threading.TIMEOUT_MAX)
        self._changed.wait_for(lambda: self._error is not None or self._counts.min() >= least, patience_s)
        if self._error is not None:
            raise CommunicationError(f"{self._name} has ended")  # `run` raises the first error
        if (found := int(self._counts.min())) < least:
            raise CommunicationError(
                f"rank {int(self._counts.argmin())} is late: rank {rank} waits at {self._name} after step {push.step}",
                got=f"its gradients up to step {found}, for {patience_s:.0f} s",
                allowed=f"those up to step {least}",
                next_step="Look at that rank's log and host; --stall-limit sets how long ranks wait.",
            )


def send(link: Communicator, array: Array, to: int) -> None:
    """Send `array` (n,); nothing if it is empty."""
    if array.size:
        link.send(array, to)


def receive(link: Communicator, array: Array, source: int) -> None:
    """Fill `array` (n,); nothing if it is empty."""
    if array.size:
        link.recv(array, source)
