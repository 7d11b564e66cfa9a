"""The summary of a run's metrics: all rows while they are few, and bounded in memory where they are many."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.storage.documents import seal
from lockstep.storage.fs import filesystem
from lockstep.training.results.resources import time_rows, usage_rows
from lockstep.training.run import summary
from lockstep.training.run.lineage import CheckpointRef, claim_next
from lockstep.training.run.metrics import PARTS, read_history
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.summary import POINTS, SMOOTHED_STEPS, Spans, read_summary

Row = dict[str, Any]


def run_of(folder: Path, *generations: list[list[Row]]) -> str:
    """A run whose generations have these parts of rows, each generation begun from step 10."""
    paths = RunPaths(str(folder))
    folder.mkdir()
    Path(paths.run_json).write_bytes(seal({"kind": "run"}))
    for number, parts in enumerate(generations, 1):
        parent = None if number == 1 else CheckpointRef(10, number - 1)
        claim_next(filesystem(str(folder)), paths, parent, epochs=9, num_ranks=2)
        where = Path(paths.metrics(number))
        where.mkdir(parents=True)
        for part, rows in enumerate(parts):
            (where / f"part-{part:05d}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(folder)


def rows_of(first: int, last: int, rng: np.random.Generator) -> list[Row]:
    """What a driver writes of these steps: a loss each, the times and the use of two ranks, an epoch of 50 steps."""
    found: list[Row] = []
    for step in range(first, last + 1):
        found.append({"kind": "step", "step": step, "epoch": step // 50, "loss": float(rng.normal()), "seconds": 1.0})
        for rank in range(2):
            times = {part: float(rng.integers(1, 9)) for part in PARTS}
            found.append({"kind": "time", "rank": rank, "step": step, "steps": 1, "sent_bytes": 8, **times})
        use = {"rss_bytes": int(rng.integers(1 << 20, 1 << 30)), "cores": 0.5, "held_bytes": 5, "limit_bytes": 9}
        found.append({"kind": "usage", "rank": step % 2, "step": step, "host": "a", "limit_of": "host", **use})
        if step % 50 == 0:
            metrics = {"loss": float(rng.normal()), "odd": "nan"}
            found.append({"kind": "epoch", "step": step, "epoch": step // 50 - 1, "metrics": metrics, "seconds": 1.0})
    return found


def test_a_short_run_loses_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    run = run_of(tmp_path / "run", [rows_of(1, 8, rng), rows_of(9, 130, rng)], [rows_of(11, 100, rng)])
    whole, short = read_history(run), read_summary(run)
    losses = [row["loss"] for row in whole.steps]
    spans = [range(max(0 if at < 10 else 10, at + 1 - SMOOTHED_STEPS), at + 1) for at in range(100)]  # of a generation
    means = [float(np.mean([losses[each] for each in span])) for span in spans]
    assert [row.pop("mean") for row in short.steps][:100] == pytest.approx(means)
    assert (
        short.steps == whole.steps
        and short.epochs == whole.epochs
        and short.usage == sorted(whole.usage, key=lambda row: row["rank"])
    )
    assert time_rows(short) == time_rows(whole) and usage_rows(short) == usage_rows(whole)
    assert short.generations == 2


def test_a_long_run_has_bounded_rows_with_the_extremes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight times as many rows take no more memory, and no rows of the report are lost."""
    monkeypatch.setattr(summary, "POINTS", 20)
    monkeypatch.setattr(summary, "SAMPLES", 20)
    peaks = []
    for steps in (300, 2_400):
        rng = np.random.default_rng(1)
        parts = [rows_of(first, first + 99, rng) for first in range(1, steps, 100)]
        run = run_of(tmp_path / str(steps), parts)
        tracemalloc.start()
        short = read_summary(run)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        rows = [row for part in parts for row in part]
        losses = [row["loss"] for row in rows if row["kind"] == "step"]
        kept = [row["loss"] for row in short.steps]
        assert (min(kept), max(kept), kept[-1]) == (min(losses), max(losses), losses[-1])
        assert 20 <= len(kept) <= 5 * 40 and short.steps[-1]["step"] == steps
        assert short.epochs[-1]["epoch"] == steps // 50 - 1 and len(short.epochs) <= 3 * 40
        assert len(short.usage) <= 2 * 24
        whole = read_history(run)
        assert time_rows(short) == time_rows(whole) and len(short.times) == 2
        assert [row[1] for row in usage_rows(short)] == [row[1] for row in usage_rows(whole)]
    assert peaks[1] < 1.5 * peaks[0], f"{peaks} bytes"


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.integers(1, 80))
def test_spans_keep_the_lowest_the_highest_and_the_last(pattern: list[float], times: int) -> None:
    values = [value + at for at in range(times) for value in pattern]
    spans = Spans("step", lambda row: {"loss": row["loss"]})
    for step, value in enumerate(values, 1):
        spans.add({"step": step, "loss": value})
    rows = spans.rows()
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows}) and rows[-1]["step"] == len(values)
    assert all(values[row["step"] - 1] == row["loss"] for row in rows)
    kept = [row["loss"] for row in rows]
    assert (min(kept), max(kept)) == (min(values), max(values)) and len(rows) <= 6 * POINTS + 3
    if len(values) <= 2 * POINTS:
        assert len(rows) == len(values)
