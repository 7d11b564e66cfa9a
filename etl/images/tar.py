"""Image sets in tar archives of class folders, plain or packed: a piece is a range of members, read in place."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lockstep.etl import columns as c
from lockstep.etl.images import source as r
from lockstep.etl.images.layout import log_spellings
from lockstep.etl.images.source import (
    MAX_FILES,
    FileList,
    ImageFiles,
    ImagePlan,
    Piece,
    Place,
    place_of,
    split_classes,
    split_word,
    step_bytes,
)
from lockstep.etl.images.tar_format import BLOCK, Member, cut_error, plan_stretches, read_members
from lockstep.etl.images.tar_names import MemberNames, Settled, key_of
from lockstep.etl.input.files import Source, find_sources, source_name
from lockstep.etl.input.lines import RAW_BYTES
from lockstep.etl.input.unpack import CHUNK_BYTES, PLAIN, Forward
from lockstep.etl.reasons import NO_CLASS, NOT_A_FILE, NOT_AN_IMAGE, REPLACED, TOO_MANY_BYTES, UNSAFE_NAME
from lockstep.features.images.decode import ImageError, Limits
from lockstep.features.images.intake import Intake, is_left_out
from lockstep.storage.errors import DataError
from lockstep.storage.urls import absolute

_COLUMNS = (c.PACKED, c.POSITION, c.SPLIT, "class", "name", c.FILE)
MAX_LINKS_A_PIECE = 2000
_SCANS_AT_ONCE = 8  # a scan waits for storage most of the time


@dataclass(frozen=True, slots=True)
class TarPiece(Piece):
    """The members of an archive from byte `start` to `end`, which are borders of members; `end` is None for a packed
    archive, which is one piece. `to_end` is true for the last piece of an archive.

    `replaced` are the positions of members that a later one replaces, and `linked` those of links that another piece
    reads, which has them in `links` as they are read: the position, name, offset and size. A packed archive, whose
    names are not known before, must not have a name twice, and its links are read after the rest. `classes` are those
    that are named like a split. With `unlabelled` no folder is a class.
    """

    source: int
    url: str
    codec: str
    start: int
    end: int | None
    to_end: bool
    split: str | None
    classes: tuple[str, ...] = ()
    replaced: tuple[int, ...] = ()
    linked: tuple[int, ...] = ()
    links: tuple[tuple[int, str, int, int], ...] = ()
    unlabelled: bool = False

    def read(self, intake: Intake, num_classes: int | None) -> Iterator[pa.RecordBatch]:
        """Raises DataError with the byte position if the archive is damaged."""
        gather, names, seen = self.gather(), MemberNames(), set[bytes]()
        replaced, linked = frozenset(self.replaced), frozenset(self.linked)
        links = [Member(position, name, True, offset, size) for position, name, offset, size in self.links]
        with Forward(self.url, self.codec) as stream:
            for member in read_members(stream, self.url, self.start, self.end, to_end=self.to_end):
                if self.codec != PLAIN:
                    self._refuse_repeated(member, seen)
                    names.add(member)
                if member.position in replaced:
                    gather.drop(REPLACED, member.position)
                elif member.position not in linked and (self.codec == PLAIN or member.link_kind is None):
                    self._take(stream, member, intake, gather)
                yield from gather.full()
        if self.codec != PLAIN:
            settled = names.settled()
            links += settled.links
            for member in settled.broken:
                self.place(member, gather)
        if links:
            with Forward(self.url, self.codec) as stream:
                for member in sorted(links, key=lambda link: (link.offset, link.position)):
                    self._take(stream, member, intake, gather)
                    yield from gather.full()
        yield from gather.rest()

    def _refuse_repeated(self, member: Member, seen: set[bytes]) -> None:
        if (key := key_of(member.parts)) in seen and member.is_safe:
            raise DataError(
                f"the packed archive {self.url} holds two members of one name",
                got=f"{member.name[:300]} again at byte {member.position} of the unpacked archive",
                allowed="each name once in a packed archive; of a plain one, the last member of a name counts",
                next_step="Unpack the archive's compression (gunzip, bunzip2, zstd -d) and give the .tar.",
            )
        seen.add(key)

    def gather(self) -> r.Gather:
        """A collector for rows of this archive."""
        return r.Gather(_COLUMNS, **{c.SOURCE: self.source, "number": 0, c.OCCURRENCE: 0})

    def place(self, member: Member, gather: r.Gather) -> Place | None:
        """Split, class and name of an image by its path; None for a member that its header rejects or leaves out."""
        parts = member.parts
        is_safe = member.is_safe and bool(parts)
        if is_safe and is_left_out(parts):
            gather.drop(NOT_AN_IMAGE, member.position)
            return None
        if not member.is_file or not is_safe:
            reason = UNSAFE_NAME if member.is_file else NOT_A_FILE
            # A link has only a header, which begins with its name.
            gather.bad(reason, member.position, member.name.encode()[:BLOCK])
            return None
        return place_of(parts, self.split, self.classes, unlabelled=self.unlabelled)

    def _take(self, stream: Forward, member: Member, intake: Intake, gather: r.Gather) -> None:
        place = self.place(member, gather)
        if place is None:
            return
        if member.size > intake.limits.max_file_bytes:
            raw, digest = read_member(stream, self.url, member)
            gather.bad_part(TOO_MANY_BYTES, member.position, raw, member.size, digest)
            return
        data = stream.at(member.offset, member.size)
        if place.label is None and not self.unlabelled:
            gather.bad(NO_CLASS, member.position, data)
            return
        try:
            image, packed = intake.hand_on(data)
        except ImageError as error:
            gather.bad(error.reason, member.position, data)
            return
        gather.record(image, packed, member.position, place.split, place.label, place.name, "/".join(member.parts))


def plan(
    inputs: Sequence[str], *, split_bytes: int, listed: Limits | None = None, classes: Sequence[str] | None = None
) -> ImagePlan:
    """Cut plain archives at borders of members; a packed one, which can only be read from its start, is one piece.
    `classes` are those that --classes names.

    With `listed` the plan also has the files, if their headers are enough to know them: plain archives, each file in
    the folder of a class and within these limits, and not too many. Raises NotFoundError for missing input and
    DataError for a file that is not an archive.
    """
    sources = find_sources(inputs)
    step = step_bytes(split_bytes)
    room = _Room(0 if any(source.codec != PLAIN for source in sources) else MAX_FILES)
    own = split_classes(classes)
    scans = [_Scan(number, source, listed, room, own) for number, source in enumerate(sources)]
    with ThreadPoolExecutor(_SCANS_AT_ONCE, thread_name_prefix="lockstep-scan") as pool:
        pieces = [piece for found in pool.map(lambda scan: scan.pieces(step), scans) for piece in found]
    log_spellings(folder for scan in scans for folder in scan.folders)
    files = ImageFiles.joined([scan.files() for scan in scans])
    return ImagePlan(sources=sources, pieces=pieces, names_may_repeat=True, files=files)


@dataclass
class _Room:
    """How many more members of all archives may be listed: 0 as soon as those of one archive cannot be. Scans in
    several threads may miscount by a few, which does not matter.
    """

    left: int


class _Scan:
    """Reads the headers of an archive once, to cut it and, with `limits`, to list its files. `folders` are those whose
    names are not ASCII.
    """

    def __init__(
        self, number: int, source: Source, limits: Limits | None, room: _Room, classes: tuple[str, ...]
    ) -> None:
        self._source, self._room, self._limits = source, room, limits if room.left else None
        split = split_word(source_name(source.url))
        self._piece = TarPiece(number, absolute(source.url), source.codec, 0, None, True, split, classes)
        self._list, self._gather = FileList(), self._piece.gather()
        self._other: list[pa.RecordBatch] = []
        self._names, self._settled = MemberNames(), Settled((), (), ())
        self.folders: set[str] = set()

    def pieces(self, step: int) -> list[TarPiece]:
        """The archive in pieces of about `step` bytes."""
        source = self._source
        if source.codec != PLAIN:
            return [self._piece]
        with Forward(source.url, PLAIN) as stream:
            parts = plan_stretches(stream, source.url, source.size_bytes, step, self._take)
        self._settled = self._names.settled()
        replaced = np.array(self._settled.replaced, dtype=np.int64)
        links = self._settled.links
        linked = np.array([link.position for link in links], dtype=np.int64)
        found = [
            replace(
                self._piece,
                start=start,
                end=end,
                to_end=end == parts[-1][1],
                replaced=tuple(replaced[slice(*np.searchsorted(replaced, (start, end)))].tolist()),
                linked=tuple(linked[slice(*np.searchsorted(linked, (start, end)))].tolist()),
            )
            for start, end in parts
        ]
        for first, last in _runs([link.size for link in links], step):
            places = tuple((link.position, link.name, link.offset, link.size) for link in links[first:last])
            found.append(replace(self._piece, end=0, to_end=False, links=places))
        return found

    def files(self) -> ImageFiles | None:
        """The files, after `pieces`; None if headers are not enough to know them."""
        gone = pa.array(self._settled.replaced, pa.int64())
        for member in self._settled.links:
            self._add(member)
        for member in self._settled.broken:
            self._add(member)
        if self._limits is None:
            return None
        self._other += self._gather.rest()
        for position in self._settled.replaced:
            self._gather.drop(REPLACED, position)
        table = self._list.table()
        if len(gone) or self._settled.links:
            table = table.filter(pc.invert(pc.is_in(table.column(c.POSITION), gone))).sort_by(c.POSITION)
            self._other = [rows.filter(pc.invert(pc.is_in(rows.column(c.POSITION), gone))) for rows in self._other]
        return ImageFiles(table, (*self._other, *self._gather.rest()))

    def _take(self, member: Member) -> None:
        self._names.add(member)
        if not member.name.isascii():
            self.folders.add(member.name.rpartition("/")[0])
        if member.link_kind is None:
            self._add(member)

    def _add(self, member: Member) -> None:
        """List a member; a link as the file that it leads to."""
        if self._limits is None:
            return
        place = self._piece.place(member, self._gather)
        self._room.left -= 1
        # A file without a class, or that is too long, is rejected with a digest of its bytes: tasks must read these.
        rejected = place is not None and (place.label is None or member.size > self._limits.max_file_bytes)
        if rejected or self._room.left < 0:
            self._room.left = 0
            self._limits, self._list, self._other = None, FileList(), []
        elif place is None:
            self._other += self._gather.full()
        else:
            at = (self._piece.source, member.position, member.offset, member.size)
            self._list.add(*at, place.split, place.label, place.name, "/".join(member.parts))


def _runs(sizes: Sequence[int], step: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of links that one task reads: about `step` bytes, MAX_LINKS_A_PIECE at most."""
    first = held = 0
    for number, size in enumerate(sizes):
        if number > first and (held + size > step or number - first == MAX_LINKS_A_PIECE):
            yield first, number
            first, held = number, 0
        held += size
    if first < len(sizes):
        yield first, len(sizes)


def read_member(stream: Forward, url: str, member: Member) -> tuple[bytes, str]:
    """Return (first bytes, SHA-256) of a member that is too long for memory. Raises DataError if the archive ends
    inside it.
    """
    digest, raw = hashlib.sha256(), stream.at(member.offset, min(RAW_BYTES, member.size))
    for at in range(0, member.size, CHUNK_BYTES):
        wanted = min(CHUNK_BYTES, member.size - at)
        data = stream.at(member.offset + at, wanted)
        if len(data) < wanted:  # a header may claim up to 2**88 bytes
            raise cut_error(url, member.position, member.size)
        digest.update(data)
    return raw, digest.hexdigest()
