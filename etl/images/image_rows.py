"""The rows that every image source gives: images, what is rejected, and what is left out, gathered into batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from etl import columns as c
from etl.input.lines import RAW_BYTES

RECORD, BAD, DROPPED = 0, 1, 2
ID_COLUMNS = ("name", "number")  # what a sample id is made of
LABEL_OUT_OF_RANGE = "label_out_of_range"
NO_LABEL = "no_label"
LABEL_TOO_LONG = "label_too_long"
NO_IMAGE = "no_image"
NO_CLASS = "no_class"
NOT_A_FILE = "not_a_regular_file"
UNSAFE_NAME = "unsafe_name"
NOT_AN_IMAGE = "not_an_image"  # dropped: its name says so
PACKED, PLACE = "_packed", "place"  # whether the image is still a file; the path below the source, of a folder
BATCH_BYTES = 4 << 20
BATCH_ROWS = 4096

# `place` is what stands behind the source's URL where a source is a folder; `class` the name that becomes a label.
OUTPUT = pa.schema(
    [
        ("kind", pa.int32()),
        (c.SOURCE, pa.int32()),
        (c.POSITION, pa.int64()),
        ("place", pa.string()),
        (c.OCCURRENCE, pa.int64()),
        (c.SPLIT, pa.string()),
        ("name", pa.string()),
        ("number", pa.int64()),
        ("image", pa.binary()),
        (PACKED, pa.bool_()),
        ("label", pa.int64()),
        ("class", pa.string()),
        ("reason", pa.string()),
        ("raw", pa.binary()),
        ("length", pa.int64()),
        ("sha256", pa.string()),
    ]
)
OUTPUT_DDL = (
    f"kind int, {c.SOURCE} int, {c.POSITION} bigint, place string, {c.OCCURRENCE} bigint, {c.SPLIT} string,"
    f" name string, number bigint, image binary, {PACKED} boolean, label bigint, class string, reason string,"
    " raw binary, length bigint, sha256 string"
)


def rows(count: int, columns: dict[str, Any]) -> pa.RecordBatch:
    """A batch of `count` rows of OUTPUT; a single value stands for all rows, a column not given is null."""
    arrays = []
    for field in OUTPUT:
        value = columns.get(field.name)
        if isinstance(value, str | int) or value is None:
            arrays.append(pa.repeat(pa.scalar(value, field.type), count))
        else:
            arrays.append(value if isinstance(value, pa.Array) else pa.array(value, type=field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=OUTPUT)


def pixel_rows(stack: np.ndarray) -> pa.Array:
    """Equal images (n, H, W, C) uint8, n at least 1, as n binary values without a copy."""
    stack = np.ascontiguousarray(stack)
    offsets = pa.py_buffer(np.arange(len(stack) + 1, dtype=np.int32) * np.int32(stack[0].size))
    return pa.Array.from_buffers(pa.binary(), len(stack), [None, offsets, pa.py_buffer(stack)])


class Gather:
    """Collects one row after another and hands out batches of about BATCH_BYTES.

    `columns` are those in which images differ, besides the image; `fixed` columns are the same in all rows.
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
        """Add a rejected record whose bytes are all there."""
        self.bad_part(reason, position, raw[:RAW_BYTES], len(raw), hashlib.sha256(raw).hexdigest(), place)

    def bad_part(
        self, reason: str, position: int, raw: bytes, length: int, sha256: str, place: str | None = None
    ) -> None:
        """Add a rejected record by the first bytes, the length and the SHA-256 of the whole."""
        told = {"kind": BAD, "reason": reason, "raw": raw, "length": length, "sha256": sha256}
        self._other.append({**told, c.POSITION: position, "place": place})
        self._bytes += len(raw)

    def drop(self, reason: str, position: int, place: str | None = None) -> None:
        """Add what is read and left out by a rule that `reason` names."""
        self._other.append({"kind": DROPPED, "reason": reason, c.POSITION: position, "place": place})

    def full(self) -> Iterator[pa.RecordBatch]:
        """The batches that are due: none before enough has come together."""
        if self._bytes >= BATCH_BYTES or len(self._images) + len(self._other) >= BATCH_ROWS:
            yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """What has come together since the last batch."""
        if self._images:
            values = dict(zip(self._columns, map(list, zip(*self._values, strict=True)), strict=True))
            yield rows(len(self._images), {**self._fixed, "kind": RECORD, "image": self._images, **values})
        if self._other:
            names = dict.fromkeys(name for row in self._other for name in row)
            columns = {name: [row.get(name) for row in self._other] for name in names}
            yield rows(len(self._other), {**self._fixed, **columns})
        self._images, self._values, self._other, self._bytes = [], [], [], 0
