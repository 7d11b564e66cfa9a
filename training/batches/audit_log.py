"""The audit that each rank writes: which sample went into which step. `lockstep.training.results.audit` checks it.

A file is CSV with a header: step (the optimizer step, from 1: the file of checkpoint N ends with step N), epoch (from
0) and sample id, 16 hex digits of its 64 bits read as unsigned. Rows are in step order, within a step in lane order.
Of a federated run, step is the round, epoch the client's local epoch, and rows are in the order of training.
In a mixture, a fourth column is the number of the sample's dataset (from 0), and the epoch is that dataset's own.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from lockstep.training.batches.feed import Batch

HEADER = b"step,epoch,sample_id\n"
MIXED_HEADER = b"step,epoch,sample_id,dataset\n"


def sample_hex(sample_id: int) -> str:
    """A sample id as audits and results write it: 16 hex digits of the unsigned value."""
    return f"{sample_id & (1 << 64) - 1:016x}"


class AuditLog:
    """Collects the batches that a rank is fed; `add` may be called from another thread.

    Batches are read ahead of training, so those of later steps stay until a later `take`. A step that is added again,
    by an iterator that was restarted, replaces the earlier one, which is the same batch. `datasets` (n_r,) int64 is the
    dataset of each row of a mixture's batch.
    """

    def __init__(self, datasets: npt.NDArray[np.int64] | None = None) -> None:
        self._datasets = datasets
        self._lock = threading.Lock()
        self._batches: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}

    def add(self, batch: Batch) -> None:
        """Add a batch; batch n (from 0) is that of optimizer step n + 1."""
        # Copies: a view would keep the features of all that was read ahead in memory.
        self.add_rows(batch.step + 1, batch.epochs.copy(), batch.sample_ids.copy())

    def add_rows(self, step: int, epochs: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]) -> None:
        """Add all rows (n,) of optimizer step `step`."""
        with self._lock:
            self._batches[step] = (epochs, ids)

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
