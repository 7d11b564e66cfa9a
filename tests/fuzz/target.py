"""What a fuzz target is: a function of bytes that must neither crash, hang nor take much memory, whatever they are.

A target checks more than that it comes back: two readers of the same bytes must agree, and records that were read must
all be accounted for. Where a checksum stands before what is read, the target puts it right first: else no input would
get past it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from lockstep.storage.errors import LockstepError


@dataclass(frozen=True, slots=True)
class Target:
    """One entrance: `run` takes any bytes, `seeds` are inputs that are as they should be."""

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    max_bytes: int = 4096


class Take:
    """Small choices out of the bytes of an input; 0 and nothing when they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def number(self, below: int) -> int:
        """A whole number from 0 up, below 65536 at most."""
        value = int.from_bytes(self.part(1 if below <= 256 else 2), "little")
        return value % below

    def part(self, count: int) -> bytes:
        """The next bytes, fewer at the end."""
        found = self._data[self._at : self._at + count]
        self._at += len(found)
        return found

    def rest(self) -> bytes:
        """All that is left."""
        return self.part(len(self._data))

    def __bool__(self) -> bool:
        return self._at < len(self._data)


@contextmanager
def refused() -> Iterator[None]:
    """Bytes may be refused by an error of ours, whose four parts can be told; any other error is a find."""
    try:
        yield
    except LockstepError as error:
        assert_told(error)


def verdict(read: Callable[[], object]) -> object:
    """What `read` gives, or the class of the error of ours that it raises."""
    try:
        return read()
    except LockstepError as error:
        assert_told(error)
        return type(error)


def assert_told(error: LockstepError) -> None:
    """Each of the four parts says something."""
    parts = {"what": error.what, "got": error.got, "allowed": error.allowed, "next_step": error.next_step}
    missing = [name for name, text in parts.items() if not text]
    assert not missing, f"{error} says nothing of {', '.join(missing)}"


def scratch(data: bytes, name: str = "input") -> str:
    """The path of a file that holds `data`; the next call with that name overwrites it."""
    path = os.path.join(_folder(), name)
    with open(path, "wb") as file:
        file.write(data)
    return path


@cache
def _folder() -> str:
    folder = tempfile.mkdtemp(prefix="lockstep-fuzz-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
