"""A run's metrics: rows written in closed parts, since HDFS shows an unclosed file as empty, and read back."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lockstep.storage.errors import CorruptionError, ExistsError, LockstepError, NotFoundError
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.run_layout import part_name
from lockstep.storage.shown import counted, short
from lockstep.storage.urls import join
from lockstep.training.run.lineage import claimed
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.status import no_run

log = logging.getLogger(__name__)
PART_BYTES = 1 << 20
PART_EVERY_S = 30.0
MAX_WAITING_BYTES = 16 << 20  # while the storage is unavailable; then older lines are dropped and counted
_DROPPED = "lines dropped while the storage was unavailable"
PARTS = ("starting_s", "data_s", "compute_s", "exchange_s", "checkpoint_s", "validation_s", "other_s")
RATE, NON_FINITE, CHECKPOINT, READING = "learning_rate", "non_finite", "checkpoint", "reading"
USAGE, STRAGGLER, BAD_RECORD = "usage", "straggler", "bad_record"
PACE = "pace"  # what a driver needs at once; it keeps no such row


class PartWriter:
    """Collects lines and writes them as `directory/part-NNNNN.SUFFIX`, each part complete or absent.

    Thread-safe. A storage that fails temporarily delays parts. `confirm` is called before a part gets its name
    (lockstep.storage.publish.write_stream).
    """

    def __init__(self, directory: str, suffix: str, confirm: Callable[[], None] | None = None) -> None:
        self._directory, self._suffix, self._confirm = directory, suffix, confirm
        self._lines: list[str] = []
        self._bytes = self._dropped = self._parts = 0
        self._written_at = time.monotonic()
        self._lock = threading.Lock()
        self._io = threading.Lock()

    def add(self, line: str) -> None:
        """Add one line, without a newline."""
        with self._lock:
            self._lines.append(line)
            self._bytes += len(line) + 1
            while self._bytes > MAX_WAITING_BYTES:
                self._bytes -= len(self._lines.pop(0)) + 1
                self._dropped += 1

    @property
    def due(self) -> bool:
        """Whether a part is large or old enough to be written."""
        with self._lock:
            old = time.monotonic() - self._written_at >= PART_EVERY_S
            return bool(self._lines) and (old or self._bytes >= PART_BYTES)

    def flush(self) -> None:
        """Write all lines as one part. Raises LockstepError, and then keeps the lines for the next call."""
        with self._io:
            with self._lock:
                lines, self._lines, self._bytes, self._written_at = self._lines, [], 0, time.monotonic()
                if self._dropped:
                    lines.insert(0, f"[{self._dropped} {_DROPPED}]")
                    self._dropped = 0
            try:
                while lines:
                    lines = lines[self._write(lines) :]
                    self._parts += 1
            except LockstepError:
                with self._lock:
                    self._lines[:0] = lines
                    self._bytes += sum(len(line) + 1 for line in lines)
                raise

    def _write(self, lines: list[str]) -> int:
        """Write the next part; returns how many of the lines are stored."""
        url = join(self._directory, part_name(self._parts, self._suffix))
        fs, data = filesystem(url), ("\n".join(lines) + "\n").encode("utf-8", "replace")
        try:
            write_file(fs, url, data, confirm=self._confirm)
        except ExistsError:
            # No other process writes here: an earlier call's part got its name, but could not be read back.
            there = fs.read_bytes(url)
            return there.count(b"\n") if data.startswith(there) else 0
        return len(lines)

    def flush_if_due(self) -> None:
        """Write a part if it is large or old enough; a failing storage is logged and tried again later."""
        if self.due:
            self.try_flush()

    def try_flush(self) -> None:
        """Call `flush`, but only log that a storage fails."""
        try:
            self.flush()
        except LockstepError as error:  # also SupersededError: an overtaken driver writes no more
            log.warning("a part of %s is delayed: %s", self._directory, error.what)


@dataclass(frozen=True, slots=True)
class History:
    """`steps` rows {step, epoch, loss, seconds} and `epochs` rows {step, epoch, metrics, seconds}, in order.

    There is one row a step and an epoch; of an epoch that --max-steps cut, that of the cut until its end is reached.
    An epoch that was validated has `val_METRIC` among its metrics, and `validation` {split, samples, left_out,
    class_counts, intervals, seconds}. One with tables of any ids has `tables`, of each {rows, waiting, admitted,
    evicted, bytes}.

    If a generation resumed from a checkpoint and repeated steps, the newest generation's rows count. `times` are the
    rows of lockstep.training.rank.metrics of all ranks and generations, with the time of repeated steps.
    """

    steps: list[dict[str, Any]]
    epochs: list[dict[str, Any]]
    times: list[dict[str, Any]]
    generations: int
    """Generations that were claimed: one more than the restarts and resumptions of the run."""
    non_finite: list[dict[str, Any]] = field(default_factory=list)
    """Rows {step, rank, what, skipped, lanes, samples} for each value that was not finite, of all generations."""
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    """Rows {step, bytes, blocked_s, written_s, cost_s, skipped, interval_s} of commits, in order of step."""
    reading: list[dict[str, Any]] = field(default_factory=list)
    """Rows of lockstep.training.reading.open of all ranks, each with its `generation`: reads up to the end of an epoch.
    """
    usage: list[dict[str, Any]] = field(default_factory=list)
    """Rows of lockstep.training.rank.usage of all ranks and generations."""
    stragglers: list[dict[str, Any]] = field(default_factory=list)
    """Rows {step, rank, host, what, own_s, others_s} for each time that a rank became slow, of all generations."""
    bad_records: list[dict[str, Any]] = field(default_factory=list)
    """Rows {step, rank, what} for each record or image that was skipped, of all generations, once each; records also
    have {shard, shard_sha256, record, records}: the first one, and how many of a block."""
    learning_rate: dict[str, Any] | None = None
    """How the model's learning rate was scaled (lockstep.training.steps.optimizers.Scaled); None if it was not."""

    def __repr__(self) -> str:
        known = ((len(self.steps), "step"), (len(self.epochs), "epoch"), (self.generations, "generation"))
        found = f"history: {', '.join(counted(number, noun) for number, noun in known)}"
        last = self.epochs[-1]["metrics"] if self.epochs else {}
        numbers = ", ".join(f"{name} {value:.4f}" for name, value in last.items() if isinstance(value, float))
        return short("\n".join([found, *([f"last epoch: {numbers}"] if numbers else [])]))


