"""Files that hold text, but no lines in UTF-8: found by their first bytes before Spark starts, with the way out."""

from __future__ import annotations

import io
import shlex

from etl.input.ranges import Source
from etl.input.unpack import PLAIN, unpacked
from lockstep.storage.errors import DataError
from lockstep.storage.fs import filesystem

LOOK_BYTES = 1 << 20
PACKED_BYTES = 512  # of content, which a packed file's first bytes nearly always hold
_BOMS = {  # the longer ones first, since UTF-32's begins with UTF-16's
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_PRINTS = {PLAIN: "cat", "gzip": "zcat", "bzip2": "bzcat", "zstd": "zstdcat"}


def check_lines(source: Source, head: bytes) -> None:
    """Raise DataError for a file of UTF-16 or UTF-32, or whose lines end with carriage returns only. `head` are the
    first bytes of the file as it is stored, packed or not.
    """
    start = _unpacked(source, head)
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
    """UTF-16 without a byte order mark: Latin letters have a zero for their other byte, text in UTF-8 has none."""
    even, odd = start[::2], start[1::2]
    for zeros, letters, name in ((odd, even, "UTF-16LE"), (even, odd, "UTF-16BE")):
        if len(zeros) > 1 and 2 * zeros.count(0) > len(zeros) and 20 * letters.count(0) < len(letters):
            return name
    return None


def _returns(start: bytes) -> bool:
    return b"\n" not in start and b"\r" in start[:-1]


def _unpacked(source: Source, head: bytes) -> bytes:
    """The first bytes of the content; of a packed file whose head does not suffice, from the file."""
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
