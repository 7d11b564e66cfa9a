"""Input files: found by patterns, cut into ranges of bytes, and their SHA-256, computed in tasks."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO

import google_crc32c
import pyarrow as pa

from lockstep.etl.input.unpack import MAGIC_BYTES, PLAIN, SUFFIXES, ZIP, codec_of, foreign_codec, unpacked
from lockstep.etl.spark.session import job_description
from lockstep.etl.spark.tasks import Items, over_slices
from lockstep.storage.dataset.manifest_entries import SourceInfo
from lockstep.storage.errors import ConfigError, DataError, NotFoundError
from lockstep.storage.files.interface import FileStat, FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import absolute, basename, join, split_url

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_WILD = re.compile(r"[*?\[]")
DEFAULT_SPLIT_BYTES = 64 << 20
HEAD_BYTES = 4 << 10
MAX_NAMED = 20  # files in a warning
_READ_BYTES = 4 << 20
DIGEST = pa.schema(
    [
        ("number", pa.int32()),
        ("bytes", pa.int64()),
        ("sha256", pa.string()),
        ("content_bytes", pa.int64()),
        ("content_crc32c", pa.string()),
    ]
)
BOM = b"\xef\xbb\xbf"
LOOK_BYTES = 1 << 20
PACKED_BYTES = 512  # of content, which a packed file's first bytes nearly always hold
_BOMS = {  # the longer ones first, since UTF-32's begins with UTF-16's
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_PRINTS = {PLAIN: "cat", "gzip": "zcat", "bzip2": "bzcat", "zstd": "zstdcat"}


def is_hidden(name: str) -> bool:
    """Whether a name is not data: side files of Spark and ours, and half-written files of `hdfs dfs -put`."""
    return name.startswith(("_", ".")) or name.endswith("._COPYING_")


def is_pattern(url: str) -> bool:
    """Whether a URL holds a wildcard: `*`, `?` or `[...]`, each within one part of the path."""
    return _WILD.search(split_url(url)[2]) is not None


def expand(url: str) -> list[str]:
    """The files and directories that match a pattern, sorted by name; hidden ones only if the pattern names them.

    Raises NotFoundError if there is none.
    """
    fs = filesystem(url)
    base, parts = fixed_part(url)
    found = [base] if fs.exists(base) and fs.stat(base).is_dir else []
    for number, part in enumerate(parts):
        found = [entry for folder in found for entry in _matches(fs, folder, part, last=number == len(parts) - 1)]
    if not found:
        raise NotFoundError(
            f"input {url} names no file",
            got="a pattern that matches nothing",
            allowed="a pattern that matches one file or more; `*` and `?` never match a `/`",
            next_step="Check --input; quote the pattern, so that the shell does not expand it.",
        )
    return [entry.removeprefix("./") for entry in found]


def visible_files(fs: FileSystem, url: str) -> Iterator[FileStat]:
    """The visible files below a directory, depth first, sorted by name in each directory.

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
                next_step="Remove the link, or give --input the folder that it leads to.",
            )
        if entry.is_dir:
            pending += [below for below in fs.list(entry.url) if not is_hidden(below.name)][::-1]
        else:
            yield entry


def fixed_part(url: str) -> tuple[str, list[str]]:
    """The directory in front of the first wildcard of a pattern, and the parts from there on."""
    path = split_url(url)[2]
    root = url[: len(url) - len(path)] + ("/" if path.startswith("/") else "")
    parts = [part for part in path.split("/") if part]
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


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """One input file: its URL, size in bytes on disk, codec (gzip, bzip2, zstd or none), and its path below what
    --input names, without a codec's suffix: records without an id of their own are known by it.
    """

    url: str
    size_bytes: int
    codec: str
    path: str = ""


@dataclass(frozen=True, slots=True)
class Range:
    """A range of one file; `start` and `length` count bytes on disk, a packed file is one range. `whole` means that the
    range is all of the file.
    """

    source_index: int
    url: str
    start: int
    length: int
    codec: str
    whole: bool = False


