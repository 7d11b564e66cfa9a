"""Arrays of pictures and labels in NumPy's files, as keras.datasets and MedMNIST keep them; pickles are never loaded.

.npy    x93NUMPY, version, length of the header, the header (type, order and shape), then the values and nothing else
.npz    a zip of .npy files, stored or deflated; the name of an array is that of its file without .npy
"""

from __future__ import annotations

import io
import logging
import math
import re
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO, Any, cast

import numpy as np
import pyarrow as pa

from lockstep.etl.images import source as r
from lockstep.etl.images.source import ImagePlan, Piece, split_word, step_bytes
from lockstep.etl.input.files import Source, find_sources, source_name
from lockstep.etl.input.unpack import PLAIN, Forward
from lockstep.features.images.intake import Intake
from lockstep.storage.errors import ConfigError, DataError, NotFoundError
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import absolute, parent

NPY, NPZ = ".npy", ".npz"
MAX_SIDE = 4096
MAX_RECORDS = (1 << 31) - 1
MAX_RECORD_BYTES = MAX_SIDE * MAX_SIDE * 4
MAX_ARRAYS = 1000
MAX_HEADER_BYTES = 10_000  # NumPy's own limit
MAX_READ_BYTES = 16 << 20  # the directory of a zip is read at once
_HEAD_BYTES = 12  # magic, version, and the header's length in its longer form
_MOST_DEFLATED = 1032  # bytes that deflate can make of one
_IMAGE_WORDS = {"x", "image", "images", "data"}
_LABEL_WORDS = {"y", "label", "labels", "target", "targets"}
_ENCRYPTED = 1
# RuntimeError and its subclass NotImplementedError: what zipfile says of an archive that it does not support
_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, ValueError, OverflowError)
_BAD_HEADER = (ValueError, TypeError, KeyError, SyntaxError, MemoryError, RecursionError, tokenize.TokenError)
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Array:
    """An array in a file: its URL and codec or, in an archive, the name of its `member`; its type, shape and place."""

    url: str
    codec: str
    member: str | None
    dtype: str
    shape: tuple[int, ...]
    header_bytes: int

    @property
    def record_bytes(self) -> int:
        """Bytes of one image or label."""
        return math.prod(self.shape[1:]) * np.dtype(self.dtype).itemsize

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole .npy file, unpacked."""
        return self.header_bytes + self.shape[0] * self.record_bytes

    @property
    def place(self) -> str:
        """Where the array is, for errors."""
        return self.url if self.member is None else f"{self.url} ({self.member})"

    def read(self, first: int, count: int, batch: int) -> Iterator[bytes]:
        """Yield the bytes of records `first` to `first + count`, `batch` records at a time. An array in an archive is
        read from its first record, and a packed or archived one to its end: so a wrong length, or a checksum that does
        not agree, is noticed. Raises DataError for it.
        """
        with _opened(self) as stream:
            position = self.header_bytes + first * self.record_bytes
            for start in range(first, first + count, batch):
                wanted = min(batch, first + count - start) * self.record_bytes
                data = stream.at(position, wanted)
                position += len(data)
                if len(data) < wanted:
                    raise _wrong_length(self.place, f"{position} bytes", self.total_bytes, self.shape)
                yield data
            if first + count == self.shape[0] and stream.at(self.total_bytes, 1):
                raise _wrong_length(self.place, f"{self.total_bytes + 1} bytes or more", self.total_bytes, self.shape)


class _Member:
    """A file of a zip that is read forwards; positions count unpacked bytes. Its checksum is compared at its end."""

    def __init__(self, file: IO[bytes], place: str) -> None:
        self._file, self._place, self._position = file, place, 0

    def at(self, position: int, size: int) -> bytes:
        """Return `size` bytes from `position`, which is not before the last end; fewer only at the end of the file."""
        with _refused_damage(self._place):
            while self._position < position:
                skipped = self._file.read(min(position - self._position, r.BATCH_BYTES))
                if not skipped:
                    return b""
                self._position += len(skipped)
            pieces = []
            while size > 0 and (data := self._file.read(min(size, r.BATCH_BYTES))):
                pieces.append(data)
                size -= len(data)
                self._position += len(data)
            return b"".join(pieces)


@contextmanager
def _opened(array: Array) -> Iterator[Forward | _Member]:
    if array.member is None:
        with Forward(array.url, array.codec) as stream:
            yield stream
        return
    with _archive(array.url) as archive:
        with _refused_damage(array.place):
            file = archive.open(array.member)
        with file:
            yield _Member(file, array.place)


@contextmanager
def _refused_damage(place: str) -> Iterator[None]:
    """Raise DataError for what Python's zipfile makes of damaged bytes."""
    try:
        yield
    except _DAMAGE as error:
        raise DataError(
            f"{place} is damaged",
            got=str(error)[:200] or type(error).__name__,
            allowed="a whole .npz file, which is a zip, as numpy.savez and numpy.savez_compressed write it",
            next_step="Fetch the file again; compare its length and digest with the origin's.",
        ) from None


