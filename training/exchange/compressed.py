"""The buckets of a layout that are summed in fewer bytes, and what a checkpoint keeps of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lockstep.training.comm.base import Communicator
from lockstep.training.compression.bucket_sum import Array, BucketSum, Tensors
from lockstep.training.compression.choose import bucket_sum, measure
from lockstep.training.compression.method import Compression
from lockstep.training.exchange.buckets import Layout

KIND = "compression"
KEPT, COMMON, CHOSEN = f"{KIND}/kept/", f"{KIND}/common/", f"{KIND}/chosen"
log = logging.getLogger(__name__)


class CompressedBuckets:
    """Sums by one method; of a layout, the buckets of float32 gradients. Others are not its business."""

    def __init__(self, communicator: Communicator, method: Compression) -> None:
        self._communicator, self._method = communicator, method
        self._sums: dict[int, BucketSum] = {}
        self._chosen = ""
        self._restored: tuple[Sequence[Tensors], bool] | None = None

    def use(self, layout: Layout) -> None:
        """Make the sums of a layout, with the state to restore."""
        if not self._method or not layout.first_tail:
            return
        self._choose(max(size for size in layout.sizes[: layout.first_tail]))
        if not self._method:
            self._restored = None
            return
        for bucket in range(layout.first_tail):
            if layout.dtypes[bucket] == np.float32:
                shapes = [(slot.start, slot.shape) for slot in map(layout.gradients.__getitem__, layout.posted(bucket))]
                self._sums[bucket] = bucket_sum(
                    self._communicator, self._method, bucket, layout.sizes[bucket], tuple(shapes)
                )
        if self._restored is not None:
            parts, divide = self._restored
            for bucket, one in self._sums.items():
                kept = [_under(f"{KEPT}{bucket:06d}/", part) for part in parts]
                one.restore(kept, _under(f"{COMMON}{bucket:06d}/", parts[0]), divide=divide)
            self._restored = None

    def _choose(self, size: int) -> None:
        """Replace `auto` by the method in the checkpoint, else by a measured one: it is chosen once in a run."""
        if self._method.name != "auto":
            return
        stored = None if self._restored is None else self._restored[0][0].get(CHOSEN)
        if stored is not None:
            name = stored.tobytes().decode()
        else:
            measured = measure(self._communicator, size)
            name = measured.name
            if self._communicator.rank == 0:
                log.warning("--compression auto: %s", measured.text)
        self._chosen = name
        self._method = replace(self._method, name=name)

    def has(self, bucket: int) -> bool:
        """Whether this bucket is summed here."""
        return bucket in self._sums

    def reduce(self, bucket: int, flat: Array, step: int) -> bool:
        """Replace `flat` by its sum over ranks in optimizer step `step`. A collective."""
        self._sums[bucket].reduce(flat, step)
        return True  # whether it is finite is asked only if some rank's part might not be

    def state(self) -> Tensors:
        """Return compression/kept/BUCKET/NAME of this rank, compression/common/BUCKET/NAME of all; views."""
        kept = {f"{KEPT}{i:06d}/{name}": value for i, one in self._sums.items() for name, value in one.kept.items()}
        common = {
            f"{COMMON}{i:06d}/{name}": value for i, one in self._sums.items() for name, value in one.common.items()
        }
        chosen = {CHOSEN: np.frombuffer(self._chosen.encode(), np.uint8)} if self._chosen else {}
        return kept | common | chosen

    def restore(self, parts: Sequence[Tensors], *, divide: bool) -> None:
        """Keep the state among `parts` until the layout is known; see `Exchange.restore_compression`."""
        mine = [{n: v.copy() for n, v in part.items() if n.startswith(f"{KIND}/")} for part in parts]
        self._restored = (mine, divide) if any(mine) else None


def _under(prefix: str, tensors: Tensors) -> Tensors:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
