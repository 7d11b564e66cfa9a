"""Reports losses, metrics and times to the driver, several steps a message."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import psutil

from lockstep.training.comm.base import LinkUse
from lockstep.training.control.client import ControlClient
from lockstep.training.reading.reader import SplitReader
from lockstep.training.run.metrics import PACE, PARTS, READING

ROW_EVERY_S = 1.0  # at most one row in this time, so that rows do not slow down steps
PACE_STEPS = 10  # a row of their times after so many, or after ROW_EVERY_S: a slow rank is named within 50 steps
PACE_EVERY_S = 0.001  # times the ranks: so many of these rows a second reach the driver at most, from all together
PACE_KEPT = 20  # steps of such a row, the last ones
ROWS, SECONDS = 20, 1.0  # a message after so many rows or seconds, so that messages do not slow down steps


class RowSink(Protocol):
    """Takes the rows, as a ControlClient does."""

    def notify(self, kind: str, **fields: Any) -> None:
        """Take rows: `kind` is metrics, `fields` {rows: [row]}."""


class Waiting(Protocol):
    """What an exchange of gradients says of its time and its bytes."""

    @property
    def waited_s(self) -> float:
        """Seconds that the last step waited for the all-reduce."""

    @property
    def sent_bytes(self) -> int:
        """Bytes sent over the network so far."""

    def links(self) -> dict[int, LinkUse]:
        """Return the use of each link, as a Communicator does."""


class StepClock:
    """Rows {kind: time, rank, step, steps, starting_s, data_s, compute_s, exchange_s, checkpoint_s, validation_s,
    other_s, sent_bytes} of one rank, in seconds; and of several ranks {kind: pace, rank, step, steps, times, links}.

    `step` is the last step of the row, `steps` their number. `starting_s`: until the end of the process' first
    step, which traces and compiles the step and waits for the first batch, which no clock can separate. Of later
    steps `data_s`: waiting for the batch after the start of the step; `exchange_s`: waiting for the all- reduce
    (what overlaps with the backward pass is not counted); `compute_s`: the rest of the steps; `other_s`: between
    steps, such as callbacks and ends of epochs. `sent_bytes`: over the network, in all collectives since the first
    step began or the row before; 0 within one host's memory.

    In a row of pace, `times` are [data, compute, exchange, other] of each of the last steps in whole microseconds, with
    other time before the step, and `links` the [seconds, bytes] of the communicator's since the row before, a step.
    """

    def __init__(
        self,
        control: RowSink,
        rank: int,
        exchange: Waiting,
        now: Callable[[], float] = time.perf_counter,
        *,
        num_ranks: int = 1,
    ) -> None:
        self._control, self._rank, self._exchange, self._now = control, rank, exchange, now
        self._num_ranks, self._pace_steps, self._pace_sent = num_ranks, 0, now()
        self._pace: deque[list[int]] = deque(maxlen=PACE_KEPT)
        self._links: dict[int, LinkUse] | None = None  # before the first row of pace
        self._ended: float | None = None  # the step before
        self._apart = 0.0  # seconds since then that count as a checkpoint or a validation
        self._ready: dict[int, float] = {}
        self._begun: float | None = None
        self._steps = self._last_step = 0
        self._first: tuple[int, float] | None = None  # the first step, and when it ended
        self._last_ended = self._set_apart_s = self._apart_at_last_s = 0.0  # since then: checkpoints, validations
        self._sent: int | None = None  # before the first step: what ranks sent to join and to restore is no step's
        self._start_row()

    def batch_is_ready(self, number: int) -> None:
        """Batch `number` (from 0) was given to TensorFlow; called by the thread that reads ahead."""
        self._ready[number] = self._now()

    def begins(self) -> None:
        """A step begins, and waits for its batch if it is not ready yet."""
        self._sent = self._exchange.sent_bytes if self._sent is None else self._sent
        self._begun = self._now()

    def ends(self, step: int) -> None:
        """Step `step` (from 1), which took batch `step - 1`, is done."""
        now, begun = self._now(), self._begun
        if begun is None:  # the loop did not call `begins`
            return
        self._begun = None
        is_first = self._first is None
        if is_first:
            self._first = step, now
            self._sums["starting_s"] = max(0.0, now - self._row_began - self._set_apart_s)
            self._set_apart_s = 0.0
        self._last_ended, self._apart_at_last_s = now, self._set_apart_s
        ready = self._ready.pop(step - 1, begun)
        data = min(max(0.0, ready - begun), now - begun)
        exchange = min(self._exchange.waited_s, now - begun - data)
        if not is_first:
            self._sums["data_s"] += data
            self._sums["exchange_s"] += exchange
            self._sums["compute_s"] += now - begun - data - exchange
        if self._num_ranks > 1:
            other = 0.0 if self._ended is None else max(0.0, begun - self._ended - self._apart)
            parts = (data, now - begun - data - exchange, exchange, other)
            self._pace.append([round(1e6 * seconds) for seconds in parts])
            self._ended, self._apart, self._pace_steps = now, 0.0, self._pace_steps + 1
            self._send_pace(step, now)
        self._steps, self._last_step = self._steps + 1, step
        if now - self._row_began >= ROW_EVERY_S:
            self.flush()

    def checkpoint(self) -> AbstractContextManager[None]:
        """Count the time inside as a checkpoint's."""
        return self._counted("checkpoint_s")

    def validation(self) -> AbstractContextManager[None]:
        """Count the time inside as a validation's."""
        return self._counted("validation_s")

    @contextmanager
    def _counted(self, part: str) -> Iterator[None]:
        began = self._now()
        try:
            yield
        finally:
            self._sums[part] += self._now() - began
            self._apart += self._now() - began
            self._set_apart_s += self._now() - began

    def first_step_s(self, began: float) -> float | None:
        """Seconds from `began` to the end of this process's first step; None before it."""
        return None if self._first is None else round(self._first[1] - began, 3)

    def steady(self) -> tuple[int | None, float]:
        """This process's first step, and the seconds from its end to that of the last step: without checkpoints and
        validations, and without the compilation that the first step begins with. (None, 0) before the first step.
        """
        if self._first is None:
            return None, 0.0
        step, ended = self._first
        return step, self._last_ended - ended - self._apart_at_last_s

    def _send_pace(self, step: int, now: float) -> None:
        waited_s = now - self._pace_sent
        if waited_s < PACE_EVERY_S * self._num_ranks or (self._pace_steps < PACE_STEPS and waited_s < ROW_EVERY_S):
            return
        links, steps = self._exchange.links(), self._pace_steps
        before = links if self._links is None else self._links
        a_step = {
            str(peer): [round((now - then) / steps, 6) for now, then in zip(use, before.get(peer, use), strict=True)]
            for peer, use in links.items()
        }
        row = {"kind": PACE, "rank": self._rank, "step": step, "steps": steps, "times": list(self._pace)}
        self._control.notify("metrics", rows=[row | {"links": a_step}])
        self._pace.clear()
        self._pace_steps, self._pace_sent, self._links = 0, now, links

    def flush(self) -> None:
        """Send the rows collected so far; after the last step, also the time of a validation."""
        if self._steps or self._sums["validation_s"]:
            elapsed = self._now() - self._row_began
            self._sums["other_s"] = max(0.0, elapsed - sum(self._sums.values()))
            rounded = {name: round(seconds, 6) for name, seconds in self._sums.items()}
            row: dict[str, Any] = {"kind": "time", "rank": self._rank, "step": self._last_step, "steps": self._steps}
            sent = self._exchange.sent_bytes
            row["sent_bytes"], self._sent = sent - (sent if self._sent is None else self._sent), sent
            self._control.notify("metrics", rows=[row | rounded])
            self._start_row()

    def _start_row(self) -> None:
        self._row_began = self._now()
        self._sums = dict.fromkeys(PARTS, 0.0)
        self._steps = 0


