"""What the ranks agree on at the end of a step, and the account of steps and micro-batches that leads to it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.storage.documents import canonical_bytes, parse_canonical
from lockstep.storage.errors import ConfigError, DataError
from training.comm.base import Communicator

FLAGS = ("stop", "checkpoint", "busy")
CONTROL_WORDS = 2 + len(FLAGS)  # loss, whether a rank has what might not be finite, then the flags
MAX_SKIPS = 10  # in a row: such a run learns nothing more
# A loss scale is halved by each skip, and begins at some tens of thousands: this many have passed all it could mend.
MAX_SCALE_SKIPS = 60


class NonFiniteError(DataError):
    """A loss, gradient or statistic that is no finite number; a restart would meet it again."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know after a step."""

    step: int
    """Steps done, this one included."""
    loss: float
    """Mean over the global batch (of an accumulation: over all its micro-batches), without any loss scale."""
    stop: bool
    checkpoint: bool
    busy: bool = False
    """On some rank a checkpoint was in flight when the step began."""
    skipped: bool = False
    """Something was not finite, and such a step is skipped: no rank has changed its weights."""
    batches: int = 1
    """Batches that went into the step: the micro-batches of gradient accumulation, else 1."""


class Steps:
    """The account of one rank. `step` counts optimizer steps done and is set by whoever restores a run."""

    def __init__(self, num_ranks: int) -> None:
        self.step = 0
        self.pending = 0
        """Micro-batches accumulated since the last optimizer step; 0 where the last batch ended one."""
        self.skips_non_finite = False
        """The loss is scaled: a gradient that is not finite skips the step instead of ending the run."""
        self.skips_any = False
        """Whatever is not finite skips the step: the caller puts back what the step has changed before its end."""
        self.skips_in_a_row = 0
        self.agreement: Agreement | None = None
        self._num_ranks = num_ranks
        self._wanted: set[str] = set()
        self._held_loss = 0.0

    def want(self, flag: str) -> None:
        """Ask all ranks for `stop` or `checkpoint`, or say that this one is `busy`; they agree with the next step."""
        if flag not in FLAGS:
            raise ConfigError(
                "ranks cannot agree on that", got=flag, allowed=", ".join(FLAGS), next_step="Ask for one of these."
            )
        self._wanted.add(flag)

    def withdraw(self, flag: str) -> None:
        """Take back a wish that no step has carried yet."""
        self._wanted.discard(flag)

    def hold(self, loss: np.ndarray) -> None:
        """Note a micro-batch whose gradients stay on this rank until the accumulation's last one; no collective."""
        self._held_loss += float(loss)
        self.pending += 1

    def _words(self, loss: np.ndarray) -> list[float]:
        """This rank's control words but for the second: its mean loss over the step's batches, and its wishes."""
        words = [(self._held_loss + float(loss)) / (self.pending + 1), 0.0, *(flag in self._wanted for flag in FLAGS)]
        self._wanted.clear()
        return words

    def _agree(
        self, words: Sequence[float], wrong: list[str], gradients: Collection[str], where: Callable[[bool], str]
    ) -> None:
        """Set the agreement of the step by the ranks' summed `words`.

        `wrong` names what is not finite, the same on all ranks. With a scaled loss a step is skipped if one of
        `gradients` is in it; statistics alone are not made good by that. `where(skipped)` is a collective that says
        which ranks and samples it was; it is asked for each step that ends the run, or is skipped without a scaled
        loss, which is no wonder. Raises NonFiniteError.
        """
        step, batches = self.step + 1, self.pending + 1
        self.pending, self._held_loss = 0, 0.0
        loss = float(words[0])
        scaled = self.skips_non_finite and any(name in gradients for name in wrong)
        if not scaled and not np.isfinite(loss):
            wrong = ["the loss", *wrong]
        skipped = bool(wrong) and (scaled or self.skips_any)
        self.skips_in_a_row = self.skips_in_a_row + 1 if skipped else 0
        most = MAX_SCALE_SKIPS if scaled else MAX_SKIPS
        too_many = self.skips_in_a_row > most
        told = where(skipped and not too_many) if wrong and (too_many or not scaled) else ""
        if wrong and (too_many or not skipped):
            after = f", after {most} steps in a row that were skipped for it" if too_many else ""
            raise NonFiniteError(
                f"step {step}: {wrong[0]} is not finite{after}",
                got=f"loss {loss}, over {self._num_ranks} ranks: {told}",
                allowed="finite numbers; all ranks stop at this step, and none has applied it",
                next_step="Lower the learning rate, clip gradients (clipnorm) or look at the data of this step.",
            )
        flags = dict(zip(FLAGS, (bool(word > 0) for word in words[2:]), strict=True))
        self.step = step
        self.agreement = Agreement(step, loss, **flags, skipped=skipped, batches=batches)


