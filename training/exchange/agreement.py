"""What the ranks agree on at the end of a step, and which samples they name when one is not finite."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.storage.errors import DataError
from lockstep.training.comm.base import Communicator
from lockstep.training.exchange.compare_ranks import everyones

FLAGS = ("stop", "checkpoint", "busy", "leave")
CONTROL_WORDS = 2 + len(FLAGS)  # loss, whether a rank has what might not be finite, then the flags
SHOWN_SAMPLES = 16  # of each rank, in an error's message; its log has them all
SHOWN_RANKS, SHOWN_NAMES = 4, 3
ROW_SAMPLES = 4096  # of each rank, in a row of the metrics


class NonFiniteError(DataError):
    """A loss, gradient or statistic is not finite; a restart would meet it again."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """The state that all ranks agree on after a step."""

    step: int
    """Steps done, this one included."""
    loss: float
    """Mean over the global batch (of an accumulation: over all its micro-batches), without any loss scale."""
    stop: bool
    checkpoint: bool
    busy: bool = False
    """A checkpoint was in flight on some rank when the step began."""
    leave: bool = False
    """All ranks write a checkpoint now and end; the run is resumed later."""
    skipped: bool = False
    """Something was not finite, and the step was skipped: no rank has changed its weights."""
    batches: int = 1
    """Batches that went into the step: the micro-batches of gradient accumulation, else 1."""
    losses: tuple[float, ...] = ()
    """The losses of the steps since the ranks last agreed, this one included; empty if they agree after each step."""
    agreed: bool = True
    """Whether this is of all ranks; else of this rank, which trains by itself
    (lockstep.training.strategies.local_steps).
    """
    equal: bool = True
    """Whether all ranks have equal weights."""


log = logging.getLogger(__name__)


class FedBatches:
    """The samples in the batches that a rank was fed and has not finished; safe for two threads.

    `first_lane` and `rows_a_lane` are the rank's; its rows are ordered by lane.
    """

    def __init__(self, first_lane: int, rows_a_lane: int) -> None:
        self._first_lane, self._rows_a_lane = first_lane, rows_a_lane
        self._lock = threading.Lock()
        self._ids: dict[int, NDArray[np.int64]] = {}

    def add(self, batch: int, sample_ids: NDArray[np.int64]) -> None:
        """Note the rows of batch number `batch`, from 0, which optimizer step `batch` + 1 takes."""
        with self._lock:
            self._ids[batch] = sample_ids.copy()

    def forget(self, step: int) -> None:
        """Drop the batches of optimizer step `step` and all before it."""
        with self._lock:
            for batch in [batch for batch in self._ids if batch < step]:
                del self._ids[batch]

    def of_step(self, step: int, rows: slice = slice(None)) -> dict[str, Any]:
        """Return {lanes: [first, last], samples: hex ids in order} of `rows` of optimizer step `step`; empty if
        unknown.
        """
        with self._lock:
            ids = self._ids.get(step - 1)
        if ids is None:
            return {}
        start, stop, _ = rows.indices(len(ids))
        lanes = [self._first_lane + start // self._rows_a_lane, self._first_lane + (stop - 1) // self._rows_a_lane]
        return {"lanes": lanes, "samples": [f"{int(one) & (1 << 64) - 1:016x}" for one in ids[rows]]}


@dataclass(frozen=True, slots=True)
class NonFinitePolicy:
    """What an exchange does about a step whose loss, gradients or statistics are not finite."""

    skips: bool = False
    """Every such step is skipped: the caller restores what the step has changed before its end. Else it ends the run,
    unless the loss is scaled."""
    fed: FedBatches | None = None
    """Names the samples of the step; None: ranks only report what was not finite."""
    report: Callable[[dict[str, Any]], None] | None = None
    """Takes a row {kind: non_finite, step, rank, what, skipped, lanes, samples} of this rank, for the metrics."""


STOPS = NonFinitePolicy()


@dataclass(frozen=True, slots=True)
class Inquiry:
    """Asks all ranks what was not finite in a step."""

    communicator: Communicator
    policy: NonFinitePolicy

    def hold(self, step: int, here: Sequence[str], *, skipped: bool, rows: slice = slice(None)) -> str:
        """A collective: what each rank found not finite in its own part of `step`, as text, the same on all ranks.

        `here` names what was not finite on this rank, in its `rows`. The rank's log and metrics get all its samples.
        """
        mine: dict[str, Any] = {"what": list(here)}
        if here and self.policy.fed is not None:
            mine |= self.policy.fed.of_step(step, rows)
        if here:
            self.report(step, mine, skipped=skipped)
        short = mine | {"samples": mine.get("samples", [])[:SHOWN_SAMPLES], "count": len(mine.get("samples", []))}
        short["what"] = [*mine["what"][:SHOWN_NAMES], *["..."] * (len(mine["what"]) > SHOWN_NAMES)]
        parts = everyones(self.communicator.on_host, short)
        found = [_words(rank, part) for rank, part in enumerate(parts) if part["what"]]
        if not found:
            return "finite on each rank, but not their sum"
        return "; ".join([*found[:SHOWN_RANKS], *["..."] * (len(found) > SHOWN_RANKS)])

    def report(self, step: int, mine: dict[str, Any], *, skipped: bool) -> None:
        """Log and report what was not finite on this rank: {what, lanes, samples}."""
        samples = mine.get("samples", [])
        words = f"; lanes {mine['lanes'][0]} to {mine['lanes'][1]}, samples {' '.join(samples)}" if samples else ""
        log.warning("step %d: not finite on this rank: %s%s", step, ", ".join(mine["what"]), words)
        if self.policy.report is not None:
            row = {"kind": "non_finite", "step": step, "rank": self.communicator.rank, "skipped": skipped}
            self.policy.report({**row, **mine, "samples": samples[:ROW_SAMPLES]})


def _words(rank: int, part: dict[str, Any]) -> str:
    words = f"rank {rank}: {', '.join(part['what'])}"
    if part["samples"]:
        lanes, more = part["lanes"], part["count"] - len(part["samples"])
        of = f"lane {lanes[0]}" if lanes[0] == lanes[1] else f"lanes {lanes[0]} to {lanes[1]}"
        words += f", of {of}, samples {' '.join(part['samples'])}"
        words += f" and {more} more, which the rank's log lists" if more else ""
    return words
