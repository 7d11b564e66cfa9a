"""Lines of ranks' output on their way to the driver's standard output: in order and within bounds.

A rank never waits long for a slow reader: a buffer that stays full for `PATIENCE_S` drops the next lines, and a line
says how many.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Literal, TextIO

LINE_BYTES = 1 << 16  # a longer line is cut into pieces of this size
CHUNK_BYTES = 1 << 16
PARTIAL_S = 1.0  # a line without an end for so long is shown unfinished
BUFFER_BYTES = 1 << 20
BATCH_BYTES = 1 << 18  # of one frame: JSON may make six bytes of one, and a frame holds 4 MiB
PATIENCE_S = 1.0
LINE_COST = 64  # bytes of a line's object: a million empty lines must count too
CLOSE_S = 10.0  # to write the last lines to a slow terminal

Which = Literal["all", "leader", "none"]
# A carriage return ends a line too (progress bars); the last byte may be the first half of "\r\n".
_END = re.compile(rb"\r\n|\n|\r(?=.)", re.DOTALL)


def read_lines(output: int) -> Iterator[bytes]:
    """The lines of a pipe without their ends, as soon as they arrive; ends with the pipe."""
    poll = select.poll()
    poll.register(output, select.POLLIN)
    waiting = b""
    while True:
        if waiting and not poll.poll(PARTIAL_S * 1000):
            yield waiting.removesuffix(b"\r")
            waiting = b""
        chunk = os.read(output, CHUNK_BYTES)
        if not chunk:
            break
        *lines, waiting = _END.split(waiting + chunk)
        for line in lines:
            yield from _cut(line)
        *pieces, waiting = _cut(waiting)
        yield from pieces
    if waiting:
        yield waiting.removesuffix(b"\r")


def _cut(line: bytes) -> list[bytes]:
    return [line[start : start + LINE_BYTES] for start in range(0, max(1, len(line)), LINE_BYTES)]


class LineBuffer:
    """A bounded queue of lines between two threads."""

    def __init__(self, most_bytes: int = BUFFER_BYTES, patience_s: float = PATIENCE_S) -> None:
        self._most, self._patience_s = most_bytes, patience_s
        self._lines: deque[str] = deque()
        self._bytes = self._dropped = 0
        self._closed = False
        self._changed = threading.Condition()

    def put(self, line: str) -> None:
        """Add a line; waits up to `patience_s` while the buffer is full, then drops lines until it is half empty."""
        with self._changed:
            if self._dropped and self._bytes > self._most // 2:
                self._dropped += 1
                return
            end = time.monotonic() + self._patience_s
            while self._bytes >= self._most and not self._closed:
                left = end - time.monotonic()
                if left <= 0:
                    self._dropped += 1
                    return
                self._changed.wait(left)
            self._note_dropped()
            self._add(line)

    def take(self) -> list[str] | None:
        """Wait for lines and take them, at most about BATCH_BYTES; None once closed and empty."""
        with self._changed:
            while not self._lines:
                if self._closed:
                    self._note_dropped()
                    if not self._lines:
                        return None
                    break
                self._changed.wait()
            taken, size = [], 0
            while self._lines and size < BATCH_BYTES:
                taken.append(self._lines.popleft())
                size += len(taken[-1]) + LINE_COST
            self._bytes -= size
            self._changed.notify_all()
            return taken

    def close(self) -> None:
        """Mark the end of the lines."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _note_dropped(self) -> None:
        if self._dropped:
            self._add(f"[{self._dropped} lines dropped: they came faster than they were taken]")
            self._dropped = 0

    def _add(self, line: str) -> None:
        self._lines.append(line)
        self._bytes += len(line) + LINE_COST
        self._changed.notify_all()


class OutputPrinter(contextlib.AbstractContextManager["OutputPrinter"]):
    """Prints the ranks' lines, each after `[rank N] `, in its own thread: no server thread waits for a terminal.

    `which` selects the lines of all ranks, of rank 0, or none. When the reader of `stream` has ended, printing stops
    with a line on standard error, and the ranks continue.
    """

    def __init__(self, which: Which = "all", stream: TextIO | None = None) -> None:
        self._which, self._stream = which, stream or sys.stdout
        self._buffer = LineBuffer()
        self._thread = threading.Thread(target=self._print, name="rank-output-print", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._buffer.close()
        self._thread.join(CLOSE_S)

    def take(self, rank: int, lines: list[str]) -> None:
        """Print lines of one rank."""
        if self._which == "all" or (self._which == "leader" and rank == 0):
            for line in lines:
                self._buffer.put(f"[rank {rank}] {line}")

    def _print(self) -> None:
        open_ = True
        while (lines := self._buffer.take()) is not None:
            if open_:
                open_ = self._write("\n".join(lines) + "\n")

    def _write(self, text: str) -> bool:
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:  # a terminal without UTF-8
                name = self._stream.encoding or "ascii"
                self._stream.write(text.encode(name, "backslashreplace").decode(name))
            self._stream.flush()
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            print(f"the ranks' output can no longer be printed ({error}); they continue", file=sys.stderr)
            return False
        return True
