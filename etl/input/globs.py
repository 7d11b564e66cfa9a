"""Patterns in input URLs, such as `logs/2015-*/*.gz`: expanded by our own listing, so HDFS has them too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import translate

from lockstep.storage.errors import DataError, NotFoundError
from lockstep.storage.files.interface import FileStat, FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import join, split_url

_WILD = re.compile(r"[*?\[]")


def is_hidden(name: str) -> bool:
    """Whether a name is nobody's data: Spark's and our own side files, and half-written files of `hdfs dfs -put`."""
    return name.startswith(("_", ".")) or name.endswith("._COPYING_")


def is_pattern(url: str) -> bool:
    """Whether a URL holds a wildcard: `*`, `?` or `[...]`, each within one part of the path."""
    return _WILD.search(split_url(url)[2]) is not None


def expand(url: str) -> list[str]:
    """The files and directories that a pattern names, in order of their names; hidden ones only where it asks for them.

    Raises NotFoundError where there is none.
    """
    path = split_url(url)[2]
    fs = filesystem(url)
    root = url[: len(url) - len(path)]
    parts = [part for part in path.split("/") if part]
    base, parts = _fixed_part(root + ("/" if path.startswith("/") else ""), parts)
    found = [base] if fs.exists(base) and fs.stat(base).is_dir else []
    for number, part in enumerate(parts):
        found = [entry for folder in found for entry in _matches(fs, folder, part, last=number == len(parts) - 1)]
    if not found:
        raise NotFoundError(
            f"input {url} names no file",
            got="a pattern that nothing fits",
            allowed="a pattern that fits a file or more; `*` and `?` never fit a `/`",
            next_step="Check --input; quote the pattern, so that the shell leaves it as it is.",
        )
    return [entry.removeprefix("./") for entry in found]


def visible_files(fs: FileSystem, url: str) -> Iterator[FileStat]:
    """The files below a directory, depth first, sorted by name in each directory, without what is hidden.

    Raises DataError for a link to a directory, which may lead elsewhere or in a circle.
    """
    pending = [entry for entry in fs.list(url) if not is_hidden(entry.name)][::-1]
    while pending:
        entry = pending.pop()
        if entry.is_dir and entry.is_special:
            raise DataError(
                f"input {entry.url} is a link to a folder",
                got="a link",
                allowed="files, links to files and folders",
                next_step="Take the link out, or give --input the folder that it leads to.",
            )
        if entry.is_dir:
            pending += [below for below in fs.list(entry.url) if not is_hidden(below.name)][::-1]
        else:
            yield entry


def _fixed_part(root: str, parts: list[str]) -> tuple[str, list[str]]:
    """The directory in front of the first wildcard, and the parts from there on."""
    while parts and _WILD.search(parts[0]) is None:
        root, parts = (join(root, parts[0]) if root else parts[0]), parts[1:]
    return root or ".", parts


def _matches(fs: FileSystem, folder: str, part: str, *, last: bool) -> list[str]:
    if _WILD.search(part) is None:
        return [url for url in [join(folder, part)] if fs.exists(url)]
    fits = re.compile(translate(part))
    hidden = part.startswith(("_", "."))
    return [
        entry.url
        for entry in fs.list(folder)
        if fits.fullmatch(entry.name) and (hidden or not is_hidden(entry.name)) and (last or entry.is_dir)
    ]
