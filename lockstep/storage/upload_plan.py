"""What an upload has to do: local files, their targets, and what lies at the targets already."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.storage.errors import ConfigError, ExistsError, NotFoundError
from lockstep.storage.files.interface import FileStat, FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import absolute, basename, join, parent, split_url

_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.upload", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Item:
    """One file: its local path, the URL it shall have, its length in bytes."""

    path: str
    url: str
    size_bytes: int


@dataclass(slots=True)
class Survey:
    """The items by what lies at their targets: nothing, a file of equal length, a file of another one.

    `left_over` are temporary files that earlier uploads of these very items have left.
    """

    missing: list[Item] = field(default_factory=list)
    equal_length: list[Item] = field(default_factory=list)
    other_length: list[Item] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)


def temporary_name(url: str, nonce: str) -> str:
    """The hidden sibling under which a file is sent; `nonce` is 16 hex digits."""
    return join(parent(url), f".{basename(url)}.{nonce}.upload")


def find_files(inputs: Sequence[str], output: str) -> list[Item]:
    """The local files in order: a file goes to OUTPUT/ITS NAME, a folder's content to OUTPUT/PATH IN THE FOLDER.

    Raises NotFoundError for what is missing; ConfigError for an input that is not local, a link, pipe or device in a
    folder, a name that HDFS does not take, two files with one target.
    """
    items: dict[str, Item] = {}
    for given in inputs:
        if split_url(given)[0] != "file":
            raise ConfigError(
                f"--input {given} is not local",
                got=given,
                allowed="files and folders of this machine",
                next_step="jobs.etl_* read hdfs:// and webhdfs:// themselves; for a copy use `hadoop distcp`.",
            )
        source = absolute(given)
        fs = filesystem(source)
        status = fs.stat(source)
        files = _below(fs, source) if status.is_dir else [(basename(source), status)]
        for relative, file in files:
            item = Item(split_url(file.url)[2], join(output, relative), file.size_bytes)
            _check_name(relative, item.path)
            if item.url in items:
                raise ConfigError(
                    f"two files would become {item.url}",
                    got=f"{items[item.url].path} and {item.path}",
                    allowed="a target for each file",
                    next_step="Upload them to different outputs.",
                )
            items[item.url] = item
    if not items:
        raise NotFoundError(
            "there is nothing to upload",
            got="folders without files",
            allowed="a file or more",
            next_step="Check --input.",
        )
    return list(items.values())


def survey(fs: FileSystem, items: Sequence[Item], output: str) -> Survey:
    """Look at all targets, one listing a directory. Raises ExistsError where a directory lies at a file's target."""
    found, folders, wanted = Survey(), dict[str, dict[str, FileStat]](), dict[str, set[str]]()
    if fs.exists(output) and not fs.stat(output).is_dir:
        raise ExistsError(
            f"{output} is a file",
            got="a file",
            allowed="a directory, or a name that is free: files are put below it",
            next_step="Correct --output.",
        )
    for item in items:
        above, name = parent(item.url), basename(item.url)
        if above not in folders:
            folders[above], wanted[above] = _listing(fs, above), set()
        wanted[above].add(name)
        there = folders[above].get(name)
        if there is None:
            found.missing.append(item)
        elif there.is_dir:
            raise ExistsError(
                f"{item.url} is a directory, {item.path} is a file",
                got="a directory",
                allowed="a file, or a name that is free",
                next_step="Correct --output.",
            )
        else:
            (found.equal_length if there.size_bytes == item.size_bytes else found.other_length).append(item)
    for above, entries in folders.items():
        for entry in entries.values():
            matched = _TEMPORARY.fullmatch(entry.name)
            if matched is not None and matched["name"] in wanted[above] and not entry.is_dir:
                found.left_over.append(entry.url)
    return found


def _below(fs: FileSystem, folder: str) -> list[tuple[str, FileStat]]:
    found, pending = list[tuple[str, FileStat]](), [("", folder)]
    while pending:
        prefix, url = pending.pop()
        for entry in fs.list(url):
            relative = prefix + entry.name
            if entry.is_special:
                raise ConfigError(
                    f"{entry.url} is a symbolic link, pipe, socket or device",
                    got="no plain file",
                    allowed="files and directories",
                    next_step="Give what it leads to as an --input of its own, or take it out.",
                )
            if entry.is_dir:
                pending.append((relative + "/", entry.url))
            else:
                found.append((relative, entry))
    return sorted(found, key=lambda pair: pair[0])


def _check_name(relative: str, path: str) -> None:
    encodable = not any("\ud800" <= character <= "\udfff" for character in relative)
    if ":" in relative or not encodable or _TEMPORARY.fullmatch(basename("/" + relative)):
        raise ConfigError(
            f"{path!r} cannot have this name on HDFS",
            got=repr(relative),
            allowed="UTF-8 without colons, and not the form .NAME.16HEXDIGITS.upload, which uploads take for their own",
            next_step="Rename the file.",
        )


def _listing(fs: FileSystem, url: str) -> dict[str, FileStat]:
    try:
        return {entry.name: entry for entry in fs.list(url)}
    except NotFoundError:
        return {}