def find_sources(
    urls: Sequence[str],
    check: Callable[[Source, bytes], bool] | None = None,
    root: str | None = None,
    *,
    zips: bool = False,
    known: Callable[[FileStat], bool] | None = None,
) -> list[Source]:
    """The input files in the order given; those of a directory or pattern are sorted by name. `check` is called with
    each file and its first HEAD_BYTES, and says whether it holds anything: files that do not are skipped, with a
    warning. Paths are below `root`, by default below the directory, the fixed part of the
    pattern, or the directory of the file that is given. `zips` takes zip archives as they are. Files that are `known`
    are left out unopened; with it, no file may be left.

    Raises NotFoundError for a missing path, a directory without files and a pattern without a match, DataError for an
    empty file without a `check`, for only such files, and for an unknown compression, ConfigError for a file that is
    named twice or is not below `root`.
    """
    sources: list[Source] = []
    empty: list[Source] = []
    seen: dict[str, str] = {}
    for url in urls:
        # If a file has exactly this name, wildcards are part of the name.
        pattern = is_pattern(url) and not filesystem(url).exists(url)
        base = root or (fixed_part(url)[0] if pattern else url)
        for named in expand(url) if pattern else [url]:
            for file in _files(named):
                place = place_of(file.url)
                if place in seen:
                    raise ConfigError(
                        f"input {file.url} is given twice",
                        got=f"named by {seen[place]} and by {url}",
                        allowed="each file once",
                        next_step="Remove one of them from --input.",
                    )
                seen[place] = url
                if known is not None and known(file):
                    continue
                source, holds = _source(file, path_below(file.url, base), check, zips)
                (sources if holds else empty).append(source)
    if empty:
        _tell_empty([source.url for source in empty], others=len(sources) > 0 or known is not None)
    return sources


def _tell_empty(urls: Sequence[str], *, others: bool) -> None:
    """Warn of files that hold nothing; raises DataError if there are no `others`."""
    named = ", ".join(urls[:MAX_NAMED]) + (f" and {len(urls) - MAX_NAMED} more" if len(urls) > MAX_NAMED else "")
    if others:
        log.warning("input: skipped, since nothing is in it, or only a header or blank lines: %s", named)
        return
    raise DataError(
        f"the input is empty: {named}",
        got="no line but a header or blank ones" if len(urls) == 1 else f"{len(urls)} files, none with a line",
        allowed="a line or more",
        next_step="Check --input, or run again when the files hold something.",
    )


def path_below(url: str, base: str) -> str:
    """The path of a file below `base`, without the suffix of a codec; its name if `base` is the file.

    Raises ConfigError if it is elsewhere.
    """
    return "/".join([*parts_below(url, base)[:-1], source_name(url)])


def parts_below(url: str, base: str) -> list[str]:
    """The parts of the path of a file or folder below `base`. Raises ConfigError if it is elsewhere."""
    whole, above = _parts(url), _parts(base)
    if whole[: len(above)] != above:
        raise ConfigError(
            f"input {url} is not below {base}",
            got=url,
            allowed=f"files below --input-root {base}",
            next_step="Give --input-root a folder that is above all inputs, or give other inputs.",
        )
    return whole[len(above) :]


def _parts(url: str) -> list[str]:
    """Return the parts of a URL, the same for all spellings of it."""
    scheme, authority, path = split_url(absolute(url))
    return [scheme, authority, *(part for part in os.path.normpath(path).split("/") if part)]


def plan_ranges(sources: Sequence[Source], split_bytes: int, *, whole: bool = False) -> list[Range]:
    """Cut plain files every `split_bytes` bytes. A packed file, which can only be read from its start, is one range;
    with `whole` every file is.
    """
    ranges = []
    for index, source in enumerate(sources):
        step = source.size_bytes if whole or source.codec != PLAIN else split_bytes
        for start in range(0, source.size_bytes, step):
            length = min(step, source.size_bytes - start)
            alone = length == source.size_bytes
            ranges.append(Range(index, absolute(source.url), start, length, source.codec, alone))
    return ranges


def source_name(url: str) -> str:
    """A file's name without `.gz`, `.bz2` or `.zst`: it is the same after the file was moved or packed."""
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


def _source(
    file: FileStat, path: str, check: Callable[[Source, bytes], bool] | None, zips: bool
) -> tuple[Source, bool]:
    """The source, and whether it holds anything."""
    if file.size_bytes == 0 and check is not None:
        return Source(file.url, 0, PLAIN, path), False
    if file.size_bytes == 0:
        raise DataError(
            f"input {file.url} is empty",
            got="0 bytes",
            allowed="content",
            next_step="Remove the file or fetch it again.",
        )
    head = filesystem(file.url).read_range(file.url, 0, min(HEAD_BYTES if check else MAGIC_BYTES, file.size_bytes))
    foreign = foreign_codec(head)
    if foreign is not None and not (zips and foreign == ZIP):
        raise DataError(
            f"input {file.url} has a compression that is not supported",
            got=foreign,
            allowed="plain files, gzip, bzip2 and zstd",
            next_step="Unpack it, or compress it with one of these.",
        )
    source = Source(file.url, file.size_bytes, codec_of(head), path)
    return source, check is None or check(source, head)