class _BoundedReads(io.RawIOBase):
    """An open file that refuses what only a forged directory of a zip asks for: reads of more than MAX_READ_BYTES, and
    places before the file's start.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file = file

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(min(size, MAX_READ_BYTES + 1) if size >= 0 else MAX_READ_BYTES + 1)
        if len(data) > MAX_READ_BYTES:
            raise zipfile.BadZipFile(f"a directory or comment of more than {MAX_READ_BYTES} bytes")
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence == io.SEEK_SET and offset < 0:
            raise zipfile.BadZipFile("a place before the file's start")
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True


@contextmanager
def _archive(url: str) -> Iterator[zipfile.ZipFile]:
    with filesystem(url).open_read(url) as file:
        with _refused_damage(url):
            # zipfile uses four methods of it, which the type cannot express
            archive = zipfile.ZipFile(cast(IO[bytes], _BoundedReads(file)))
        with archive:
            yield archive


@dataclass(frozen=True, slots=True)
class _Found:
    """An array's name, the number of its file, and how to read its header: those that are not used are never read."""

    name: str
    number: int
    source: Source
    member: zipfile.ZipInfo | None = None

    @property
    def path(self) -> str:
        """The path that its ids hold: a file of an archive is below it."""
        return self.source.path if self.member is None else f"{self.source.path}/{self.member.filename}"

    @property
    def place(self) -> str:
        """Where the array is, for errors."""
        return self.source.url if self.member is None else f"{self.source.url} ({self.member.filename})"

    def opened(self) -> Array:
        """Read the header. Raises DataError for values that are Python objects, another order than C, and a length that
        is not the header's.
        """
        source, size = self.source, None
        if self.member is not None:
            size = _plausible_size(self.member, self.place, source.size_bytes)
        elif source.codec == PLAIN:
            size = source.size_bytes
        member = None if self.member is None else self.member.filename
        unread = Array(absolute(source.url), source.codec, member, "|u1", (0,), 0)
        with _opened(unread) as stream:
            head = stream.at(0, _HEAD_BYTES)
            head += stream.at(len(head), _rest_of_header(head))
        array = _parsed(unread, head)
        if size not in (None, array.total_bytes):
            raise _wrong_length(self.place, f"{size} bytes", array.total_bytes, array.shape)
        return array


