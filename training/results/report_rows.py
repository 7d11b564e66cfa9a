"""A report's tables of what the ranks did beside computing: time, checkpoints, reading."""

from __future__ import annotations

from statistics import median
from typing import Any

from training.rank.step_clock import PARTS
from training.run.history import History

_TIME_WORDS = {
    "data_s": "waiting for data",
    "compute_s": "computing",
    "exchange_s": "waiting for the all-reduce",
    "checkpoint_s": "writing checkpoints",
    "other_s": "callbacks and ends of epochs",
}


def time_rows(history: History) -> list[tuple[str, str]]:
    """Shares of each rank's time, in all generations."""
    rows = []
    for rank in sorted({row["rank"] for row in history.times}):
        sums = {part: sum(row[part] for row in history.times if row["rank"] == rank) for part in PARTS}
        total = sum(sums.values())
        shares = [f"{_TIME_WORDS[part]} {seconds / total:.1%}" for part, seconds in sums.items() if total]
        rows.append((f"rank {rank}", f"{', '.join(shares)} of {total:.1f} s"))
    return rows


def checkpoint_rows(history: History) -> list[tuple[str, str]]:
    """How many were committed, how many were not made since one was on its way, and what they cost the training."""
    rows = history.checkpoints
    told = [
        ("committed", str(len(rows))),
        ("skipped, while one was being written", str(sum(row.get("skipped", 0) for row in rows))),
    ]
    for name, words in (
        ("blocked_s", "steps stood still for"),
        ("written_s", "written in the background in"),
        ("cost_s", "cost of one, with slower steps beside it"),
    ):
        values = [row[name] for row in rows if isinstance(row.get(name), int | float)]
        if values:
            told.append((words, f"{median(values):.3f} s in the median, {max(values):.3f} s at most"))
    return told


def reading_rows(history: History) -> list[tuple[str, str]]:
    """What each rank read, of all generations; with a cache, how much of it came from there."""
    last: dict[tuple[int, int], dict[str, Any]] = {}
    for row in history.reading:  # a row counts since its process began: a generation's newest stands for all
        last[row["rank"], row["generation"]] = row
    told = []
    for rank in sorted({rank for rank, _ in last}):
        rows = [row for (of, _), row in last.items() if of == rank]
        fetched, waited = _sum(rows, "fetched_bytes"), _sum(rows, "waited_s")
        text = f"{fetched / 1e6:.1f} MB fetched, {waited:.1f} s waited for"
        if any("cache_hits" in row for row in rows):
            hits, misses = _sum(rows, "cache_hits"), _sum(rows, "cache_misses")
            share = f" ({hits / (hits + misses):.1%})" if hits + misses else ""
            text += f"; {hits:.0f} of {hits + misses:.0f} reads from the cache{share}"
            text += f", {_sum(rows, 'cache_hit_bytes') / 1e6:.1f} MB"
        told.append((f"rank {rank}", text))
    return told


def _sum(rows: list[dict[str, Any]], name: str) -> float:
    return sum(row.get(name, 0) for row in rows)
