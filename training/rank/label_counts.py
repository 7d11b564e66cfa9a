"""How many rows of each class a rank was fed, counted as its batches pass."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.features.schema.signature import Signature
from training.comm.base import Communicator


class LabelCounts:
    """Rows of each class since the last `taken`; of labels without a number of classes those of 0 and of 1."""

    def __init__(self, signature: Signature) -> None:
        self._classes = signature.num_classes
        # Without classes the third is of other numbers. Float, since mixup makes shares of classes.
        self._counts = np.zeros(self._classes or 3)

    def add(self, labels: NDArray[Any] | None) -> None:
        """Labels (n,), or shares of classes (n, classes)."""
        if labels is None:
            return
        if self._classes is None:
            self._counts += [(labels == 0).sum(), (labels == 1).sum(), ((labels != 0) & (labels != 1)).sum()]
        elif labels.ndim == 2:
            self._counts += labels.sum(axis=0)
        else:
            self._counts += np.bincount(labels.astype(np.int64), minlength=self._classes)

    def taken(self, communicator: Communicator) -> list[int] | None:
        """Rows of each class on all ranks, which begin again at 0; None of labels that are no classes. A collective."""
        counts, self._counts = self._counts, np.zeros_like(self._counts)
        communicator.all_reduce(counts)
        if self._classes is None:
            if counts[2] or not counts.any():
                return None
            counts = counts[:2]
        return [round(float(count)) for count in counts]
