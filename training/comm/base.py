"""The communicator's interface: what a rank may ask of the others.

Every rank makes the same calls in the same order with equal sizes and dtypes; a difference is an error, never a
wrong sum. Sums are formed in one fixed order, so results are equal bit for bit on every rank and in every run.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from lockstep.storage.errors import CommunicationError

Op = Literal["sum", "mean", "min", "max"]
OPS: tuple[str, ...] = get_args(Op)
UFUNCS: dict[str, np.ufunc] = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = (np.dtype("float16"), BFLOAT16, np.dtype("float32"), np.dtype("float64"))
DTYPES = (*(np.dtype(name) for name in ("uint8", "int32", "int64")), *FLOATS)
CALL_DEADLINE_S = 600.0  # slow is no failure: tracing, restoring or a slow batch elsewhere can take minutes
MAX_GATHERED_BYTES = 64 << 20  # of one rank in all_gather_bytes: metadata, not tensors
ALIGN_BYTES = 64  # a cache line, and the widest vector register


class Communicator(ABC):
    """Collectives over the ranks of one generation. Not for use by two threads at the same time; see `group`.

    Buffers are flat, contiguous and writable, of uint8, int32, int64 (which wrap), float16, bfloat16 (ml_dtypes),
    float32 or float64; else TypeError or ValueError on this rank alone, before anything is sent. Every collective
    raises CommunicationError naming the rank waited for, lost or differing; the communicator has then ended.
    """

    def __init__(self, rank: int, num_ranks: int, generation: int, deadline_s: float) -> None:
        self.rank, self.num_ranks, self.generation = rank, num_ranks, generation
        self.deadline_s = deadline_s
        """The longest that one call may take; may be changed between calls."""

    @abstractmethod
    def all_reduce(self, buf: NDArray[Any], op: Op = "sum") -> None:
        """Replace `buf` (n,) on every rank by the elementwise sum, mean, minimum or maximum over ranks, in place.

        `mean` is for floats alone: the sum, divided by num_ranks. A NaN of any rank makes sum, mean, min and max NaN.
        Each single addition, and the division, is rounded to the buffer's dtype, also for float16 and bfloat16.
        """

    def all_reduce_each(self, take: Callable[[], NDArray[Any] | None], done: Callable[[], None]) -> None:
        """Sum the buffers that `take` gives, one after another, until it gives None; `done` is called for each.

        A backend may begin a buffer before the ones before it are done (so they share no memory), and asks `take` again
        at `look_again`; `done` comes in their order. Ranks may take the same buffers in other portions, by `all_reduce`
        too.
        """
        while (buf := take()) is not None:
            self.all_reduce(buf)
            done()

    def look_again(self) -> None:  # noqa: B027 - a backend that begins no buffer early has nobody to tell
        """Say, from any thread, that `take` of an `all_reduce_each` under way has more to give than before."""

    @abstractmethod
    def all_gather_parts(self, buf: NDArray[Any]) -> None:
        """Give each rank's own part of `buf` (n,), as in `part_of`, to all ranks, in place."""

    @abstractmethod
    def broadcast(self, buf: NDArray[Any], root: int = 0) -> None:
        """Replace `buf` (n,) on every rank by that of rank `root`, in place."""

    @abstractmethod
    def send(self, buf: NDArray[Any], to: int) -> None:
        """Send `buf` (n,), which may be read-only, to rank `to`, which calls `recv` with equal n and dtype.

        It may wait for that `recv`, and does where `buf` is large: two ranks that first send to each other and then
        receive wait for each other, as in MPI, until the deadline's error names one to the other. Let one begin with
        `recv`.
        """

    @abstractmethod
    def recv(self, buf: NDArray[Any], source: int) -> None:
        """Fill `buf` (n,) by what rank `source` sends. Frames between two ranks keep their order."""

    @abstractmethod
    def group(self, ranks: Sequence[int]) -> Communicator:
        """A communicator of these ranks, numbered anew by their place in `ranks`; ValueError if this rank is none.

        Called by its members alone, in the same order on each. It has a sequence of its own and may be used from
        another thread at the same time as this one; it ends when this one is closed or aborted.
        """

    @property
    def on_host(self) -> Communicator:
        """What takes small arrays of the host in the middle of a step: this one, unless it is for a device's."""
        return self

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End this communicator from any thread: a blocked call and every later one raises CommunicationError."""

    @abstractmethod
    def close(self) -> None:
        """Free what it holds, its groups included. Safe to call twice."""

    def reduce_scatter(self, buf: NDArray[Any], op: Op = "sum") -> NDArray[Any]:
        """Reduce as `all_reduce` does, but return this rank's part alone: a view, `part_of(buf, rank)`.

        The rest of `buf` (n,) is undefined afterwards.
        """
        self.all_reduce(buf, op)
        return self.part_of(buf, self.rank)

    def all_gather(self, buf: NDArray[Any]) -> NDArray[Any]:
        """Return (num_ranks, n): row r is the `buf` (n,) of rank r. All ranks give the same n and dtype."""
        check_buffer(buf, writable=False)
        flat = self.allocate(self.num_ranks * buf.size, buf.dtype)
        self.part_of(flat, self.rank)[:] = buf
        self.all_gather_parts(flat)
        return flat.reshape(self.num_ranks, buf.size)  # (num_ranks * n,) -> (num_ranks, n)

    def all_gather_ragged(self, buf: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the `buf` (n_r,) of every rank r in rank order; sizes may differ, dtypes may not."""
        check_buffer(buf, writable=False)
        sizes = self.all_gather(np.array([buf.size], np.int64))[:, 0]
        padded = self.allocate(int(sizes.max()), buf.dtype)
        padded[: buf.size] = buf
        return [row[:size].copy() for row, size in zip(self.all_gather(padded), sizes.tolist(), strict=True)]

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self.all_reduce(np.zeros(1, np.uint8), "max")

    def allocate(self, size: int, dtype: Any) -> NDArray[Any]:
        """A flat zeroed buffer (size,) that this backend reduces fastest, 64-byte aligned; any other works too."""
        dtype = np.dtype(dtype)
        raw = np.zeros(size * dtype.itemsize + ALIGN_BYTES, np.uint8)
        start = -raw.ctypes.data % ALIGN_BYTES
        return raw[start : start + size * dtype.itemsize].view(dtype)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's `data`, in rank order; sizes may differ, at most 64 MiB each."""
        sizes = self.all_gather(np.array([len(data)], np.int64))[:, 0]
        longest = int(sizes.max())
        if longest > MAX_GATHERED_BYTES:
            raise CommunicationError(
                f"rank {int(sizes.argmax())} gathers too much metadata",
                got=f"{longest} bytes",
                allowed=f"{MAX_GATHERED_BYTES} bytes a rank",
                next_step="Send tensors by all_gather or all_reduce.",
            )
        return [row.tobytes() for row in self.all_gather_ragged(np.frombuffer(data, np.uint8))]

    def part_of(self, buf: NDArray[Any], rank: int) -> NDArray[Any]:
        """The view of `buf` (n,) that is rank `rank`'s part in reduce_scatter and all_gather_parts."""
        start, stop = part_bounds(buf.size, self.num_ranks)[rank]
        return buf[start:stop]


