"""Where each gradient lies in the flat buffers that are reduced.

Tensors are taken in reverse order of the variables, since backpropagation has the last layers' gradients first, and
are filled into buckets of about 4 MiB, one dtype each. What every step shares (statistics, loss, control word) follows
in the last bucket, so it costs no message of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

BUCKET_BYTES = 4 << 20  # facts of the exchange on one core a rank: 4 MiB buckets 925 samples/s, one bucket 855
ALIGN_BYTES = 64  # TensorFlow takes an array without a copy only where it begins at a multiple of this


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor's place: elements start..start + size - 1 of bucket `bucket`."""

    bucket: int
    start: int
    size: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The buckets of one model; equal on every rank, since it comes from shapes and dtypes alone."""

    dtypes: tuple[np.dtype[Any], ...]
    """Of each bucket."""
    sizes: tuple[int, ...]
    """Elements of each bucket, the control words at the end of the last one included."""
    gradients: tuple[Slot, ...]
    """In the order of the variables."""
    statistics: tuple[Slot, ...]
    """In the order given."""
    control: Slot
    """Loss and flags."""

    @property
    def first_tail(self) -> int:
        """The first bucket that holds more than gradients, so that it can leave only at the end of the step."""
        return min([self.control.bucket, *(slot.bucket for slot in self.statistics)])

    def posted(self, bucket: int) -> list[int]:
        """Numbers of the gradients in a bucket, in the order of their places."""
        found = [i for i, slot in enumerate(self.gradients) if slot.bucket == bucket]
        return sorted(found, key=lambda i: self.gradients[i].start)


Spec = tuple[tuple[int, ...], np.dtype[Any]]


def lay_out(
    gradients: Sequence[Spec], statistics: Sequence[Spec], control_words: int, bucket_bytes: int = BUCKET_BYTES
) -> Layout:
    """Place `gradients` and `statistics` ((shape, dtype) each) and the control words."""
    dtypes: list[np.dtype[Any]] = []
    sizes: list[int] = []

    def place(shape: tuple[int, ...], dtype: np.dtype[Any], grow: bool) -> Slot:
        size = math.prod(shape)
        fits = sizes and dtypes[-1] == dtype and (grow or (sizes[-1] + size) * dtype.itemsize <= bucket_bytes)
        if not fits:
            dtypes.append(dtype)
            sizes.append(0)
        start = sizes[-1]
        align = ALIGN_BYTES // dtype.itemsize
        sizes[-1] = start + -(-size // align) * align
        return Slot(len(sizes) - 1, start, size, shape)

    placed = [place(shape, dtype, grow=False) for shape, dtype in reversed(gradients)]
    statistic_slots = tuple(place(shape, dtype, grow=True) for shape, dtype in statistics)
    # Never in two bytes: the loss would lose its digits.
    wide = dtypes[-1] if dtypes and dtypes[-1].itemsize >= 4 else np.dtype(np.float32)
    control = place((control_words,), wide, grow=True)
    return Layout(tuple(dtypes), tuple(sizes), tuple(reversed(placed)), statistic_slots, control)
