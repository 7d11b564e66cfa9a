"""What a run measured, step by step, read back from its closed metric parts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from lockstep.storage.errors import CorruptionError, NotFoundError
from lockstep.storage.fs import filesystem
from training.rank.step_clock import PARTS
from training.run.lineage import claimed
from training.run.paths import RunPaths

RATE, NON_FINITE, CHECKPOINT, READING = "learning_rate", "non_finite", "checkpoint", "reading"


@dataclass(frozen=True, slots=True)
class History:
    """`steps` rows {step, epoch, loss, seconds} and `epochs` rows {step, epoch, metrics, seconds}, in order of step.

    Where a generation went back to a checkpoint and did steps again, the newest generation's row stands. `times` are
    the rows of training.rank.step_clock of all ranks and generations: time that was spent, for steps done again too.
    """

    steps: list[dict[str, Any]]
    epochs: list[dict[str, Any]]
    times: list[dict[str, Any]]
    generations: int
    """Generations that were claimed: one more than the restarts and resumptions of the run."""
    non_finite: list[dict[str, Any]] = field(default_factory=list)
    """Rows {step, rank, what, skipped, lanes, samples} of ranks and generations that met what was not finite."""
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    """Rows {step, bytes, blocked_s, written_s, cost_s, skipped, interval_s} of what was committed, in order of step."""
    reading: list[dict[str, Any]] = field(default_factory=list)
    """Rows of training.reading.reading of all ranks, each with its `generation`: what was read up to the end of an
    epoch.
    """
    learning_rate: dict[str, Any] | None = None
    """What was done to the model's learning rate (training.steps.optimizers.Scaled); None where nothing was."""


def read_history(run: str) -> History:
    """Read the metrics of the run at URL `run`. Raises NotFoundError for no run, CorruptionError for a bad part."""
    fs, paths = filesystem(run), RunPaths(run)
    if not fs.exists(paths.run_json):
        raise NotFoundError(
            f"{run} is no run",
            got="no run.json",
            allowed="a directory that jobs.train wrote",
            next_step="Check the URL.",
        )
    kept: dict[str, dict[int, dict[str, Any]]] = {"step": {}, "epoch": {}, CHECKPOINT: {}, RATE: {}}
    times, non_finite, reading = [], [], []
    generations = sorted(claimed(fs, paths))
    for generation in generations:
        for row in _rows(paths.metrics(generation)):
            if row["kind"] == "time":
                times.append(row)
            elif row["kind"] == NON_FINITE:
                non_finite.append(row)
            elif row["kind"] == READING:
                reading.append({**row, "generation": generation})
            else:
                kept[row["kind"]][row["step"]] = row
    steps, epochs, checkpoints, rates = ([rows[step] for step in sorted(rows)] for rows in kept.values())
    rate = rates[-1] if rates else None
    return History(steps, epochs, times, len(generations), non_finite, checkpoints, reading, rate)


def _rows(directory: str) -> list[dict[str, Any]]:
    fs = filesystem(directory)
    try:
        parts = [part for part in fs.list(directory) if part.name.endswith(".jsonl")]
    except NotFoundError:
        return []  # a generation that failed before its first step measured nothing
    rows = []
    for part in parts:
        for number, line in enumerate(fs.read_bytes(part.url).splitlines()):
            rows.append(_row(line, part.url, number))
    return rows


def _row(line: bytes, url: str, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
        timed = row["kind"] == "time" and all(isinstance(row[name], int | float) for name in ("rank", *PARTS))
        known = row["kind"] in ("step", "epoch", RATE, NON_FINITE, CHECKPOINT, READING) or timed
        if known and isinstance(row["step"], int):
            return dict(row)
        problem = "neither a step, an epoch, a rate, a rank's time or reading, a checkpoint nor what was not finite"
    except (ValueError, KeyError, TypeError) as error:
        problem = repr(error)
    what = f"a metrics file holds a line that is no measurement ({problem})"
    raise CorruptionError(what, file=url, record=number, got=repr(line[:80]))
