"""One file of plain TFRecords, in a task: batches in, frames out, memory of one batch."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import IO, cast

import numpy as np
import pyarrow as pa

from lockstep.features.examples.codec import RecordEncoder
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Columns
from lockstep.storage.errors import DataError
from lockstep.storage.files.interface import Writer
from lockstep.storage.formats.gzip_blocks import LEVEL
from lockstep.storage.fs import filesystem
from pyspark_tfrecord.options import WriteOptions


def write_part(url: str, batches: Iterable[pa.RecordBatch], fields: Sequence[Field], options: WriteOptions) -> int:
    """Write the rows to a new file at `url`, which is on the disks when this returns; returns how many rows.

    No file is made where there is no row. Raises DataError naming the column for a null in a list or in place of one,
    and for a double that 32 bits cannot hold.
    """
    encoder = RecordEncoder(Columns(tuple(fields)))
    rows = (batch for batch in batches if len(batch))
    first = next(rows, None)
    if first is None:
        return 0
    count = 0
    with filesystem(url).create(url) as writer:
        with _sink(writer, options) as put:
            for batch in chain([first], rows):
                columns = [_as(batch.column(field.name), field) for field in fields]
                typed = pa.RecordBatch.from_arrays(columns, [field.name for field in fields])
                put(encoder.encode(typed)[0].data)
                count += len(batch)
        writer.sync()
    return count


@contextmanager
def _sink(writer: Writer, options: WriteOptions) -> Iterator[Callable[[memoryview], object]]:
    if options.compression is None:
        yield writer.write
        return
    # mtime 0: the same rows give the same bytes.
    with gzip.GzipFile("", "wb", LEVEL, cast(IO[bytes], writer), mtime=0) as packed:
        yield packed.write


def _as(column: pa.Array, field: Field) -> pa.Array:
    """A column as its encoder takes it: doubles rounded to float32, as the options say; others unchanged."""
    item = column.type.value_type if field.is_list else column.type
    if field.dtype != "float32" or item != pa.float64():
        return column
    typed = column.cast(field.arrow_type)
    before = (column.flatten() if field.is_list else column).drop_null().to_numpy(zero_copy_only=False)
    after = (typed.flatten() if field.is_list else typed).drop_null().to_numpy(zero_copy_only=False)
    lost = np.flatnonzero(np.isinf(after) & np.isfinite(before))
    if len(lost):
        raise DataError(
            f"column `{field.name}` holds a number that float32 cannot",
            got=repr(float(before[lost[0]])),
            allowed="up to 3.4e38",
            next_step="Scale the column, or leave such rows out.",
        )
    return typed
