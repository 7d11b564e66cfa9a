"""Local disk: durable by fsync of the file and of its directory, renames that never overwrite."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import os
import shutil
import stat as stat_bits
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from lockstep.storage.errors import DeniedError, DiskFullError, ExistsError, NotFoundError, StorageError
from lockstep.storage.files.interface import (
    FileStat,
    FileSystem,
    Listing,
    RangeFile,
    Writer,
    check_range,
    short_file,
)
from lockstep.storage.urls import join, split_url

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_NOT_THERE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)  # kernels and file systems without renameat2's flag
PAGE_BYTES = 4096  # address, file offset and length must be multiples of it
_O_DIRECT = getattr(os, "O_DIRECT", 0)  # 0 where the system lacks it


def rename_noreplace(source: str, target: str) -> None:
    """Rename atomically if the kernel can. Raises FileExistsError if the name is taken."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if hasattr(libc, "renameat2"):
            names = os.fsencode(source), os.fsencode(target)
            if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_NOREPLACE) == 0:
                return
            code = ctypes.get_errno()
            if code not in _NOT_THERE:
                raise OSError(code, os.strerror(code), source, None, target)
    rename_noreplace_portable(source, target)


def rename_noreplace_portable(source: str, target: str) -> None:
    """Rename without overwriting if renameat2 is missing: atomic for files (a hard link fails on an existing name); for
    directories it checks first, since rename refuses a target directory with content but not an empty one.
    """
    if stat_bits.S_ISDIR(os.lstat(source).st_mode):
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        os.rename(source, target)
    else:
        os.link(source, target, follow_symlinks=False)
        os.unlink(source)


