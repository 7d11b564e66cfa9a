"""What a rank was doing when it died: a page of memory that it shares with its supervisor, which outlives it.

A heartbeat says the step of up to a second ago, since a step costs no message; this page says the last one.
"""

from __future__ import annotations

import mmap
import os
import struct

_SIZE = 4096
_HEAD = struct.Struct("<qqqH")  # steps done, the batches (start, stop) that are decoded, the bytes of the text after it
NO_STEP = -1


class LastWords:
    """The page behind the file descriptor `fd`, which this takes over. Any thread may write."""

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, _SIZE)
        os.close(fd)

    def did(self, step: int) -> None:
        """Note how many optimizer steps are done."""
        struct.pack_into("<q", self._page, 0, step)

    def reads(self, what: str | range) -> None:
        """Note which records are being read now, "" for none, or which batches (from 0) are being decoded."""
        batches, text = (what, b"") if isinstance(what, range) else (range(0), what.encode()[: _SIZE - _HEAD.size])
        struct.pack_into("<qqH", self._page, 8, batches.start, batches.stop, 0)  # a death here leaves no half of a text
        self._page[_HEAD.size : _HEAD.size + len(text)] = text
        struct.pack_into("<H", self._page, _HEAD.size - 2, len(text))

    def read(self) -> tuple[int, str | range]:
        """The steps done (NO_STEP if none was noted), and what `reads` noted last."""
        step, start, stop, size = _HEAD.unpack_from(self._page)
        text = self._page[_HEAD.size : _HEAD.size + size].decode(errors="replace")
        return step, range(start, stop) if start < stop else text

    def close(self) -> None:
        """Give the page back."""
        self._page.close()


def new_page() -> int:
    """A file descriptor of an empty page."""
    fd = os.memfd_create("lockstep-last-words", os.MFD_CLOEXEC)
    os.ftruncate(fd, _SIZE)
    os.pwrite(fd, _HEAD.pack(NO_STEP, 0, 0, 0), 0)
    return fd