def _plausible_size(member: zipfile.ZipInfo, place: str, archive_bytes: int) -> int:
    """The unpacked bytes of a member. Raises DataError if its packed bytes cannot be these."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or member.flag_bits & _ENCRYPTED:
        raise DataError(
            f"{place} is packed in a way that is not supported",
            got="encrypted" if member.flag_bits & _ENCRYPTED else f"compression {member.compress_type}",
            allowed="stored or deflated, as numpy.savez and numpy.savez_compressed write it",
            next_step="Write it by numpy.savez_compressed.",
        )
    packed, size = member.compress_size, member.file_size
    most = packed if member.compress_type == zipfile.ZIP_STORED else _MOST_DEFLATED * packed
    if size > most or member.header_offset + packed > archive_bytes:
        raise DataError(
            f"{place} cannot be as large as the archive says",
            got=f"{size} bytes from {packed}, in an archive of {archive_bytes}",
            allowed=f"no more than {_MOST_DEFLATED} bytes from one, all of them in the archive",
            next_step="Fetch the file again; do not use it if its origin is not known.",
        )
    return size


def _rest_of_header(head: bytes) -> int:
    """The bytes of the header behind the first _HEAD_BYTES; 0 if there is none, or one that is too long."""
    if head[:6] != np.lib.format.MAGIC_PREFIX or len(head) < _HEAD_BYTES:
        return 0
    start, length = (10, head[8:10]) if head[6] == 1 else (12, head[8:12])
    end = start + int.from_bytes(length, "little")
    return end - len(head) if end <= MAX_HEADER_BYTES else 0


def _parsed(unread: Array, head: bytes) -> Array:
    """The array whose file begins with `head`, all of its header."""
    try:
        file = io.BytesIO(head)
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
        if read is None:
            raise ValueError(f"version {version}, for types with names")
        shape, fortran, dtype = read(file)
        shape = tuple(map(int, shape))
    except _BAD_HEADER as error:
        raise DataError(
            f"{unread.place} is not a NumPy array",
            got=f"{str(error)[:200] or type(error).__name__}; it begins with {head[:8].hex(' ') or 'nothing'}",
            allowed="a .npy file as numpy.save writes it",
            next_step="Check --input, or fetch the file again.",
        ) from None
    if dtype.hasobject:
        raise DataError(
            f"{unread.place} holds Python objects, which only unpickling can read",
            got=f"type {dtype}",
            allowed="numbers: a pickle can run any code and is never loaded",
            next_step="Store an array of numbers, such as numpy.stack(images).astype('uint8').",
        )
    if fortran and len(shape) > 1:
        raise DataError(
            f"{unread.place} is in Fortran's order, in which the pixels of a picture are apart",
            got="fortran_order: True",
            allowed="C order",
            next_step="Store numpy.ascontiguousarray(...) of it.",
        )
    good = all(0 <= size <= MAX_RECORDS for size in shape) and len(shape) <= 4 and dtype.names is None
    if not good:
        raise DataError(
            f"{unread.place} has a type or shape that pictures and labels do not have",
            got=f"{dtype} {shape}"[:200],
            allowed=f"numbers, 1 to 4 dimensions of at most {MAX_RECORDS}",
            next_step="Name the arrays by --image-arrays and --label-arrays.",
        )
    return replace(unread, dtype=dtype.str, shape=shape, header_bytes=file.tell())


def _wrong_length(place: str, got: str, total: int, shape: tuple[int, ...]) -> DataError:
    return DataError(
        f"{place} has the wrong length",
        got=got,
        allowed=f"{total} bytes, as its header says: {' x '.join(map(str, shape))}",
        next_step="Fetch the file again; compare its digest with the origin's.",
    )


@dataclass(frozen=True, slots=True)
class ArrayPiece(Piece):
    """`count` records of an array of images and one of labels, starting with record `first`."""

    images: Array
    source: int
    labels: Array
    labels_source: int
    name: str
    split: str | None
    first: int
    count: int

    def __post_init__(self) -> None:
        for field in ("images", "labels"):
            value: Any = getattr(self, field)
            if not isinstance(value, Array):  # it comes from JSON
                object.__setattr__(self, field, Array(**{**value, "shape": tuple(value["shape"])}))

    def read(self, intake: Intake, num_classes: int | None) -> Iterator[pa.RecordBatch]:
        """Raises DataError for arrays whose length is not that of their header."""
        assert num_classes is not None
        images, labels = self.images, self.labels
        step = max(1, r.BATCH_BYTES // images.record_bytes)
        pixels, classes = (array.read(self.first, self.count, step) for array in (images, labels))
        start = self.first
        for data, label_bytes in zip(pixels, classes, strict=True):
            values = np.frombuffer(label_bytes, dtype=labels.dtype)
            good = (values >= 0) & (values < num_classes)
            numbers = np.arange(start, start + len(values))
            # (n * H * W * C,) -> (n, H, W, C), one channel where the array has none
            stack = np.frombuffer(data, dtype=np.uint8).reshape(len(values), *images.shape[1:3], -1)
            if good.any():
                kinds = values[good].astype(np.int64)
                yield r.numbered_rows(self, numbers[good], numbers[good], intake.stack(stack[good]), kinds)
            if not good.all():
                raw = [value.tobytes() for value in values[~good]]
                yield r.wrong_labels(self.labels_source, numbers[~good], raw, labels.member)
            start += len(values)


Names = tuple[tuple[str, str], ...]  # of an array of images and its labels, by the flags


def plan(
    inputs: Sequence[str], *, names: Names, given: bool, num_classes: int, split_bytes: int, root: str | None = None
) -> ImagePlan:
    """Pair the arrays by `names`, or by the usual ones, and check types, shapes and lengths.

    Raises NotFoundError if there is no pair, ConfigError for names that do not say which arrays go together or which
    split they are, DataError for arrays that do not fit.
    """
    found = find_sources(inputs, root=root, zips=True)
    numbered = [(number, one) for number, one in enumerate(found) if source_name(one.url).endswith((NPY, NPZ))]
    sources = [one for _, one in numbered]
    groups: dict[str, list[_Found]] = {}
    for number, source in enumerate(sources):
        for array in _arrays_of(number, source):
            groups.setdefault(source.url if array.member else parent(source.url), []).append(array)
    pieces: list[ArrayPiece] = []
    named: list[Source] = []
    first: Array | None = None
    records = 0
    unused = set(names)
    for place, group in groups.items():
        for image, label in _pairs(place, group, names):
            images, labels = _checked(image, label)
            unused.discard((image.name, label.name))
            first = first or images
            _same_size(first, images)
            named.append(replace(image.source, path=image.path))
            records += images.shape[0]
            split = _split_of(image) if given else None
            pieces += _pieces(images, labels, image, label, split, step_bytes(split_bytes))
    if first is None:
        raise NotFoundError(
            f"input {' '.join(inputs)[:500]} holds no arrays",
            got="no *.npz and no *.npy" if not sources else "archives without an array",
            allowed="*.npz, *.npy, or a folder of them",
            next_step="Check --input and --source.",
        )
    if unused:
        raise NotFoundError(
            "no input holds the arrays that --image-arrays and --label-arrays name",
            got=", ".join(f"{one} with {two}" for one, two in sorted(unused)),
            allowed="names of arrays in --input",
            next_step="Correct the names or leave them out.",
        )
    height, width, *channels = first.shape[1:]
    return ImagePlan(
        sources=sources,
        pieces=pieces,
        shape=(height, width, channels[0] if channels else 1),
        num_classes=num_classes,
        records=records,
        named=named,
    )


def _arrays_of(number: int, source: Source) -> list[_Found]:
    name = source_name(source.url)
    if name.endswith(NPY):
        return [_Found(name.removesuffix(NPY), number, source)]
    if source.codec != PLAIN:
        raise DataError(
            f"input {source.url} is a packed archive",
            got=f"{source.codec} around a .npz file, which is packed itself",
            allowed="the .npz file",
            next_step="Unpack it once.",
        )
    with _archive(absolute(source.url)) as archive:
        members = [one for one in archive.infolist() if one.filename.endswith(NPY)]
    names = [one.filename for one in members]
    if len(names) > MAX_ARRAYS or len(set(names)) < len(names):
        raise DataError(
            f"input {source.url} holds too many arrays, or one twice",
            got=f"{len(names)} arrays of {len(set(names))} names",
            allowed=f"{MAX_ARRAYS} arrays at most, each with a name of its own",
            next_step="Write the archive again by numpy.savez.",
        )
    return [_Found(one.filename.removesuffix(NPY), number, source, one) for one in members]


def _pairs(place: str, group: Sequence[_Found], names: Names) -> list[tuple[_Found, _Found]]:
    """The arrays of one archive or folder that go together."""
    there = {array.name: array for array in group}
    wanted = [pair for pair in names if not there.keys().isdisjoint(pair)] if names else _usual(place, list(there))
    if not wanted or any(name not in there for pair in wanted for name in pair):
        raise NotFoundError(
            f"{place} does not hold the arrays of images and their labels",
            got=f"arrays {', '.join(there)}"[:500],
            allowed=", ".join(f"{one} with {two}" for one, two in wanted or names)
            or "x_train with y_train, x_test with y_test, train_images with train_labels, images with labels, x with y",
            next_step="Name them: --image-arrays A,B --label-arrays C,D, in the same order.",
        )
    if unused := [name for name in there if all(name not in pair for pair in wanted)]:
        log.warning("arrays of %s that are neither images nor labels are not read: %s", place, ", ".join(unused)[:500])
    return [(there[one], there[two]) for one, two in wanted]


def _usual(place: str, names: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs by the words in their names, all but one of which are equal: train_images, train_labels."""
    found: dict[tuple[str, ...], dict[bool, str]] = {}
    for name in names:
        words = re.split(r"[^a-z0-9]+", name.lower())
        roles = [word for word in words if word in _IMAGE_WORDS | _LABEL_WORDS]
        if len(roles) != 1:
            continue
        kind = roles[0] in _IMAGE_WORDS
        pair = found.setdefault(tuple(word for word in words if word != roles[0]), {})
        if kind in pair:
            raise ConfigError(
                f"{place} has two arrays that may be the {'images' if kind else 'labels'}",
                got=f"{pair[kind]} and {name}"[:200],
                allowed="one of them",
                next_step="Name the arrays: --image-arrays A --label-arrays C.",
            )
        pair[kind] = name
    return [(pair.get(True, "its images"), pair.get(False, "its labels")) for pair in found.values()]


