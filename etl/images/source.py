"""The image files of plain archives, known by their headers alone: what it takes to plan each shard on the driver."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from etl import columns as c

# About 100 bytes each of the driver's memory. In the message that starts a shard's task, which Spark allows 128 MiB by
# default, they are 52 bytes each: even if all of them lie in one shard, they fit.
MAX_FILES = 2_000_000
OFFSET, LENGTH = "_offset", "_length"
FILES = pa.schema(
    [
        (c.SOURCE, pa.int32()),
        (c.POSITION, pa.int64()),
        (OFFSET, pa.int64()),
        (LENGTH, pa.int64()),
        (c.SPLIT, pa.string()),
        ("class", pa.string()),
        ("name", pa.string()),
    ]
)
_CHUNK_ROWS = 1 << 12  # as Python objects: more would only give the collector of garbage more to look through


@dataclass(frozen=True)
class ImageFiles:
    """`files` has a row of FILES for each file that should be an image, in order of source and position; `other` the
    rows of etl.images.image_rows of what is rejected or left out by its header.
    """

    files: pa.Table
    other: tuple[pa.RecordBatch, ...]

    @classmethod
    def joined(cls, parts: list[ImageFiles | None]) -> ImageFiles | None:
        """The files of all sources; None where those of one are not known."""
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        return cls(pa.concat_tables([part.files for part in known]), tuple(row for part in known for row in part.other))


class FileList:
    """Rows of FILES, gathered one after another; the driver holds them as Arrow's columns, not as Python's objects."""

    def __init__(self) -> None:
        self._rows: list[tuple[object, ...]] = []
        self._batches: list[pa.RecordBatch] = []

    def add(self, *values: object) -> None:
        """One file, its values in the order of FILES."""
        self._rows.append(values)
        if len(self._rows) == _CHUNK_ROWS:
            self._pack()

    def table(self) -> pa.Table:
        """All that was added."""
        self._pack()
        return pa.Table.from_batches(self._batches, FILES).combine_chunks()

    def _pack(self) -> None:
        if self._rows:
            columns = zip(FILES, zip(*self._rows, strict=True), strict=True)
            arrays = [pa.array(values, field.type) for field, values in columns]
            self._batches.append(pa.RecordBatch.from_arrays(arrays, schema=FILES))
            self._rows = []
