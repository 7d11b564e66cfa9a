"""What the ranks of a run used, as rows of tables: time, memory, processors, reads, checkpoints."""

from __future__ import annotations

from statistics import median
from typing import Any

from lockstep.training.driver.stragglers import where
from lockstep.training.results.curves import TIME_WORDS
from lockstep.training.run.metrics import PARTS, History
from lockstep.training.run.notes import NAMED


def time_rows(history: History) -> list[tuple[str, str]]:
    """How each rank's time was spent over all generations, and what it sent over the network."""
    rows = []
    for rank in sorted({row["rank"] for row in history.times}):
        sums = {part: sum(row[part] for row in history.times if row["rank"] == rank) for part in PARTS}
        if not sums["validation_s"]:  # a run without validation
            del sums["validation_s"]
        total = sum(sums.values())
        shares = [f"{TIME_WORDS[part]} {seconds / total:.1%}" for part, seconds in sums.items() if total]
        mine = [row for row in history.times if row["rank"] == rank]
        sent, steps = _sum(mine, "sent_bytes"), _sum(mine, "steps")
        text = f"; {sent / steps / 1e6:.3g} MB sent a step" if sent and steps else ""
        rows.append((f"rank {rank}", f"{', '.join(shares)} of {total:.1f} s{text}"))
    return rows


def checkpoint_rows(history: History) -> list[tuple[str, str]]:
    """How many checkpoints were committed and skipped, and what they cost the training."""
    rows = history.checkpoints
    found = [
        ("committed", str(len(rows))),
        ("skipped, while one was being written", str(sum(row.get("skipped", 0) for row in rows))),
    ]
    for name, words in (
        ("blocked_s", "steps stopped for"),
        ("written_s", "written in the background in"),
        ("cost_s", "cost of one, including slower steps"),
    ):
        values = [row[name] for row in rows if isinstance(row.get(name), int | float)]
        if values:
            found.append((words, f"{median(values):.3f} s in the median, {max(values):.3f} s at most"))
    return found


def reading_rows(history: History) -> list[tuple[str, str]]:
    """What each rank read, over all generations, and how much of it came from a cache."""
    last: dict[tuple[int, int], dict[str, Any]] = {}
    for row in history.reading:  # a row counts since its process began: the newest of a generation has it all
        last[row["rank"], row["generation"]] = row
    found = []
    for rank in sorted({rank for rank, _ in last}):
        rows = [row for (of, _), row in last.items() if of == rank]
        fetched, waited = _sum(rows, "fetched_bytes"), _sum(rows, "waited_s")
        text = f"{fetched / 1e6:.1f} MB fetched, {waited:.1f} s waited for{_share_read(rows[-1])}"
        if any("cache_hits" in row for row in rows):
            hits, misses = _sum(rows, "cache_hits"), _sum(rows, "cache_misses")
            share = f" ({hits / (hits + misses):.1%})" if hits + misses else ""
            text += f"; {hits:.0f} of {hits + misses:.0f} reads from the cache{share}"
            text += f", {_sum(rows, 'cache_hit_bytes') / 1e6:.1f} MB"
        found.append((f"rank {rank}", text))
    return found


def _share_read(row: dict[str, Any]) -> str:
    """Which part of a split's bytes an epoch reads; nothing of runs that did not record it."""
    whole = row.get("split_bytes")
    return f"; an epoch reads {row['pass_bytes'] / whole:.1%} of the {whole / 1e6:.1f} MB of the split" if whole else ""


def straggler_rows(history: History) -> list[tuple[str, str]]:
    """Each time that a rank slowed the others down."""
    return [
        (
            f"from step {row['step']}",
            f"rank {row['rank']} on {row['host']}: {row['own_s'] * 1e3:,.1f} ms of its own a step, the others "
            f"{row['others_s'] * 1e3:,.1f} ms, most of it {where(row['what'])}",
        )
        for row in history.stragglers
    ]


def bad_record_rows(history: History) -> list[tuple[str, str]]:
    """The number of records and images that were skipped, and the names of the first; nothing if there are none."""
    rows = history.bad_records
    if not rows:
        return []
    number = sum(row.get("records", 1) for row in rows)
    return [("number", str(number)), *((f"at step {row['step']}", row["what"]) for row in rows[:NAMED])]


def usage_rows(history: History) -> list[tuple[str, ...]]:
    """Memory, processor and GPU of each rank over all generations, below a head."""
    rows: list[tuple[str, ...]] = []
    for rank in sorted({row["rank"] for row in history.usage}):
        mine = [row for row in history.usage if row["rank"] == rank]
        fullest = max(mine, key=lambda row: row["held_bytes"] / row["limit_bytes"])
        full = f"{fullest['held_bytes'] / fullest['limit_bytes']:.0%} of {fullest['limit_bytes'] / 2**20:,.0f} MiB"
        trained = [row["cores"] for row in mine if row["step"]]
        cores = f"{median(trained):.2f}" if trained else ""
        gpu = [row for row in mine if "gpu_bytes" in row]
        shares = [row["gpu_share"] for row in gpu if "gpu_share" in row]
        used = f"{max(row['gpu_bytes'] for row in gpu) / 2**20:,.0f} MiB" if gpu else "none"
        used += f", {median(shares):.0%} busy" if shares else ""
        most = f"{max(row['rss_bytes'] for row in mine) / 2**20:,.0f} MiB"
        rows.append((f"rank {rank} on {mine[-1]['host']}", most, f"{full} ({fullest['limit_of']})", cores, used))
    return [("rank", "most resident memory", "its container or host at most", "cores (median)", "GPU"), *rows]


def _sum(rows: list[dict[str, Any]], name: str) -> float:
    return sum(row.get(name, 0) for row in rows)
