"""The memory that the ranks of one host share: an anonymous sealed file, mapped, and the buffers allocated in it."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import struct
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from lockstep.storage.errors import CommunicationError
from lockstep.storage.kernels import memory
from lockstep.storage.kernels.jit import kernels
from lockstep.training.comm.base import ALIGN_BYTES
from lockstep.training.comm.shm import atomics
from lockstep.training.comm.shm.atomics import claim_word

PAGE_BYTES = 4096
FLAG, LEFT, CALLS, REASON = 0, 64, 128, 1024  # offsets in a rank's control page
CALL_BYTES = 64  # tag, size in bytes, place in the segment or -1: int64 each
REASON_BYTES = PAGE_BYTES - REASON - 4
INLINE_BYTES = 32 << 10  # up to here each rank reduces the whole buffer; docs/decisions/042-shared-memory.md
SLOTS, SLOT_BYTES = 4, 64 << 10  # of send and recv
SENT, TAKEN, HEADERS = 0, 64, 128  # offsets in the page of a pair; a header: tag, size
HEADER_BYTES = 24
MAX_RANKS = 128  # of one host; a message between processes carries at most 253 sockets
STAGE_BYTES = 512 << 10  # of one half, all parts together: fits the second-level cache; larger ones save rounds
MIN_CHUNK_BYTES = 32 << 10
# From <linux/fcntl.h>; Python 3.11 has them only if it was built on a kernel with them.
_ADD_SEALS, _GET_SEALS, _SEAL, _SHRINK, _GROW = 1033, 1034, 1, 2, 4
_SEALS = _SEAL | _SHRINK | _GROW
_WORD = struct.Struct("<i")
_CALL = struct.Struct("<qqq")


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets in bytes for `num_ranks` ranks with `arena_bytes` each; the same on all of them."""

    num_ranks: int
    arena_bytes: int

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one part that a reduction stages at a time: a half holds a chunk for each rank, and the result."""
        each = max(MIN_CHUNK_BYTES, STAGE_BYTES // max(1, self.num_ranks - 1))
        return -(-each // PAGE_BYTES) * PAGE_BYTES

    @property
    def half_bytes(self) -> int:
        """Bytes of one half of a rank's stage."""
        return (self.num_ranks + 1) * self.chunk_bytes

    @property
    def control(self) -> int:
        return PAGE_BYTES

    @property
    def inline(self) -> int:
        return self.control + self.num_ranks * PAGE_BYTES

    @property
    def pairs(self) -> int:
        return self.inline + self.num_ranks * 2 * INLINE_BYTES

    @property
    def pair_bytes(self) -> int:
        return PAGE_BYTES + SLOTS * SLOT_BYTES

    @property
    def stage(self) -> int:
        return self.pairs + self.num_ranks**2 * self.pair_bytes

    @property
    def arena(self) -> int:
        return self.stage + self.num_ranks * 2 * self.half_bytes

    @property
    def size(self) -> int:
        return self.arena + self.num_ranks * self.arena_bytes


