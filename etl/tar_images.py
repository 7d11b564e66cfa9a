"""Tar archives of class folders, plain or packed: members are read where they lie, a stretch of them a task."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa

from etl import columns as c
from etl import image_rows as r
from etl.archives import BLOCK, Member, cut_error, plan_stretches, read_members
from etl.forward import CHUNK_BYTES, Forward
from etl.intake import Intake
from etl.lines import RAW_BYTES
from etl.pieces import ImagePlan, Piece, step_bytes
from etl.places import is_left_out, place_of, split_word
from etl.ranges import Source, find_sources, source_name
from etl.unpack import PLAIN
from features.decode import TOO_LONG, ImageError
from storage.fs import absolute

_COLUMNS = (r.PACKED, c.POSITION, c.SPLIT, "class", "name")
_SCANS_AT_ONCE = 8  # a scan waits for storage most of the time


@dataclass(frozen=True, slots=True)
class TarPiece(Piece):
    """The members of an archive from byte `start` to `end`, borders of members; a packed archive whole, `end` None.
    `to_end` is true for the last piece of an archive.
    """

    source: int
    url: str
    codec: str
    start: int
    end: int | None
    to_end: bool
    split: str | None

    def read(self, intake: Intake, num_classes: int | None) -> Iterator[pa.RecordBatch]:
        """Raises DataError with the byte position where the archive is damaged."""
        gather = r.Gather(_COLUMNS, **{c.SOURCE: self.source, "number": 0, c.OCCURRENCE: 0})
        with Forward(self.url, self.codec) as stream:
            for member in read_members(stream, self.url, self.start, self.end, to_end=self.to_end):
                self._take(stream, member, intake, gather)
                yield from gather.full()
        yield from gather.rest()

    def _take(self, stream: Forward, member: Member, intake: Intake, gather: r.Gather) -> None:
        parts = member.parts
        if not member.is_file or not member.is_safe or not parts:
            reason = r.UNSAFE_NAME if member.is_file else r.NOT_A_FILE
            # What a link says stands in its header, whose first part is the name.
            gather.bad(reason, member.position, member.name.encode()[:BLOCK])
            return
        if is_left_out(parts):
            gather.drop(r.NOT_AN_IMAGE, member.position)
            return
        place = place_of(parts, self.split)
        if member.size > intake.limits.max_file_bytes:
            raw, digest = _passed(stream, self.url, member)
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


def plan(inputs: Sequence[str], *, split_bytes: int) -> ImagePlan:
    """Cut plain archives at borders of members; a packed one, which can only be read from its start, stays whole.

    Raises NotFoundError for missing input and DataError for a plain archive that is none.
    """
    sources = find_sources(inputs)
    step = step_bytes(split_bytes)
    with ThreadPoolExecutor(_SCANS_AT_ONCE, thread_name_prefix="lockstep-scan") as pool:
        cut = list(pool.map(lambda source: _stretches(source, step), sources))
    pieces = []
    for number, (source, parts) in enumerate(zip(sources, cut, strict=True)):
        split = split_word(source_name(source.url))
        for start, end in parts:
            to_end = end == parts[-1][1]
            pieces.append(TarPiece(number, absolute(source.url), source.codec, start, end, to_end, split))
    return ImagePlan(sources=sources, pieces=pieces, names_may_repeat=True)


def _stretches(source: Source, step: int) -> Sequence[tuple[int, int | None]]:
    if source.codec != PLAIN:
        return [(0, None)]
    if source.size_bytes <= step:
        return [(0, source.size_bytes)]
    with Forward(source.url, PLAIN) as stream:
        return plan_stretches(stream, source.url, source.size_bytes, step)


def _passed(stream: Forward, url: str, member: Member) -> tuple[bytes, str]:
    """(first bytes, SHA-256) of a member that is too long to be held. Raises DataError where the archive ends in it."""
    digest, raw = hashlib.sha256(), stream.at(member.offset, min(RAW_BYTES, member.size))
    for at in range(0, member.size, CHUNK_BYTES):
        wanted = min(CHUNK_BYTES, member.size - at)
        data = stream.at(member.offset + at, wanted)
        if len(data) < wanted:  # a header may claim 2**88 bytes, which nobody lives to count to
            raise cut_error(url, member.position, member.size)
        digest.update(data)
    return raw, digest.hexdigest()