def _checked(image: _Found, label: _Found) -> tuple[Array, Array]:
    """The headers of a pair. Raises DataError for a wrong type or shape, and for two lengths."""
    images, labels = image.opened(), label.opened()
    sides, kind = images.shape[1:], np.dtype(labels.dtype).kind
    flat = labels.shape[1:] in ((), (1,))
    shaped = len(sides) in (2, 3) and all(1 <= side <= MAX_SIDE for side in sides) and sides[2:] in ((), (1,), (3,))
    if images.dtype != "|u1" or not shaped or not images.shape[0] or images.record_bytes > MAX_RECORD_BYTES:
        raise DataError(
            f"{images.place} is no array of pictures",
            got=f"{np.dtype(images.dtype)} {images.shape}",
            allowed=f"uint8 (n, height, width), or with 1 or 3 channels as the last; sides 1 to {MAX_SIDE}",
            next_step="Store numpy.round(255 * x).astype('uint8') of fractions, numpy.moveaxis(x, 1, -1) of channels in"
            " front; or name the arrays by --image-arrays.",
        )
    if kind not in "iu" or not flat:
        raise DataError(
            f"{labels.place} is no array of labels",
            got=f"{np.dtype(labels.dtype)} {labels.shape}",
            allowed="whole numbers (n,) or (n, 1)",
            next_step="Store labels.argmax(axis=1) of one column a class, numpy.unique(labels, return_inverse=True)[1]"
            " of names; or name the arrays by --label-arrays.",
        )
    if images.shape[0] != labels.shape[0]:
        raise DataError(
            f"{images.place} and {labels.place} do not belong together",
            got=f"{images.shape[0]} images, {labels.shape[0]} labels",
            allowed="a label for each image",
            next_step="Fetch both again from one origin, or name the arrays by --image-arrays and --label-arrays.",
        )
    return images, labels


