"""Moves lanes from slow ranks to fast ones (--balance): how many lanes each rank has, never which batches there are.

Ranks report their own times (input, compute, between steps). When another split of the lanes promises clearly shorter
steps, all ranks write a checkpoint and leave, and the next generation resumes with that split.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from lockstep.training.driver.stragglers import times_a_step
from lockstep.training.plan.mixture import Plan

WINDOW = 40  # rows of each rank, whose medians are one window; a row is a step, or a second of shorter steps
AGREE = 2  # windows in a row in each of which the same split must be better
LEAST = 0.1  # of a step's time: the least that a move must save
QUIET, BACK = 4, 20  # windows after a move without another; and in which no rank's share moves back
WORTH = 2.0  # times a restart's seconds: the least that a move must save in the rest of the run
MOST = 2  # times an even share: the largest share of a rank, whose memory must hold it


@dataclass(frozen=True, slots=True)
class Window:
    """What ranks needed for a step: medians in seconds."""

    own_s: tuple[float, ...]
    """What each rank needed for a step, without the exchange."""
    step_s: float
    """What the slowest rank needed for a step, with the exchange."""


@dataclass(frozen=True, slots=True)
class Move:
    """Another split of the lanes; decided with window number `window` of the driver."""

    window: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    step_s: float
    predicted_s: float

    def note(self) -> str:
        """One line on what moves, and why."""
        before, after = (" ".join(map(str, shares)) for shares in (self.before, self.after))
        return (
            f"lanes of the ranks {before} -> {after}: a step of {self.step_s * 1e3:,.1f} ms should take "
            f"{self.predicted_s * 1e3:,.1f} ms; the ranks write a checkpoint and resume from it"
        )


def best_shares(own_s: Sequence[float], shares: Sequence[int], width: int = 1) -> tuple[int, ...]:
    """The lanes of each rank for which the slowest is fastest, if times grow with lanes; `own_s` are those of `shares`.

    Lanes move in units of `width`. Each rank keeps at least a unit, and has at most MOST times an even share.
    """
    units = sum(shares) // width
    most = -(-MOST * units // len(shares))
    cost = [seconds / share for seconds, share in zip(own_s, shares, strict=True)]
    found = [1] * len(shares)
    # The next unit goes to the rank that is done first with it; of equal ones to that which had more lanes.
    nexts = [(2 * cost[rank], -shares[rank], rank) for rank in range(len(shares))]
    heapq.heapify(nexts)
    for _ in range(units - len(shares)):
        _, had, rank = heapq.heappop(nexts)
        found[rank] += 1
        if found[rank] < most:
            heapq.heappush(nexts, ((found[rank] + 1) * cost[rank], had, rank))
    return tuple(count * width for count in found)


def decide(
    windows: Sequence[Window],
    shares: tuple[int, ...],
    width: int,
    moves: Sequence[Move],
    number: int,
    *,
    steps_left: int,
    restart_s: float,
) -> Move | None:
    """The move to make now, if any; pure.

    `windows` are those with these `shares`, the last one number `number` of the driver, `moves` those made before.
    """
    if len(windows) < AGREE or len(shares) < 2:
        return None
    last = windows[-AGREE:]
    own = [fmean(times) for times in zip(*(window.own_s for window in last), strict=True)]
    after = best_shares(own, shares, width)
    saved = [max(w.own_s) - max(map(_scaled, w.own_s, shares, after)) for w in last]
    if any(s <= LEAST * w.step_s for s, w in zip(saved, last, strict=True)):
        return None
    step_s, saved_s = fmean(w.step_s for w in last), fmean(saved)
    if saved_s * steps_left < WORTH * restart_s:
        return None
    if moves:
        helped = step_s < (moves[-1].step_s + moves[-1].predicted_s) / 2
        if number - moves[-1].window < (QUIET if helped else BACK):
            return None
    for move in moves:
        back = any((b - a) * (y - x) < 0 for a, b, x, y in zip(shares, after, move.before, move.after, strict=False))
        if number - move.window < BACK and back:
            return None
    return Move(number, shares, after, step_s, step_s - saved_s)


def _scaled(seconds: float, before: int, after: int) -> float:
    return seconds * after / before


class Balancer:
    """Follows the ranks of all generations of a driver by their rows {kind: time}, and keeps their shares."""

    def __init__(self, plan: Plan, groups: int | None, steps: int, now: Callable[[], float] = time.monotonic) -> None:
        """`groups` are the lane groups that ranks own as a whole, `steps` those of the whole run."""
        self._plan, self._groups, self._steps, self._now = plan, groups, steps, now
        self._width = plan.lanes // (groups or plan.lanes)
        self._moves: list[Move] = []
        self._number = 0
        self.shares: tuple[int, ...] | None = None
        """The lanes of each rank; None: as even as possible."""
        self.wanted: Move | None = None
        """The move for which the ranks must leave."""

    def begin(self, num_ranks: int) -> tuple[int, ...] | None:
        """Begin a generation; returns the lanes of each rank, None for even shares: those of another number of ranks do
        not fit.
        """
        if self.wanted is not None:
            self._moves.append(self.wanted)
            self.shares, self.wanted = self.wanted.after, None
        even = tuple(len(self._plan.rank_lanes(rank, num_ranks, self._groups)) for rank in range(num_ranks))
        if self.shares is not None and (len(self.shares) != num_ranks or self.shares == even):
            self.shares = None
        self._current = self.shares or even
        self._windows: list[Window] = []
        self._rows: list[list[tuple[float, float]]] = [[] for _ in even]
        self._began, self._restart_s = self._now(), 0.0
        return self.shares

    def failed(self) -> None:
        """The generation failed before a checkpoint: a rank may lack memory for its share, so shares are even again."""
        self.shares = self.wanted = None

    def add(self, row: Mapping[str, Any]) -> Move | None:
        """Take a row; returns a move once, when it is decided."""
        if (times := times_a_step(row)) is None or self.wanted is not None:
            return None
        self._restart_s = self._restart_s or self._now() - self._began
        self._rows[int(row["rank"])].append((times["own_s"], times["step_s"]))
        if min(map(len, self._rows)) < WINDOW:
            return None
        own, steps = zip(*(map(median, zip(*rows, strict=True)) for rows in self._rows), strict=True)
        self._rows = [[] for _ in own]
        self._windows.append(Window(own, steps[own.index(max(own))]))
        self._number += 1
        left = self._steps - int(row["step"])
        self.wanted = decide(
            self._windows, self._current, self._width, self._moves, self._number,
            steps_left=left, restart_s=self._restart_s,
        )  # fmt: skip
        return self.wanted
