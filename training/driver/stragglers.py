"""Names the rank that the others wait for, from the times that all ranks report.

In lockstep all ranks have the same step time; the slow one is the one whose own time (input, compute, between steps) is
long while the others wait in the exchange. If all of them wait there, it is the one from and to which bytes are under
way for longest: its network is slow.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from lockstep.training.run.metrics import STRAGGLER

WINDOW = 20  # steps of a rank whose median and mean count
LEAST = 10  # steps of each rank before they are compared
PATIENCE = 20  # steps in whose comparisons the same rank is found by medians, before it is named
PATIENCE_MEANS = 30  # and by means, to which one long step does not suffice: a limit of a processor stops a process for
# 50 of each 100 ms, which is one of many short steps
REST_S = 60.0  # after a rank was named, before any is named again, and twice as long each time: other work on a host
# for a quarter of a second is noise, but 50 short steps; ranks that share a busy host are slow in turn
SLOW, WELL = 1.3, 1.15  # times the others' own time: slow above the first, well again below the second
SHARE = 0.1  # of a step: the least excess that is named
TO_A_RANK = 0.9  # the weight of the time of bytes to a rank, next to that of bytes from it: a tie is the sender's
# Callbacks, what Keras and the run do there, ends of epochs; without checkpoints and validations.
BETWEEN = "between steps"
OWN = {"data_s": "input", "compute_s": "compute", "other_s": BETWEEN}  # a part of a row, and its name
NETWORK = "network"
_ADVICE = {
    "input": "look at the disk or network of that host, and at --read-ahead-bytes and --cache (docs/performance.md)",
    "compute": "look for other work on that host, a limit of its processor, or a slower processor or GPU",
    BETWEEN: "look at what the model's callbacks do on that rank; without any, for other work on that host",
    NETWORK: "look at the link of that host and at other traffic on it, or send fewer bytes (--compression)",
}


def where(what: str) -> str:
    """Say in words where a slow rank's time goes, from the `what` of a Straggler."""
    return what if what == BETWEEN else f"for {what}"


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank whose steps take longer than those of the others; times are medians, in seconds a step."""

    rank: int
    what: str
    """The part with the largest excess: input, compute or between steps; else network."""
    own_s: float
    others_s: float

    def to_row(self, step: int, host: str) -> dict[str, Any]:
        """The row {kind: straggler} of a run's metrics."""
        return {
            "kind": STRAGGLER,
            "step": step,
            "rank": self.rank,
            "host": host,
            "what": self.what,
            "own_s": round(self.own_s, 6),
            "others_s": round(self.others_s, 6),
        }

    def note(self, host: str) -> str:
        """One line on this rank, and what to do about it."""
        return (
            f"rank {self.rank} on {host} is slow: {self.own_s * 1e3:,.1f} ms of its own a "
            f"step, the others {self.others_s * 1e3:,.1f} ms, most of it {where(self.what)}; next: {_ADVICE[self.what]}"
        )


Middle = Callable[[Sequence[float]], float]
Step = Mapping[str, Any]
"""{data_s, compute_s, other_s, exchange_s, own_s, step_s} of a step, and `links` {rank: (seconds, bytes)} a step."""


def find_straggler(
    times: Sequence[Sequence[Step]], rows: Sequence[int], named: int | None = None, middle: Middle = median
) -> Straggler | None:
    """The slowest rank, if it is clearly slower than the others; None also for a single rank.

    `times[rank]` are its last steps, of which `middle` counts, `rows[rank]` its rows of a global batch: a rank that
    only has more rows is not slow. `named` was named before, and stays so down to `WELL`.
    """
    if len(times) < 2:
        return None
    own = [middle([row["own_s"] for row in of_rank]) for of_rank in times]
    slowest, others = _slowest(own, named)
    others_s = median(own[rank] for rank in others)
    a_row = median(own[rank] / rows[rank] for rank in others) * rows[slowest]
    if not _is_slow(own[slowest], max(others_s, a_row), others_s, _step_s(times[slowest], middle), slowest == named):
        return _slow_network(times, named, middle)
    parts = {part: [middle([row[part] for row in of_rank]) for of_rank in times] for part in OWN}
    worst = max(OWN, key=lambda part: parts[part][slowest] - median(parts[part][rank] for rank in others))
    return Straggler(slowest, OWN[worst], own[slowest], others_s)


def _slowest(seconds: Sequence[float], named: int | None) -> tuple[int, list[int]]:
    """The rank with the longest time, and the others."""
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    if named is not None and seconds[named] * WELL >= seconds[slowest]:
        slowest = named  # two that are alike do not take turns
    return slowest, [rank for rank in range(len(seconds)) if rank != slowest]


def _is_slow(own_s: float, usual_s: float, others_s: float, step_s: float, is_named: bool) -> bool:
    return own_s > usual_s * (WELL if is_named else SLOW) and own_s - others_s > SHARE * step_s


def _step_s(steps: Sequence[Step], middle: Middle) -> float:
    return middle([step["step_s"] for step in steps])


