"""A run's metrics in bounded memory: curves of at most so many points, sums in place of rows. For runs of weeks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lockstep.training.run.metrics import (
    BAD_RECORD,
    CHECKPOINT,
    NON_FINITE,
    PARTS,
    RATE,
    READING,
    STRAGGLER,
    USAGE,
    History,
    read_rows,
)

POINTS = 400  # of a curve; more would only make a page larger
SMOOTHED_STEPS = 20  # of the mean next to a loss: that of a single batch says little
SAMPLES = 2000  # rows of use that are kept of a rank
MOST_NAMED = 1000  # rows about single steps, such as a slow rank's: the first ones are kept
Row = dict[str, Any]


def read_summary(run: str) -> History:
    """Read the metrics of the run at URL `run` as `read_history` does, in memory that does not grow with its length.

    Of more than POINTS steps or epochs, equal spans have the rows with the lowest and highest values and the last one.
    A step's row has `mean`, of its generation's last SMOOTHED_STEPS losses. `times` has a row a rank, with the sums;
    `usage` an even sample of each rank, with the highest values; `reading` the last row of each rank and generation;
    of rows about single steps there are the first MOST_NAMED. Raises what `read_history` raises.
    """
    generations, rows = read_rows(run)
    fold = _Fold()
    for generation, row in rows:
        fold.add(row, generation)
    return fold.history(len(generations))


class Spans:
    """Rows in order of their number, thinned: while there are more than twice POINTS, spans become twice as long."""

    def __init__(self, number: str, values: Callable[[Row], Mapping[str, Any]]) -> None:
        """`number` is the field that counts rows, from 0 or 1; `values` are those whose extremes are kept."""
        self._number, self._values, self._width = number, values, 1
        self._spans: dict[int, dict[Any, Row]] = {}  # by span: the row by (value's name, lowest or highest), or "last"

    def add(self, row: Row) -> None:
        """Take a row; one of the same number replaces it while all rows are kept."""
        span = row[self._number] // self._width
        if self._width == 1:
            self._spans.pop(span, None)
        self._keep(self._spans.setdefault(span, {}), row)
        if len(self._spans) > 2 * POINTS:
            self._merge()

    def rows(self) -> list[Row]:
        """The rows that are kept, in order."""
        found = {row[self._number]: row for kept in self._spans.values() for row in kept.values()}
        return [found[number] for number in sorted(found)]

    def _merge(self) -> None:
        self._width *= 2
        merged: dict[int, dict[Any, Row]] = {}
        for span, kept in sorted(self._spans.items()):
            for row in sorted(kept.values(), key=lambda row: int(row[self._number])):
                self._keep(merged.setdefault(span // 2, {}), row)
        self._spans = merged

    def _keep(self, kept: dict[Any, Row], row: Row) -> None:
        if "last" not in kept or kept["last"][self._number] <= row[self._number]:
            kept["last"] = row
        for name, value in self._values(row).items():
            if isinstance(value, int | float):  # not "nan"
                for which, sign in (("low", 1), ("high", -1)):
                    best = kept.get((name, which))
                    if best is None or sign * value < sign * self._values(best)[name]:
                        kept[name, which] = row


class _Sample:
    """Every k-th row, and those with the highest values."""

    def __init__(self, values: Callable[[Row], Mapping[str, float]]) -> None:
        self._values, self._every, self._seen = values, 1, 0
        self._rows: list[Row] = []
        self._highest: dict[str, Row] = {}
        self._last: Row | None = None

    def add(self, row: Row) -> None:
        if self._seen % self._every == 0:
            self._rows.append(row)
        self._seen, self._last = self._seen + 1, row
        if len(self._rows) > SAMPLES:
            self._rows, self._every = self._rows[::2], 2 * self._every
        for name, value in self._values(row).items():
            if name not in self._highest or value > self._values(self._highest[name])[name]:
                self._highest[name] = row

    def rows(self) -> Iterator[Row]:
        yield from self._rows
        more = {id(row): row for row in (*self._highest.values(), self._last) if row is not None}
        known = {id(row) for row in self._rows}
        yield from (row for key, row in more.items() if key not in known)


def _use(row: Row) -> dict[str, float]:
    found = {"rss": row["rss_bytes"], "held": row["held_bytes"] / row["limit_bytes"]}
    return found | ({"gpu": row["gpu_bytes"]} if "gpu_bytes" in row else {})


class _Fold:
    """The summary so far."""

    def __init__(self) -> None:
        self._steps = Spans("step", lambda row: {"loss": row["loss"], "mean": row.get("mean")})
        self._epochs = Spans("epoch", lambda row: row["metrics"])
        self._losses: deque[tuple[int, float]] = deque(maxlen=SMOOTHED_STEPS)  # of the last steps
        self._times: dict[int, Row] = {}
        self._usage: dict[int, _Sample] = {}
        self._reading: dict[tuple[int, int], Row] = {}
        self._checkpoints: dict[int, Row] = {}
        self._rate: Row | None = None
        self._bad: dict[str, Row] = {}
        self._named: dict[str, list[Row]] = {}

    def add(self, row: Row, generation: int) -> None:
        """Take the next row."""
        kind = row["kind"]
        if kind == "step":
            while self._losses and self._losses[-1][0] >= row["step"]:  # a later generation repeats steps
                self._losses.pop()
            if isinstance(row["loss"], int | float):
                self._losses.append((row["step"], row["loss"]))
                row["mean"] = sum(loss for _, loss in self._losses) / len(self._losses)
            self._steps.add(row)
        elif kind == "epoch":
            self._epochs.add(row)
        elif kind == "time":
            self._add_time(row)
        elif kind == USAGE:
            self._usage.setdefault(row["rank"], _Sample(_use)).add(row)
        elif kind == READING:
            self._reading[row["rank"], generation] = {**row, "generation": generation}
        elif kind == CHECKPOINT:
            self._checkpoints[row["step"]] = row
        elif kind == RATE:
            self._rate = row
        elif kind == BAD_RECORD:
            self._bad.setdefault(row["what"], row)
        elif len(named := self._named.setdefault(kind, [])) < MOST_NAMED:
            named.append(row)

    def _add_time(self, row: Row) -> None:
        sums = self._times.setdefault(row["rank"], {**row, "steps": 0, "sent_bytes": 0, **dict.fromkeys(PARTS, 0.0)})
        sums["step"] = row["step"]
        for name in ("steps", "sent_bytes", *PARTS):
            sums[name] += row.get(name, 0)

    def history(self, generations: int) -> History:
        """The summary as a history."""
        return History(
            self._steps.rows(),
            self._epochs.rows(),
            [self._times[rank] for rank in sorted(self._times)],
            generations,
            non_finite=self._named.get(NON_FINITE, []),
            checkpoints=[self._checkpoints[step] for step in sorted(self._checkpoints)],
            reading=list(self._reading.values()),
            usage=[row for rank in sorted(self._usage) for row in self._usage[rank].rows()],
            stragglers=self._named.get(STRAGGLER, []),
            bad_records=list(self._bad.values()),
            learning_rate=self._rate,
        )