def part_bounds(size: int, num_ranks: int) -> list[tuple[int, int]]:
    """Start and stop of each rank's part of `size` elements: as np.array_split, the first parts one longer."""
    each, longer = divmod(size, num_ranks)
    starts = [rank * each + min(rank, longer) for rank in range(num_ranks + 1)]
    return list(pairwise(starts))


def divide_by_ranks(buf: NDArray[Any], num_ranks: int) -> None:
    """Make a mean of a sum, in place: one rounded division in the buffer's own dtype, the same on every rank."""
    with np.errstate(all="ignore"):
        np.divide(buf, buf.dtype.type(num_ranks), out=buf)


def check_buffer(buf: NDArray[Any], op: str = "sum", *, writable: bool = True) -> None:
    """Raise TypeError or ValueError unless `buf` is what collectives work on in place."""
    if not isinstance(buf, np.ndarray) or isinstance(buf, np.ma.MaskedArray):  # a mask would not travel
        raise TypeError(f"a collective needs a numpy array, got {type(buf).__name__}; pass numpy.asarray(it), unmasked")
    if buf.ndim != 1 or not buf.flags.c_contiguous or (writable and not buf.flags.writeable):
        raise ValueError(
            f"a collective needs a flat, contiguous, writable array, got shape {buf.shape}, "
            f"contiguous={buf.flags.c_contiguous}, writable={buf.flags.writeable}; "
            "pass array.reshape(-1) of a contiguous array"
        )
    if buf.dtype not in DTYPES:
        raise TypeError(f"a collective got dtype {buf.dtype}; allowed are {', '.join(map(str, DTYPES))}; cast first")
    if op not in OPS:
        raise ValueError(f"a reduction got op {op!r}; allowed are {', '.join(OPS)}")
    if op == "mean" and buf.dtype not in FLOATS:
        raise TypeError(f"a mean got dtype {buf.dtype}; allowed are {', '.join(map(str, FLOATS))}; sum and divide")


