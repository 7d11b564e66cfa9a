"""The plan of reading: input files cut into (file, start, length) ranges, from names and sizes alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from etl.input.globs import expand, is_pattern, visible_files
from etl.input.unpack import MAGIC_BYTES, PLAIN, SUFFIXES, codec_of, foreign_codec
from lockstep.storage.errors import ConfigError, DataError, NotFoundError
from lockstep.storage.files.interface import FileStat
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import absolute, basename, split_url

DEFAULT_SPLIT_BYTES = 64 << 20
HEAD_BYTES = 4 << 10


@dataclass(frozen=True, slots=True)
class Source:
    """One input file: its URL, size in bytes on disk, and codec (gzip, bzip2, zstd or none)."""

    url: str
    size_bytes: int
    codec: str


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes of one file; `start` and `length` count bytes on disk, a packed file is one range. `whole` says that they
    are all that the file has.
    """

    source_index: int
    url: str
    start: int
    length: int
    codec: str
    whole: bool = False


def find_sources(urls: Sequence[str], check: Callable[[Source, bytes], None] | None = None) -> list[Source]:
    """The input files, in the order given; directories and patterns give theirs in order of names. `check` is called
    with each file and its first HEAD_BYTES.

    Raises NotFoundError for a missing path, for a directory without files and for a pattern that nothing fits,
    DataError for an empty file and one of another packer, ConfigError for a file that is named twice.
    """
    sources: list[Source] = []
    seen: dict[str, str] = {}
    for url in urls:
        # A name that holds a wildcard and is there as it stands is meant.
        for named in expand(url) if is_pattern(url) and not filesystem(url).exists(url) else [url]:
            for file in _files(named):
                place = _place(file.url)
                if place in seen:
                    raise ConfigError(
                        f"input {file.url} is there twice",
                        got=f"named by {seen[place]} and by {url}",
                        allowed="each file once",
                        next_step="Take one of them out of --input.",
                    )
                seen[place] = url
                sources.append(_source(file, check))
    return sources


def plan_ranges(sources: Sequence[Source], split_bytes: int, *, whole: bool = False) -> list[Range]:
    """Cut plain files at each `split_bytes` bytes; a packed file, which can only be read from its start, stays whole,
    and so does every file where `whole` is asked for.
    """
    ranges = []
    for index, source in enumerate(sources):
        step = source.size_bytes if whole or source.codec != PLAIN else split_bytes
        for start in range(0, source.size_bytes, step):
            length = min(step, source.size_bytes - start)
            whole = length == source.size_bytes
            ranges.append(Range(index, absolute(source.url), start, length, source.codec, whole))
    return ranges


def source_name(url: str) -> str:
    """A file's name without `.gz`, `.bz2` or `.zst`: what stays when files move or are packed."""
    name = basename(url)
    suffix = next((suffix for suffix in SUFFIXES.values() if name.endswith(suffix)), "")
    return name.removesuffix(suffix)


def _files(url: str) -> list[FileStat]:
    fs = filesystem(url)
    try:
        status = fs.stat(url)
    except NotFoundError:
        raise NotFoundError(
            f"input {url} does not exist",
            got="nothing there",
            allowed="a file, a directory or a pattern such as 'logs/2015-*.gz'",
            next_step="Check --input.",
        ) from None
    files = list(visible_files(fs, url)) if status.is_dir else [status]
    if not files:
        raise NotFoundError(
            f"input {url} holds no file",
            got="an empty directory",
            allowed="a file or more",
            next_step="Check --input.",
        )
    return files


def _source(file: FileStat, check: Callable[[Source, bytes], None] | None) -> Source:
    if file.size_bytes == 0:
        raise DataError(
            f"input {file.url} is empty",
            got="0 bytes",
            allowed="content",
            next_step="Take the file out or fetch it again.",
        )
    head = filesystem(file.url).read_range(file.url, 0, min(HEAD_BYTES if check else MAGIC_BYTES, file.size_bytes))
    foreign = foreign_codec(head)
    if foreign is not None:
        raise DataError(
            f"input {file.url} is packed in a way that is not read",
            got=foreign,
            allowed="plain files, gzip, bzip2 and zstd",
            next_step="Unpack it, or pack it anew by one of these.",
        )
    source = Source(file.url, file.size_bytes, codec_of(head))
    if check is not None:
        check(source, head)
    return source


def _place(url: str) -> str:
    """The same text for every way of writing one file's URL; a local link counts as what it leads to."""
    scheme, authority, path = split_url(url)
    if scheme == "file":
        return os.path.realpath(path)
    return f"{scheme}://{authority}{os.path.normpath(path)}"
