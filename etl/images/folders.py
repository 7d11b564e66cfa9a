"""Image sets in folders of class folders: each image is a file, and a task reads many of them."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lockstep.etl import columns as c
from lockstep.etl.images import source as r
from lockstep.etl.images.layout import log_spellings
from lockstep.etl.images.source import (
    DROPPED,
    SPLITS,
    ImagePlan,
    Piece,
    composed,
    place_of,
    split_classes,
    split_word,
    step_bytes,
)
from lockstep.etl.input.files import Source
from lockstep.etl.input.lines import RAW_BYTES
from lockstep.etl.input.unpack import CHUNK_BYTES
from lockstep.etl.reasons import NO_CLASS, NOT_A_FILE, NOT_AN_IMAGE, TOO_MANY_BYTES
from lockstep.etl.spark.tasks import mapped
from lockstep.features.images.decode import ImageError
from lockstep.features.images.intake import Intake, is_left_out
from lockstep.storage.dataset.manifest_entries import SourceInfo
from lockstep.storage.errors import ConfigError, DataError, NotFoundError
from lockstep.storage.fs import FileStat, filesystem, walk
from lockstep.storage.urls import absolute, basename, join, split_url

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)
MAX_FILES_A_PIECE = 2000
_COLUMNS = (c.PACKED, c.SPLIT, "class", "name", c.FILE, c.PLACE, c.LENGTH, c.SHA256)
_EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
_LINES = pa.schema([(c.SOURCE, pa.int32()), ("lines", pa.binary()), ("bytes", pa.int64())])


@dataclass(frozen=True, slots=True)
class FolderPiece(Piece):
    """Files of one folder: their paths below it and sizes in bytes; -1 for anything but a file or a link to one.
    `classes` are those that are named like a split. With `unlabelled` no folder is a class.
    """

    source: int
    root: str
    split: str | None
    files: tuple[tuple[str, int], ...]
    classes: tuple[str, ...] = ()
    unlabelled: bool = False

    def read(self, intake: Intake, num_classes: int | None) -> Iterator[pa.RecordBatch]:
        """Raises DataError for a file that does not have its planned length."""
        gather = r.Gather(_COLUMNS, **{c.SOURCE: self.source, c.POSITION: 0, "number": 0, c.OCCURRENCE: 0})
        for place, size in self.files:
            self._take(place, size, intake, gather)
            yield from gather.full()
        yield from gather.rest()

    def _take(self, place: str, size: int, intake: Intake, gather: r.Gather) -> None:
        parts = place.split("/")
        if is_left_out(parts):
            gather.drop(NOT_AN_IMAGE, 0, place)
            return
        if size < 0:
            gather.bad_part(NOT_A_FILE, 0, b"", 0, _EMPTY_SHA256, place)
            return
        url = join(self.root, place)
        if size > intake.limits.max_file_bytes:
            raw = filesystem(url).read_range(url, 0, min(RAW_BYTES, size))
            gather.bad_part(TOO_MANY_BYTES, 0, raw, size, _digest(url), place)
            return
        with filesystem(url).open_read(url) as file:
            data = file.read(size + 1)
        if len(data) != size:
            raise DataError(
                f"input {url} changed while it was read",
                got=f"{len(data)} bytes",
                allowed=f"{size} bytes as at the start",
                next_step="Run again when nothing writes to the input.",
            )
        known = place_of(parts, self.split, self.classes, unlabelled=self.unlabelled)
        if known.label is None and not self.unlabelled:
            gather.bad(NO_CLASS, 0, data, place)
            return
        try:
            image, packed = intake.hand_on(data)
        except ImageError as error:
            gather.bad(error.reason, 0, data, place)
            return
        digest = hashlib.sha256(data).hexdigest()
        gather.record(image, packed, known.split, known.label, known.name, place, place, size, digest)


def plan(inputs: Sequence[str], *, split_bytes: int, classes: Sequence[str] | None = None) -> ImagePlan:
    """List the files below each input, in order of their places; `classes` are those that --classes names.

    Raises NotFoundError for an input that is missing, not a folder, or empty, ConfigError for folders that overlap,
    and DataError for links to folders.
    """
    _refuse_overlap(inputs)
    sources, pieces, places = [], [], list[str]()
    for number, url in enumerate(inputs):
        root = absolute(url)
        files = _listed(url, root)
        # Count as digest_trees does: files that are dropped by their names do not change a dataset.
        held = sum(max(size, 0) for place, size in files if not is_left_out(place.split("/")))
        sources.append(Source(url, held, "none"))
        _log_empty(root, files)
        split = split_word(basename(root))
        own = split_classes(classes)
        pieces += [FolderPiece(number, root, split, part, own) for part in _cut(files, step_bytes(split_bytes))]
        places += [place for place, _ in files if not place.isascii()]
    # Two files whose names differ only in the form of their letters are two samples of one name.
    repeat = len(inputs) > 1 or len(set(map(composed, places))) < len(places)
    log_spellings(place.rpartition("/")[0] for place in places)
    return ImagePlan(sources=sources, pieces=pieces, trees=True, names_may_repeat=repeat)


def _refuse_overlap(inputs: Sequence[str]) -> None:
    """Raise ConfigError if one input is, or is inside, another: each image must be read once."""
    places = [_place(url) for url in inputs]
    for (one, place), (other, above) in permutations(zip(inputs, places, strict=True), 2):
        if place[: len(above)] == above:
            raise ConfigError(
                f"input {one} would be read twice",
                got="given twice" if place == above else f"it is inside {other}",
                allowed="separate folders, none inside another",
                next_step="Remove one of them from --input.",
            )


def _place(url: str) -> tuple[str, ...]:
    """Return the parts of a folder's URL, the same for all spellings of it; a local link counts as its target."""
    scheme, authority, path = split_url(absolute(url))
    path = os.path.realpath(path) if scheme == "file" else os.path.normpath(path)
    return (scheme, authority, *(part for part in path.split("/") if part))


