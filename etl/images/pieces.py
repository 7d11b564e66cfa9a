"""What one task reads of an image set, and what the driver knows of all of it before Spark starts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from etl.images.intake import Intake
from etl.images.source import ImageFiles
from etl.input.ranges import Source

MAX_STEP_BYTES = 8 << 20  # decoding takes ten times as long as reading: smaller pieces keep all cores busy to the end


class Piece(ABC):
    """A part of the input; a frozen dataclass of plain values, since it travels as JSON."""

    source: int
    """The number of the file that it is read from (of two, the one with the images)."""

    @abstractmethod
    def read(self, intake: Intake, num_classes: int | None) -> Iterator[pa.RecordBatch]:
        """The rows of etl.images.image_rows. Labels that are numbers go to quarantine from `num_classes` on.

        Raises DataError for a file that is damaged or not as long as planned.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagePlan:
    """Sources, pieces and what is known already.

    `shape` is (height, width, channels) before any operation, None for files of any size. `num_classes` is None where
    classes are names, which come to light when all is read; `class_names` are those of labels that are numbers.
    `records` is what the headers promise, None where they promise nothing. `trees` says that sources are folders.
    `files` are those in plain archives, where they were listed.
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

    def piece_bytes(self) -> list[int]:
        """About how many bytes of input each piece has: its share of its file."""
        counts = Counter(piece.source for piece in self.pieces)
        return [self.sources[piece.source].size_bytes // counts[piece.source] for piece in self.pieces]


def step_bytes(split_bytes: int) -> int:
    """Bytes of input for a task: what the caller asks for, or less."""
    return min(split_bytes, MAX_STEP_BYTES)
