"""The communicator's interface: collectives between ranks.

Every rank makes the same calls in the same order with equal sizes and dtypes; a difference is an error, never a
wrong sum. Each backend adds in one fixed order, so results are equal bit for bit on every rank and in every run.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

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
CALL_DEADLINE_S = 600.0  # a slow rank has not failed: tracing, restoring or a slow batch can take minutes
MAX_GATHERED_BYTES = 64 << 20  # of one rank in all_gather_bytes: metadata, not tensors
ALIGN_BYTES = 64  # a cache line, and the widest vector register


class LinkUse(NamedTuple):
    """How a connection was used in one direction, from this rank; both are 0 where the system does not count it."""

    seconds: float
    """Seconds in which bytes were under way: sent, and not yet acknowledged by the other host. It is long where the
    link is slow."""
    bytes: float
    """Bytes that the other host has acknowledged."""


class Communicator(ABC):
    """Collectives over the ranks of one generation. Two threads must not use it at the same time; see `group`.

    Buffers are flat, contiguous and writable, of uint8, int32, int64 (which wrap), float16, bfloat16 (ml_dtypes),
    float32 or float64; else TypeError or ValueError on this rank only, before anything is sent. Every collective
    raises CommunicationError naming the rank that is late, lost or makes another call; the communicator has then ended.
    """

    def __init__(self, rank: int, num_ranks: int, generation: int, deadline_s: float) -> None:
        self.rank, self.num_ranks, self.generation = rank, num_ranks, generation
        self.deadline_s = deadline_s
        """The longest that one call may take; callers may set it between calls."""

    @abstractmethod
    def all_reduce(self, buf: NDArray[Any], op: Op = "sum") -> None:
        """Replace `buf` (n,) on every rank by the elementwise sum, mean, minimum or maximum over ranks, in place.

        `mean` is for floats only: the sum, divided by num_ranks. A NaN of any rank makes sum, mean, min and max NaN.
        Each addition, and the division, is rounded to the buffer's dtype, also for float16 and bfloat16.
        """

    def all_reduce_each(self, take: Callable[[], NDArray[Any] | None], done: Callable[[], None]) -> None:
        """Sum the buffers that `take` returns, one after another, until it returns None; `done` is called for each.

        A backend may begin a buffer before earlier ones are done, so buffers must share no memory; it calls `take`
        again after `look_again`. `done` is called in the order of the buffers. Ranks may group the same buffers
        differently, and mix this with `all_reduce`.
        """
        while (buf := take()) is not None:
            self.all_reduce(buf)
            done()

    def look_again(self) -> None:  # noqa: B027 - a backend that begins no buffer early ignores it
        """Report that `take` of the current `all_reduce_each` has another buffer; any thread may call this."""

    @abstractmethod
    def all_gather_parts(self, buf: NDArray[Any]) -> None:
        """Send each rank's own part of `buf` (n,), as in `part_of`, to all ranks, in place."""

    @abstractmethod
    def broadcast(self, buf: NDArray[Any], root: int = 0) -> None:
        """Replace `buf` (n,) on every rank by that of rank `root`, in place."""

    @abstractmethod
    def send(self, buf: NDArray[Any], to: int) -> None:
        """Send `buf` (n,), which may be read-only, to rank `to`, which calls `recv` with equal n and dtype.

        It may wait for that `recv`, and does if `buf` is large: two ranks that both send first wait for each other,
        as in MPI, until the deadline. Let one of them begin with `recv`.
        """

    @abstractmethod
    def recv(self, buf: NDArray[Any], source: int) -> None:
        """Fill `buf` (n,) with what rank `source` sends. Messages between two ranks keep their order."""

    @abstractmethod
    def group(self, ranks: Sequence[int]) -> Communicator:
        """A communicator of these ranks, numbered by their position in `ranks`; ValueError if this rank is not in it.

        Only its members call this, in the same order on each. Another thread may use the group at the same time as
        this communicator; the group ends when this one is closed or aborted.
        """

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent over the network so far, its groups' and all headers included; what goes
        through the memory of a host is not counted.
        """
        return 0

    def links(self) -> dict[int, LinkUse]:
        """The use so far of the connection to each rank that this one has one to, over the network."""
        return {}

    @property
    def on_host(self) -> Communicator:
        """The communicator for small arrays in host memory: this one, unless this one works on a device's memory."""
        return self

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End this communicator from any thread: a blocked call and every later one raises CommunicationError."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources, those of its groups too. Safe to call twice."""

    def reduce_scatter(self, buf: NDArray[Any], op: Op = "sum") -> NDArray[Any]:
        """Reduce like `all_reduce`, with its bits, but return only this rank's part: a view, `part_of(buf, rank)`.

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

    def all_to_all_ragged(self, parts: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Send `parts[r]` (n_r,) to each rank r; return the parts that the ranks have sent here, in rank order.

        Sizes may differ, and be 0; all parts of all ranks have one dtype. `parts` has one array a rank, with this
        rank's own, of which the result has a copy. `parts` may be read-only.
        """
        sizes = self._agree_on_parts(parts)
        found = [np.empty(size, parts[0].dtype) for size in sizes[:, self.rank].tolist()]
        found[self.rank][:] = parts[self.rank]
        for peer in partners(self.rank, self.num_ranks):
            for sends in (self.rank < peer, self.rank > peer):  # `send` may wait: the lower rank of a pair begins
                if sends and parts[peer].size:
                    self.send(parts[peer], peer)
                elif not sends and found[peer].size:
                    self.recv(found[peer], peer)
        return found

    def _agree_on_parts(self, parts: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
        """Agree how many elements rank s sends to rank r: (num_ranks, num_ranks), in [s, r]. A collective.

        Raises CommunicationError on every rank, and ends this communicator, if the ranks' dtypes differ.
        """
        check_parts(parts, self.num_ranks)
        mine = np.array([*(part.size for part in parts), DTYPES.index(parts[0].dtype)], np.int64)
        table = self.all_gather(mine)
        dtypes = table[:, -1]
        if (dtypes != dtypes[0]).any():
            other = int(np.argmax(dtypes != dtypes[0]))
            error = CommunicationError(
                f"ranks 0 and {other} send parts of different dtypes in all_to_all_ragged",
                got=f"{DTYPES[dtypes[0]]} and {DTYPES[dtypes[other]]}",
                allowed="one dtype on all ranks",
                next_step="Compare the ranks' logs; all must run one version and one configuration.",
            )
            self.abort(error.what)
            raise error
        return table[:, :-1]

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self.all_reduce(np.zeros(1, np.uint8), "max")

    def allocate(self, size: int, dtype: Any) -> NDArray[Any]:
        """A flat zeroed buffer (size,), 64-byte aligned, of the kind that this backend reduces fastest."""
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
    """Start and stop of each rank's part of `size` elements; like np.array_split, the first parts are one longer."""
    each, longer = divmod(size, num_ranks)
    starts = [rank * each + min(rank, longer) for rank in range(num_ranks + 1)]
    return list(pairwise(starts))


def divide_by_ranks(buf: NDArray[Any], num_ranks: int) -> None:
    """Turn a sum into a mean, in place: one rounded division in the buffer's own dtype, the same on every rank."""
    with np.errstate(all="ignore"):
        np.divide(buf, buf.dtype.type(num_ranks), out=buf)


def check_buffer(buf: NDArray[Any], op: str = "sum", *, writable: bool = True) -> None:
    """Raise TypeError or ValueError unless collectives can work on `buf` in place."""
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


def check_parts(parts: Sequence[NDArray[Any]], num_ranks: int) -> None:
    """Raise TypeError or ValueError unless `parts` are an array for each rank, of one dtype."""
    if len(parts) != num_ranks:
        raise ValueError(f"all_to_all_ragged got {len(parts)} parts; allowed is one for each of {num_ranks} ranks")
    for part in parts:
        check_buffer(part, writable=False)
        if part.dtype != parts[0].dtype:
            raise TypeError(f"all_to_all_ragged got parts of {parts[0].dtype} and {part.dtype}; allowed is one dtype")


def partners(rank: int, num_ranks: int) -> list[int]:
    """The other ranks, in an order in which all ranks are in pairs at the same time (one is left out if odd).

    The circle method of tournaments (Kirkman, 1847): in round t, ranks whose numbers add up to t, modulo the largest
    odd number up to num_ranks, meet; the one that would meet itself meets the last rank of an even number.
    """
    modulus = num_ranks - 1 + num_ranks % 2
    met = []
    for turn in range(modulus):
        if rank == modulus:  # the last of an even number: it meets the rank p with 2 p = turn
            peer = turn * (modulus + 1) // 2 % modulus
        else:
            peer = (turn - rank) % modulus
            peer = modulus if peer == rank else peer
        if peer < num_ranks:
            met.append(peer)
    return met


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
    """The group's ranks; ValueError unless they are distinct ranks of this communicator and include this one."""
    members = tuple(operator.index(member) for member in ranks)  # TypeError unless they are integers
    for member in members:
        check_rank("group", member, num_ranks)
    if len(set(members)) != len(members) or rank not in members:
        raise ValueError(f"group got ranks {members}; allowed are different ranks, with this one, {rank}, among them")
    return members


def links_of(each: Iterable[Mapping[int, LinkUse]]) -> dict[int, LinkUse]:
    """The sums of several `links`."""
    found: dict[int, LinkUse] = {}
    for one in each:
        for peer, use in one.items():
            sum_s, sum_bytes = found.get(peer, LinkUse(0.0, 0.0))
            found[peer] = LinkUse(sum_s + use.seconds, sum_bytes + use.bytes)
    return found


class SoloCommunicator(Communicator):
    """The communicator of a single rank, with the same checks and the same behaviour after `abort` and `close`."""

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

    def all_to_all_ragged(self, parts: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        check_parts(parts, 1)
        self._check_open()
        return [parts[0].copy()]

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