def whole_pages(size: int) -> NDArray[np.uint8]:
    """Return (size,) bytes of untouched memory, aligned to a page."""
    memory = np.empty(size + PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % PAGE_BYTES
    return memory[start : start + size]


def write_uncached(descriptor: int, data: memoryview) -> int:
    """Write the first of these bytes past the page cache, as many as possible; returns how many.

    Writes nothing if the file system has no direct writes, or if the memory or the file position is not aligned to a
    page; never writes the last bytes that do not fill a page. The caller writes the rest. Raises OSError.
    """
    whole, done = len(data) - len(data) % PAGE_BYTES, 0
    while done < whole and (count := _directly(descriptor, partial(os.write, descriptor, data[done:whole]))):
        done += count
    return done


class UncachedFile(io.FileIO):
    """A file to read with `readinto` into memory of `whole_pages`; uses the page cache if direct reads fail."""

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        """Read bytes into `buffer`, as any raw file does."""
        read = super().readinto
        count = _directly(self.fileno(), partial(read, buffer))
        # EINVAL, for instance, at the end of a file whose length is not a multiple of a page.
        return read(buffer) if count is None else count


def _directly(descriptor: int, call: Callable[[], int | None]) -> int | None:
    """Call `call` with the page cache bypassed; returns its result, or None if the system refuses that."""
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


class LocalFileSystem(FileSystem):
    """Files of this machine, by plain paths or file:/// URLs."""

    gap_bytes = 16 << 10

    def open_read(self, url: str) -> BinaryIO:
        with _translated("open", url):
            return open(_path(url), "rb", opener=_open_regular)

    def open_uncached(self, url: str) -> BinaryIO:
        with _translated("open", url):
            return cast(BinaryIO, UncachedFile(_path(url), opener=_open_regular))

    def read_range(self, url: str, offset: int, length: int) -> bytes:
        check_range(url, offset, length)
        with _translated("read", url), open(_path(url), "rb", opener=_open_regular) as file:
            size = os.fstat(file.fileno()).st_size
            if offset + length > size:
                raise short_file(url, offset, length, size)
            file.seek(offset)
            data = file.read(length)
        if len(data) != length:
            raise short_file(url, offset, length, offset + len(data))
        return data

    def open_ranges(self, url: str, size_bytes: int) -> RangeFile:
        with _translated("open", url):
            return _LocalRanges(url, _open_regular(_path(url), os.O_RDONLY | os.O_CLOEXEC))

    def create(self, url: str, *, exclusive: bool = True) -> Writer:
        path = _path(url)
        with _translated("create", url):
            _make_parents(path)
            flags = os.O_EXCL if exclusive else os.O_TRUNC
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o644)
        return _LocalWriter(url, path, descriptor)

    def rename_new(self, src: str, dst: str) -> None:
        source, target = _path(src), _path(dst)
        with _translated("rename", src, dst):
            os.lstat(source)
            if not os.path.isdir(os.path.dirname(target) or "."):
                raise NotADirectoryError(errno.ENOTDIR, "the parent of the target is not a directory", target)
            rename_noreplace(source, target)
            _sync_directory(target)
            _sync_directory(source)

    def replace(self, src: str, dst: str) -> None:
        source, target = _path(src), _path(dst)
        with _translated("replace", src, dst):
            if stat_bits.S_ISDIR(os.lstat(source).st_mode):
                raise StorageError(
                    f"{src} cannot replace {dst}",
                    got="a directory",
                    allowed="a file",
                    next_step="Use rename_new for directories.",
                )
            if os.path.isdir(target):
                raise FileExistsError(errno.EEXIST, "the target is a directory", target)
            os.replace(source, target)
            _sync_directory(target)
            _sync_directory(source)

    def list(self, url: str) -> Listing:
        with _translated("list", url), os.scandir(_path(url)) as entries:
            names = sorted(entry.name for entry in entries)
        found = (_entry(join(url, name), name) for name in names)
        return [entry for entry in found if entry is not None]

    def stat(self, url: str) -> FileStat:
        path = _path(url)
        with _translated("find", url):
            return _file_stat(url, os.path.basename(path.rstrip("/")), os.stat(path))

    def mkdirs(self, url: str, *, mode: int = 0o755) -> None:
        path = _path(url)
        with _translated("make", url):
            if os.path.isdir(path):
                return
            _make_parents(path)
            with suppress(FileExistsError):
                os.mkdir(path, mode)
            if not os.path.isdir(path):
                raise FileExistsError(errno.EEXIST, "a file has this name", path)
            _sync_directory(path)

    def delete(self, url: str, *, recursive: bool = False) -> bool:
        path = _path(url)
        with _translated("delete", url):
            try:
                is_dir = stat_bits.S_ISDIR(os.lstat(path).st_mode)
            except (FileNotFoundError, NotADirectoryError):
                return False
            try:
                if not is_dir:
                    os.unlink(path)
                elif recursive:
                    shutil.rmtree(path)
                else:
                    os.rmdir(path)
            except FileNotFoundError:
                return not os.path.lexists(path)
            _sync_directory(path)
        return True


class _LocalRanges:
    def __init__(self, url: str, descriptor: int) -> None:
        self._url, self._descriptor = url, descriptor
        self._close = weakref.finalize(self, os.close, descriptor)

    def read_at(self, offset: int, length: int) -> bytes:
        check_range(self._url, offset, length)
        with _translated("read", self._url):
            size = os.fstat(self._descriptor).st_size
            if offset + length > size:
                raise short_file(self._url, offset, length, size)
            pieces, got = [], 0
            while got < length and (piece := os.pread(self._descriptor, length - got, offset + got)):
                pieces.append(piece)
                got += len(piece)
        if got != length:
            raise short_file(self._url, offset, length, offset + got)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def read_into(self, offset: int, target: memoryview) -> None:
        length = len(target)
        check_range(self._url, offset, length)
        with _translated("read", self._url):
            got = 0
            while got < length and (more := os.preadv(self._descriptor, [target[got:]], offset + got)):
                got += more
        if got != length:
            raise short_file(self._url, offset, length, os.fstat(self._descriptor).st_size)

    def close(self) -> None:
        self._close()


