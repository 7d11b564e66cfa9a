"""The first pass over an image set, in the tasks: pieces in; images, rejected and left-out records out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from etl.images.cifar import CifarPiece
from etl.images.folders import FolderPiece
from etl.images.idx_images import IdxPiece
from etl.images.intake import Intake
from etl.images.parquet import ParquetPiece
from etl.images.pieces import Piece
from etl.images.tar import TarPiece
from etl.spark.tasks import EachSlice

_KINDS: dict[str, type[Piece]] = {
    kind.__name__: kind for kind in (IdxPiece, CifarPiece, FolderPiece, TarPiece, ParquetPiece)
}


def to_json(piece: Piece) -> dict[str, Any]:
    """A piece as plain values."""
    # each Piece is a dataclass; the protocol cannot say so
    return {"kind": type(piece).__name__, **asdict(piece)}  # type: ignore[call-overload]


def from_json(found: Mapping[str, Any]) -> Piece:
    """The piece that to_json wrote."""
    values = dict(found)
    return _KINDS[values.pop("kind")](**values)


class ParseImages(EachSlice):
    """The function for mapInArrow: pieces in, rows of etl.images.image_rows.OUTPUT_DDL out."""

    def __init__(self, settings: dict[str, str], intake: Intake, num_classes: int | None) -> None:
        super().__init__(settings)
        self._intake, self._num_classes = intake, num_classes

    def batches_of(self, items: Sequence[Mapping[str, Any]]) -> Iterator[pa.RecordBatch]:
        """Read the pieces. Raises what their kinds raise."""
        for item in items:
            yield from from_json(item).read(self._intake, self._num_classes)
