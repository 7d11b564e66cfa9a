"""The step's one exchange: buckets go to a thread that reduces them while later gradients are still computed.

No TensorFlow here: `training.distribute` calls `post` and `finish` from the graph, with NumPy arrays.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.errors import CommunicationError, DataError
from training.buckets import ALIGN_BYTES, Layout, Slot
from training.comm.base import Communicator

Array = NDArray[Any]
FLAGS = ("stop", "checkpoint")
CONTROL_WORDS = 1 + len(FLAGS)  # loss, then the flags
GRACE_S = 30.0  # beyond the communicator's own deadline, which has the better message


class NonFiniteError(DataError):
    """A loss, gradient or statistic that is no finite number; a restart would meet it again."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know after a step."""

    step: int
    """Steps done, this one included."""
    loss: float
    """Mean over the global batch."""
    stop: bool
    checkpoint: bool


class Exchange:
    """Sums of one optimizer step over all ranks.

    `scale` is n_r / G: this rank's mean gradients, statistics and loss are multiplied by it before the sum, which is
    then the mean over the global batch. `step` counts optimizer steps done and is set by whoever restores a run.
    """

    def __init__(self, communicator: Communicator, scale: float) -> None:
        self.communicator, self.scale = communicator, scale
        self.step = 0
        self.agreement: Agreement | None = None
        self.error: BaseException | None = None
        self.waited_s = 0.0
        """Seconds that the last step stood still for its sums."""
        self._layout: Layout | None = None
        self._names: tuple[str, ...] = ()
        self._pools: list[list[_Buffer]] = []
        self._current: list[_Buffer] = []
        self._posted: queue.SimpleQueue[_Buffer | None] = queue.SimpleQueue()
        self._reduced: queue.SimpleQueue[BaseException | bool] = queue.SimpleQueue()
        self._wanted: set[str] = set()
        self._thread = threading.Thread(target=self._reduce, name="exchange", daemon=True)
        self._thread.start()

    def use(self, layout: Layout, names: Sequence[str]) -> None:
        """Set the buckets; `names` of gradients and statistics, for errors. A graph traced again gives the same."""
        if self._layout is not None and self._layout != layout:
            raise CommunicationError(
                "the model's gradients changed their shapes or number during the run",
                got=f"{len(layout.gradients)} gradients in {len(layout.sizes)} buckets",
                allowed=f"{len(self._layout.gradients)} in {len(self._layout.sizes)} buckets, as at the start",
                next_step="Freeze or unfreeze layers between runs, not during one.",
            )
        if self._layout is None:
            self._layout, self._names = layout, tuple(names)
            self._pools = [[] for _ in layout.sizes]

    def want(self, flag: str) -> None:
        """Ask all ranks for `stop` or `checkpoint`; they agree at the end of the next step."""
        assert flag in FLAGS, flag
        self._wanted.add(flag)

    def post(self, bucket: int, *gradients: Array) -> None:
        """Hand in the gradients of a bucket, in the order of `Layout.posted`; returns at once."""
        layout = self._of_layout()
        while len(self._current) <= bucket:
            self._current.append(self._free_buffer(len(self._current)))
        flat = self._current[bucket]
        for number, gradient in zip(layout.posted(bucket), gradients, strict=True):
            slot = layout.gradients[number]
            np.multiply(gradient.reshape(-1), self.scale, out=flat.view(slot), casting="same_kind")
        if bucket < layout.first_tail:
            self._posted.put(flat)

    def finish(self, loss: Array, *statistics: Array) -> list[Array]:
        """Hand in the rest and wait: the sums of all gradients, then of all statistics.

        Gradients are views of buffers that stay untouched while anyone holds them. Raises NonFiniteError on every rank
        alike, or what the communicator raises.
        """
        layout = self._of_layout()
        try:
            if self.error is not None:
                raise self.error
            while len(self._current) < len(layout.sizes):
                self._current.append(self._free_buffer(len(self._current)))
            for slot, value in zip(layout.statistics, statistics, strict=True):
                place = self._current[slot.bucket].view(slot)
                np.multiply(value.reshape(-1), self.scale, out=place, casting="same_kind")
            words = self._current[layout.control.bucket].view(layout.control)
            words[0] = loss * self.scale
            words[1:] = [flag in self._wanted for flag in FLAGS]
            self._wanted.clear()
            for flat in self._current[layout.first_tail :]:
                self._posted.put(flat)
            self._agree(self._await(len(layout.sizes)), words)
            sums = [self._current[slot.bucket].lend(slot) for slot in layout.gradients]
            # Copies: a variable that is assigned a statistic keeps its memory, and these are small.
            sums += [self._current[slot.bucket].view(slot).reshape(slot.shape).copy() for slot in layout.statistics]
        except BaseException as error:
            self.error = error
            raise
        finally:
            self._current = []
        return sums

    def close(self) -> None:
        """End the thread; the communicator stays open."""
        self._posted.put(None)
        self._thread.join(GRACE_S)

    def _of_layout(self) -> Layout:
        assert self._layout is not None, "use() comes first"
        return self._layout

    def _free_buffer(self, bucket: int) -> _Buffer:
        """A buffer of the bucket that nobody reads any more; TensorFlow frees the last step's a little late."""
        pool = self._pools[bucket]
        found = next((flat for flat in pool if not flat.is_lent()), None)
        if found is None:
            layout = self._of_layout()
            found = _Buffer(layout.sizes[bucket], layout.dtypes[bucket])
            pool.append(found)
        return found

    def _await(self, buckets: int) -> bool:
        """Wait for all reductions; True if every sum is finite."""
        finite, began = True, time.perf_counter()
        for _ in range(buckets):
            try:
                reduced = self._reduced.get(timeout=self.communicator.deadline_s + GRACE_S)
            except queue.Empty:
                raise CommunicationError(
                    f"rank {self.communicator.rank}: the exchange of step {self.step + 1} did not end",
                    got=f"silence for {self.communicator.deadline_s + GRACE_S:.0f} s",
                    allowed="an end or an error from the communicator by then",
                    next_step="Look at the other ranks' logs.",
                ) from None
            if isinstance(reduced, BaseException):
                raise reduced
            finite = finite and reduced
        self.waited_s = time.perf_counter() - began
        return finite

    def _agree(self, finite: bool, words: Array) -> None:
        step = self.step + 1
        if not finite:
            raise NonFiniteError(
                f"step {step}: {self._name_of_wrong()} is not finite",
                got=f"loss {float(words[0])}, over {self.communicator.num_ranks} ranks",
                allowed="finite numbers; all ranks stop at this step, and none has applied it",
                next_step="Lower the learning rate, clip gradients (clipnorm) or look at the data of this step.",
            )
        flags = dict(zip(FLAGS, (bool(word > 0) for word in words[1:]), strict=True))
        self.step = step
        self.agreement = Agreement(step, float(words[0]), **flags)

    def _name_of_wrong(self) -> str:
        layout = self._of_layout()
        if not np.isfinite(self._current[layout.control.bucket].view(layout.control)[0]):
            return "the loss"
        for name, slot in zip(self._names, (*layout.gradients, *layout.statistics), strict=True):
            if not np.isfinite(self._current[slot.bucket].view(slot)).all():
                return name
        raise AssertionError("a sum was not finite, but every part is")

    def _reduce(self) -> None:
        while (flat := self._posted.get()) is not None:
            try:
                self.communicator.all_reduce(flat.data)
                self._reduced.put(_all_finite(flat.data))
            except BaseException as error:  # raised again where the step waits
                self._reduced.put(error)


class _Buffer:
    """A flat, aligned buffer that knows which views of it are still held."""

    def __init__(self, size: int, dtype: np.dtype[Any]) -> None:
        raw = np.zeros(size * dtype.itemsize + ALIGN_BYTES, np.uint8)  # zeros: the gaps between slots are summed too
        start = -raw.ctypes.data % ALIGN_BYTES
        self.data: Array = raw[start : start + size * dtype.itemsize].view(dtype)
        self._lent: list[weakref.ref[Array]] = []

    def view(self, slot: Slot) -> Array:
        return self.data[slot.start : slot.start + slot.size]

    def lend(self, slot: Slot) -> Array:
        view = self.view(slot).reshape(slot.shape)
        self._lent.append(weakref.ref(view))
        return view

    def is_lent(self) -> bool:
        self._lent = [view for view in self._lent if view() is not None]
        return bool(self._lent)


def _all_finite(flat: Array) -> bool:
    """Whether all are finite; the sum answers at once nearly always (it may overflow where no part does)."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(flat.sum())) or bool(np.isfinite(flat).all())
