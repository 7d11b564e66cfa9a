"""Which sample went into which step: written by each rank, and checked along a run's chain of checkpoints.

A file is CSV with a header: step (the optimizer step, from 1: the file of checkpoint N ends with step N), epoch (from
0) and sample id, 16 hex digits of its 64 bits read as unsigned. Rows lie in step order, within a step in lane order.
Of a mixture a fourth column says which dataset a sample is of (from 0), and the epoch is that dataset's own.
"""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lockstep.storage.errors import CorruptionError
from lockstep.storage.fs import filesystem
from training.batches.feed import Batch
from training.plan.epoch_plan import EpochPlan
from training.plan.mixture import MixedPlan, Plan
from training.plan.order import Run
from training.reading.reader import SplitReader

HEADER = b"step,epoch,sample_id\n"
MIXED_HEADER = b"step,epoch,sample_id,dataset\n"
_LINE = re.compile(rb"([0-9]{1,18}),([0-9]{1,18}),([0-9a-f]{16})")  # numbers that an int64 holds
_MIXED_LINE = re.compile(_LINE.pattern + rb",([0-9]{1,18})")
_ROW = np.dtype([("step", np.int64), ("epoch", np.int64), ("id", np.int64), ("dataset", np.int64)])
Rows = npt.NDArray[np.void]


def sample_hex(sample_id: int) -> str:
    """A sample id as audits and results show it: 16 hex digits of the unsigned value."""
    return f"{sample_id & (1 << 64) - 1:016x}"


class AuditLog:
    """Collects the batches that a rank is fed; safe to add to from another thread.

    Batches are read ahead of training, so those of later steps stay until a later `take`. A step that is added again
    (an iterator begun anew) replaces what was there: it is the same batch. `datasets` says of a mixture which dataset
    each row of a batch is of: (n_r,) int64.
    """

    def __init__(self, datasets: npt.NDArray[np.int64] | None = None) -> None:
        self._datasets = datasets
        self._lock = threading.Lock()
        self._batches: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}

    def add(self, batch: Batch) -> None:
        """Remember a batch; batch n (from 0) is what optimizer step n + 1 is made of."""
        with self._lock:
            # Copies, so that no view keeps the features of a whole read-ahead in memory.
            self._batches[batch.step + 1] = (batch.epochs.copy(), batch.sample_ids.copy())

    def take(self, step: int) -> bytes:
        """The CSV of all rows up to optimizer step `step` since the last call."""
        with self._lock:
            done = sorted(number for number in self._batches if number <= step)
            parts = [(number, *self._batches.pop(number)) for number in done]
        if self._datasets is not None:
            datasets = self._datasets.tolist()
            return MIXED_HEADER + b"".join(
                b"%d,%d,%s,%d\n" % (number, epoch, sample_hex(sample).encode(), dataset)
                for number, epochs, ids in parts
                for epoch, sample, dataset in zip(epochs.tolist(), ids.tolist(), datasets, strict=True)
            )
        return HEADER + b"".join(
            b"%d,%d,%s\n" % (number, epoch, sample_hex(sample).encode())
            for number, epochs, ids in parts
            for epoch, sample in zip(epochs.tolist(), ids.tolist(), strict=True)
        )