def place_of(url: str) -> str:
    """One text for all spellings of a file's URL; a local link counts as its target."""
    scheme, authority, path = split_url(url)
    if scheme == "file":
        return os.path.realpath(path)
    return f"{scheme}://{authority}{os.path.normpath(path)}"


def _digests(items: Items) -> Iterator[pa.RecordBatch]:
    """Rows of DIGEST for files given by number, URL and planned bytes."""
    yield pa.RecordBatch.from_pylist([digest_of(**item) for item in items], schema=DIGEST)


def digest_sources(
    spark: SparkSession, sources: Sequence[Source], known: Sequence[Mapping[str, Any]] = (), *, paths: bool = False
) -> tuple[SourceInfo, ...]:
    """Length and SHA-256 of each input file, in order; with `paths` also its path, which the ids of its records hold.

    Files that are not `known` (rows of DIGEST) are read a second time: the digest of a file does not follow from those
    of its ranges.
    """
    numbers = sorted(set(range(len(sources))) - {row["number"] for row in known})
    found = list(known)
    if numbers:
        sizes = [sources[number].size_bytes for number in numbers]
        items = [
            {"number": number, "url": absolute(one.url), "planned_bytes": one.size_bytes, "codec": one.codec}
            for number, one in ((number, sources[number]) for number in numbers)
        ]
        with job_description(spark, "SHA-256 of the input files"):
            rows = over_slices(spark, items, sizes, DEFAULT_SPLIT_BYTES, _digests, DIGEST).collect()
        found += [row.asDict() for row in rows]
    return infos_of(sources, found, paths=paths)


def infos_of(
    sources: Sequence[Source], found: Sequence[Mapping[str, Any]], *, paths: bool = False
) -> tuple[SourceInfo, ...]:
    """The manifest's entries for the sources, from rows of DIGEST in any order."""
    values = sorted((dict(row) for row in found), key=lambda row: row["number"])
    named = [(sources[row.pop("number")], row) for row in values]
    return tuple(SourceInfo(url=source.url, path=source.path if paths else None, **row) for source, row in named)


def digest_of(number: int, url: str, planned_bytes: int, codec: str = PLAIN) -> dict[str, object]:
    """A row of DIGEST for one file; of a packed one it says nothing of the content. Raises DataError if the file does
    not have the planned length.
    """
    with filesystem(url).open_read(url) as file, HashedFile(file) as hashed:
        row = {"number": number, "bytes": planned_bytes, "sha256": hashed.whole(url, planned_bytes)}
    return row | (hashed.content.row if codec == PLAIN else dict.fromkeys(hashed.content.row))


