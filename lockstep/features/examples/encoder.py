"""RecordEncoder: Arrow record batches to framed tf.Examples in one reused buffer."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lockstep.features.examples.columns import describe
from lockstep.features.examples.layout import Layout
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import DataError


class RecordEncoder:
    """Encodes rows, frames them and works out both checksums, byte for byte as lockstep.features.examples.example and
    lockstep.storage.formats.tfrecord.

    The kernels are compiled at the first call, or found compiled. Not safe for several threads at once; the GIL is
    released while a batch is encoded. Memory: a buffer of the largest batch's encoded bytes and 16 bytes a row.
    """

    def __init__(self, schema: Schema) -> None:
        self._layout = Layout.of(schema)
        self._buffer = np.empty(0, dtype=np.uint8)

    def sizes(self, batch: pa.RecordBatch) -> NDArray[np.int64]:
        """The bytes that each row takes framed, (n,) int64, without encoding it. Raises DataError as `encode` does."""
        places, owners = describe(self._layout, batch)
        offsets = self._offsets(places, batch.num_rows)[1]
        del owners  # they had to live until here
        return np.diff(offsets)

    def encode(self, batch: pa.RecordBatch) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """The framed records of a batch end to end, uint8, and where each begins and the last ends, (n + 1,) int64.

        The bytes are a view into a buffer that the next call overwrites. Columns are found by name. Raises DataError
        for a null where none may be or within a list, a tensor of the wrong length, a column of another type.
        """
        from lockstep.features.examples import encode_kernel as kernel

        layout = self._layout
        places, owners = describe(layout, batch)
        entries, offsets = self._offsets(places, batch.num_rows)
        total = int(offsets[-1])
        if len(self._buffer) < total + kernel.SPILL_BYTES:
            self._buffer = np.empty(total + total // 8 + kernel.SPILL_BYTES, dtype=np.uint8)
        exact = kernel.encode(*layout.arguments, places, entries, offsets, self._buffer.ctypes.data)
        del owners
        if not exact:
            raise DataError(
                "the encoded records of a batch do not have the sizes that were worked out for them",
                got=f"{batch.num_rows} records",
                allowed=f"{total} bytes in all",
                next_step="Check that nothing changes the rows while they are written, and run the job again.",
            )
        return self._buffer[:total], offsets

    def _offsets(self, places: NDArray[np.int64], rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        from lockstep.features.examples import encode_kernel as kernel

        layout = self._layout
        entries, offsets = np.zeros(rows, dtype=np.int64), np.empty(rows + 1, dtype=np.int64)
        kernel.sizes(layout.kinds, layout.widths, layout.head_sizes, layout.name_sizes, places, entries)
        kernel.framed(entries, offsets)
        return entries, offsets
