"""The operations of every file system; lockstep.storage.fs chooses the backend by URL."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO, Protocol, runtime_checkable

from lockstep.storage.errors import ConfigError, CorruptionError, LockstepError, NotFoundError

COMPLETE_MARKS = ("_manifest.json", "_SUCCESS")
MAX_WHOLE_BYTES = 1 << 30  # manifests, indexes, fitted files; a sparse file of 1 TiB is easily forged


@dataclass(frozen=True, slots=True)
class FileStat:
    """One entry of a directory: `url` in the form in which it was asked for, size in bytes (0 for directories).

    Only `list` sets `is_special`: a symbolic link (also a broken one), pipe, socket or device.
    """

    url: str
    name: str
    is_dir: bool
    size_bytes: int
    mtime_ms: int
    is_special: bool = False


@dataclass(frozen=True, slots=True)
class StoredChecksum:
    """A checksum that a storage keeps of a file: the name of its algorithm, and its bytes."""

    algorithm: str
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Promises:
    """What a backend does as a disk does; an object store does neither."""

    atomic_rename: bool = True
    """A directory is renamed in one step: a reader never sees a part of it under the new name."""
    directories: bool = True
    """A directory exists by itself, empty or not; elsewhere it is a common beginning of names."""


# Inside FileSystem the name `list` is a method.
Listing = list[FileStat]


class Writer(ABC):
    """A new file being written. As a context manager it closes on success and aborts on an exception."""

    @abstractmethod
    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append all of `data`; returns its length in bytes."""

    def write_uncached(self, data: memoryview) -> int:
        """Write data as `write` does, past the page cache if the backend can: for long files."""
        return self.write(data)

    @abstractmethod
    def sync(self) -> None:
        """Return once everything written so far is on the disks; over WebHDFS, once its servers have it."""

    @abstractmethod
    def close(self) -> None:
        """Finish the file; only now is its length certain to readers. A second call does nothing."""

    @abstractmethod
    def abort(self) -> None:
        """Abandon the file and remove it; never raises a StorageError of the removal."""

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.close()
        except BaseException:
            self.abort()  # an unfinished file must not look finished
            raise


