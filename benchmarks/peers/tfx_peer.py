"""tfx-bsl's encoder with framing, as a process of another environment: benchmarks.codec starts it.

    PYTHON_WITH_TFX_BSL benchmarks/peers/tfx_peer.py ROWS.arrow OUT

For each line on stdin it writes all rows of an Arrow file as TFRecord and answers with the CPU seconds that it took.
tfx-bsl 1.21.0 needs a protobuf and a pandas that do not go with this project's pins.
"""

from __future__ import annotations

import struct
import sys
import time

import google_crc32c
import numpy as np
import pyarrow as pa
from tfx_bsl.coders.example_coder import RecordBatchToExamplesEncoder

BATCH_ROWS = 4096


def masked(data: bytes) -> int:
    """The masked CRC-32C of TFRecord."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def as_lists(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Each value as a list of one, which is all that the encoder takes; a null as no list."""
    columns = []
    for column in batch.columns:
        values = column.cast(pa.large_binary()) if pa.types.is_binary(column.type) else column
        valid = np.asarray(column.is_valid())
        offsets = np.concatenate([[0], np.cumsum(valid)])
        mask = pa.array(~valid) if column.null_count else None
        columns.append(pa.LargeListArray.from_arrays(pa.array(offsets), values.drop_null(), mask=mask))
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def write(batches: list[pa.RecordBatch], out: str) -> None:
    """All rows as one TFRecord file."""
    encoder = RecordBatchToExamplesEncoder()
    with open(out, "wb") as file:
        for batch in batches:
            parts = []
            for record in encoder.encode(as_lists(batch)):
                length = struct.pack("<Q", len(record))
                parts += (length, struct.pack("<I", masked(length)), record, struct.pack("<I", masked(record)))
            file.write(b"".join(parts))


def main() -> None:
    """Answer until stdin ends."""
    rows, out = sys.argv[1:]
    with pa.OSFile(rows) as file:
        table = pa.ipc.open_file(file).read_all()
    batches = table.combine_chunks().to_batches(max_chunksize=BATCH_ROWS)
    for _ in sys.stdin:
        start = time.process_time()
        write(batches, out)
        print(time.process_time() - start, flush=True)


if __name__ == "__main__":
    main()
