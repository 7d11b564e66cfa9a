"""Sums of one bucket over all ranks, in fewer bytes; each keeps between steps what its method needs.

All work is in the unit of the sum: a rank's contribution is its gradient times its share of the batch. So what ranks
have not sent yet may be added over ranks, and divided again between another number of them.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.training.comm.base import Communicator, part_bounds
from lockstep.training.compression import kernels as k
from lockstep.training.compression.codecs import Codec, codec_of
from lockstep.training.compression.method import Compression

Array = NDArray[Any]
Tensors = dict[str, Array]
Placed = tuple[int, tuple[int, ...]]
"""A tensor's first element in its bucket, and its shape."""


class BucketSum(ABC):
    """The sum of bucket `number`, (size,) float32, of tensors (start, shape) with gaps between them. Every rank makes
    the same calls in the same order.
    """

    def __init__(
        self, communicator: Communicator, method: Compression, number: int, size: int, tensors: Sequence[Placed]
    ) -> None:
        self.communicator, self.method, self.number, self.size = communicator, method, number, size
        self.tensors = sorted(tensors)
        ends = [0, *(start + math.prod(shape) for start, shape in self.tensors)]
        starts = [*(start for start, _ in self.tensors), size]
        self._gaps = [slice(end, start) for end, start in zip(ends, starts, strict=True) if start > end]
        self.kept: Tensors = {}
        """This rank's own state, arrays (size,) float32, whose sum over ranks is what counts."""
        self.common: Tensors = {}
        """State that is the same on all ranks."""

    @abstractmethod
    def reduce(self, flat: Array, step: int) -> None:
        """Replace `flat` (size,) by the sum over ranks, the same bits on each; `step` counts from 1. A collective."""

    def clear_gaps(self, flat: Array) -> None:
        """Zero what is between tensors of `flat` (size,): a reused buffer has the last step's code there."""
        for gap in self._gaps:
            flat[gap] = 0

    def restore(self, kept: Sequence[Tensors], common: Tensors, *, divide: bool) -> None:
        """Continue with the state of a checkpoint: `kept` of this rank alone, or, to `divide` it, of all its ranks."""
        for name, mine in self.kept.items():
            parts = [part[name].astype(np.float64) for part in kept if name in part]
            if parts:
                total = np.sum(parts, axis=0) / (self.communicator.num_ranks if divide else 1)
                mine[:] = total.astype(np.float32)
        for name, value in common.items():
            self.common[name][...] = value


class CodedSum(BucketSum):
    """Each rank sums one part of the bucket: it gets that part from all others in code, adds in rank order in float32,
    and sends the sum to all in code. 2 (N - 1) / N of the codes leave each rank, as in a ring.

    With a method that keeps errors, each rank adds to the next step's contribution what its codes have lost: of the
    other parts those of its own contribution, of its own part those of the sum (Tang et al., "DoubleSqueeze", 2019).
    """

    def __init__(
        self, communicator: Communicator, method: Compression, number: int, size: int, tensors: Sequence[Placed]
    ) -> None:
        super().__init__(communicator, method, number, size, tensors)
        self._codec: Codec = codec_of(method)
        blocks = part_bounds(-(-size // self._codec.block), communicator.num_ranks)
        self._bounds = [(min(size, a * self._codec.block), min(size, b * self._codec.block)) for a, b in blocks]
        self._scratch = np.empty(max(stop - start for start, stop in self._bounds), np.float32)
        if method.keeps:
            self.kept["residual"] = np.zeros(size, np.float32)

    def reduce(self, flat: Array, step: int) -> None:
        comm, codec, rank = self.communicator, self._codec, self.communicator.rank
        residual = self.kept.get("residual")
        self.clear_gaps(flat)
        if residual is not None:
            self.clear_gaps(residual)
            k.add_to(flat, residual)
        coded: list[Array] = []
        for peer, (start, stop) in enumerate(self._bounds):
            x = flat[start : stop if peer != rank else start]
            coded.append(codec.encode(x, self._key(step, peer)))
            if residual is not None and peer != rank:
                self._keep(residual[start:stop], x, coded[peer])
        found = comm.all_to_all_ragged(coded)
        start, stop = self._bounds[rank]
        total = np.zeros(stop - start, np.float32)
        for peer, data in enumerate(found):
            part = flat[start:stop] if peer == rank else self._scratch[: stop - start]
            if peer != rank:
                codec.decode(data, part)
            k.add_to(total, part)
        mine = codec.encode(total, self._key(step, comm.num_ranks))
        if residual is not None:
            self._keep(residual[start:stop], total, mine)
        for (start, stop), data in zip(self._bounds, comm.all_gather_ragged(mine), strict=True):
            codec.decode(data, flat[start:stop])

    def _keep(self, residual: Array, x: Array, coded: Array) -> None:
        """Set `residual` to what the code of `x` has lost."""
        self._codec.decode(coded, residual)
        np.subtract(x, residual, out=residual)

    def _key(self, step: int, place: int) -> int:
        """The key of random draws for one array of one rank in one step."""
        return key_of(self.method.seed, step, self.communicator.rank, self.number, place)


def key_of(*numbers: int) -> int:
    """Return 64 bits that depend on all of the numbers."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "big")