def parse_audit(data: bytes, *, file: str) -> Rows:
    """Rows (n,) of int64 fields step, epoch, id, dataset (0 where there is one). Raises CorruptionError naming file and
    row for anything else."""
    header = MIXED_HEADER if data.startswith(MIXED_HEADER) else HEADER
    if not data.startswith(header) or not data.endswith(b"\n"):
        what = "an audit without its header or cut in a line"
        raise CorruptionError(what, file=file, got=repr(data[:40]), allowed=f"{HEADER!r} and whole lines")
    lines, row_form = data[len(header) :].split(b"\n")[:-1], _MIXED_LINE if header is MIXED_HEADER else _LINE
    rows = np.zeros(len(lines), dtype=_ROW)
    for number, line in enumerate(lines):
        cells = row_form.fullmatch(line)
        if cells is None:
            raise CorruptionError("a row of an audit cannot be read", file=file, record=number, got=repr(line[:60]))
        value = int(cells[3], 16)
        signed = value - (1 << 64) if value >> 63 else value
        rows[number] = (int(cells[1]), int(cells[2]), signed, int(cells[4]) if header is MIXED_HEADER else 0)
    return rows


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit shows. Samples are (epoch, sample id in hex, of a mixture also its dataset); all empty but
    `left_over` (of a mixture that of its first dataset, whose epochs the run counts) where all is well.
    """

    steps: int
    samples: int
    missing: tuple[tuple[int, str], ...]
    repeated: tuple[tuple[int, str], ...]
    unknown: tuple[tuple[int, str], ...]
    short_steps: tuple[int, ...]
    left_over: tuple[tuple[int, str], ...]
    places: tuple[str, ...] = ()
    """What is wrong with which file and row (training.results.audit_places)."""

    @property
    def ok(self) -> bool:
        """Each sample of each epoch exactly once, what is left over as planned, global batches full, all in place."""
        return not (self.missing or self.repeated or self.unknown or self.short_steps or self.places)


def left_over(plan: EpochPlan, reader: SplitReader, epochs: int, steps: int | None = None) -> list[tuple[int, int]]:
    """(epoch, sample id) of the samples that `epochs` epochs leave after `steps` steps, by default all of them."""
    left = plan.leftover(epochs, steps)
    places = [(epoch, run) for epoch, position in left for run in plan.runs(epoch, position, position + 1)]
    records: dict[tuple[int, int], list[int]] = defaultdict(list)  # by block, read once: there may be nearly G of them
    for _, run in places:
        records[run.shard, run.first_record // plan.block_records].append(run.first_record)
    ids: dict[tuple[int, int], int] = {}
    for (shard, _), wanted in records.items():
        first = min(wanted)
        rows = reader.read(Run(shard, first, max(wanted) - first + 1))
        found = _ids(rows.column(_id_column(reader)))
        ids |= {(shard, record): int(found[record - first]) for record in wanted}
    return [(epoch, ids[run.shard, run.first_record]) for epoch, run in places]


def check_audit(
    plan: Plan,
    readers: SplitReader | Sequence[SplitReader],
    audits: Iterable[str | tuple[str, bytes]],
    *,
    steps: int,
    epochs: int,
) -> AuditReport:
    """Hold the audits of a run against its data set, or of a mixture against each of its own.

    `audits` are the URLs (or name and content) of all ranks' audit files along the chain of checkpoints, oldest first;
    `steps` the steps of the chain's tip; `epochs` those of the whole run. The ids come from the shards themselves, in
    file order, so that the check does not rest on the plan but for which samples are left over. Of the datasets of a
    mixture but the first, the epochs that have begun are checked.
    """
    rows = np.concatenate([np.zeros(0, dtype=_ROW), *(_load(audit) for audit in audits)])
    readers = [readers] if isinstance(readers, SplitReader) else readers
    if not isinstance(plan, MixedPlan):
        return _check(plan, readers[0], rows, steps, epochs)
    strange = rows[rows["dataset"] >= len(plan.parts)]
    reports = []
    for number, (part, reader) in enumerate(zip(plan.parts, readers, strict=True)):
        passes = epochs if number == 0 else plan.epochs_begun(number, steps)
        suffix = f" of dataset {number + 1}"
        reports.append(_check(part, reader, rows[rows["dataset"] == number], steps, passes, suffix))
    return AuditReport(
        steps=steps,
        samples=len(rows),
        missing=tuple(sample for report in reports for sample in report.missing),
        repeated=tuple(sample for report in reports for sample in report.repeated),
        unknown=(*(sample for report in reports for sample in report.unknown), *_names(strange, " of no dataset")),
        short_steps=tuple(sorted({step for report in reports for step in report.short_steps})),
        left_over=reports[0].left_over,
    )


def all_ids(reader: SplitReader) -> npt.NDArray[np.int64]:
    """The sample ids of a split in file order, (n,)."""
    blocks: list[Run] = [reader.table.run(block) for block in range(reader.table.num_blocks)]
    return np.concatenate([_ids(reader.read(run).column(_id_column(reader))) for run in blocks])


def _check(plan: EpochPlan, reader: SplitReader, rows: Rows, steps: int, epochs: int, suffix: str = "") -> AuditReport:
    ids = all_ids(reader)
    everything = np.sort(ids)
    # A sample of an epoch is counted in cell (epoch, rank of its id among all).
    place = np.minimum(np.searchsorted(everything, rows["id"]), len(everything) - 1)
    known = (everything[place] == rows["id"]) & (rows["epoch"] < epochs) & (rows["step"] >= 1) & (rows["step"] <= steps)
    counts = np.zeros((epochs, len(everything)), dtype=np.int64)
    np.add.at(counts, (rows["epoch"][known], place[known]), 1)
    planned = np.zeros_like(counts)
    left: list[tuple[int, int, int]] = []
    for epoch, positions, records in _left_records(plan, reader, epochs, steps):
        planned[epoch, np.searchsorted(everything, ids[records])] = 1
        left += ((epoch, *cell) for cell in zip(positions.tolist(), ids[records].tolist(), strict=True))
    a_step = np.bincount(rows["step"][known], minlength=steps + 1)[1 : steps + 1]

    def named(cells: npt.NDArray[np.bool_]) -> tuple[tuple[int, str], ...]:
        return tuple((int(e), sample_hex(int(everything[s])) + suffix) for e, s in zip(*np.nonzero(cells), strict=True))

    return AuditReport(
        steps=steps,
        samples=len(rows),
        missing=named(counts + planned < 1),
        repeated=named(counts + planned > 1),
        unknown=_names(rows[~known], suffix),
        short_steps=tuple((np.flatnonzero(a_step != plan.global_batch) + 1).tolist()),
        left_over=tuple((epoch, sample_hex(sample) + suffix) for epoch, _, sample in sorted(left)),
    )


def _names(rows: Rows, suffix: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(row["epoch"]), sample_hex(int(row["id"])) + suffix) for row in rows)


def _left_records(
    plan: EpochPlan, reader: SplitReader, epochs: int, steps: int
) -> Iterator[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """(epoch, positions, records) of what `steps` steps leave of `epochs` epochs: two (n,) int64; records are counted
    over all shards."""
    starts = np.concatenate([[0], np.cumsum(reader.table.shard_records)])
    used = steps * (plan.global_batch // plan.lanes)
    for lane in range(plan.lanes):
        for epoch, positions in plan.lane_positions(lane, used, plan.received(lane, epochs)):
            first = int(positions.min())
            runs = plan.runs(epoch, first, int(positions.max()) + 1)
            records = [np.arange(run.count) + starts[run.shard] + run.first_record for run in runs]
            yield epoch, positions, np.concatenate(records)[positions - first]


def _load(audit: str | tuple[str, bytes]) -> Rows:
    if isinstance(audit, str):
        return parse_audit(filesystem(audit).read_bytes(audit), file=audit)
    return parse_audit(audit[1], file=audit[0])


def _id_column(reader: SplitReader) -> str:
    return reader.schema.id_field.name


def _ids(column: object) -> npt.NDArray[np.int64]:
    return np.asarray(column, dtype=np.int64)