def _listed(url: str, root: str) -> list[tuple[str, int]]:
    fs = filesystem(root)
    if not fs.exists(root) or not fs.stat(root).is_dir:
        raise NotFoundError(
            f"input {url} is not a folder",
            got="a file" if fs.exists(root) else "nothing there",
            allowed="a folder that holds a folder for each class",
            next_step="Check --input; a tar archive goes with --source tar.",
        )
    above = len(root.rstrip("/")) + 1
    files = [(entry.url[above:], _size(entry)) for entry in walk(fs, root)]
    if not files:
        raise NotFoundError(
            f"input {url} holds no file", got="an empty folder", allowed="an image or more", next_step="Check --input."
        )
    return files


def _log_empty(root: str, files: Sequence[tuple[str, int]]) -> None:
    """Report class folders, directly in the root or in the folder of a split, that hold no image."""
    holders: set[tuple[str, ...]] = set()
    for place, _ in files:
        parts = place.split("/")
        if len(parts) > 1 and not is_left_out(parts):
            holders |= {tuple(parts[:1]), tuple(parts[:-1][:2])}
    splits = sorted(above for above in holders if len(above) == 1 and above[0].lower() in SPLITS)
    empty = []
    for above in ((), *splits):
        entries = filesystem(root).list(join(root, *above))
        inside = [(*above, entry.name) for entry in entries if entry.is_dir and not is_left_out((entry.name, ""))]
        empty += ["/".join(folder) for folder in inside if folder not in holders]
    if empty:
        log.warning("folders without an image become no class: %s", ", ".join(sorted(empty)[:10]))


def _size(entry: FileStat) -> int:
    """The bytes of a file, or of the file that a link leads to; -1 for pipes, devices and broken links.

    Raises DataError for a link to a folder: without its images a class would be missing.
    """
    if not entry.is_special:
        return entry.size_bytes
    if entry.is_dir:
        raise DataError(
            f"input {entry.url} is a link to a folder",
            got="a link",
            allowed="folders, files, and links to files",
            next_step="Replace the link by the folder that it leads to, or give --input that folder.",
        )
    scheme, _, path = split_url(entry.url)
    return entry.size_bytes if scheme == "file" and os.path.isfile(path) else -1


def _cut(files: Sequence[tuple[str, int]], step: int) -> Iterator[tuple[tuple[str, int], ...]]:
    part: list[tuple[str, int]] = []
    held = 0
    for place, size in files:
        if part and (held + size > step or len(part) == MAX_FILES_A_PIECE):
            yield tuple(part)
            part, held = [], 0
        part.append((place, size))
        held += max(size, 0)
    if part:
        yield tuple(part)


def _digest(url: str) -> str:
    digest = hashlib.sha256()
    with filesystem(url).open_read(url) as file:
        while data := file.read(CHUNK_BYTES):
            digest.update(data)
    return digest.hexdigest()


def digest_trees(parsed: DataFrame, sources: Sequence[Source]) -> tuple[SourceInfo, ...]:
    """Bytes and SHA-256 of each folder: the digest is over a line `SHA256 BYTES PATH` for each file, in order.

    `parsed` are rows of lockstep.etl.images.source. Spark sorts them; the driver holds the lines of one partition.
    """
    files = parsed.where(f"kind <> {DROPPED}").select(c.SOURCE, c.PLACE, c.LENGTH, c.SHA256)
    found = mapped(files.orderBy(c.SOURCE, c.PLACE), lines_of, _LINES)
    digests, sizes = [hashlib.sha256() for _ in sources], [0 for _ in sources]
    for row in found.toLocalIterator():
        digests[row[c.SOURCE]].update(row["lines"])
        sizes[row[c.SOURCE]] += row["bytes"]
    return tuple(
        SourceInfo(source.url, size, digest.hexdigest())
        for source, size, digest in zip(sources, sizes, digests, strict=True)
    )


def lines_of(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The function for mapInArrow: files in order in, the lines of each stretch of one source out."""
    for batch in batches:
        if not batch.num_rows:
            continue
        sources = np.asarray(batch.column(c.SOURCE))
        borders = [0, *(np.flatnonzero(np.diff(sources)) + 1).tolist(), len(sources)]
        for start, end in pairwise(borders):
            yield _lines(batch.slice(start, end - start))


def _lines(batch: pa.RecordBatch) -> pa.RecordBatch:
    lengths = batch.column(c.LENGTH)
    lines = pc.binary_join_element_wise(batch.column(c.SHA256), lengths.cast(pa.string()), batch.column(c.PLACE), " ")
    text = "".join(line + "\n" for line in lines.to_pylist())
    row = {c.SOURCE: batch.column(c.SOURCE)[0].as_py(), "lines": text.encode(), "bytes": pc.sum(lengths).as_py()}
    return pa.RecordBatch.from_pylist([row], schema=_LINES)
