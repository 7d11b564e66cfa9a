"""Text that grows, uploaded in closed parts: HDFS shows an unclosed file as empty."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from lockstep.storage.errors import ExistsError, LockstepError
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.urls import join

log = logging.getLogger(__name__)

PART_BYTES = 1 << 20
PART_EVERY_S = 30.0
MAX_WAITING_BYTES = 16 << 20  # while the storage is away; older lines are then dropped and their number is told


class PartWriter:
    """Collects lines and writes them as `directory/part-NNNNN.SUFFIX`, each part whole or absent.

    Thread-safe. A storage that fails for a while delays parts; it never fails the caller before `close`. `confirm` is
    called before a part gets its name (lockstep.storage.publish.write_stream).
    """

    def __init__(self, directory: str, suffix: str, confirm: Callable[[], None] | None = None) -> None:
        self._directory, self._suffix, self._confirm = directory, suffix, confirm
        self._lines: list[str] = []
        self._bytes = self._dropped = self._parts = 0
        self._written_at = time.monotonic()
        self._lock = threading.Lock()
        self._io = threading.Lock()

    def add(self, line: str) -> None:
        """Add one line, without its end of line."""
        with self._lock:
            self._lines.append(line)
            self._bytes += len(line) + 1
            while self._bytes > MAX_WAITING_BYTES:
                self._bytes -= len(self._lines.pop(0)) + 1
                self._dropped += 1

    @property
    def due(self) -> bool:
        """Whether a part is worth writing now: large enough, or old enough."""
        with self._lock:
            old = time.monotonic() - self._written_at >= PART_EVERY_S
            return bool(self._lines) and (old or self._bytes >= PART_BYTES)

    def flush(self) -> None:
        """Write what is there as one part. Raises LockstepError; the lines are then kept for the next call."""
        with self._io:
            with self._lock:
                lines, self._lines, self._bytes, self._written_at = self._lines, [], 0, time.monotonic()
                if self._dropped:
                    lines.insert(0, f"[{self._dropped} lines dropped while the storage was away]")
                    self._dropped = 0
            try:
                while lines:
                    lines = lines[self._write(lines) :]
                    self._parts += 1
            except LockstepError:
                with self._lock:
                    self._lines[:0] = lines
                    self._bytes += sum(len(line) + 1 for line in lines)
                raise

    def _write(self, lines: list[str]) -> int:
        """Write the next part; returns how many of the lines are in parts then."""
        url = join(self._directory, f"part-{self._parts:05d}.{self._suffix}")
        fs, data = filesystem(url), ("\n".join(lines) + "\n").encode("utf-8", "replace")
        try:
            write_file(fs, url, data, confirm=self._confirm)
        except ExistsError:
            # Nobody else writes here: an earlier call's part has got its name, and failed in reading it back.
            there = fs.read_bytes(url)
            return there.count(b"\n") if data.startswith(there) else 0
        return len(lines)

    def flush_if_due(self) -> None:
        """Write a part if one is due; a failing storage is told in the log and tried again later."""
        if self.due:
            self.try_flush()

    def try_flush(self) -> None:
        """`flush`, but a failing storage is told in the log."""
        try:
            self.flush()
        except LockstepError as error:  # with the storage's failures: a driver that was overtaken writes no more
            log.warning("a part of %s is delayed: %s", self._directory, error.what)
