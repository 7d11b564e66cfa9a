"""The IDX format of MNIST, plain or packed; the length of a file is checked against its header.

offset 0   two zero bytes, the type of the values (08: unsigned byte), the number of dimensions d
offset 4   d big-endian uint32: the sizes; for images n, height, width (and channels), for labels n
then       the values in C order, nothing else
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from lockstep.etl.images import source as r
from lockstep.etl.images.source import ImagePlan, Piece, step_bytes
from lockstep.etl.input.files import Source, find_sources, source_name
from lockstep.etl.input.unpack import PLAIN, Forward
from lockstep.features.images.intake import Intake
from lockstep.storage.errors import ConfigError, DataError, NotFoundError
from lockstep.storage.urls import absolute, parent

_UNSIGNED_BYTE = 0x08
MAX_SIDE = 4096
MAX_RECORDS = (1 << 31) - 1
# The length of a packed file is not known, so its header must not be able to claim all memory.
MAX_RECORD_BYTES = MAX_SIDE * MAX_SIDE * 4
_KIND = re.compile(r"(images|labels)(.*?)idx\d")
_GIVEN = {"train": "train", "t10k": "test", "test": "test"}


@dataclass(frozen=True, slots=True)
class IdxFile:
    """An IDX file of unsigned bytes: URL, codec and dimensions, of which the first is the number of records."""

    url: str
    codec: str
    shape: tuple[int, ...]

    @property
    def header_bytes(self) -> int:
        """The position of the values."""
        return 4 + 4 * len(self.shape)

    @property
    def record_bytes(self) -> int:
        """Bytes of one record."""
        return math.prod(self.shape[1:])

    @property
    def total_bytes(self) -> int:
        """Decompressed length of the file."""
        return self.header_bytes + self.shape[0] * self.record_bytes

    def position(self, record: int) -> int:
        """The position of a record, in decompressed bytes."""
        return self.header_bytes + record * self.record_bytes


def read_header(source: Source) -> IdxFile:
    """Read and check the header, and for a plain file its length. Raises DataError naming the file."""
    with Forward(source.url, source.codec) as stream:
        head = stream.at(0, 4)
        if len(head) < 4 or head[:3] != bytes([0, 0, _UNSIGNED_BYTE]) or not 1 <= head[3] <= 4:
            raise _bad(
                source.url, f"it begins with {head.hex(' ')}", "00 00 08 and 1 to 4 dimensions", "IDX of unsigned bytes"
            )
        sizes = stream.at(4, 4 * head[3])
    if len(sizes) < 4 * head[3]:
        raise _short(source.url, 4 + len(sizes), f"a header of {4 + 4 * head[3]} bytes")
    file = IdxFile(source.url, source.codec, struct.unpack(f">{head[3]}I", sizes))
    sides = all(1 <= size <= MAX_SIDE for size in file.shape[1:])
    if not (sides and 1 <= file.shape[0] <= MAX_RECORDS and file.record_bytes <= MAX_RECORD_BYTES):
        allowed = f"1 to {MAX_RECORDS} records, sides 1 to {MAX_SIDE}, {MAX_RECORD_BYTES} bytes a record at most"
        raise _bad(source.url, f"dimensions {file.shape}", allowed, "an image set")
    if source.codec == PLAIN and source.size_bytes != file.total_bytes:
        raise _length(file, source.size_bytes)
    return file


def read_records(file: IdxFile, first: int, count: int, batch: int) -> Iterator[bytes]:
    """Yield the bytes of records `first` to `first + count`, `batch` records at a time.

    A packed file is read from its start, and to its end if the range ends there, so that a wrong length is noticed.
    Raises DataError for it.
    """
    with Forward(file.url, file.codec) as stream:
        for start in range(first, first + count, batch):
            wanted = min(batch, first + count - start) * file.record_bytes
            data = stream.at(file.position(start), wanted)
            if len(data) < wanted:
                # The bytes before the range were skipped, so the end of the file is not known.
                skipped = start == first > 0 and not data
                raise _length(file, file.position(start) + len(data), "or fewer" if skipped else "")
            yield data
        if first + count == file.shape[0] and (rest := stream.at(file.total_bytes, 1 << 20)):
            raise _length(file, file.total_bytes + len(rest), "or more")


def _length(file: IdxFile, got: int, more: str = "") -> DataError:
    return _short(
        file.url, got, f"{file.total_bytes} bytes, as its header says: {' x '.join(map(str, file.shape))}", more
    )


def _short(url: str, got: int, allowed: str, more: str = "") -> DataError:
    return DataError(
        f"IDX file {url} has the wrong length",
        got=f"{got} bytes {more}".strip(),
        allowed=allowed,
        next_step="Fetch the file again; compare its digest with the origin's.",
    )


def _bad(url: str, got: str, allowed: str, what: str) -> DataError:
    return DataError(f"{url} is not {what}", got=got, allowed=allowed, next_step="Check --input and --source.")


@dataclass(frozen=True, slots=True)
class Pair:
    """An image file and its label file, their numbers among the sources, and the split in their name."""

    images: IdxFile
    labels: IdxFile
    source: int
    labels_source: int
    split: str | None


@dataclass(frozen=True, slots=True)
class IdxPiece(Piece):
    """`count` records of a pair, starting with record `first`."""

    images_url: str
    images_codec: str
    shape: tuple[int, ...]
    source: int
    labels_url: str
    labels_codec: str
    labels_source: int
    name: str
    split: str | None
    first: int
    count: int

    def read(self, intake: Intake, num_classes: int | None) -> Iterator[pa.RecordBatch]:
        """Raises DataError for files whose length is not that of their header."""
        assert num_classes is not None
        images = IdxFile(self.images_url, self.images_codec, tuple(self.shape))
        labels = IdxFile(self.labels_url, self.labels_codec, (images.shape[0],))
        step = max(1, r.BATCH_BYTES // images.record_bytes)
        pixels = read_records(images, self.first, self.count, step)
        classes = read_records(labels, self.first, self.count, step)
        start = self.first
        for data, label_bytes in zip(pixels, classes, strict=True):
            label = np.frombuffer(label_bytes, dtype=np.uint8)
            good = label < num_classes
            numbers = np.arange(start, start + len(label))
            # (n * H * W * C,) -> (n, H, W, C), one channel where the file has none
            stack = np.frombuffer(data, dtype=np.uint8).reshape(len(label), *images.shape[1:3], -1)
            if good.any():
                positions = numbers[good] * images.record_bytes + images.header_bytes
                yield r.numbered_rows(self, positions, numbers[good], intake.stack(stack[good]), label[good])
            if not good.all():
                raw = [bytes([value]) for value in label[~good].tolist()]
                yield r.wrong_labels(self.labels_source, numbers[~good] + labels.header_bytes, raw)
            start += len(label)


def plan(
    inputs: Sequence[str], *, given: bool, num_classes: int, split_bytes: int, root: str | None = None
) -> ImagePlan:
    """Pair the files by name and check headers and lengths.

    Raises ConfigError for names that are none, NotFoundError for half a pair, DataError for headers that do not fit.
    """
    sources = find_sources(inputs, root=root)
    pairs = pair_up(sources, given)
    height, width, *channels = pairs[0].images.shape[1:]
    return ImagePlan(
        sources=sources,
        pieces=_pieces(sources, pairs, step_bytes(split_bytes)),
        shape=(height, width, channels[0] if channels else 1),
        num_classes=num_classes,
        records=sum(pair.images.shape[0] for pair in pairs),
        named=[sources[pair.source] for pair in pairs],
    )


def pair_up(sources: Sequence[Source], given: bool) -> list[Pair]:
    """The pairs among `sources`; with `given` each must name its split."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for number, source in enumerate(sources):
        name = source_name(source.url)
        kind = _KIND.search(name)
        if kind is None:
            raise ConfigError(
                f"input {source.url} is not named like an IDX file",
                got=name,
                allowed="*images*idx3* and *labels*idx1*, plain, .gz, .bz2 or .zst",
                next_step="Name the files as MNIST does, or remove this one.",
            )
        key = (parent(source.url), _KIND.sub(r"*\2idx", name))
        if kind.group(1) in found.setdefault(key, {}):
            raise ConfigError(
                f"input {source.url} is given twice",
                got="the same name plain and packed, or given twice",
                allowed="one of them",
                next_step="Remove one of them.",
            )
        found[key][kind.group(1)] = number
    pairs: list[Pair] = []
    for numbers in found.values():
        pair = _pair(sources, numbers, given)
        if pairs and pairs[0].images.shape[1:] != pair.images.shape[1:]:
            raise DataError(
                f"{pair.images.url} holds images of another size",
                got=str(pair.images.shape[1:]),
                allowed=f"{pairs[0].images.shape[1:]} as in {pairs[0].images.url}",
                next_step="Build a dataset from each.",
            )
        pairs.append(pair)
    return pairs