class Content:
    """Length and CRC-32C of bytes as they come: costs a hundredth of what reading lines does, so it is kept always."""

    def __init__(self) -> None:
        self.size, self._crc = 0, 0

    def add(self, data: bytes) -> None:
        """Count the next bytes."""
        self._crc, self.size = google_crc32c.extend(self._crc, data), self.size + len(data)

    @property
    def row(self) -> dict[str, Any]:
        """The length and the checksum as a row's columns of DIGEST."""
        return {"content_bytes": self.size, "content_crc32c": f"{self._crc:08x}"}

    def through(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """The pieces, each counted."""
        for piece in pieces:
            self.add(piece)
            yield piece


class HashedFile(io.RawIOBase):
    """A file that is read from its start and hashed on the way."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file, self._digest, self.content = file, hashlib.sha256(), Content()

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._digest.update(data)
        self.content.add(data)
        return data

    def whole(self, url: str, planned_bytes: int) -> str:
        """Read the rest of the file; returns its SHA-256. Raises DataError if it does not have the planned length."""
        while self.read(_READ_BYTES):
            pass  # `read` has counted and hashed it
        if self.content.size != planned_bytes:
            raise DataError(
                f"input {url} changed while it was read",
                got=f"{self.content.size} bytes",
                allowed=f"{planned_bytes} bytes as at the start",
                next_step="Run again when nothing writes to the input.",
            )
        return self._digest.hexdigest()


def find_lines(
    urls: Sequence[str], header: bool, root: str | None = None, known: Callable[[FileStat], bool] | None = None
) -> list[Source]:
    """The files of lines, by find_sources, checked by check_lines. A file without a line is skipped with a warning,
    such as a log that was just rotated; so are blank lines alone and, with `header`, a first line alone.
    """

    def check(source: Source, head: bytes) -> bool:
        check_lines(source, head)
        return _has_lines(source, head, header)

    return find_sources(urls, check, root, known=known)


def _has_lines(source: Source, head: bytes, header: bool) -> bool:
    """Whether a file holds a line that is not blank besides a header; any file that `head` is not all of does."""
    if source.size_bytes > len(head):
        return True
    try:
        pieces = [head] if source.codec == PLAIN else unpacked(source.url, io.BytesIO(head), source.codec, HEAD_BYTES)
        content = b"".join(islice(pieces, 2))
    except DataError:  # damage is reported where the file is read
        return True
    lines = content.removeprefix(BOM).split(b"\n")
    return len(content) > HEAD_BYTES or sum(line not in (b"", b"\r") for line in lines) > header


def check_lines(source: Source, head: bytes) -> None:
    """Raise DataError for a file in UTF-16 or UTF-32, whose lines end with carriage returns only, or that is packed
    twice. `head` is the beginning of the file as stored, packed or not.
    """
    start = _unpacked(source, head)
    inside = foreign_codec(start) or codec_of(start)
    if source.codec != PLAIN and inside != PLAIN:
        raise DataError(
            f"input {source.url} is a packed file inside a packed file",
            got=f"{inside} inside {source.codec}",
            allowed="lines of text, packed once or not at all",
            next_step=f"Unpack it once: {_print(source)} > NEW, and give NEW to --input.",
        )
    wide = next((name for bom, name in _BOMS.items() if start.startswith(bom)), None) or _by_zeros(start)
    if wide is not None:
        raise DataError(
            f"input {source.url} is not in UTF-8",
            got=f"{wide}, by its first bytes {start[:8].hex(' ')}",
            allowed="text in UTF-8, of which ASCII is a part",
            next_step=f"Convert it: {_print(source)} | iconv -f {wide} -t UTF-8 > NEW, and give NEW to --input.",
        )
    if _returns(start) and _returns(_more(source)):
        raise DataError(
            f"input {source.url} has lines that end with a carriage return only",
            got="\\r and no \\n, as old Macs and some spreadsheets write",
            allowed="lines that end with \\n, or \\r\\n",
            next_step=f"Convert it: {_print(source)} | tr '\\r' '\\n' > NEW, and give NEW to --input.",
        )


def _by_zeros(start: bytes) -> str | None:
    """UTF-16 without a byte order mark: every other byte of Latin letters is zero, and UTF-8 text has no zeros."""
    even, odd = start[::2], start[1::2]
    for zeros, letters, name in ((odd, even, "UTF-16LE"), (even, odd, "UTF-16BE")):
        if len(zeros) > 1 and 2 * zeros.count(0) > len(zeros) and 20 * letters.count(0) < len(letters):
            return name
    return None


def _returns(start: bytes) -> bool:
    return b"\n" not in start and b"\r" in start[:-1]


def _unpacked(source: Source, head: bytes) -> bytes:
    """The first bytes of the content; of a packed file they are read from the file if `head` is too short."""
    if source.codec == PLAIN:
        return head
    try:
        return next(unpacked(source.url, io.BytesIO(head), source.codec, PACKED_BYTES), b"")
    except DataError:  # such as bzip2, whose blocks are larger than a head
        return _more(source, PACKED_BYTES)


def _more(source: Source, size: int = LOOK_BYTES) -> bytes:
    with filesystem(source.url).open_read(source.url) as file:
        if source.codec == PLAIN:
            return file.read(size)
        try:
            return next(unpacked(source.url, file, source.codec, size), b"")
        except DataError:  # damage is reported where the file is read
            return b""


def _print(source: Source) -> str:
    """A command that prints the file's content."""
    scheme = source.url.partition("://")[0] if "://" in source.url else "file"
    name = shlex.quote(source.url.removeprefix("file://"))
    if scheme == "file":
        return f"{_PRINTS[source.codec]} {name}"
    return f"hdfs dfs -cat {name}" + ("" if source.codec == PLAIN else f" | {_PRINTS[source.codec]}")