SHOWN_SAMPLES = 16  # of each rank, in an error's message; its log has them all
SHOWN_RANKS, SHOWN_NAMES = 4, 3
ROW_SAMPLES = 4096  # of each rank, in a row of the metrics
log = logging.getLogger(__name__)


class FedBatches:
    """Which samples lie in the batches that a rank was fed and has not done with; for two threads.

    `first_lane` and `rows_a_lane` are the rank's: its rows lie lane after lane.
    """

    def __init__(self, first_lane: int, rows_a_lane: int) -> None:
        self._first_lane, self._rows_a_lane = first_lane, rows_a_lane
        self._lock = threading.Lock()
        self._ids: dict[int, NDArray[np.int64]] = {}

    def add(self, batch: int, sample_ids: NDArray[np.int64]) -> None:
        """Batch number `batch`, from 0, which optimizer step `batch` + 1 takes, has these rows."""
        with self._lock:
            self._ids[batch] = sample_ids.copy()

    def forget(self, step: int) -> None:
        """Optimizer step `step` is done, and all before it."""
        with self._lock:
            for batch in [batch for batch in self._ids if batch < step]:
                del self._ids[batch]

    def of_step(self, step: int, rows: slice = slice(None)) -> dict[str, Any]:
        """{lanes: [first, last], samples: hex ids in order} of `rows` of optimizer step `step`; empty if not known."""
        with self._lock:
            ids = self._ids.get(step - 1)
        if ids is None:
            return {}
        start, stop, _ = rows.indices(len(ids))
        lanes = [self._first_lane + start // self._rows_a_lane, self._first_lane + (stop - 1) // self._rows_a_lane]
        return {"lanes": lanes, "samples": [f"{int(one) & (1 << 64) - 1:016x}" for one in ids[rows]]}


@dataclass(slots=True)
class Inquiry:
    """What an exchange asks once a step is not finite; without `fed` ranks tell only what was not."""

    communicator: Communicator
    fed: FedBatches | None = None
    report: Callable[[dict[str, Any]], None] | None = None
    """Takes a row {kind: non_finite, step, rank, what, skipped, lanes, samples} of this rank, for the metrics."""

    def hold(self, step: int, here: Sequence[str], *, skipped: bool, rows: slice = slice(None)) -> str:
        """A collective: what each rank found not finite in its own part of `step`, in words, the same on all ranks.

        `here` names what was so on this rank, in its `rows`. The rank's log and metrics get all of its samples.
        """
        mine: dict[str, Any] = {"what": list(here)}
        if here and self.fed is not None:
            mine |= self.fed.of_step(step, rows)
        if here:
            self._tell(step, mine, skipped)
        short = mine | {"samples": mine.get("samples", [])[:SHOWN_SAMPLES], "count": len(mine.get("samples", []))}
        short["what"] = [*mine["what"][:SHOWN_NAMES], *["..."] * (len(mine["what"]) > SHOWN_NAMES)]
        parts = [parse_canonical(data, file="a rank") for data in self._everyones(canonical_bytes(short))]
        found = [_words(rank, part) for rank, part in enumerate(parts) if part["what"]]
        if not found:
            return "finite on each rank alone, but not their sum"
        return "; ".join([*found[:SHOWN_RANKS], *["..."] * (len(found) > SHOWN_RANKS)])

    def _everyones(self, data: bytes) -> list[bytes]:
        comm = self.communicator.on_host
        return [data] if comm.num_ranks == 1 else comm.all_gather_bytes(data)

    def _tell(self, step: int, mine: dict[str, Any], skipped: bool) -> None:
        samples = mine.get("samples", [])
        words = f"; lanes {mine['lanes'][0]} to {mine['lanes'][1]}, samples {' '.join(samples)}" if samples else ""
        log.warning("step %d: not finite on this rank: %s%s", step, ", ".join(mine["what"]), words)
        if self.report is not None:
            row = {"kind": "non_finite", "step": step, "rank": self.communicator.rank, "skipped": skipped}
            self.report({**row, **mine, "samples": samples[:ROW_SAMPLES]})


def _words(rank: int, part: dict[str, Any]) -> str:
    words = f"rank {rank}: {', '.join(part['what'])}"
    if part["samples"]:
        lanes, more = part["lanes"], part["count"] - len(part["samples"])
        of = f"lane {lanes[0]}" if lanes[0] == lanes[1] else f"lanes {lanes[0]} to {lanes[1]}"
        words += f", of {of}, samples {' '.join(part['samples'])}"
        words += f" and {more} more, which the rank's log lists" if more else ""
    return words
