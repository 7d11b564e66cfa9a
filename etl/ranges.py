"""The plan of reading: input files cut into (file, start, length) ranges, from names and sizes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from storage.errors import DataError, NotFoundError
from storage.fs import absolute, basename, filesystem, walk

GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Source:
    """One input file: its URL, size in bytes on disk, and codec (gzip or none)."""

    url: str
    size_bytes: int
    codec: str


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes of one file for one task; `start` and `length` count bytes on disk, a gzip file is one range."""

    source_index: int
    url: str
    start: int
    length: int
    codec: str


def find_sources(urls: Sequence[str]) -> list[Source]:
    """The input files, in the order given; directories are walked in order of names.

    Raises NotFoundError for a missing path and for a directory without files, DataError for an empty file.
    """
    sources = []
    for url in urls:
        fs = filesystem(url)
        try:
            status = fs.stat(url)
        except NotFoundError:
            raise NotFoundError(
                f"input {url} does not exist",
                got="nothing there",
                allowed="a file or directory",
                next_step="Check --input.",
            ) from None
        files = [file for file in walk(fs, url) if not file.name.startswith(("_", "."))] if status.is_dir else [status]
        if not files:
            raise NotFoundError(
                f"input {url} holds no file",
                got="an empty directory",
                allowed="a file or more",
                next_step="Check --input.",
            )
        for file in files:
            if file.size_bytes == 0:
                raise DataError(
                    f"input {file.url} is empty",
                    got="0 bytes",
                    allowed="content",
                    next_step="Take the file out or fetch it again.",
                )
            magic = fs.read_range(file.url, 0, min(2, file.size_bytes))
            sources.append(Source(file.url, file.size_bytes, "gzip" if magic == GZIP_MAGIC else "none"))
    return sources


def plan_ranges(sources: Sequence[Source], split_bytes: int) -> list[Range]:
    """Cut plain files at each `split_bytes` bytes; a gzip file, which can only be read from its start, stays whole."""
    ranges = []
    for index, source in enumerate(sources):
        step = source.size_bytes if source.codec == "gzip" else split_bytes
        for start in range(0, source.size_bytes, step):
            ranges.append(Range(index, absolute(source.url), start, min(step, source.size_bytes - start), source.codec))
    return ranges


def source_name(url: str) -> str:
    """A file's name without `.gz`: what stays when files move or are packed."""
    return basename(url).removesuffix(".gz")
