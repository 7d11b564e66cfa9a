"""The digest of a folder: over its files in order, however their rows come."""

from __future__ import annotations

import pyarrow as pa
import pytest

from lockstep.etl.images.folders import lines_of

ROWS = [(0, "a/1.jpg", 7, "ab" * 32), (0, "b/ü.jpg", 0, "cd" * 32), (2, "a/1.jpg", 9, "ef" * 32)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_line_for_each_file_by_source(size: int) -> None:
    columns = zip(*ROWS, strict=True)
    names, kinds = ("_source", "_place", "_length", "_sha256"), (pa.int32(), pa.string(), pa.int64(), pa.string())
    table = pa.table({n: pa.array(v, k) for n, v, k in zip(names, columns, kinds, strict=True)})
    lines, sizes = {0: b"", 2: b""}, {0: 0, 2: 0}
    for batch in lines_of(table.to_batches(size)):
        for row in batch.to_pylist():
            lines[row["_source"]] += row["lines"]
            sizes[row["_source"]] += row["bytes"]
    told = [f"{digest} {size} {place}\n".encode() for _, place, size, digest in ROWS]
    assert lines == {0: told[0] + told[1], 2: told[2]} and sizes == {0: 7, 2: 9}
