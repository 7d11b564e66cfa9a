"""Where everything lies in the segment that the ranks of one host share.

    page 0             who ended the communicator first: rank + 1, or 0
    control            a page a rank: its flag, whether it has left, two call descriptors, why it ended
    inline             two areas a rank for calls so small that data and announcement go together
    pairs              a page and SLOTS slots for each (sender, receiver)
    stage              two halves a rank, through which arrays go that are not in the segment
    arena              a rank's buffers of `allocate`

Pages that nobody touches take no memory, so the segment is made as large as it may ever become.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

PAGE_BYTES = 4096
FLAG, LEFT, CALLS, REASON = 0, 64, 128, 1024  # offsets in a rank's control page
CALL_BYTES = 64  # tag, size in bytes, place in the segment or -1: int64 each
REASON_BYTES = PAGE_BYTES - REASON - 4
INLINE_BYTES = 32 << 10  # up to here each rank reduces all of it alone; docs/decisions/042-shared-memory.md
SLOTS, SLOT_BYTES = 4, 64 << 10  # of send and recv
SENT, TAKEN, HEADERS = 0, 64, 128  # offsets in the page of a pair; a header: tag, size
HEADER_BYTES = 24
MAX_RANKS = 128  # of one host; a message between processes carries at most 253 sockets
STAGE_BYTES = 512 << 10  # of one half, all parts together: fits the second-level cache; larger ones save rounds
MIN_CHUNK_BYTES = 32 << 10


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets in bytes for `num_ranks` ranks with `arena_bytes` each; the same on all of them."""

    num_ranks: int
    arena_bytes: int

    @property
    def chunk_bytes(self) -> int:
        """What a reduction stages of one part at a time: a half holds such a chunk for each rank, and the result."""
        each = max(MIN_CHUNK_BYTES, STAGE_BYTES // max(1, self.num_ranks - 1))
        return -(-each // PAGE_BYTES) * PAGE_BYTES

    @property
    def half_bytes(self) -> int:
        """Of one half of a rank's stage."""
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
    """A rank's share of the machine's memory, which no sum of buffers can go beyond."""
    pages = os.sysconf("SC_PHYS_PAGES")
    return -(-pages * mmap.PAGESIZE // num_ranks // PAGE_BYTES) * PAGE_BYTES
