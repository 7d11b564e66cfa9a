"""Names a rank whose memory is running out before the system kills it, from the samples that all ranks send."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import Any

FULL = 0.9  # of a limit
WINDOW = 36  # samples of one rank: three minutes at lockstep.training.rank.usage.SAMPLE_EVERY_S
LEAST_BYTES = 32 << 20  # what a rank has grown by in a window, else it is steady
AHEAD_S = 3600.0  # growth that takes longer to reach the limit is not named yet
MIB = 1 << 20
_ADVICE = "give the container more memory, or use fewer ranks a host or a smaller batch (docs/operations.md)"


def growth(samples: Sequence[tuple[float, float]]) -> float:
    """Bytes a second by which memory grows steadily, from samples (seconds, bytes); 0.0 if it does not.

    The median of the slopes between all pairs (Theil 1950, Sen 1968), which single peaks do not change. It is steady
    if each third of the samples has grown over the one before, the last one by at least half of the mean.
    """
    third = len(samples) // 3
    low, middle, high = (median(held for _, held in samples[n * third : (n + 1) * third]) for n in range(3))
    grown = high - low
    if grown < LEAST_BYTES or middle <= low or high - middle < grown / 4:
        return 0.0
    return median((b - a) / (later - earlier) for (earlier, a), (later, b) in combinations(samples, 2))


class MemoryWatch:
    """Follows the ranks of one generation by their rows {kind: usage} (lockstep.training.rank.usage.Usage)."""

    def __init__(self, rank_limit_bytes: int | None = None) -> None:
        """`rank_limit_bytes`: what a container that the cluster manager watches has for each of its ranks."""
        self._rank_limit = rank_limit_bytes
        self._samples: dict[int, deque[tuple[float, float]]] = {}
        self._noted: set[tuple[str, object]] = set()

    def add(self, row: Mapping[str, Any], now: float) -> list[str]:
        """Take a row that arrived at `now` (monotonic seconds); returns notes, each once for a rank or a host."""
        rank, host, rss = int(row["rank"]), str(row["host"]), int(row["rss_bytes"])
        held, limit, whose = int(row["held_bytes"]), int(row["limit_bytes"]), f"its {row['limit_of']}"
        if self._rank_limit is not None and held / limit < rss / self._rank_limit:
            held, limit, whose = rss, self._rank_limit, "its part of the container"
        notes = []
        if held >= FULL * limit and self._first("full", rank if held == rss else host):
            notes.append(
                f"rank {rank} on {host} may be killed for its memory: {whose} holds {held // MIB} of {limit // MIB} "
                f"MiB ({held / limit:.0%}), this rank {rss // MIB}; next: {_ADVICE}"
            )
        if int(row["step"]) < 1:  # building and tracing a model takes memory, and ends
            return notes
        samples = self._samples.setdefault(rank, deque(maxlen=WINDOW))
        samples.append((now, rss))
        if len(samples) == WINDOW and ("grows", rank) not in self._noted:
            rate = growth(list(samples))
            left_s = (limit - held) / rate if rate > 0 else AHEAD_S
            if left_s < AHEAD_S and self._first("grows", rank):
                notes.append(
                    f"the memory of rank {rank} on {host} grows by {rate * 60 / MIB:.0f} MiB a minute, now "
                    f"{rss // MIB} MiB: {whose} of {limit // MIB} MiB is full in about {left_s / 60:.0f} minutes; "
                    f"next: look for what the model's callbacks or layers keep, or {_ADVICE}"
                )
        return notes

    def _first(self, kind: str, whose: object) -> bool:
        new = (kind, whose) not in self._noted
        self._noted.add((kind, whose))
        return new