def default_arena_bytes(num_ranks: int) -> int:
    """A rank's share of the machine's memory, which its buffers cannot exceed."""
    pages = os.sysconf("SC_PHYS_PAGES")
    return -(-pages * mmap.PAGESIZE // num_ranks // PAGE_BYTES) * PAGE_BYTES


log = logging.getLogger(__name__)


def create_file(size: int) -> int:
    """A descriptor of an unnamed file of `size` zero bytes, sealed against resizing. Raises OSError."""
    fd = os.memfd_create("lockstep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)  # takes no memory before pages are touched
        fcntl.fcntl(fd, _ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


@kernels(__name__, memory, atomics)
def _claim(address: Any, mark: Any) -> Any:
    """Write `mark` at `address` if 0 is there."""
    claim_word(address, types.int32(mark))


class Segment:
    """One rank's mapping of the file `fd`, which it takes over. Unmapped when it and all its buffers are gone.

    Raises OSError if it cannot be mapped, CommunicationError if the file does not match `layout`.
    """

    def __init__(self, fd: int, layout: Layout, rank: int) -> None:
        self.layout, self._rank, self._fd = layout, rank, fd
        size, seals = os.fstat(fd).st_size, fcntl.fcntl(fd, _GET_SEALS)
        if size != layout.size or seals & _SEALS != _SEALS:
            raise CommunicationError(
                f"rank {rank} got a wrong shared file",
                got=f"{size} bytes, seals {seals}",
                allowed=f"{layout.size} bytes, sealed against resizing ({_SEALS})",
                next_step="Install one version for all ranks.",
            )
        self._map = mmap.mmap(fd, size)
        self.address: int = np.frombuffer(self._map, np.uint8, 1).ctypes.data
        _claim(self.address, 0)  # changes nothing; compiled or loaded now, so that an abort takes effect at once
        self._holes = [(layout.arena + rank * layout.arena_bytes, layout.arena_bytes)]  # (start, bytes), by start
        self._own = self._holes[0]
        self._returned: deque[tuple[int, int]] = deque()
        self._warned = False
        self._lock = threading.Lock()  # a thread may allocate while another one is in a call

    def close(self) -> None:
        """Close the file; the mapping stays while a buffer is held."""
        with self._lock:  # or a thread that allocates would reserve space in the next file with this number
            os.close(self._fd)
            self._fd = -1

    def place_of(self, address: int, size: int) -> int:
        """The offset of a buffer of `size` bytes in this rank's arena, -1 if it is elsewhere."""
        start, length = self._own
        place = address - self.address
        return place if start <= place and place + size <= start + length else -1

    def allocate(self, size: int, dtype: np.dtype[Any]) -> NDArray[Any] | None:
        """A zeroed buffer (size,) in the arena, None if there is no room. Its memory is free again when it is gone."""
        length = -(-max(1, size * dtype.itemsize) // ALIGN_BYTES) * ALIGN_BYTES
        with self._lock:
            start = self._take(length) if self._fd >= 0 else None
            if start is None:
                return None
            try:
                # Reserve pages now: a failure when one is touched would be a signal that ends the process.
                os.posix_fallocate(self._fd, start, length)
            except OSError as error:
                self._returned.append((start, length))
                if not self._warned:
                    log.warning("rank %d: no %d bytes to share (%s): buffers are copied", self._rank, length, error)
                self._warned = True
                return None
        raw = np.frombuffer(self._map, np.uint8, length, start)
        raw[:] = 0
        # A finalizer may run in any thread, at any allocation: it only notes the range.
        weakref.finalize(raw, self._returned.append, (start, length)).atexit = False
        return raw[: size * dtype.itemsize].view(dtype)

    def _take(self, length: int) -> int | None:
        while self._returned:
            self._holes.append(self._returned.popleft())
        self._holes.sort()
        merged: list[tuple[int, int]] = []
        for start, size in self._holes:
            if merged and sum(merged[-1]) == start:
                start, size = merged[-1][0], merged.pop()[1] + size
            merged.append((start, size))
        self._holes = merged
        for number, (start, size) in enumerate(self._holes):
            if size >= length:
                self._holes[number : number + 1] = [(start + length, size - length)] if size > length else []
                return start
        return None

    def _page(self, rank: int) -> int:
        return self.layout.control + rank * PAGE_BYTES

    def end(self, reason: str) -> None:
        """Record why this rank ends the communicator; the first reason of all ranks is kept."""
        text = reason.encode()[:REASON_BYTES]
        start = self._page(self._rank) + REASON
        self._map[start : start + 4 + len(text)] = _WORD.pack(len(text)) + text
        _claim(self.address, self._rank + 1)

    def ended(self) -> tuple[int, str] | None:
        """Return (rank, reason) of the rank that ended the communicator."""
        (first,) = _WORD.unpack_from(self._map, 0)
        if not 0 < first <= self.layout.num_ranks:
            return None
        start = self._page(first - 1) + REASON
        (length,) = _WORD.unpack_from(self._map, start)
        text = bytes(self._map[start + 4 : start + 4 + max(0, min(length, REASON_BYTES))])
        return first - 1, text.decode(errors="replace")

    def leave(self) -> None:
        """Record that this rank makes no more calls, without an error."""
        _WORD.pack_into(self._map, self._page(self._rank) + LEFT, 1)

    def has_left(self, rank: int) -> bool:
        """Whether `rank` has closed its communicator."""
        return bool(_WORD.unpack_from(self._map, self._page(rank) + LEFT)[0])

    def call_of(self, rank: int, call: int) -> tuple[int, int]:
        """Return (tag, size in bytes) that `rank` has announced for call number `call`."""
        tag, size, _ = _CALL.unpack_from(self._map, self._page(rank) + CALLS + (call & 1) * CALL_BYTES)
        return tag, size

    def header_of(self, sender: int, receiver: int, number: int) -> tuple[int, int]:
        """Return (tag, size in bytes) of message slot `number` between two ranks."""
        pair = self.layout.pairs + (sender * self.layout.num_ranks + receiver) * self.layout.pair_bytes
        tag, size, _ = _CALL.unpack_from(self._map, pair + HEADERS + number % SLOTS * HEADER_BYTES)
        return tag, size
