"""Counts the classes of the labels that a run trains on."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.features.schema.signature import Signature
from lockstep.training.comm.base import Communicator


class ClassCounts:
    """Counts the rows of each class in the steps of an epoch that are done; without a number of classes, those of 0 and
    of 1. Safe for two threads: one adds batches ahead of the steps.
    """

    def __init__(self, signature: Signature) -> None:
        self._classes, self._tasks = signature.num_classes, signature.tasks is not None
        self._lock = threading.Lock()
        self._ahead: dict[int, NDArray[np.float64]] = {}
        # Without classes the third counts other numbers. Float, since mixup makes shares of classes.
        self.epoch = np.zeros(self._classes or 3)
        """This rank's part (classes,), which a checkpoint within an epoch keeps."""
        self.last: list[int] | None = None
        """What `epoch_ends` found last."""

    def add(self, batch: int, labels: NDArray[Any] | None) -> None:
        """Labels (n,), or shares of classes (n, classes), of batch number `batch`, from 0."""
        if labels is None:
            return
        if self._classes is None:
            counts = np.array([(labels == 0).sum(), (labels == 1).sum(), ((labels != 0) & (labels != 1)).sum()], float)
        elif labels.ndim == 2:
            counts = labels.sum(axis=0, dtype=np.float64)
        else:
            counts = np.bincount(labels.astype(np.int64), minlength=self._classes).astype(np.float64)
        with self._lock:
            self._ahead[batch] = counts

    def step_ends(self, step: int) -> None:
        """Count the batches of optimizer step `step`, from 1, and of those before."""
        with self._lock:
            for batch in [batch for batch in self._ahead if batch < step]:
                self.epoch += self._ahead.pop(batch)

    def epoch_ends(self, communicator: Communicator) -> list[int] | None:
        """The rows of each class in this epoch on all ranks; None if labels are not classes, or those of several tasks.
        A collective.
        """
        if self._tasks:
            return None
        counts = self.epoch.copy()
        communicator.all_reduce(counts)
        if self._classes is None:
            known = counts[:2].any() and not counts[2]
            counts = counts[:2] if known else counts[:0]
        self.last = [round(float(count)) for count in counts] or None
        return self.last