def _slow_network(times: Sequence[Sequence[Step]], named: int | None, middle: Middle) -> Straggler | None:
    """The rank whose network all ranks wait for: bytes from it, and to it, are under way for longer, and for longer
    each, since some ranks may have to send more than others.
    """
    sent = [_sent(of_rank, middle) for of_rank in times]
    linked = [rank for rank, peers in enumerate(sent) if peers]  # on a host, one rank may speak for all
    if len(linked) < 2:
        return None
    to = TO_A_RANK if len(linked) > 2 else 0.0  # of two, each has the other's
    seconds, each_s = [], []
    for rank in linked:
        mine = [*((1.0, *use) for use in sent[rank].values())]
        mine += [(to, *sent[peer][rank]) for peer in linked if rank in sent[peer]]
        weight = sum(share * count for share, _, count in mine)
        seconds.append(sum(share * used_s for share, used_s, _ in mine) / (1 + to))
        each_s.append(seconds[-1] * (1 + to) / weight if weight else 0.0)
    before = linked.index(named) if named in linked else None
    slowest, others = _slowest(seconds, before)
    others_s, others_each_s = median(seconds[one] for one in others), median(each_s[one] for one in others)
    if each_s[slowest] <= others_each_s * (WELL if slowest == before else SLOW):
        return None
    step_s = _step_s(times[linked[slowest]], middle)
    if not _is_slow(seconds[slowest], others_s, others_s, step_s, slowest == before):
        return None
    # What all ranks wait: while one of them computes, bytes to it may be under way for long.
    waited_s = min(middle([row["exchange_s"] for row in of_rank]) for of_rank in times)
    if waited_s <= SHARE * step_s:
        return None
    return Straggler(linked[slowest], NETWORK, seconds[slowest], others_s)


def _sent(steps: Sequence[Step], middle: Middle) -> dict[int, tuple[float, float]]:
    """Seconds and bytes a step from a rank to each peer."""
    peers = {peer for step in steps for peer in step["links"]}
    uses = {peer: [step["links"].get(peer, (0.0, 0.0)) for step in steps] for peer in peers}
    return {peer: (middle([one for one, _ in each]), middle([one for _, one in each])) for peer, each in uses.items()}


def times_a_step(row: Mapping[str, Any]) -> dict[str, float] | None:
    """Return {data_s, compute_s, other_s, own_s, step_s} of a row {kind: time}, for a step; None if it is only a
    validation, or the first step, whose time is that of the start.
    """
    steps = int(row["steps"]) - bool(row.get("starting_s"))
    if steps < 1:
        return None
    a_step = {part: row[part] / steps for part in OWN}
    a_step["own_s"] = sum(a_step.values())
    a_step["step_s"] = a_step["own_s"] + row["exchange_s"] / steps
    return a_step


def steps_of(row: Mapping[str, Any]) -> list[Step]:
    """The steps of a row {kind: pace}."""
    links = {int(peer): tuple(use) for peer, use in row["links"].items()}
    found: list[Step] = []
    for data, compute, exchange, other in row["times"]:
        own = (data + compute + other) / 1e6
        found.append(
            {
                "data_s": data / 1e6,
                "compute_s": compute / 1e6,
                "other_s": other / 1e6,
                "exchange_s": exchange / 1e6,
                "own_s": own,
                "step_s": own + exchange / 1e6,
                "links": links,
            }
        )
    return found


class _Found:
    """The rank that comparisons by one `middle` find, and since when."""

    def __init__(self, middle: Middle, patience: int) -> None:
        self._middle, self._patience = middle, patience
        self._rank: int | None = None
        self._since = 0
        self._is_named = False

    def compare(self, times: Sequence[Sequence[Step]], rows: Sequence[int], step: int) -> Straggler | None:
        """A rank once, when it was found for long enough, and again only after it was well."""
        found = find_straggler(times, rows, self._rank if self._is_named else None, self._middle)
        rank = None if found is None else found.rank
        if rank != self._rank:
            self._rank, self._since, self._is_named = rank, step, False
        if found is None or self._is_named or step - self._since < self._patience - 1:
            return None
        self._is_named = True
        return found

    def again(self) -> None:
        """Find the rank once more, if it still is slow then."""
        self._is_named = False


class Stragglers:
    """Follows the ranks of one generation by their rows {kind: pace} (lockstep.training.rank.metrics.StepClock)."""

    def __init__(self, rows: Sequence[int], now: Callable[[], float] = time.monotonic) -> None:
        """`rows[rank]` are its rows of a global batch."""
        self._rows, self._now = rows, now
        self._times: list[deque[Step]] = [deque(maxlen=WINDOW) for _ in rows]
        self._done = [0 for _ in rows]  # steps of each rank so far
        self._fresh: set[int] = set()
        self._found = (_Found(median, PATIENCE), _Found(fmean, PATIENCE_MEANS))
        self._rests_until, self._rest_s = 0.0, REST_S
        self._named: int | None = None

    def add(self, row: Mapping[str, Any]) -> Straggler | None:
        """Take a row; returns a rank once, when it has become slow, and again only after it was well; none while
        the last note rests.
        """
        rank = int(row["rank"])
        self._times[rank] += steps_of(row)
        self._done[rank] += row["steps"]
        self._fresh.add(rank)
        if len(self._fresh) < len(self._times) or min(map(len, self._times)) < LEAST:
            return None
        self._fresh.clear()
        step, now = min(self._done), self._now()
        for one, found in [(one, one.compare(self._times, self._rows, step)) for one in self._found]:
            if found is None:
                continue
            if self._named is None or now >= self._rests_until:
                self._rests_until, self._rest_s = now + self._rest_s, 2 * self._rest_s
                self._named = found.rank
                return found
            if found.rank != self._named:
                one.again()
        return None
