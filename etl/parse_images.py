"""The first pass over an image set, in the tasks: pieces in; images, rejected and left-out records out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict

import pyarrow as pa

from etl.cifar import CifarPiece
from etl.folders import FolderPiece
from etl.idx_images import IdxPiece
from etl.intake import Intake
from etl.parquet_images import ParquetPiece
from etl.pieces import Piece
from etl.spark_errors import in_task
from etl.tar_images import TarPiece
from storage.settings import set_hadoop_settings

PIECE_DDL = "piece string"
_KINDS: dict[str, type[Piece]] = {
    kind.__name__: kind for kind in (IdxPiece, CifarPiece, FolderPiece, TarPiece, ParquetPiece)
}


def to_text(piece: Piece) -> str:
    """A piece as one line of JSON."""
    # each Piece is a dataclass; the protocol cannot say so
    return json.dumps({"kind": type(piece).__name__, **asdict(piece)})  # type: ignore[call-overload]


def from_text(text: str) -> Piece:
    """The piece that to_text wrote."""
    values = json.loads(text)
    return _KINDS[values.pop("kind")](**values)


class ParseImages:
    """The function for mapInArrow: rows of PIECE_DDL in, rows of etl.image_rows.OUTPUT_DDL out."""

    def __init__(self, settings: dict[str, str], intake: Intake, num_classes: int | None) -> None:
        self._settings, self._intake, self._num_classes = settings, intake, num_classes

    @in_task
    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Read each piece. Raises what its kind raises."""
        set_hadoop_settings(self._settings)
        for batch in batches:
            for text in batch.column("piece").to_pylist():
                yield from from_text(text).read(self._intake, self._num_classes)
