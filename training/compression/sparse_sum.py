"""Sums of each rank's largest elements; the others are kept and sent when they have grown.

topk   Aji and Heafield, "Sparse communication for distributed gradient descent" (EMNLP 2017)
dgc    Lin et al., "Deep gradient compression" (ICLR 2018): with momentum correction (momentum is added up before
       elements are chosen), masking (an element that is sent loses its momentum), clipping of each rank's gradient,
       and a warm-up, in which the share falls from a quarter to its final value
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lockstep.training.comm.base import Communicator
from lockstep.training.compression import kernels as k
from lockstep.training.compression.bucket_sum import Array, BucketSum, Placed
from lockstep.training.compression.method import Compression

FIRST_SHARE = 0.25  # of the warm-up, as in Lin et al.


def largest(values: Array, count: int) -> Array:
    """The positions (count,) int32, ascending, of the largest absolute values of `values` (n,) float32, count <= n; a
    NaN is the largest.

    Counts by the upper bits first, so that only values near the smallest chosen one are compared: 0.8 ms for a million,
    where a partition of all takes 11.
    """
    counts = np.zeros(4096, np.int64)
    k.count_sizes(values.view(np.int32), counts)
    above = np.cumsum(counts[::-1])[::-1]  # values of this size or a larger one
    least = int(np.flatnonzero(above >= count)[-1])
    sizes = values.view(np.int32) & k.SIGNLESS
    near = np.flatnonzero(sizes >= least << 19)
    order = np.argpartition(sizes[near], near.size - count)[near.size - count :]
    return np.sort(near[order]).astype(np.int32)


class SparseSum(BucketSum):
    """Each rank sends its chosen elements to all; all add them in rank order."""

    def __init__(
        self, communicator: Communicator, method: Compression, number: int, size: int, tensors: Sequence[Placed]
    ) -> None:
        super().__init__(communicator, method, number, size, tensors)
        self._elements = sum(math.prod(shape) for _, shape in self.tensors)
        self.kept["residual"] = np.zeros(size, np.float32)
        if method.momentum:
            self.kept["momentum"] = np.zeros(size, np.float32)

    def reduce(self, flat: Array, step: int) -> None:
        residual, momentum = self.kept["residual"], self.kept.get("momentum")
        self.clear_gaps(flat)
        if self.method.clip_norm is not None:
            self._clip(flat, self.method.clip_norm / math.sqrt(self.communicator.num_ranks))
        if momentum is not None:
            momentum *= np.float32(self.method.momentum)
            momentum += flat
        residual += flat if momentum is None else momentum
        count = max(1, math.ceil(self.share(step) * self._elements))
        chosen = largest(residual, count)
        message = np.concatenate([chosen.view(np.uint8), residual[chosen].view(np.uint8)])
        residual[chosen] = 0
        if momentum is not None:
            momentum[chosen] = 0
        flat[:] = 0
        for row in self.communicator.all_gather(message):
            flat[row[: 4 * count].view(np.int32)] += row[4 * count :].view(np.float32)

    def share(self, step: int) -> float:
        """The share of elements that is sent in this step, from 1."""
        done = min(1.0, (step - 1) / self.method.warm_up_steps) if self.method.warm_up_steps else 1.0
        first = max(FIRST_SHARE, self.method.value)
        return float(first * (self.method.value / first) ** done)

    def _clip(self, flat: Array, most: float) -> None:
        for start, shape in self.tensors:
            part = flat[start : start + math.prod(shape)]
            norm = math.sqrt(float(np.sum(np.square(part, dtype=np.float64))))
            if norm > most:
                part *= np.float32(most / norm)
