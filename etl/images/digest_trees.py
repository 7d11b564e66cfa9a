"""Bytes and SHA-256 of folders, over the digests of their files in order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl import columns as c
from etl.images.image_rows import DROPPED
from etl.input.ranges import Source
from etl.spark.tasks import mapped
from lockstep.storage.dataset.manifest_entries import SourceInfo

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_DDL = f"{c.SOURCE} int, lines binary, bytes bigint"
_LINES = pa.schema([(c.SOURCE, pa.int32()), ("lines", pa.binary()), ("bytes", pa.int64())])


def digest_trees(parsed: DataFrame, sources: Sequence[Source]) -> tuple[SourceInfo, ...]:
    """Bytes and SHA-256 of each folder: over a line `SHA256 BYTES PLACE` for each file that was read, in order.

    `parsed` are rows of etl.images.image_rows. Spark sorts them; the driver holds the lines of one partition.
    """
    files = parsed.where(f"kind <> {DROPPED}").select(c.SOURCE, "place", "length", "sha256")
    found = mapped(files.orderBy(c.SOURCE, "place"), lines_of, _DDL)
    digests, sizes = [hashlib.sha256() for _ in sources], [0 for _ in sources]
    for row in found.toLocalIterator():
        digests[row[c.SOURCE]].update(row["lines"])
        sizes[row[c.SOURCE]] += row["bytes"]
    return tuple(
        SourceInfo(source.url, size, digest.hexdigest())
        for source, size, digest in zip(sources, sizes, digests, strict=True)
    )


def lines_of(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The function for mapInArrow: files in order in, the lines of each stretch of one source out."""
    for batch in batches:
        if not batch.num_rows:
            continue
        sources = np.asarray(batch.column(c.SOURCE))
        borders = [0, *(np.flatnonzero(np.diff(sources)) + 1).tolist(), len(sources)]
        for start, end in pairwise(borders):
            yield _lines(batch.slice(start, end - start))


def _lines(batch: pa.RecordBatch) -> pa.RecordBatch:
    lengths = batch.column("length")
    lines = pc.binary_join_element_wise(batch.column("sha256"), lengths.cast(pa.string()), batch.column("place"), " ")
    text = "".join(line + "\n" for line in lines.to_pylist())
    row = {c.SOURCE: batch.column(c.SOURCE)[0].as_py(), "lines": text.encode(), "bytes": pc.sum(lengths).as_py()}
    return pa.RecordBatch.from_pylist([row], schema=_LINES)
