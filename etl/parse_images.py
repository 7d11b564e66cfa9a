"""The first pass over an image set, in the tasks: ranges of records in; resized images and quarantined labels out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from etl import columns as c
from etl.idx import IdxFile, read_records
from etl.spark_errors import in_task
from features.images import resize
from storage.settings import set_hadoop_settings

PAIR_DDL = (
    "images_url string, images_codec string, shape array<int>, images_source int, labels_url string,"
    " labels_codec string, labels_source int, name string, occurrence bigint, split string, first bigint, count bigint"
)
RECORD, BAD = 0, 1
LABEL_OUT_OF_RANGE = "label_out_of_range"
BATCH_BYTES = 4 << 20

OUTPUT = pa.schema(
    [
        ("kind", pa.int32()),
        (c.SOURCE, pa.int32()),
        (c.POSITION, pa.int64()),
        (c.OCCURRENCE, pa.int64()),
        (c.SPLIT, pa.string()),
        ("name", pa.string()),
        ("number", pa.int64()),
        ("image", pa.binary()),
        ("label", pa.int64()),
        ("reason", pa.string()),
        ("raw", pa.binary()),
        ("length", pa.int64()),
        ("sha256", pa.string()),
    ]
)
OUTPUT_DDL = (
    f"kind int, {c.SOURCE} int, {c.POSITION} bigint, {c.OCCURRENCE} bigint, {c.SPLIT} string, name string,"
    " number bigint, image binary, label bigint, reason string, raw binary, length bigint, sha256 string"
)


class ParseImages:
    """The function for mapInArrow: rows of PAIR_DDL in, rows of OUTPUT_DDL out."""

    def __init__(self, settings: dict[str, str], size: tuple[int, ...], num_classes: int) -> None:
        self._settings, self._size, self._num_classes = settings, size, num_classes

    @in_task
    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Read each range. Raises DataError for files that are not as long as their headers say."""
        set_hadoop_settings(self._settings)
        for batch in batches:
            for row in batch.to_pylist():
                yield from self.read_range(row)

    def read_range(self, row: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        """The records of one row of PAIR_DDL."""
        images = IdxFile(row["images_url"], row["images_codec"], tuple(row["shape"]))
        labels = IdxFile(row["labels_url"], row["labels_codec"], (images.shape[0],))
        step = max(1, BATCH_BYTES // images.record_bytes)
        pixels = read_records(images, row["first"], row["count"], step)
        classes = read_records(labels, row["first"], row["count"], step)
        start = row["first"]
        for data, label_bytes in zip(pixels, classes, strict=True):
            label = np.frombuffer(label_bytes, dtype=np.uint8)
            good = label < self._num_classes
            numbers = np.arange(start, start + len(label))
            # (n * H * W * C,) -> (n, H, W, C), one channel where the file has none
            stack = np.frombuffer(data, dtype=np.uint8).reshape(len(label), *images.shape[1:3], -1)
            if good.any():
                yield self._records(row, images, stack[good], label[good], numbers[good])
            if not good.all():
                yield _bad(row, labels, label[~good], numbers[~good])
            start += len(label)

    def _records(
        self, row: dict[str, Any], images: IdxFile, stack: np.ndarray, label: np.ndarray, numbers: np.ndarray
    ) -> pa.RecordBatch:
        resized = np.ascontiguousarray(resize(stack, *self._size))
        count, width = len(resized), resized[0].size
        offsets = pa.py_buffer(np.arange(count + 1, dtype=np.int32) * np.int32(width))
        return _rows(
            count,
            {
                "kind": RECORD,
                c.SOURCE: row["images_source"],
                c.POSITION: numbers * images.record_bytes + images.header_bytes,
                c.OCCURRENCE: row["occurrence"],
                c.SPLIT: row["split"],
                "name": row["name"],
                "number": numbers,
                "image": pa.Array.from_buffers(pa.binary(), count, [None, offsets, pa.py_buffer(resized)]),
                "label": label,
            },
        )


def _bad(row: dict[str, Any], labels: IdxFile, label: np.ndarray, numbers: np.ndarray) -> pa.RecordBatch:
    raw = [bytes([value]) for value in label.tolist()]
    return _rows(
        len(label),
        {
            "kind": BAD,
            c.SOURCE: row["labels_source"],
            c.POSITION: numbers + labels.header_bytes,
            "reason": LABEL_OUT_OF_RANGE,
            "raw": raw,
            "length": np.ones(len(label), dtype=np.int64),
            "sha256": [hashlib.sha256(value).hexdigest() for value in raw],
        },
    )


def _rows(count: int, columns: dict[str, Any]) -> pa.RecordBatch:
    """A batch of OUTPUT; a single value stands for all rows, a column not given is null."""
    arrays = []
    for field in OUTPUT:
        value = columns.get(field.name)
        if isinstance(value, str | int) or value is None:
            arrays.append(pa.repeat(pa.scalar(value, field.type), count))
        else:
            arrays.append(value if isinstance(value, pa.Array) else pa.array(value, type=field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=OUTPUT)