@dataclass(frozen=True, slots=True)
class Saved:
    """A committed checkpoint."""

    step: int
    bytes: int
    """The size of this rank's file."""
    written_s: float
    """How long hash, upload and commit took, while the training continued."""


class StepReports:
    """Rows {kind: step, step, epoch, loss, seconds} and {kind: epoch, step, epoch, metrics, class_counts, seconds} of
    rank 0.

    A skipped step has `skipped`; its epoch has the number of skipped steps since this process began.
    """

    def __init__(self, control: ControlClient) -> None:
        self._control = control
        self._rows: list[dict[str, Any]] = []
        self._skipped = 0
        self._began = self._sent = time.monotonic()

    def learning_rate(self, done: dict[str, Any]) -> None:
        """How the model's learning rate was changed, at the start of the process: a row {kind: learning_rate}."""
        self._add({"kind": "learning_rate", "step": 0, **done})

    def step(self, step: int, epoch: int, loss: float, *, skipped: bool = False) -> None:
        """The loss over the global batch of optimizer step `step` (from 1); `skipped`: no weight was changed."""
        self._skipped += skipped
        self._add(
            {"kind": "step", "step": step, "epoch": epoch, "loss": loss, **({"skipped": True} if skipped else {})}
        )
        if len(self._rows) >= ROWS or time.monotonic() - self._sent >= SECONDS:
            self.flush()

    def epoch(
        self,
        step: int,
        epoch: int,
        metrics: dict[str, Any],
        class_counts: list[int] | None,
        validation: dict[str, Any] | None = None,
        tables: Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        """The metrics of an epoch (from 0) over all ranks, how many of its rows were of each class, if known, what
        else its `validation` found, and how large `tables` without a number of rows are.
        """
        more: dict[str, Any] = {"skipped": self._skipped} if self._skipped else {}
        more |= {"class_counts": class_counts} if class_counts is not None else {}
        more |= {"validation": validation} if validation is not None else {}
        more |= {"tables": tables} if tables else {}
        self._skipped = 0
        self._add({"kind": "epoch", "step": step, "epoch": epoch, "metrics": metrics, **more})
        self.flush()

    def checkpoint(self, saved: Saved, blocked_s: float, cost_s: float, skipped: int, interval_s: float | None) -> None:
        """A committed checkpoint, and how many were skipped since the one before.

        The training stopped for `blocked_s` and lost `cost_s` in all; the next checkpoint follows in `interval_s`
        seconds (None: the schedule counts steps). `bytes` is the size of rank 0's file.
        """
        self._add(
            {
                "kind": "checkpoint",
                "step": saved.step,
                "bytes": saved.bytes,
                "blocked_s": round(blocked_s, 6),
                "written_s": round(saved.written_s, 6),
                "cost_s": round(cost_s, 6),
                "skipped": skipped,
                "interval_s": None if interval_s is None else round(interval_s, 3),
            }
        )

    def flush(self) -> None:
        """Send the rows collected so far."""
        if self._rows:
            self._control.notify("metrics", rows=self._rows)
        self._rows, self._sent = [], time.monotonic()

    def _add(self, row: dict[str, Any]) -> None:
        self._rows.append({**row, "seconds": round(time.monotonic() - self._began, 3)})


def reading_row(readers: Sequence[SplitReader], rank: int, step: int) -> dict[str, Any]:
    """Row {kind: reading, rank, step, ahead, direct, dropped, fetched_bytes, waited_s} of a rank since its start;
    `pass_bytes` are what a pass over the split fetches, of its `split_bytes`; with a cache also {cache_hits,
    cache_hit_bytes, cache_misses, cache_kept_bytes, cache_damaged}, which count blocks; `cache_failure` says why the
    cache of `host` takes no more blocks; `resident_bytes` is the process's memory now.
    """
    read = [reader.counts for reader in readers]
    names = ("ahead", "direct", "dropped", "fetched_bytes")
    row: dict[str, Any] = {"kind": READING, "rank": rank, "step": step}
    row |= {name: sum(getattr(counts.fetched, name) for counts in read) for name in names}
    row["waited_s"] = round(sum(counts.fetched.waited_s for counts in read), 6)
    row["pass_bytes"] = sum(reader.pass_bytes for reader in readers)
    row["split_bytes"] = sum(info.bytes for reader in readers for _, _, info in reader.stored)
    caches = [counts.cached for counts in read if counts.cached is not None]
    if caches:
        of_cache = ("hits", "hit_bytes", "misses", "kept_bytes", "damaged")
        row |= {f"cache_{name}": sum(getattr(counts, name) for counts in caches) for name in of_cache}
    if failures := [counts.cache_failure for counts in read if counts.cache_failure]:
        row |= {"cache_failure": failures[0], "host": socket.gethostname()}
    row["resident_bytes"] = resident_bytes()
    return row


def resident_bytes() -> int:
    """Resident memory of this process now."""
    return int(psutil.Process().memory_info().rss)
