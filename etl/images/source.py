"""What all sources of images share: rows, pieces, plans, lists of files, and what a path says of an image."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from lockstep.etl import columns as c
from lockstep.etl.columns import PACKED
from lockstep.etl.input.files import Source
from lockstep.etl.input.lines import RAW_BYTES
from lockstep.etl.reasons import LABEL_OUT_OF_RANGE
from lockstep.etl.split.splits import TEST, TRAIN, VALIDATION
from lockstep.features.images.intake import Intake

# A file takes about 100 bytes and its path of the driver's memory.
MAX_FILES = 2_000_000
OFFSET = "_offset"
FILES = pa.schema(
    [
        (c.SOURCE, pa.int32()),
        (c.POSITION, pa.int64()),
        (OFFSET, pa.int64()),
        (c.LENGTH, pa.int64()),
        (c.SPLIT, pa.string()),
        ("class", pa.string()),
        ("name", pa.string()),
        (c.FILE, pa.string()),
    ]
)
_CHUNK_ROWS = 1 << 12  # rows held as Python objects: more would only burden the garbage collector
RECORD, BAD, DROPPED = 0, 1, 2
ID_COLUMNS = ("name", "number")  # what a sample id is made of
BATCH_BYTES = 4 << 20
BATCH_ROWS = 4096
# `class` is the name that becomes a label.
OUTPUT = pa.schema(
    [
        ("kind", pa.int32()),
        *c.REJECTED,
        (c.OCCURRENCE, pa.int64()),
        (c.SPLIT, pa.string()),
        ("name", pa.string()),
        (c.FILE, pa.string()),
        ("number", pa.int64()),
        ("image", pa.binary()),
        (PACKED, pa.bool_()),
        ("label", pa.int64()),
        ("class", pa.string()),
    ]
)
MAX_STEP_BYTES = 8 << 20  # decoding takes ten times as long as reading: small pieces keep all cores busy to the end
SPLITS = {"train": TRAIN, "training": TRAIN, "test": TEST, "testing": TEST, "t10k": TEST}


@dataclass(frozen=True)
class ImageFiles:
    """`files` has a row of FILES for each file that should be an image, in order of source and position; `other` has
    the rows of OUTPUT of files that are rejected or left out by their headers.
    """

    files: pa.Table
    other: tuple[pa.RecordBatch, ...]

    @classmethod
    def joined(cls, parts: list[ImageFiles | None]) -> ImageFiles | None:
        """The files of all sources; None if those of one are not known."""
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        return cls(pa.concat_tables([part.files for part in known]), tuple(row for part in known for row in part.other))


class FileList:
    """Collects rows of FILES; the driver holds them as Arrow columns, not as Python objects."""

    def __init__(self) -> None:
        self._rows: list[tuple[object, ...]] = []
        self._batches: list[pa.RecordBatch] = []

    def add(self, *values: object) -> None:
        """One file, its values in the order of FILES."""
        self._rows.append(values)
        if len(self._rows) == _CHUNK_ROWS:
            self._pack()

    def table(self) -> pa.Table:
        """Return all rows that were added."""
        self._pack()
        return pa.Table.from_batches(self._batches, FILES).combine_chunks()

    def _pack(self) -> None:
        if self._rows:
            columns = zip(FILES, zip(*self._rows, strict=True), strict=True)
            arrays = [pa.array(values, field.type) for field, values in columns]
            self._batches.append(pa.RecordBatch.from_arrays(arrays, schema=FILES))
            self._rows = []


def rows(count: int, columns: dict[str, Any]) -> pa.RecordBatch:
    """A batch of `count` rows of OUTPUT; a single value is repeated for all rows, a column not given is null."""
    arrays = []
    for declared in OUTPUT:
        value = columns.get(declared.name)
        if isinstance(value, str | int) or value is None:
            arrays.append(pa.repeat(pa.scalar(value, declared.type), count))
        else:
            arrays.append(value if isinstance(value, pa.Array) else pa.array(value, type=declared.type))
    return pa.RecordBatch.from_arrays(arrays, schema=OUTPUT)


def pixel_rows(stack: np.ndarray) -> pa.Array:
    """Equal images (n, H, W, C) uint8, n at least 1, as n binary values without a copy."""
    stack = np.ascontiguousarray(stack)
    offsets = pa.py_buffer(np.arange(len(stack) + 1, dtype=np.int32) * np.int32(stack[0].size))
    return pa.Array.from_buffers(pa.binary(), len(stack), [None, offsets, pa.py_buffer(stack)])


class Numbered(Protocol):
    """A piece of a file whose records are known by their numbers."""

    @property
    def source(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def split(self) -> str | None: ...


def numbered_rows(
    piece: Numbered, positions: np.ndarray, numbers: np.ndarray, stack: np.ndarray, labels: np.ndarray
) -> pa.RecordBatch:
    """Rows of good records of a file that are known by their numbers: `stack` (n, H, W, C) uint8, the rest (n,)."""
    return rows(
        len(stack),
        {
            "kind": RECORD,
            c.SOURCE: piece.source,
            c.POSITION: positions,
            c.OCCURRENCE: 0,
            c.SPLIT: piece.split,
            "name": piece.name,
            "number": numbers,
            "image": pixel_rows(stack),
            "label": labels,
        },
    )


def wrong_labels(source: int, positions: np.ndarray, raw: list[bytes], place: str | None = None) -> pa.RecordBatch:
    """Rows for quarantine of labels that are no class: `raw` has the bytes of each, `positions` (n,) its place."""
    return rows(
        len(raw),
        {
            "kind": BAD,
            c.SOURCE: source,
            c.POSITION: positions,
            c.PLACE: place,
            c.REASON: LABEL_OUT_OF_RANGE,
            c.RAW: raw,
            c.LENGTH: np.array([len(label) for label in raw], dtype=np.int64),
            c.SHA256: [hashlib.sha256(label).hexdigest() for label in raw],
        },
    )


class Gather:
    """Collects rows and makes batches of about BATCH_BYTES.

    `columns` are the columns that differ between images, except the image; `fixed` columns are equal in all rows.
    """

    def __init__(self, columns: tuple[str, ...], **fixed: Any) -> None:
        self._columns, self._fixed = columns, fixed
        self._bytes = 0
        self._images: list[bytes] = []
        self._values: list[tuple[Any, ...]] = []
        self._other: list[dict[str, Any]] = []

    def record(self, image: bytes, *values: Any) -> None:
        """Add an image, with its values in the order of `columns`."""
        self._images.append(image)
        self._values.append(values)
        self._bytes += len(image)

    def bad(self, reason: str, position: int, raw: bytes, place: str | None = None) -> None:
        """Add a rejected record, all of whose bytes are given."""
        self.bad_part(reason, position, raw[:RAW_BYTES], len(raw), hashlib.sha256(raw).hexdigest(), place)

    def bad_part(
        self, reason: str, position: int, raw: bytes, length: int, sha256: str, place: str | None = None
    ) -> None:
        """Add a rejected record by the first bytes, the length and the SHA-256 of the whole."""
        rejected = {c.POSITION: position, c.PLACE: place, c.REASON: reason, c.RAW: raw}
        self._other.append({"kind": BAD, **rejected, c.LENGTH: length, c.SHA256: sha256})
        self._bytes += len(raw)

    def drop(self, reason: str, position: int, place: str | None = None) -> None:
        """Add a record that is left out by a rule, which `reason` names."""
        self._other.append({"kind": DROPPED, c.REASON: reason, c.POSITION: position, c.PLACE: place})

    def full(self) -> Iterator[pa.RecordBatch]:
        """A batch if enough rows were collected, else nothing."""
        if self._bytes >= BATCH_BYTES or len(self._images) + len(self._other) >= BATCH_ROWS:
            yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """The rows since the last batch."""
        if self._images:
            values = dict(zip(self._columns, map(list, zip(*self._values, strict=True)), strict=True))
            yield rows(len(self._images), {**self._fixed, "kind": RECORD, "image": self._images, **values})
        if self._other:
            names = dict.fromkeys(name for row in self._other for name in row)
            columns = {name: [row.get(name) for row in self._other] for name in names}
            yield rows(len(self._other), {**self._fixed, **columns})
        self._images, self._values, self._other, self._bytes = [], [], [], 0


class Piece(ABC):
    """A part of the input that one task reads; a frozen dataclass of plain values, since it is sent as JSON."""

    source: int
    """The number of the file that it is read from (for two files, of the one with the images)."""

    @abstractmethod
    def read(self, intake: Intake, num_classes: int | None) -> Iterator[pa.RecordBatch]:
        """The rows of OUTPUT. Numeric labels of `num_classes` or more are rejected.

        Raises DataError for a file that is damaged or does not have its planned length.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagePlan:
    """Sources, pieces and what is known before reading.

    `shape` is (height, width, channels) before any operation, None for files of any size. `num_classes` is None if
    classes are names, which are known after reading; `class_names` are those of numeric labels. `records` is the number
    in the headers, None if they have none. `trees` means that sources are folders. `files` are those of plain archives,
    if they were listed. `named` are the files whose paths are in the ids of their images, with these paths.
    """

    sources: Sequence[Source]
    pieces: Sequence[Piece]
    shape: tuple[int, int, int] | None = None
    num_classes: int | None = None
    class_names: tuple[str, ...] = ()
    records: int | None = None
    trees: bool = False
    names_may_repeat: bool = False
    files: ImageFiles | None = None
    named: Sequence[Source] = ()

    def piece_bytes(self) -> list[int]:
        """The approximate bytes of input of each piece: its share of its file."""
        counts = Counter(piece.source for piece in self.pieces)
        return [self.sources[piece.source].size_bytes // counts[piece.source] for piece in self.pieces]


def step_bytes(split_bytes: int) -> int:
    """Bytes of input for a task: `split_bytes`, or less."""
    return min(split_bytes, MAX_STEP_BYTES)


SPLITS |= dict.fromkeys(("val", "valid", "validation", "dev"), VALIDATION)


class Place(NamedTuple):
    """The split that a path names (or None), the class (or None), and the name from which the sample id is made."""

    split: str | None
    label: str | None
    name: str


def split_word(text: str) -> str | None:
    """The split that the name of a file or folder contains as a word, such as `cifar10_train.tar`; the first one."""
    return next((SPLITS[word] for word in re.split(r"[^a-z0-9]+", text.lower()) if word in SPLITS), None)


def place_of(
    parts: Sequence[str], hint: str | None = None, classes: Sequence[str] = (), *, unlabelled: bool = False
) -> Place:
    """Read a relative path. The first folder named like a split is the split, and the folder in it the class. Without
    one, the class is the folder of the file and the split is `hint`, from the name of the archive or root.

    A folder that holds the file and that `classes` names is the class, also if it is named like a split; with
    `unlabelled` there is no class. Names are in
    Unicode's composed form (NFC): systems that decompose the letters of a name give the same classes and sample ids.
    """
    split, label, hinted = _of_folders(tuple(parts[:-1]), hint, tuple(classes))
    name = composed("/".join(parts))
    # With the hint in front, a sample has the same name if its split is a folder or a separate archive.
    return Place(split, None if unlabelled else label, f"{split}/{name}" if hinted and split else name)


def composed(text: str) -> str:
    """A name in Unicode's composed form, NFC."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def split_classes(classes: Sequence[str] | None) -> tuple[str, ...]:
    """Return those of the named classes that are named like a split."""
    return tuple(name for name in classes or () if name.lower() in SPLITS)


@lru_cache(maxsize=1 << 12)  # images come class by class
def _of_folders(
    folders: tuple[str, ...], hint: str | None, classes: tuple[str, ...]
) -> tuple[str | None, str | None, bool]:
    """Return (split, class, whether the split is the hint's)."""
    folders = tuple(map(composed, folders))
    for number, folder in enumerate(folders):
        split = SPLITS.get(folder.lower())
        if split is None or (folder in classes and number == len(folders) - 1):
            continue
        inside = folders[number + 1 :]
        while inside and SPLITS.get(inside[0].lower()) == split and not (inside[0] in classes and len(inside) == 1):
            inside = inside[1:]  # train/train/cat, as some archives unpack
        return split, next(iter(inside), None), False
    return hint, folders[-1] if folders else None, True
