"""Local files past the page cache (O_DIRECT): for long files that nobody on this host reads soon.

The kernel takes whole pages between memory and disk itself. What it must not copy into its own memory costs a quarter
of the processor time, drives nothing out of that memory, and comes from the disk when it is read back.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

PAGE_BYTES = 4096  # memory, place in the file and length must be at multiples of it
_O_DIRECT = getattr(os, "O_DIRECT", 0)  # 0 where the system has no such thing


def whole_pages(size: int) -> NDArray[np.uint8]:
    """(size,) bytes of memory, not touched yet, that begin with a page."""
    memory = np.empty(size + PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % PAGE_BYTES
    return memory[start : start + size]


def write_uncached(descriptor: int, data: memoryview) -> int:
    """Write as many of the first of these bytes as can be written past the page cache; how many those were.

    None of them where the file system has no such way, or the memory or the place in the file begins within a page;
    never the last ones that fill no page. The caller writes the rest. Raises OSError.
    """
    whole, done = len(data) - len(data) % PAGE_BYTES, 0
    while done < whole and (count := _directly(descriptor, partial(os.write, descriptor, data[done:whole]))):
        done += count
    return done


class UncachedFile(io.FileIO):
    """A file to read with `readinto` into memory of `whole_pages`; what cannot be had so comes by the page cache."""

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        """As of any raw file."""
        read = super().readinto
        count = _directly(self.fileno(), partial(read, buffer))
        # Refused, for one, where the file goes on within a page: behind its last bytes.
        return read(buffer) if count is None else count


def _directly(descriptor: int, call: Callable[[], int | None]) -> int | None:
    """What `call` returns where the file is used past the page cache meanwhile; None where the system refuses that."""
    if not _O_DIRECT:
        return None
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _O_DIRECT)
        return call()
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
