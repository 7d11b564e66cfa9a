"""The footer of a Parquet file, compared with its digest before Arrow parses it: damaged ones can abort the process."""

from __future__ import annotations

import atexit
import os
import select
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING

from lockstep.storage.documents import sha256_hex
from lockstep.storage.errors import CorruptionError, StorageError
from lockstep.storage.files.interface import FileSystem

if TYPE_CHECKING:
    from lockstep.storage.dataset.manifest_entries import ShardInfo

MAGIC = b"PAR1"
_TAIL = struct.Struct("<I4s")  # the last 8 bytes of a file: length of the Thrift bytes before them, magic
_FIRST_GUESS_BYTES = 1 << 16
_TRIAL_DEADLINE_S = 60  # for milliseconds of work, or the start of Python
_TRY_FOOTERS = """
import faulthandler, resource, sys
import pyarrow as pa, pyarrow.parquet as pq

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
faulthandler.disable()  # an abort here is an answer, not a crash to report
footers, answers = sys.stdin.buffer, sys.stdout.buffer
answers.write(b".")
answers.flush()
while length := footers.read(8):  # until the process that asks has ended
    metadata = pq.read_metadata(pa.BufferReader(footers.read(int.from_bytes(length, "little"))))
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for column in range(group.num_columns):
            chunk = group.column(column)
            chunk.dictionary_page_offset, chunk.data_page_offset, chunk.path_in_schema
    answers.write(b".")
    answers.flush()
"""


def read_footer(read_range: Callable[[int, int], bytes], size: int, file: str) -> bytes:
    """The footer of a Parquet file of `size` bytes: its Thrift bytes, their length and the magic, to the file's end.

    `read_range(offset, length)` gives bytes of the file, `file` names it in errors. Raises CorruptionError where the
    end is not that of a Parquet file.
    """
    if size < len(MAGIC) + _TAIL.size:
        raise damaged_footer(file, f"{size} bytes", "a Parquet file", offset=0)
    guess = min(size, _FIRST_GUESS_BYTES)
    tail = read_range(size - guess, guess)
    length, magic = _TAIL.unpack(tail[-_TAIL.size :])
    need = length + _TAIL.size
    if magic != MAGIC or need > size - len(MAGIC):
        got, allowed = f"a footer of {length} bytes, {magic!r}", f"{MAGIC!r} after a footer that fits"
        raise damaged_footer(file, got, allowed, offset=size - _TAIL.size)
    return tail[-need:] if need <= guess else read_range(size - need, need)


def read_published_footer(fs: FileSystem, url: str, info: ShardInfo) -> bytes:
    """The footer of the shard at `url`. Raises CorruptionError where its SHA-256 is not the manifest's."""
    footer = read_footer(lambda offset, length: fs.read_range(url, offset, length), info.bytes, url)
    if sha256_hex(footer) != info.footer_sha256:
        got, allowed = f"sha256 {sha256_hex(footer)}", f"{info.footer_sha256}"
        raise damaged_footer(url, got, allowed, offset=info.bytes - len(footer))
    return footer


def damaged_footer(file: str, got: str, allowed: str, *, offset: int | None = None) -> CorruptionError:
    """The error for a footer that is not the published one."""
    what = "a Parquet footer is damaged or not the one published"
    return CorruptionError(what, file=file, offset=offset, got=got, allowed=allowed)


@lru_cache(maxsize=64)
def columns_are_readable(footer: bytes) -> bool:
    """Whether `row_group(i).column(j)` works for all columns of a footer, whose digest may be forged too.

    For some footers Arrow's C++ throws and pyarrow does not catch it: the process aborts. So another process tries
    first. Raises what `pq.read_metadata` does, and StorageError if such a process does not start.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    whole = MAGIC + footer
    pq.read_metadata(pa.BufferReader(whole))
    with _trying:
        return _trial().survives(whole)


class _Trial:
    """A process that looks at one footer after the other, until one ends it.

    Not a fork of this process: in a fork Python drops the other threads' thread-locals, and py4j's then shut the
    sockets down by which this process talks to Java.
    """

    def __init__(self) -> None:
        self.of = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _TRY_FOOTERS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # C++ prints its message there
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        if not self._answers():
            self.end()
            raise StorageError(
                "the process that tries Parquet footers did not start",
                got=f"no answer of {sys.executable} within {_TRIAL_DEADLINE_S} s",
                allowed="a Python that imports pyarrow, as this one does",
                next_step=f"Run: {sys.executable} -c 'import pyarrow.parquet'",
            )

    @property
    def is_over(self) -> bool:
        """Whether a new process is needed: this one has ended, or is that of the process from which we were forked."""
        return self.of != os.getpid() or self._process.poll() is not None

    def survives(self, footer: bytes) -> bool:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(len(footer).to_bytes(8, "little") + footer)
            self._process.stdin.flush()
            answered = self._answers()
        except BrokenPipeError:
            answered = False
        if not answered:
            self.end()
        return answered

    def _answers(self) -> bool:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _TRIAL_DEADLINE_S)
        return bool(ready) and self._process.stdout.read(1) == b"."

    def end(self) -> None:
        if self.of == os.getpid():
            self._process.kill()
            with suppress(BrokenPipeError):
                self._process.communicate()


_trying = threading.Lock()
_trials: list[_Trial] = []  # none or one


def _trial() -> _Trial:
    if not _trials or _trials[-1].is_over:
        _end_trials()
        _trials.append(_Trial())
    return _trials[-1]


def _end_trials() -> None:
    while _trials:
        _trials.pop().end()


atexit.register(_end_trials)
