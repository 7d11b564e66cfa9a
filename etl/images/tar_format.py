"""The members of a tar archive, read in place: nothing is unpacked to disk, so no name can reach outside.

A member is a header of 512 bytes and its content, padded to whole blocks of 512:

offset   0 name (100)          124 size, octal or binary (12)     148 checksum, octal (8)    156 type (1)
offset 157 target of a link     257 "ustar" and version           345 prefix of the name (155; only POSIX)

Extension headers may come before it: L and K (GNU: a long name, the long target of a link), x (POSIX: records
"LENGTH KEY=VALUE"). After the header of a sparse file (S, GNU) may come blocks that its size does not include. Blocks
of zeros end an archive; if archives were concatenated, more members follow, and are read too.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from lockstep.etl.input.unpack import CHUNK_BYTES, Forward
from lockstep.storage.errors import DataError

BLOCK = 512
MAX_EXTENSION_BYTES = 1 << 20
MAX_NAME_BYTES = 4096
MAX_PADDING_BYTES = 16 << 20  # archivers pad to 10 KiB, some to a MiB; a sparse file of a TiB of zeros is free to make
_FILES, _FOLDER, _LINKS = (b"0", b"\0", b"7"), b"5", (b"1", b"2", b"3", b"4", b"6")
HARD_LINK, SYMBOLIC_LINK = b"1", b"2"
_EXTENSIONS = (b"L", b"K", b"x", b"g")
_SPARSE, _SPARSE_MORE, _SPARSE_MORE_AGAIN = (
    b"S",
    482,
    504,
)  # GNU; the byte that says whether another block of the map follows
_ADLER = 65521


class Member(NamedTuple):
    """One member that is not a directory: the position of its header, its name, the position and size of its content.

    `is_file` is False for links, devices, pipes, sparse files and all other members without plain content. `link` is
    the target of a link, `link_kind` None for any other member.
    """

    position: int
    name: str
    is_file: bool
    offset: int
    size: int
    link: str = ""
    link_kind: bytes | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the name, without a leading `./`."""
        parts = self.name.split("/")
        if "" in parts or "." in parts:
            parts = [part for part in parts if part not in ("", ".")]
        return tuple(parts)

    @property
    def is_safe(self) -> bool:
        """Whether the name stays inside the folder into which it would be unpacked."""
        if self.name.startswith(("/", "\\")):
            return False
        return ".." not in self.name or ".." not in self.name.replace("\\", "/").split("/")


def read_members(
    stream: Forward, url: str, start: int = 0, end: int | None = None, *, to_end: bool = True
) -> Iterator[Member]:
    """Yield the members whose headers are between `start` and `end`, both borders of members; `end` None means unknown,
    as in a packed archive. `to_end` means that the archive ends there.

    The caller may read a member's content from `stream` before it takes the next. The header of a packed archive may
    claim any size: its content is checked when the next member is taken. Raises DataError with the byte position for an
    invalid header, for a cut member, and for an archive without zeros at its end: one that is cut between two members
    would otherwise look complete.
    """
    for _, member in _entries(stream, url, start, end, to_end):
        if member is not None:
            yield member


def plan_stretches(
    stream: Forward, url: str, size: int, step: int, take: Callable[[Member], None] | None = None
) -> list[tuple[int, int]]:
    """Cut an unpacked archive of `size` bytes into ranges (start, end) of about `step` bytes; only headers are read.

    `take` is called with each member. Raises the errors of read_members.
    """
    borders = [0]
    for begin, member in _entries(stream, url, 0, size, True):
        if member is None:
            continue
        if begin >= borders[-1] + step:
            borders.append(begin)
        if take is not None:
            take(member)
    return list(zip(borders, [*borders[1:], size], strict=True))