class RangeFile(Protocol):
    """An open file that is read by ranges, by one thread at a time."""

    def read_at(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`. Raises CorruptionError where the file has fewer."""

    def close(self) -> None:
        """Release the connection or descriptor; never raises."""


@runtime_checkable
class IntoMemory(Protocol):
    """A RangeFile that reads into memory of the caller's."""

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` from `offset` on. Raises as `read_at` does."""


class FileSystem(ABC):
    """Operations on full URLs. Missing paths raise NotFoundError, existing targets ExistsError, missing bytes
    CorruptionError, other failures StorageError.
    """

    whom = "the storage"
    """Who serves the file, for errors."""
    promises = Promises()
    calls_at_once = 4
    """How many ranges a reader has under way, and how many shards are opened or moved at once (decision 072)."""
    gap_bytes = 128 << 10
    """Up to so many bytes between two parts of a file are read with them, since another read would cost more."""

    @abstractmethod
    def open_read(self, url: str) -> BinaryIO:
        """Open a file for buffered, seekable reading; `read(n)` gives n bytes unless the file ends."""

    def open_uncached(self, url: str) -> BinaryIO:
        """Open a file that is read to its end with `readinto` only; bypasses the page cache if the backend can."""
        return self.open_read(url)

    @abstractmethod
    def read_range(self, url: str, offset: int, length: int) -> bytes:
        """Read exactly `length` bytes from `offset`. Raises CorruptionError where the file is shorter."""

    def open_ranges(self, url: str, size_bytes: int) -> RangeFile:
        """Open a file, whose first `size_bytes` must be readable, for many reads of ranges. A backend may open it at
        the first read, so that a missing file is only reported then.
        """
        return _Ranges(self, url)

    def read_bytes(self, url: str) -> bytes:
        """Read a whole file, as long as `stat` says it is. Raises CorruptionError if fewer bytes come, or if it is
        longer than MAX_WHOLE_BYTES.
        """
        status = self.stat(url)
        if status.is_dir:
            raise NotFoundError(
                f"{url} is a directory", got="a directory", allowed="a file", next_step="Check the path."
            )
        if status.size_bytes > MAX_WHOLE_BYTES:
            raise CorruptionError(
                "a file is longer than any of its kind",
                file=url,
                got=f"{status.size_bytes} bytes",
                allowed=f"{MAX_WHOLE_BYTES} bytes at most",
            )
        return self.read_range(url, 0, status.size_bytes)

    @abstractmethod
    def create(self, url: str, *, exclusive: bool = True) -> Writer:
        """Create a file, its parents too. An existing file is refused (ExistsError), or replaced at once if not
        `exclusive`; a directory of that name is always refused.
        """

    @abstractmethod
    def rename_new(self, src: str, dst: str) -> None:
        """Rename a file or directory onto a free name, in one step. Raises ExistsError where `dst` is a file or a
        directory, NotFoundError where `src` or the parent of `dst` is missing.

        Without `promises.atomic_rename`, a directory is copied and then deleted. COMPLETE_MARKS are the last files to
        appear and the first to go: a directory that has its mark is whole.
        """

    @abstractmethod
    def replace(self, src: str, dst: str) -> None:
        """Rename a file over a file (or a free name), in one step. Directories are refused: StorageError, or
        ExistsError for a directory as `dst`.
        """

    @abstractmethod
    def list(self, url: str) -> Listing:
        """List a directory, sorted by name. A file raises StorageError."""

    @abstractmethod
    def stat(self, url: str) -> FileStat:
        """Describe a file or directory."""

    @abstractmethod
    def mkdirs(self, url: str, *, mode: int = 0o755) -> None:
        """Make a directory and its parents; does nothing for an existing directory; a file raises ExistsError."""

    @abstractmethod
    def delete(self, url: str, *, recursive: bool = False) -> bool:
        """Delete a file or directory; returns False where nothing was there. A directory with content raises
        StorageError unless `recursive`.
        """

    def stored_checksum(self, url: str) -> StoredChecksum | None:
        """The checksum that the storage keeps of a file, without reading its bytes; None if it keeps none or does not
        expose it.
        """
        return None

    def discard(self, url: str) -> bool:
        """Delete an unneeded file or directory with its content; returns False, and raises nothing, if that fails."""
        try:
            return self.delete(url, recursive=True)
        except LockstepError:
            return False

    @property
    def away(self) -> bool:
        """Whether a call has used up all of its attempts, and this process got no answer since it began."""
        return False

    def exists(self, url: str) -> bool:
        """Whether a file or directory is there."""
        try:
            self.stat(url)
        except NotFoundError:
            return False
        return True


class ConditionalWrites(FileSystem):
    """A backend without renames that writes a whole file in one step, on a condition that its server checks."""

    @abstractmethod
    def put_new(self, url: str, data: bytes) -> None:
        """Write a file whose name must be free. Raises ExistsError if it is not."""

    @abstractmethod
    def version(self, url: str) -> object | None:
        """The version of a file, for `put_over`; None if there is none."""

    @abstractmethod
    def put_over(self, url: str, data: bytes, version: object) -> None:
        """Replace this version of a file. Raises ExistsError if the file has another version, or is gone."""

    @abstractmethod
    def fill(self, src: str, dst: str, before_marks: Callable[[], None]) -> None:
        """Copy the files of a directory to free names in another and delete them at `src`. COMPLETE_MARKS are copied
        last, after a call of `before_marks`, and deleted first.
        """


class _Ranges:
    """A RangeFile that opens the file at each read."""

    def __init__(self, fs: FileSystem, url: str) -> None:
        self._fs, self._url = fs, url

    def read_at(self, offset: int, length: int) -> bytes:
        return self._fs.read_range(self._url, offset, length)

    def close(self) -> None:
        """Do nothing: this backend holds nothing open."""


def check_range(url: str, offset: int, length: int) -> None:
    """Raise ConfigError for a range with a negative start or length."""
    if offset < 0 or length < 0:
        raise ConfigError(
            f"a range of {url} cannot be read",
            got=f"offset {offset}, length {length}",
            allowed="numbers from 0 up",
            next_step="This is a fault of the caller.",
        )


def short_file(url: str, offset: int, length: int, size: int) -> CorruptionError:
    """The error for a file that ends before the bytes that must be there."""
    return CorruptionError(
        "file is shorter than it must be (cut off, or never closed by its writer)",
        file=url,
        offset=min(offset + length, size),
        got=f"{size} readable bytes",
        allowed=f"bytes {offset} to {offset + length}",
    )
