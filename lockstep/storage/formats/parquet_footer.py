"""The footer of a Parquet file, compared with its digest before Arrow parses it: damaged ones can abort the process."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING

from lockstep.storage.documents import sha256_hex
from lockstep.storage.errors import CorruptionError
from lockstep.storage.files.interface import FileSystem

if TYPE_CHECKING:
    from lockstep.storage.dataset.manifest_entries import ShardInfo

MAGIC = b"PAR1"
_TAIL = struct.Struct("<I4s")  # the last 8 bytes of a file: length of the Thrift bytes before them, magic
_FIRST_GUESS_BYTES = 1 << 16
_FORK_DEADLINE_S = 60  # for milliseconds of work


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

    For some footers Arrow's C++ throws and pyarrow does not catch it: the process aborts. So a fork of this process
    tries first. It starts no thread and takes no lock of ours, and ends by `_exit`, or by a signal after
    _FORK_DEADLINE_S. The answer is cached: a fork takes tens of milliseconds if this process holds gigabytes. Raises
    what `pq.read_metadata` does.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    metadata = pq.read_metadata(pa.BufferReader(MAGIC + footer))
    child = os.fork()
    if child == 0:
        code = 1
        with suppress(BaseException):  # this copy of the process must end here in any case
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_FORK_DEADLINE_S)
            faulthandler.disable()  # an abort here is an answer, not a crash to report
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # C++ prints its message there
            for number in range(metadata.num_row_groups):
                group = metadata.row_group(number)
                for column in range(group.num_columns):
                    chunk = group.column(column)
                    _ = chunk.dictionary_page_offset, chunk.data_page_offset, chunk.path_in_schema
            code = 0
        os._exit(code)
    _, status = os.waitpid(child, 0)
    return status == 0
