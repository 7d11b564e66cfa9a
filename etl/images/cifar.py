"""CIFAR-10 and CIFAR-100, binary version: records of fixed length in *.bin files, also packed or in the archive.

CIFAR-10    1 byte class, then 3 x 1,024 bytes: the red, green and blue plane of 32 rows of 32 pixels
CIFAR-100   1 byte coarse class, 1 byte fine class (the label), then the same
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from lockstep.etl import columns as c
from lockstep.etl.images import source as r
from lockstep.etl.images.source import ImagePlan, Piece, split_word, step_bytes
from lockstep.etl.images.tar_format import read_members
from lockstep.etl.input.files import Source, find_sources, source_name
from lockstep.etl.input.unpack import PLAIN, Forward
from lockstep.etl.reasons import LABEL_OUT_OF_RANGE
from lockstep.features.images.intake import Intake
from lockstep.storage.errors import DataError, NotFoundError
from lockstep.storage.urls import absolute, basename

SIDE, CHANNELS = 32, 3
PIXELS = SIDE * SIDE * CHANNELS
LABEL_BYTES = {"cifar10": 1, "cifar100": 2}
NUM_CLASSES = {"cifar10": 10, "cifar100": 100}
NAMES = {
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    # A record has only the number of its label: the names come from a file next to the batches, if there is one.
    "cifar100": (),
}
NAME_FILES = {"cifar100": "fine_label_names.txt"}
MAX_NAMES_BYTES = 64 << 10
_TAR_MAGIC_AT, _TAR_MAGIC = 257, b"ustar"


@dataclass(frozen=True, slots=True)
class CifarPiece(Piece):
    """`count` records of a file, starting with record `first`; all of a packed file (`count` None).

    `offset` is the position of the file in the unpacked bytes of `url`: 0 unless it is a member of an archive.
    """

    source: int
    url: str
    codec: str
    offset: int
    label_bytes: int
    name: str
    split: str | None
    first: int
    count: int | None

    def read(self, intake: Intake, num_classes: int | None) -> Iterator[pa.RecordBatch]:
        """Raises DataError for a file that ends inside a record."""
        assert num_classes is not None
        width = self.label_bytes + PIXELS
        step, number = max(1, r.BATCH_BYTES // width), self.first
        with Forward(self.url, self.codec) as stream:
            while self.count is None or number < self.first + self.count:
                wanted = step if self.count is None else min(step, self.first + self.count - number)
                data = stream.at(self.offset + number * width, wanted * width)
                if len(data) % width or (self.count is not None and len(data) < wanted * width):
                    raise _wrong_length(self.url, number * width + len(data), width)
                if not data:
                    return
                # (n * width,) -> (n, width)
                records = np.frombuffer(data, dtype=np.uint8).reshape(-1, width)
                yield from self._rows(records, number, intake, num_classes)
                number += len(records)

    def _rows(self, records: np.ndarray, first: int, intake: Intake, num_classes: int) -> Iterator[pa.RecordBatch]:
        numbers = np.arange(first, first + len(records))
        labels = records[:, self.label_bytes - 1]
        # (n, 3 * 32 * 32) -> (n, 3, 32, 32) -> (n, 32, 32, 3)
        stack = records[:, self.label_bytes :].reshape(-1, CHANNELS, SIDE, SIDE).transpose(0, 2, 3, 1)
        good = labels < num_classes
        positions = self.offset + numbers * records.shape[1]
        if good.any():
            yield r.numbered_rows(self, positions[good], numbers[good], intake.stack(stack[good]), labels[good])
        gather = r.Gather((), **{c.SOURCE: self.source, "name": self.name})
        for at in np.flatnonzero(~good).tolist():
            gather.bad(LABEL_OUT_OF_RANGE, int(positions[at]), records[at].tobytes())
        yield from gather.rest()


def plan(
    inputs: Sequence[str], kind: str, *, given: bool, num_classes: int, split_bytes: int, root: str | None = None
) -> ImagePlan:
    """Find the *.bin files, also in archives, and check the lengths of those whose length is known.

    Raises NotFoundError if there is none, DataError for a wrong length, for a name without a split if `given`, and for
    an incomplete file of class names.
    """
    names, names_file = NAMES[kind], NAME_FILES.get(kind)
    found = find_sources(inputs, root=root)
    sources = [source for source in found if _is_archive(source) or _is_wanted(source, names_file)]
    width = LABEL_BYTES[kind] + PIXELS
    pieces: list[CifarPiece] = []
    batches: list[Source] = []
    for number, source in enumerate(sources):
        for name, offset, size in _files(source, names_file):
            # as if the archive had been unpacked where it is
            path = posixpath.join(posixpath.dirname(source.path), name)
            if name == names_file:
                names = _names(source, offset, size, NUM_CLASSES[kind])
                continue
            split = _split_of(name)
            if given and split is None:
                raise DataError(
                    f"{source.url} does not name its split",
                    got=name,
                    allowed="*train*.bin, data_batch_*.bin or *test*.bin",
                    next_step="Use --split 80/20.",
                )
            batches.append(replace(source, path=path))
            count, step = None, 0
            if size is not None:
                if size % width or not size:
                    raise _wrong_length(f"{source.url} ({name})", size, width)
                count, step = size // width, max(1, step_bytes(split_bytes) // width)
            for first in range(0, count or 1, step or 1):
                part = None if count is None else min(step, count - first)
                pieces.append(
                    CifarPiece(
                        source=number,
                        url=absolute(source.url),
                        codec=source.codec,
                        offset=offset,
                        label_bytes=LABEL_BYTES[kind],
                        name=path,
                        split=split if given else None,
                        first=first,
                        count=part,
                    )
                )
    if not pieces:
        raise NotFoundError(
            f"input {' '.join(inputs)} holds no CIFAR batch",
            got="no *.bin",
            allowed="*.bin, *.bin.gz, or a tar of them",
            next_step="Fetch cifar-10-binary.tar.gz or cifar-100-binary.tar.gz, or check --input.",
        )
    return ImagePlan(
        sources=sources,
        pieces=pieces,
        shape=(SIDE, SIDE, CHANNELS),
        num_classes=num_classes,
        class_names=names[:num_classes],
        named=batches,
    )


def _split_of(name: str) -> str | None:
    """The split by the official names: data_batch_1.bin ... are for training, the others contain train or test."""
    return split_word(name) or ("train" if basename(name).startswith("data_batch") else None)


def _is_batch(name: str) -> bool:
    return name.endswith(".bin")


def _is_wanted(source: Source, names_file: str | None) -> bool:
    name = source_name(source.url)
    return _is_batch(name) or name == names_file


def _names(source: Source, offset: int, size: int | None, count: int) -> tuple[str, ...]:
    """The names of the classes in order. Raises DataError for a wrong number of them."""
    with Forward(source.url, source.codec) as stream:
        data = stream.at(offset, MAX_NAMES_BYTES if size is None else min(size, MAX_NAMES_BYTES))
    names = tuple(data.decode("utf-8", errors="backslashreplace").split())
    if len(names) != count or len(set(names)) != count:
        raise DataError(
            f"{source.url} does not name the classes",
            got=f"{len(names)} names, {len(set(names))} of them different",
            allowed=f"{count} names, a line each",
            next_step="Fetch the file again, or remove the file of the names.",
        )
    return names


def _is_archive(source: Source) -> bool:
    with Forward(source.url, source.codec) as stream:
        return stream.at(_TAR_MAGIC_AT, len(_TAR_MAGIC)) == _TAR_MAGIC and not _is_batch(source_name(source.url))


def _files(source: Source, names_file: str | None) -> Iterator[tuple[str, int, int | None]]:
    """Yield (name, offset, bytes or None if unknown before reading) of each batch in a source, and of the file of
    names.
    """
    if not _is_archive(source):
        yield source_name(source.url), 0, source.size_bytes if source.codec == PLAIN else None
        return
    with Forward(source.url, source.codec) as stream:
        for member in read_members(stream, source.url, 0, source.size_bytes if source.codec == PLAIN else None):
            if member.is_file and member.is_safe and (_is_batch(member.name) or member.parts[-1:] == (names_file,)):
                yield member.parts[-1], member.offset, member.size


def _wrong_length(url: str, got: int, width: int) -> DataError:
    return DataError(
        f"{url} is not a CIFAR batch",
        got=f"{got} bytes",
        allowed=f"records of {width} bytes",
        next_step="Check --source (cifar10 or cifar100), or fetch the file again.",
    )