def check_rank(what: str, rank: int, num_ranks: int) -> None:
    """Raise ValueError unless `rank` is one of this communicator."""
    if not 0 <= rank < num_ranks:
        raise ValueError(f"{what} got rank {rank}; allowed are ranks 0 to {num_ranks - 1}")


def check_peer(what: str, peer: int, rank: int, num_ranks: int) -> None:
    """Raise ValueError unless `peer` is another rank of this communicator."""
    check_rank(what, peer, num_ranks)
    if peer == rank:
        raise ValueError(f"{what} got rank {peer}, which is this one; allowed are the other ranks")


def check_group(ranks: Sequence[int], rank: int, num_ranks: int) -> tuple[int, ...]:
    """The group's ranks; ValueError unless they are different ranks of this communicator, this one among them."""
    members = tuple(operator.index(member) for member in ranks)  # TypeError for half a rank
    for member in members:
        check_rank("group", member, num_ranks)
    if len(set(members)) != len(members) or rank not in members:
        raise ValueError(f"group got ranks {members}; allowed are different ranks, with this one, {rank}, among them")
    return members


class SoloCommunicator(Communicator):
    """One rank alone; the same checks and the same behaviour after `abort` and `close` as the others."""

    def __init__(self, generation: int = 1, deadline_s: float = CALL_DEADLINE_S) -> None:
        super().__init__(0, 1, generation, deadline_s)
        self._ended: str | None = None
        self._groups: list[SoloCommunicator] = []

    def all_reduce(self, buf: NDArray[Any], op: Op = "sum") -> None:
        check_buffer(buf, op)
        self._check_open()

    def all_gather_parts(self, buf: NDArray[Any]) -> None:
        check_buffer(buf)
        self._check_open()

    def broadcast(self, buf: NDArray[Any], root: int = 0) -> None:
        check_buffer(buf)
        check_rank("broadcast", root, 1)
        self._check_open()

    def send(self, buf: NDArray[Any], to: int) -> None:
        check_buffer(buf, writable=False)
        check_peer("send", to, 0, 1)

    def recv(self, buf: NDArray[Any], source: int) -> None:
        check_buffer(buf)
        check_peer("recv", source, 0, 1)

    def group(self, ranks: Sequence[int]) -> Communicator:
        check_group(ranks, 0, 1)
        self._check_open()
        made = SoloCommunicator(self.generation, self.deadline_s)
        self._groups = [group for group in self._groups if not group.has_ended] + [made]
        return made

    @property
    def has_ended(self) -> bool:
        """Whether it was closed or aborted."""
        return self._ended is not None

    def abort(self, reason: str) -> None:
        self._ended = self._ended or reason
        for group in self._groups:
            group.abort(self._ended)

    def close(self) -> None:
        self.abort("it was closed")

    def _check_open(self) -> None:
        if self._ended is not None:
            raise CommunicationError(
                f"rank 0: the communicator has ended: {self._ended}", next_step="Start the rank again."
            )
