"""What bounds a run, from what was measured: a few rules, each with its threshold and the reason for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from training.profiling.verdict import Measured, Spread

Part = Literal["storage", "input", "exchange", "computing"]
Bound = Literal["storage", "input", "exchange", "computing", "nothing clear"]
PARTS: tuple[Part, ...] = get_args(Part)
WORDS: dict[Part, str] = {
    "storage": "reading from storage",
    "input": "decoding, encoding, augmenting and handing over batches",
    "exchange": "waiting for the ranks' sums",
    "computing": "computing",
}

# MLPerf Storage asks that steps wait for less than a tenth of their time, be it for reading or for what follows it.
STORAGE_SHARE = 0.10
INPUT_SHARE = 0.10
# Below it an exchange that cost nothing would make the run at most a quarter faster, and it never costs nothing.
EXCHANGE_SHARE = 0.20
# From here on all else together, were it free, would make the run at most a third faster.
COMPUTING_SHARE = 0.75
# Rounds whose quartiles are further apart do not tell a share that is smaller than this distance.
UNSTEADY = 0.25
# Beside steps data shares cores and caches with them, and batches are copied once more than without them. What steps
# lose beyond so many times what the data takes alone is not its doing, but another program's.
TIMES_ALONE = 3.0
LEAST_REST = 0.01  # of a step that is left when its bound is gone: a hundred times as fast is as good as any number

_LIMITS: dict[Part, float] = {"storage": STORAGE_SHARE, "input": INPUT_SHARE, "exchange": EXCHANGE_SHARE}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What bounds a run on data that were not read before."""

    bound_by: Bound
    shares: dict[Part, float]
    """Of a step on cold data; they add up to 1."""
    gain_at_most: float
    """How many times as fast the run were without what bounds it; where that is computing, with twice the ranks; 1
    where nothing is clear.
    """
    steady: bool
    """Whether the rounds agree well enough."""


def judge(measured: Measured) -> Verdict:
    """The rules.

    1. Storage costs what cold steps take longer than cached ones, the input what cached ones take longer than
       synthetic ones: only where three rounds of four say so (the lower quartile of the differences is above 0), not
       more than TIMES_ALONE what they take without steps, and both together not more than cold steps take longer
       than synthetic ones.
    2. The exchange costs what a synthetic step stands still for it; computing is the rest.
    3. The largest share that reaches its threshold is the bound; else computing, if it reaches its own; else nothing.
    4. Where rounds are unsteady, a share that is not above their spread is no bound.
    """
    shares = _shares(measured)
    width = measured.cold.width
    steady = width <= UNSTEADY
    reached = {part: shares[part] for part, limit in _LIMITS.items() if shares[part] >= limit}
    if not reached and shares["computing"] >= COMPUTING_SHARE:
        reached = {"computing": shares["computing"]}
    bound: Bound = "nothing clear"
    gain = 1.0
    if reached:
        part = max(reached, key=lambda part: reached[part])
        if steady or reached[part] > width:
            bound, lost = part, reached[part] / 2 if part == "computing" else reached[part]
            gain = 1 / max(1 - lost, LEAST_REST)
    return Verdict(bound, shares, gain, steady)


def _cost(difference: Spread, at_most: float) -> float:
    return min(max(0.0, difference.median), at_most) if difference.low > 0 else 0.0


def _shares(measured: Measured) -> dict[Part, float]:
    whole = measured.cold.median
    rest = max(0.0, measured.by_data.median)
    storage = _cost(measured.fetching, min(rest, TIMES_ALONE * measured.cold_alone.median))
    given = _cost(measured.handing_over, min(rest - storage, TIMES_ALONE * measured.cached_alone.median))
    costs = [storage, given, max(0.0, measured.exchange_s)]
    # Medians of differences need not fit the median of the whole: they never make up more than all of it.
    scale = 1 / max(whole, sum(costs)) if whole > 0 else 0.0
    storage, given, exchange = (cost * scale for cost in costs)
    return {
        "storage": storage,
        "input": given,
        "exchange": exchange,
        "computing": max(0.0, 1.0 - storage - given - exchange),
    }