class _LocalWriter(Writer):
    def __init__(self, url: str, path: str, descriptor: int) -> None:
        self._url, self._path = url, path
        self._file = os.fdopen(descriptor, "wb", buffering=1 << 20)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        with _translated("write", self._url):
            return self._file.write(data)

    def write_uncached(self, data: memoryview) -> int:
        with _translated("write", self._url):
            self._file.flush()
            done = write_uncached(self._file.fileno(), data)
            return done + self._file.write(data[done:])

    def sync(self) -> None:
        with _translated("sync", self._url):
            self._file.flush()
            os.fsync(self._file.fileno())
            _sync_directory(self._path)

    def close(self) -> None:
        with _translated("close", self._url):
            self._file.close()

    def abort(self) -> None:
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            os.unlink(self._path)


def _path(url: str) -> str:
    return split_url(url)[2].rstrip("/") or "/"  # no directory can be renamed to `name/`, which does not exist yet


def _entry(url: str, name: str) -> FileStat | None:
    """One entry of a listing, or None if it has disappeared. A link has the values of its target, if there is one."""
    path = _path(url)
    with _translated("find", url):
        try:
            own = os.lstat(path)
        except FileNotFoundError:
            return None
    there = own
    if stat_bits.S_ISLNK(own.st_mode):
        with suppress(OSError):  # a broken or circular link
            there = os.stat(path)
    plain = stat_bits.S_ISREG(own.st_mode) or stat_bits.S_ISDIR(own.st_mode)
    return replace(_file_stat(url, name, there), is_special=not plain)


def _file_stat(url: str, name: str, status: os.stat_result) -> FileStat:
    is_dir = stat_bits.S_ISDIR(status.st_mode)
    size = 0 if is_dir or stat_bits.S_ISLNK(status.st_mode) else status.st_size
    return FileStat(url, name, is_dir, size, status.st_mtime_ns // 1_000_000)


def _make_parents(path: str) -> None:
    folder = os.path.dirname(path.rstrip("/")) or "."
    try:
        os.makedirs(folder, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder) from error


def _sync_directory(path: str) -> None:
    descriptor = os.open(os.path.dirname(path.rstrip("/")) or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_regular(path: str, flags: int) -> int:
    # Opening a pipe would block and reading a device might never end: O_NONBLOCK lets us check first.
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat_bits.S_ISREG(mode) or stat_bits.S_ISDIR(mode):  # `open` itself refuses a directory
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "a pipe, socket or device")


@contextmanager
def _translated(verb: str, url: str, other: str | None = None) -> Iterator[None]:
    place = f"{url} to {other}" if other else url
    try:
        yield
    except (FileExistsError, IsADirectoryError) as error:
        if isinstance(error, IsADirectoryError) and verb in ("open", "read"):
            raise NotFoundError(
                f"cannot {verb} {place}", got="a directory", allowed="a file", next_step="Check the path."
            ) from error
        raise ExistsError(
            f"cannot {verb} {place}: the name is taken",
            got=error.strerror or str(error),
            allowed="a name that is free",
            next_step="Choose another name, or delete the existing one.",
        ) from error
    except NotADirectoryError as error:
        if verb in ("list", "create", "make") and (verb != "list" or os.path.isfile(_path(url))):
            raise StorageError(
                f"cannot {verb} {place}",
                got=error.strerror or str(error),
                allowed="directories",
                next_step="Check the path.",
            ) from error
        raise _missing(verb, place, error) from error
    except FileNotFoundError as error:
        raise _missing(verb, place, error) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(
                f"the disk is full: cannot {verb} {place}",
                got=error.strerror or str(error),
                allowed="room on that disk, and in this user's quota",
                next_step="Free space there (df, quota), then repeat the call.",
            ) from error
        kind = DeniedError if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else StorageError
        raise kind(
            f"cannot {verb} {place}",
            got=error.strerror or str(error),
            allowed="a readable file" if verb in ("open", "read") else "a disk that is writable and has room",
            next_step="Check the path, its permissions and the free space.",
        ) from error


def _missing(verb: str, place: str, error: OSError) -> NotFoundError:
    return NotFoundError(
        f"cannot {verb} {place}: not there",
        got=error.strerror or str(error),
        allowed="an existing path",
        next_step="Check the path.",
    )