def _same_size(first: Array, images: Array) -> None:
    if first.shape[1:] != images.shape[1:]:
        raise DataError(
            f"{images.place} holds images of another size",
            got=str(images.shape[1:]),
            allowed=f"{first.shape[1:]} as in {first.place}",
            next_step="Build a dataset from each.",
        )


def _split_of(image: _Found) -> str:
    """The split that the array's name says, else its file's or that of a folder above. Raises ConfigError if none
    does.
    """
    for part in (image.name, *image.source.path.split("/")[::-1]):
        if (split := split_word(part)) is not None:
            return split
    raise ConfigError(
        f"{image.place} does not name its split",
        got=image.name,
        allowed="train, val or test as a word in the name of the array, of the file or of its folder",
        next_step="Use --split 80/20.",
    )


def _pieces(
    images: Array, labels: Array, image: _Found, label: _Found, split: str | None, step: int
) -> Iterator[ArrayPiece]:
    """A plain file of images is cut after about `step` bytes; a packed one and an array in an archive are one piece."""
    plain = images.member is None and images.codec == PLAIN
    records = max(1, step // images.record_bytes) if plain else images.shape[0]
    for first in range(0, images.shape[0], records):
        count = min(records, images.shape[0] - first)
        yield ArrayPiece(images, image.number, labels, label.number, image.path, split, first, count)