def read_history(run: str) -> History:
    """Read the metrics of the run at URL `run`. Raises NotFoundError without a run, CorruptionError for a bad part."""
    kept: dict[str, dict[int, dict[str, Any]]] = {"step": {}, "epoch": {}, CHECKPOINT: {}, RATE: {}}
    kinds = ("time", NON_FINITE, READING, USAGE, STRAGGLER, BAD_RECORD)
    listed: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    generations, rows = read_rows(run)
    for generation, row in rows:
        if row["kind"] in listed:
            listed[row["kind"]].append({**row, "generation": generation} if row["kind"] == READING else row)
        else:
            kept[row["kind"]][row[_counted(row["kind"])]] = row
    steps, epochs, checkpoints, rates = ([found[step] for step in sorted(found)] for found in kept.values())
    rate = rates[-1] if rates else None
    return History(
        steps,
        epochs,
        listed["time"],
        len(generations),
        non_finite=listed[NON_FINITE],
        checkpoints=checkpoints,
        reading=listed[READING],
        usage=listed[USAGE],
        stragglers=listed[STRAGGLER],
        bad_records=list({row["what"]: row for row in reversed(listed[BAD_RECORD])}.values())[::-1],
        learning_rate=rate,
    )


def _counted(kind: str) -> str:
    """What there is one row of this kind for."""
    return "epoch" if kind == "epoch" else "step"


def read_rows(run: str, kind: str = "") -> tuple[list[int], Iterator[tuple[int, dict[str, Any]]]]:
    """The generations of a run, and each row of its metrics with its generation, a part at a time; only those of `kind`
    if it is given, which parses no others. Raises NotFoundError without a run, CorruptionError at a bad part.
    """
    fs, paths = filesystem(run), RunPaths(run)
    if not fs.exists(paths.run_json):
        raise no_run(fs, paths)
    generations = sorted(claimed(fs, paths))
    return generations, (
        (generation, row) for generation in generations for row in _rows(paths.metrics(generation), kind.encode())
    )


def _rows(directory: str, kind: bytes) -> Iterator[dict[str, Any]]:
    fs = filesystem(directory)
    try:
        parts = [part for part in fs.list(directory) if part.name.endswith(".jsonl")]
    except NotFoundError:
        return  # a generation that failed before its first step has no metrics
    for part in parts:
        for number, line in enumerate(fs.read_bytes(part.url).splitlines()):
            if kind in line and not (line.startswith(b"[") and line.endswith(f"{_DROPPED}]".encode())):
                row = _row(line, part.url, number)
                if not kind or row["kind"].encode() == kind:
                    yield row


def _row(line: bytes, url: str, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
        timed = row["kind"] == "time" and all(isinstance(row[name], int | float) for name in ("rank", *PARTS))
        kinds = ("step", "epoch", RATE, NON_FINITE, CHECKPOINT, READING, USAGE, STRAGGLER, BAD_RECORD)
        known = row["kind"] in kinds or timed
        if known and isinstance(row["step"], int) and isinstance(row[_counted(row["kind"])], int):
            return dict(row)
        problem = "no row of a kind that is known, with its numbers"
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        problem = repr(error)
    what = f"a metrics file holds a line that is no measurement ({problem})"
    raise CorruptionError(what, file=url, record=number, got=repr(line[:80]))
