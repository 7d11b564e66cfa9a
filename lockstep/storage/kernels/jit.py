"""Compiled kernels, cached for each machine: a Spark worker finds what another one has compiled.

Numba's own cache looks for code by the path of its source file. Executors import the rooms from a zip whose folder has
another name in every session, so there it would never find anything; and it does not see that a function of another
file, compiled into this one, has changed. Here the key is the SHA-256 of the names and sources of all modules that the
code is made of.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, ClassVar

from numba import njit
from numba.core.caching import CompileResultCacheImpl, FunctionCache

log = logging.getLogger(__name__)


def kernels(module: str, *used: ModuleType) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for the kernels of `module` (its __name__), which call functions of the modules `used`.

    A kernel is compiled at its first call, without the GIL, and kept in cache_folder(). Integers wrap around.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = njit(nogil=True, boundscheck=False)(function)
        if cache_folder() is not None:
            _Place.used[module] = used
            compiled._cache = _Cache(function)
        return compiled

    return decorate


@cache
def cache_folder() -> str | None:
    """The folder of compiled kernels: NUMBA_CACHE_DIR, else the user's cache, else one for the user in the temporary
    folder. None unless one of them can be written by this user and by no other: its content is executed.
    """
    user = os.getuid()
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    places = [os.environ.get("NUMBA_CACHE_DIR"), os.path.join(home, "lockstep")]
    places.append(os.path.join(tempfile.gettempdir(), f"lockstep-{user}"))
    for place in filter(None, places):
        try:
            os.makedirs(place, mode=0o700, exist_ok=True)
            found = os.lstat(place)
        except OSError:
            continue
        ours = stat.S_ISDIR(found.st_mode) and found.st_uid == user
        if ours and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and os.access(place, os.W_OK | os.X_OK):
            return place
    log.warning("no folder for compiled kernels among %s: each process compiles its own", places)
    return None


class _Place:
    """Numba's locator for one function: which folder, and what the code was made of."""

    used: ClassVar[dict[str, tuple[ModuleType, ...]]] = {}

    def __init__(self, function: Callable[..., Any]) -> None:
        self._py_file = function.__code__.co_filename  # Numba names it in its warnings
        self._name, self._line = function.__module__, function.__code__.co_firstlineno

    @classmethod
    def from_function(cls, function: Callable[..., Any], _file: str) -> _Place:
        return cls(function)

    def get_cache_path(self) -> str:
        folder = cache_folder()
        assert folder is not None
        return os.path.join(folder, f"kernels-{self.get_source_stamp()[:16]}")

    def ensure_cache_path(self) -> None:
        os.makedirs(self.get_cache_path(), mode=0o700, exist_ok=True)

    def get_source_stamp(self) -> str:
        digest = hashlib.sha256()
        for module in (sys.modules[self._name], *self.used[self._name]):
            digest.update(f"{module.__name__}\n".encode() + _source(module))  # the code refers to modules by name
        return digest.hexdigest()

    def get_disambiguator(self) -> str:
        return str(self._line)


@cache
def _source(module: ModuleType) -> bytes:
    loader: Any = module.__loader__
    assert module.__file__ is not None
    return bytes(loader.get_data(module.__file__))  # the loader, since the file may be in a zip


class _Impl(CompileResultCacheImpl):
    _locator_classes: ClassVar[list[type]] = [_Place]


class _Cache(FunctionCache):
    _impl_class = _Impl
