"""Image sets in tar archives of class folders, plain or packed: a piece is a range of members, read in place."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pyarrow as pa

from etl import columns as c
from etl.images import source as r
from etl.images.source import (
    MAX_FILES,
    FileList,
    ImageFiles,
    ImagePlan,
    Piece,
    Place,
    is_left_out,
    place_of,
    split_word,
    step_bytes,
)
from etl.images.tar_format import BLOCK, Member, cut_error, plan_stretches, read_members
from etl.input.files import Source, find_sources, source_name
from etl.input.lines import RAW_BYTES
from etl.input.unpack import CHUNK_BYTES, PLAIN, Forward
from etl.write.late import Intake
from lockstep.features.images.decode import TOO_LONG, ImageError, Limits
from lockstep.storage.urls import absolute

_COLUMNS = (c.PACKED, c.POSITION, c.SPLIT, "class", "name")
_SCANS_AT_ONCE = 8  # a scan waits for storage most of the time


@dataclass(frozen=True, slots=True)
class TarPiece(Piece):
    """The members of an archive from byte `start` to `end`, which are borders of members; `end` is None for a packed
    archive, which is one piece. `to_end` is true for the last piece of an archive.
    """

    source: int
    url: str
    codec: str
    start: int
    end: int | None
    to_end: bool
    split: str | None

    def read(self, intake: Intake, num_classes: int | None) -> Iterator[pa.RecordBatch]:
        """Raises DataError with the byte position if the archive is damaged."""
        gather = self.gather()
        with Forward(self.url, self.codec) as stream:
            for member in read_members(stream, self.url, self.start, self.end, to_end=self.to_end):
                self._take(stream, member, intake, gather)
                yield from gather.full()
        yield from gather.rest()

    def gather(self) -> r.Gather:
        """A collector for rows of this archive."""
        return r.Gather(_COLUMNS, **{c.SOURCE: self.source, "number": 0, c.OCCURRENCE: 0})

    def place(self, member: Member, gather: r.Gather) -> Place | None:
        """Split, class and name of an image by its path; None for a member that its header rejects or leaves out."""
        parts = member.parts
        if not member.is_file or not member.is_safe or not parts:
            reason = r.UNSAFE_NAME if member.is_file else r.NOT_A_FILE
            # A link has only a header, which begins with its name.
            gather.bad(reason, member.position, member.name.encode()[:BLOCK])
            return None
        if is_left_out(parts):
            gather.drop(r.NOT_AN_IMAGE, member.position)
            return None
        return place_of(parts, self.split)

    def _take(self, stream: Forward, member: Member, intake: Intake, gather: r.Gather) -> None:
        place = self.place(member, gather)
        if place is None:
            return
        if member.size > intake.limits.max_file_bytes:
            raw, digest = read_member(stream, self.url, member)
            gather.bad_part(TOO_LONG, member.position, raw, member.size, digest)
            return
        data = stream.at(member.offset, member.size)
        if place.label is None:
            gather.bad(r.NO_CLASS, member.position, data)
            return
        try:
            image, packed = intake.hand_on(data)
        except ImageError as error:
            gather.bad(error.reason, member.position, data)
            return
        gather.record(image, packed, member.position, place.split, place.label, place.name)


def plan(inputs: Sequence[str], *, split_bytes: int, listed: Limits | None = None) -> ImagePlan:
    """Cut plain archives at borders of members; a packed one, which can only be read from its start, is one piece.

    With `listed` the plan also has the files, if their headers are enough to know them: plain archives, each file in
    the folder of a class and within these limits, and not too many. Raises NotFoundError for missing input and
    DataError for a file that is not an archive.
    """
    sources = find_sources(inputs)
    step = step_bytes(split_bytes)
    room = _Room(0 if any(source.codec != PLAIN for source in sources) else MAX_FILES)
    scans = [_Scan(number, source, listed, room) for number, source in enumerate(sources)]
    with ThreadPoolExecutor(_SCANS_AT_ONCE, thread_name_prefix="lockstep-scan") as pool:
        cut = list(pool.map(lambda scan: scan.stretches(step), scans))
    pieces = [
        replace(scan.piece, start=start, end=end, to_end=end == parts[-1][1])
        for scan, parts in zip(scans, cut, strict=True)
        for start, end in parts
    ]
    files = ImageFiles.joined([scan.files() for scan in scans])
    return ImagePlan(sources=sources, pieces=pieces, names_may_repeat=True, files=files)


@dataclass
class _Room:
    """How many more members of all archives may be listed: 0 as soon as those of one archive cannot be. Scans in
    several threads may miscount by a few, which does not matter.
    """

    left: int


class _Scan:
    """Reads the headers of an archive once, to cut it and, with `limits`, to list its files."""

    def __init__(self, number: int, source: Source, limits: Limits | None, room: _Room) -> None:
        self._source, self._room, self._limits = source, room, limits if room.left else None
        split = split_word(source_name(source.url))
        self.piece = TarPiece(number, absolute(source.url), source.codec, 0, None, to_end=True, split=split)
        self._list, self._gather = FileList(), self.piece.gather()
        self._other: list[pa.RecordBatch] = []

    def stretches(self, step: int) -> Sequence[tuple[int, int | None]]:
        """(start, end) of each piece."""
        source = self._source
        if source.codec != PLAIN:
            return [(0, None)]
        if source.size_bytes <= step and self._limits is None:
            return [(0, source.size_bytes)]
        with Forward(source.url, PLAIN) as stream:
            return plan_stretches(stream, source.url, source.size_bytes, step, self._take)

    def files(self) -> ImageFiles | None:
        """The files, after `stretches`; None if headers are not enough to know them."""
        if self._limits is None:
            return None
        self._other += self._gather.rest()
        return ImageFiles(self._list.table(), tuple(self._other))

    def _take(self, member: Member) -> None:
        if self._limits is None:
            return
        place = self.piece.place(member, self._gather)
        self._room.left -= 1
        # A file without a class, or that is too long, is rejected with a digest of its bytes: tasks must read these.
        rejected = place is not None and (place.label is None or member.size > self._limits.max_file_bytes)
        if rejected or self._room.left < 0:
            self._room.left = 0
            self._limits, self._list, self._other = None, FileList(), []
        elif place is None:
            self._other += self._gather.full()
        else:
            at = (self.piece.source, member.position, member.offset, member.size)
            self._list.add(*at, place.split, place.label, place.name)


def read_member(stream: Forward, url: str, member: Member) -> tuple[bytes, str]:
    """(first bytes, SHA-256) of a member too long for memory. Raises DataError if the archive ends inside it."""
    digest, raw = hashlib.sha256(), stream.at(member.offset, min(RAW_BYTES, member.size))
    for at in range(0, member.size, CHUNK_BYTES):
        wanted = min(CHUNK_BYTES, member.size - at)
        data = stream.at(member.offset + at, wanted)
        if len(data) < wanted:  # a header may claim up to 2**88 bytes
            raise cut_error(url, member.position, member.size)
        digest.update(data)
    return raw, digest.hexdigest()
