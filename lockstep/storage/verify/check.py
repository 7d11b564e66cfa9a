"""The findings of a verification with their place, and the digest check of one listed file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lockstep.storage.digest import Digest, HashedReader
from lockstep.storage.errors import ConfigError, CorruptionError, DataError, NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import walk
from lockstep.storage.publish import is_temporary
from lockstep.storage.urls import join


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault: file (relative to the verified directory), record number and byte offset if known, description."""

    path: str
    record: int | None
    offset: int | None
    what: str

    def __str__(self) -> str:
        place = self.path
        if self.record is not None:
            place += f", record {self.record}"
        if self.offset is not None:
            place += f", offset {self.offset}"
        return f"{place}: {self.what}"


class Check:
    """One verification: its root, its findings so far, its callbacks.

    `on_ok(path, text)` is called for each intact file, `on_bytes(n)` as bytes are read.
    """

    def __init__(
        self,
        fs: FileSystem,
        root: str,
        on_ok: Callable[[str, str], None],
        on_bytes: Callable[[int], None],
    ) -> None:
        self.fs, self.root = fs, root.rstrip("/") or "/"
        self.on_ok, self.on_bytes = on_ok, on_bytes
        self.findings: list[Finding] = []

    def url(self, path: str) -> str:
        """The URL of a path below the root."""
        return join(self.root, path)

    def bad(self, path: str, what: str, *, record: int | None = None, offset: int | None = None) -> None:
        """Note a fault."""
        self.findings.append(Finding(path, record, offset, what))

    def caught(self, path: str, error: ConfigError | DataError) -> None:
        """Note a fault that reading `path` raised."""
        if isinstance(error, NotFoundError):
            self.bad(path, "missing")
        elif isinstance(error, CorruptionError):
            what = error.what.removesuffix(f": {error.file}").split(f": {error.file}, ")[0]
            self.bad(path, what + _detail(error), record=error.record, offset=error.offset)
        else:
            self.bad(path, error.what + _detail(error))

    def special_files(self) -> bool:
        """Note every link, pipe, socket and device; nothing published holds any. Returns whether there are some."""
        before = len(self.findings)
        for entry in walk(self.fs, self.root, may_vanish=True):  # a run in progress moves its staging directories
            if entry.is_special:
                what = "a link, pipe, socket or device where only files and directories may be"
                self.bad(entry.url[len(self.root) :].lstrip("/"), what)
        return len(self.findings) > before

    def extra_files(self, expected: Iterable[str], below: str = "") -> None:
        """Note every file under `below` that is not one of `expected` (both relative to the root)."""
        wanted = set(expected)
        top = self.url(below) if below else self.root
        try:
            found = [entry.url[len(self.root) :].lstrip("/") for entry in walk(self.fs, top)]
        except NotFoundError:
            return
        for path in found:
            if path not in wanted:
                self.bad(path, "an extra file that no manifest lists")

    def names(self, path: str) -> list[str]:
        """The names in a directory; none if it does not exist."""
        try:
            return [entry.name for entry in self.fs.list(self.url(path))]
        except NotFoundError:
            return []

    def unexpected(self, path: str) -> None:
        """Note a file that does not belong there, unless it has the name of a file that a killed writer leaves."""
        name = path.rpartition("/")[2]
        if not (is_temporary(name) or name.endswith(".part")):
            self.bad(path, "an extra file that does not belong here")

    def file(self, path: str, size: int, sha256: str, *, crc32c: str | None = None) -> bool:
        """Read all of a listed file and compare length and digests; returns whether they match."""
        try:
            with self.fs.open_read(self.url(path)) as file:
                hashed = HashedReader(file, self.on_bytes)
                if self.too_long(path, size):
                    return False
                hashed.drain()
        except (NotFoundError, CorruptionError) as error:
            self.caught(path, error)
            return False
        return self.compare(path, hashed.digest, size, sha256, crc32c=crc32c)

    def too_long(self, path: str, size: int) -> bool:
        """Note a listed file that is longer than `size`, before it is read: a sparse TiB would take hours."""
        actual = self.fs.stat(self.url(path)).size_bytes
        if actual > size:
            self._wrong_length(path, actual, size)
        return actual > size

    def _wrong_length(self, path: str, actual: int, size: int) -> None:
        kind = "cut short" if actual < size else "longer than listed"
        self.bad(path, f"{kind}: {actual} bytes instead of {size}", offset=min(actual, size))

    def compare(
        self,
        path: str,
        found: Digest,
        size: int,
        sha256: str,
        *,
        crc32c: str | None = None,
        silent: bool = False,
    ) -> bool:
        """Compare the bytes read with the manifest; `silent` if a more precise finding was noted already."""
        if found.bytes != size:
            self._wrong_length(path, found.bytes, size)
            return False
        if found.sha256 != sha256:
            if not silent:
                self.bad(path, f"changed: sha256 is {found.sha256}, listed is {sha256}")
            return False
        if crc32c is not None and found.crc32c != crc32c:
            self.bad(path, f"crc32c is {found.crc32c}, the manifest says {crc32c}")
            return False
        return True


def _detail(error: ConfigError | DataError) -> str:
    parts = [text for text in (error.got and f"got {error.got}", error.allowed and f"allowed {error.allowed}") if text]
    return f" ({', '.join(parts)})" if parts else ""