def _entries(
    stream: Forward, url: str, start: int, end: int | None, to_end: bool
) -> Iterator[tuple[int, Member | None]]:
    """Yield (position of the first header of a member, the member or None for a directory) in order."""
    position, begin, extension, closed = start, start, dict[str, str](), False
    while end is None or position < end:
        block = stream.at(position, BLOCK)
        if not block:
            break
        if not block.strip(b"\0"):
            closed, position = True, _after_zeros(stream, url, position)
            begin, extension = position, {}  # an extension is valid only in its own archive
            continue
        closed = False
        size, kind = _checked(block, url, position)
        data_at, has_data = position + BLOCK, kind not in (*_LINKS, _FOLDER)
        if kind == _SPARSE:
            data_at += _sparse_blocks(stream, url, position, block)
        if has_data and kind not in _EXTENSIONS and "size" in extension:
            size = _pax_size(extension["size"], url, position)
        following = data_at + (-(-size // BLOCK) * BLOCK if has_data else 0)
        if has_data and end is not None and data_at + size > end:
            raise cut_error(url, position, size)
        if kind in _EXTENSIONS:
            extension |= _extension(stream, url, position, size, kind)
            position, begin = following, following if kind == b"g" and not extension else begin
            continue
        name = extension.get("path") or _name(block)
        sparse = kind == _SPARSE or any(key.startswith("GNU.sparse") for key in extension)
        folder = kind == _FOLDER or (kind == b"\0" and name.endswith("/"))
        is_file = kind in _FILES and not sparse
        if folder:
            yield begin, None
        else:
            yield (
                begin,
                Member(position, name, is_file, data_at, size if has_data else 0, *_link(block, kind, extension)),
            )
        if has_data and size and end is None and not stream.at(data_at + size - 1, 1):
            raise cut_error(url, position, size)
        position = begin = following
        extension = {}
    if to_end and not closed:
        raise _bad(url, position, "the end of the file", "blocks of zeros, which end an archive, or another member")


def _sparse_blocks(stream: Forward, url: str, position: int, header: bytes) -> int:
    """The bytes of the blocks that continue a sparse file's map, between its header and its content."""
    found, more = 0, header[_SPARSE_MORE]
    while more:
        found += BLOCK
        block = stream.at(position + found, BLOCK)
        if len(block) < BLOCK or found > MAX_EXTENSION_BYTES:
            raise _bad(
                url, position, f"a map of {found} bytes or more", f"a whole map of {MAX_EXTENSION_BYTES} at most"
            )
        more = block[_SPARSE_MORE_AGAIN]
    return found


def _after_zeros(stream: Forward, url: str, start: int) -> int:
    """The position of the first block after `start` that is not all zeros, or the end."""
    position = start
    while position - start <= MAX_PADDING_BYTES:
        chunk = stream.at(position, CHUNK_BYTES)
        zeros = len(chunk) - len(chunk.lstrip(b"\0"))
        if zeros < len(chunk) or len(chunk) < CHUNK_BYTES:
            return position + (zeros // BLOCK * BLOCK if zeros < len(chunk) else len(chunk))
        position += len(chunk)
    raise _bad(url, start, f"more than {MAX_PADDING_BYTES} zeros", "a member, or the end of the archive")


def _checked(block: bytes, url: str, position: int) -> tuple[int, bytes]:
    """Return (size, type) of a header; raises DataError if its checksum is wrong."""
    if len(block) < BLOCK:
        raise _bad(url, position, f"the last {len(block)} bytes", "whole blocks of 512 bytes")
    try:
        wanted = _octal(block[148:156])
        size = _number(block[124:136])
    except ValueError:
        raise _bad(url, position, block[:16].hex(" ") + " ...", "a tar header") from None
    # The sum over all bytes, with spaces in place of the checksum. Adler-32 computes it modulo 65521, in C.
    found = zlib.adler32(block[:148] + b" " * 8 + block[156:]) & 0xFFFF
    if found != (wanted + 1) % _ADLER and wanted != _signed_sum(block):
        raise _bad(url, position, "a checksum that does not hold", "a tar header")
    return size, block[156:157]


def _signed_sum(block: bytes) -> int:
    """The checksum of some old archivers, over signed bytes."""
    values = np.frombuffer(block, dtype=np.int8).astype(np.int64)
    return int(values.sum() - values[148:156].sum()) + 8 * 32


def _octal(field: bytes) -> int:
    text = field.partition(b"\0")[0].strip()
    if not text.isdigit():  # int would also accept signs and underscores
        raise ValueError
    return int(text, 8)


def _number(field: bytes) -> int:
    """A size: octal digits, or big-endian binary after a byte 0x80; an empty one, as for links, is 0."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    return _octal(field) if field.strip(b"\0 ") else 0


def _name(block: bytes) -> str:
    name = block[:100].partition(b"\0")[0]
    prefix = block[345:500].partition(b"\0")[0] if block[257:263] == b"ustar\0" else b""
    return _text(prefix + b"/" + name if prefix else name)


def _link(block: bytes, kind: bytes, extension: dict[str, str]) -> tuple[str, bytes | None]:
    if kind not in (HARD_LINK, SYMBOLIC_LINK):
        return "", None
    return extension.get("linkpath") or _text(block[157:257].partition(b"\0")[0]), kind


def _text(raw: bytes) -> str:
    """A name as text; bytes that are not UTF-8 are escaped, so that it fits any column."""
    return raw[:MAX_NAME_BYTES].decode("utf-8", errors="backslashreplace")


def _extension(stream: Forward, url: str, position: int, size: int, kind: bytes) -> dict[str, str]:
    """The values of an extension header for the next member; those of a global one (g) are not needed here."""
    if size > MAX_EXTENSION_BYTES:
        raise _bad(
            url, position, f"an extension header of {size} bytes", f"at most {MAX_EXTENSION_BYTES} bytes of extension"
        )
    data = stream.at(position + BLOCK, size)
    if len(data) < size:
        raise cut_error(url, position, size)
    if kind in (b"L", b"K"):
        return {"path" if kind == b"L" else "linkpath": _text(data.partition(b"\0")[0])}
    return _records(data, url, position) if kind == b"x" else {}


def _records(data: bytes, url: str, position: int) -> dict[str, str]:
    found, at = {}, 0
    while at < len(data) and data[at]:
        digits = data[at : at + 20].split(b" ")[0]
        length = int(digits) if digits.isdigit() else 0
        record = data[at : at + length]
        key, equals, value = record[len(digits) + 1 : -1].partition(b"=")
        if len(record) < length or not equals or record[-1:] != b"\n":
            raise _bad(url, position, f"a record {data[at : at + 16]!r}", "records of the form LENGTH KEY=VALUE")
        found[_text(key)] = _text(value)
        at += length
    return found


def _pax_size(text: str, url: str, position: int) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise _bad(url, position, f"size {text[:40]!r}", "a number of bytes")
    return int(text)


def cut_error(url: str, position: int, size: int) -> DataError:
    """The error for a member whose content is not completely in the archive; its header is at `position`."""
    return _bad(url, position, f"a member of {size} bytes", "a member that ends within the archive")


def _bad(url: str, position: int, got: str, allowed: str) -> DataError:
    return DataError(
        f"archive {url} cannot be read on at byte {position}",
        got=got,
        allowed=allowed,
        next_step="Check --input and --source, or fetch the archive again and compare its digest with the origin's.",
    )
