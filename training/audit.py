"""Which sample went into which step: written by each rank, and checked along a run's chain of checkpoints.

A file is CSV with a header: step (the optimizer step, from 1: the file of checkpoint N ends with step N), epoch (from
0) and sample id, 16 hex digits of its 64 bits read as unsigned. Rows lie in step order, within a step in lane order.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from storage.errors import CorruptionError
from storage.fs import filesystem
from training.batches import Batch
from training.plan import EpochPlan
from training.positions import Run
from training.reader import SplitReader

HEADER = b"step,epoch,sample_id\n"
_ROW = np.dtype([("step", np.int64), ("epoch", np.int64), ("id", np.int64)])
Rows = npt.NDArray[np.void]


def sample_hex(sample_id: int) -> str:
    """A sample id as audits and results show it: 16 hex digits of the unsigned value."""
    return f"{sample_id & (1 << 64) - 1:016x}"


class AuditLog:
    """Collects the batches that a rank is fed; safe to add to from another thread.

    Batches are read ahead of training, so those of later steps stay until a later `take`. A step that is added again
    (an iterator begun anew) replaces what was there: it is the same batch.
    """

    def __init__(self) -> None:
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
        return HEADER + b"".join(
            b"%d,%d,%s\n" % (number, epoch, sample_hex(sample).encode())
            for number, epochs, ids in parts
            for epoch, sample in zip(epochs.tolist(), ids.tolist(), strict=True)
        )


def parse_audit(data: bytes, *, file: str) -> Rows:
    """Rows (n,) of int64 fields step, epoch, id. Raises CorruptionError naming file and row for anything else."""
    if not data.startswith(HEADER) or not data.endswith(b"\n"):
        what = "an audit without its header or cut in a line"
        raise CorruptionError(what, file=file, got=repr(data[:40]), allowed=f"{HEADER!r} and whole lines")
    lines = data[len(HEADER) :].split(b"\n")[:-1]
    rows = np.zeros(len(lines), dtype=_ROW)
    for number, line in enumerate(lines):
        cells = line.split(b",")
        good = len(cells) == 3 and cells[0].isdigit() and cells[1].isdigit() and len(cells[2]) == 16
        try:
            value = int(cells[2], 16) if good else -1
        except ValueError:
            value = -1
        if value < 0:
            raise CorruptionError("a row of an audit cannot be read", file=file, record=number, got=repr(line[:60]))
        rows[number] = (int(cells[0]), int(cells[1]), value - (1 << 64) if value >> 63 else value)
    return rows


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit shows. Samples are (epoch, sample id in hex); all empty but `left_over` where all is well."""

    steps: int
    samples: int
    missing: tuple[tuple[int, str], ...]
    repeated: tuple[tuple[int, str], ...]
    unknown: tuple[tuple[int, str], ...]
    short_steps: tuple[int, ...]
    left_over: tuple[tuple[int, str], ...]

    @property
    def ok(self) -> bool:
        """Each sample of each epoch exactly once, what is left over as planned, every global batch full."""
        return not (self.missing or self.repeated or self.unknown or self.short_steps)


def left_over(plan: EpochPlan, reader: SplitReader, epochs: int, steps: int | None = None) -> list[tuple[int, int]]:
    """(epoch, sample id) of the samples that `epochs` epochs leave after `steps` steps, by default all of them."""
    found: list[tuple[int, int]] = []
    for epoch, position in plan.leftover(epochs, steps):
        rows = reader.read_all(plan.runs(epoch, position, position + 1))
        found.append((epoch, int(_ids(rows.column(_id_column(reader)))[0])))
    return found


def check_audit(
    plan: EpochPlan, reader: SplitReader, audits: Iterable[str | tuple[str, bytes]], *, steps: int, epochs: int
) -> AuditReport:
    """Hold the audits of a run against its data set.

    `audits` are the URLs (or name and content) of all ranks' audit files along the chain of checkpoints, oldest first;
    `steps` the steps of the chain's tip; `epochs` those of the whole run. The ids come from the shards themselves, in
    file order, so that the check does not rest on the plan but for which samples are left over.
    """
    rows = np.concatenate([np.zeros(0, dtype=_ROW), *(_load(audit) for audit in audits)])
    everything = np.sort(_all_ids(reader))
    # A sample of an epoch is counted in cell (epoch, rank of its id among all).
    place = np.minimum(np.searchsorted(everything, rows["id"]), len(everything) - 1)
    known = (everything[place] == rows["id"]) & (rows["epoch"] < epochs) & (rows["step"] >= 1) & (rows["step"] <= steps)
    counts = np.zeros((epochs, len(everything)), dtype=np.int64)
    np.add.at(counts, (rows["epoch"][known], place[known]), 1)
    left = left_over(plan, reader, epochs, steps)
    planned = np.zeros_like(counts)
    for epoch, sample in left:
        planned[epoch, np.searchsorted(everything, sample)] = 1
    a_step = np.bincount(rows["step"][known], minlength=steps + 1)[1 : steps + 1]

    def named(cells: npt.NDArray[np.bool_]) -> tuple[tuple[int, str], ...]:
        return tuple((int(e), sample_hex(int(everything[s]))) for e, s in zip(*np.nonzero(cells), strict=True))

    return AuditReport(
        steps=steps,
        samples=len(rows),
        missing=named(counts + planned < 1),
        repeated=named(counts + planned > 1),
        unknown=tuple((int(row["epoch"]), sample_hex(int(row["id"]))) for row in rows[~known]),
        short_steps=tuple((np.flatnonzero(a_step != plan.global_batch) + 1).tolist()),
        left_over=tuple((epoch, sample_hex(sample)) for epoch, sample in left),
    )


def _load(audit: str | tuple[str, bytes]) -> Rows:
    if isinstance(audit, str):
        return parse_audit(filesystem(audit).read_bytes(audit), file=audit)
    return parse_audit(audit[1], file=audit[0])


def _id_column(reader: SplitReader) -> str:
    return reader.schema.id_field.name


def _all_ids(reader: SplitReader) -> npt.NDArray[np.int64]:
    blocks: list[Run] = [reader.table.run(block) for block in range(reader.table.num_blocks)]
    return np.concatenate([_ids(reader.read(run).column(_id_column(reader))) for run in blocks])


def _ids(column: object) -> npt.NDArray[np.int64]:
    return np.asarray(column, dtype=np.int64)
