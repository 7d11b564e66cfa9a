"""A user's own modules: the folder of the call, or that of --code, importable here and on Spark's executors.

The folder is the last one on the import path, so it hides no module of Lockstep, Python or an installed package.
Executors get a zip of the Python files that this process would import from it.
"""

from __future__ import annotations

import importlib.machinery
import logging
import os
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lockstep.process.installed import ROOMS, ROOT, is_linked
from lockstep.storage.errors import ConfigError

log = logging.getLogger(__name__)

MOST_FILES = 2_000
MOST_BYTES = 32 << 20
MOST_ENTRIES = 50_000  # that are looked at: the folder of a call may be a home with all its data
NO_CODE = ("__pycache__", "node_modules", "site-packages")


@dataclass(frozen=True, slots=True)
class CodeFolder:
    """A folder of a user's own modules."""

    path: Path
    asked: bool
    """Whether the user named it; else it is the folder of the call, which may hold anything."""

    @classmethod
    def of_call(cls, asked: str | None) -> Self | None:
        """The folder that `--code` names, else the current one; None for a driver in a container of a cluster, whose
        current folder is not the user's. Raises ConfigError if there is no such folder.
        """
        if asked is None:
            return None if ROOT.is_file() else cls(Path.cwd(), False)
        if not Path(asked).is_dir():
            raise ConfigError(
                "--code names no folder",
                got=asked,
                allowed="a folder of Python modules and packages on this host",
                next_step="Correct --code; without it the current folder is used.",
            )
        return cls(Path(asked).absolute(), True)

    @classmethod
    def of_script(cls, first: str) -> Self | None:
        """The folder of a script or notebook, which is `first` on its import path; None if that is no folder."""
        path = Path(first or os.getcwd()).absolute()
        return cls(path, False) if path.is_dir() else None

    def use(self) -> None:
        """Put the folder last on this process' import path, which ranks on this host inherit."""
        if str(self.path) not in sys.path:
            sys.path.append(str(self.path))

    def modules(self) -> list[str]:
        """The names of the modules and packages that this process imports from the folder, sorted."""
        names = {entry.name.removesuffix(".py") for entry in _entries(self.path)}
        return sorted(name for name in names if name.isidentifier() and self._has(name))

    def _has(self, name: str) -> bool:
        if name in ROOMS or name in sys.stdlib_module_names or is_linked(self.path / name):
            return False
        spec = importlib.machinery.PathFinder.find_spec(name)
        places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
        return any(place is not None and Path(place).parent == self.path for place in places)

    def pack(self, target: str) -> bool:
        """Zip the Python files of `modules` into `target`; equal files make equal bytes. Returns whether there are any.

        Raises ConfigError for a named folder with too much in it; the folder of a call is then left out, which a
        warning says.
        """
        try:
            files = list(_python_files(self.path, self.modules()))
        except _TooMuchError as error:
            if self.asked:
                raise ConfigError(
                    f"--code {self.path} holds more than can be sent to executors",
                    got=str(error),
                    allowed=f"up to {MOST_FILES} Python files of {MOST_BYTES >> 20} MiB together",
                    next_step="Name the folder that holds only your modules.",
                ) from None
            log.warning("%s is not sent to executors: %s; name a folder of modules with --code", self.path, error)
            return False
        names = [path.relative_to(self.path) for path in files]
        folders = {folder for name in names for folder in name.parents if folder.name}
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for folder in sorted(folders):  # without an entry, Python 3.11 finds no package that has no __init__.py
                archive.writestr(zipfile.ZipInfo(f"{folder.as_posix()}/"), b"")
            for name in names:
                entry = zipfile.ZipInfo(name.as_posix())  # of the year 1980
                archive.writestr(entry, (self.path / name).read_bytes(), zipfile.ZIP_DEFLATED)
        return bool(files)


class _TooMuchError(Exception):
    """A folder that is too large to be sent."""


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """The Python files and folders directly in `folder` that may be code, by name; none of a folder out of reach."""
    try:
        found = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return []
    return [entry for entry in found if not entry.name.startswith(".") and _may_be_code(entry)]


def _may_be_code(entry: os.DirEntry[str]) -> bool:
    if not entry.is_dir():
        return entry.name.endswith(".py")
    return entry.name not in NO_CODE and not os.path.exists(f"{entry.path}/pyvenv.cfg")


def _python_files(folder: Path, modules: list[str]) -> Iterator[Path]:
    """The Python files of these modules of a folder. Raises _TooMuchError."""
    todo = [entry for entry in _entries(folder) if entry.name.removesuffix(".py") in modules]
    looked_at = files = size = 0
    while todo:
        entry = todo.pop(0)
        looked_at += 1
        if entry.is_dir(follow_symlinks=Path(entry.path).parent == folder):  # no endless way through links
            todo += _entries(Path(entry.path))
        elif entry.is_file():
            files, size = files + 1, size + entry.stat().st_size
            yield Path(entry.path)
        if files > MOST_FILES or size > MOST_BYTES or looked_at > MOST_ENTRIES:
            raise _TooMuchError(f"{files} Python files of {size >> 20} MiB among {looked_at} entries, and more")


def imported_here(launcher: str) -> bool:
    """Whether ranks import modules that this process has too: under spark-submit, executors may have more of them."""
    return launcher == "local" or "PYSPARK_GATEWAY_PORT" not in os.environ