def _pair(sources: Sequence[Source], numbers: dict[str, int], given: bool) -> Pair:
    if len(numbers) < 2:
        there = sources[next(iter(numbers.values()))].url
        missing = "labels" if "images" in numbers else "images"
        raise NotFoundError(
            f"input {there} has no file of {missing}",
            got="one file of a pair",
            allowed="images and labels in one folder, named alike",
            next_step="Give --input both files, or their folder.",
        )
    images, labels = (read_header(sources[numbers[kind]]) for kind in ("images", "labels"))
    for file, dimensions in ((images, (3, 4)), (labels, (1,))):
        if len(file.shape) not in dimensions or (len(file.shape) == 4 and file.shape[3] not in (1, 3)):
            raise DataError(
                f"{file.url} has the wrong number of dimensions",
                got=str(file.shape),
                allowed=" or ".join(map(str, dimensions)) + ", of a fourth 1 or 3 channels",
                next_step="Check which file holds images and which labels.",
            )
    if images.shape[0] != labels.shape[0]:
        raise DataError(
            f"{images.url} and {labels.url} do not belong together",
            got=f"{images.shape[0]} images, {labels.shape[0]} labels",
            allowed="a label for each image",
            next_step="Fetch both files again from one origin.",
        )
    name = source_name(images.url)
    split = _GIVEN.get(re.split(r"[-_.]", name)[0])
    if given and split is None:
        raise ConfigError(
            f"{images.url} does not name its split",
            got=name,
            allowed="train-*, t10k-* or test-*",
            next_step="Use --split 80/20.",
        )
    return Pair(images, labels, numbers["images"], numbers["labels"], split if given else None)


def _pieces(sources: Sequence[Source], pairs: Sequence[Pair], step: int) -> list[IdxPiece]:
    """A packed file of images is one piece, a plain one is cut after about `step` bytes."""
    pieces = []
    for pair in pairs:
        images, labels = pair.images, pair.labels
        records = images.shape[0] if images.codec != PLAIN else max(1, step // images.record_bytes)
        for first in range(0, images.shape[0], records):
            pieces.append(
                IdxPiece(
                    images_url=absolute(images.url),
                    images_codec=images.codec,
                    shape=images.shape,
                    source=pair.source,
                    labels_url=absolute(labels.url),
                    labels_codec=labels.codec,
                    labels_source=pair.labels_source,
                    name=sources[pair.source].path,
                    split=pair.split,
                    first=first,
                    count=min(records, images.shape[0] - first),
                )
            )
    return pieces
