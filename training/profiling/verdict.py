"""What the ranks measured in all rounds, put together: seconds of a step and of a batch, with their spread."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SYNTHETIC, CACHED, COLD = "synthetic", "cached", "cold"
KINDS = (SYNTHETIC, CACHED, COLD)
CACHED_ALONE, COLD_ALONE = "cached_alone", "cold_alone"
ALONE = (CACHED_ALONE, COLD_ALONE)


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one value or more; quartiles as `statistics.quantiles` has them with the ends included."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    @property
    def width(self) -> float:
        """The quartiles' distance as a share of the median; 0 where that is 0."""
        return (self.high - self.low) / self.median if self.median else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Seconds; a step is as slow as its slowest rank, and differences are taken within each round."""

    synthetic: Spread
    """A step on one batch that is fed again and again."""
    cached: Spread
    """A step on batches whose blocks come from memory or the node's cache."""
    cold: Spread
    """A step on batches whose blocks were not read before."""
    handing_over: Spread
    """`cached` less `synthetic`: decoding, encoding, augmenting and handing over, as far as steps wait for it."""
    fetching: Spread
    """`cold` less `cached`: reading, as far as steps wait for it."""
    by_data: Spread
    """`cold` less `synthetic`: both."""
    exchange_s: float
    """That a step on one batch stands still for the sums, on the rank that stands still least: the others wait for it
    too, which is not the exchange's fault."""
    cached_alone: Spread
    """A batch of the slowest rank without a step, from memory or cache."""
    cold_alone: Spread
    """The same from storage."""
    input_cpu_s: float
    """CPU time of a batch of `cached_alone`, all threads."""
    waiting: dict[str, float]
    """By kind: the share of a step that the rank that waits most stood still for its batch
    (training.rank.step_clock).
    """


def put_together(ranks: Sequence[Mapping[str, Any]]) -> Measured:
    """Of what each rank returned (training.profiling.profile_rank): {rounds: [{kind: {seconds, steps, ...}}]}, as many
    rounds on each.
    """
    rounds = list(zip(*(rank["rounds"] for rank in ranks), strict=True))  # of each round, all ranks

    def each(kind: str, over: Callable[..., float] = max, part: str = "seconds") -> list[float]:
        return [over(rank[kind][part] / rank[kind]["steps"] for rank in found) for found in rounds]

    def less(kind: str, other: str) -> Spread:
        return Spread.of([a - b for a, b in zip(each(kind), each(other), strict=True)])

    return Measured(
        synthetic=Spread.of(each(SYNTHETIC)),
        cached=Spread.of(each(CACHED)),
        cold=Spread.of(each(COLD)),
        handing_over=less(CACHED, SYNTHETIC),
        fetching=less(COLD, CACHED),
        by_data=less(COLD, SYNTHETIC),
        exchange_s=statistics.median(each(SYNTHETIC, min, "exchange_s")),
        cached_alone=Spread.of(each(CACHED_ALONE)),
        cold_alone=Spread.of(each(COLD_ALONE)),
        input_cpu_s=statistics.median(each(CACHED_ALONE, max, "cpu_s")),
        waiting={
            kind: statistics.median(max(rank[kind]["data_s"] / rank[kind]["seconds"] for rank in r) for r in rounds)
            for kind in KINDS
        },
    )
