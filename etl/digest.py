"""SHA-256 of the input files, worked out in tasks: a file each."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from etl.ranges import Source
from etl.tasks import EachRow, planned
from storage.errors import DataError
from storage.fs import absolute, filesystem
from storage.manifest import SourceInfo
from storage.settings import hadoop_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DDL = "number int, url string, bytes bigint, sha256 string"
_READ_BYTES = 4 << 20
_SCHEMA = pa.schema([("number", pa.int32()), ("url", pa.string()), ("bytes", pa.int64()), ("sha256", pa.string())])


class DigestSources(EachRow):
    """The function for mapInArrow: rows (number, url, planned bytes) in, the same with what was found out."""

    def batches_of(self, row: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
        """Raises DataError for a file whose length is not the planned one."""
        yield pa.RecordBatch.from_pylist([digest_of(row["number"], row["url"], row["bytes"])], schema=_SCHEMA)


def digest_sources(spark: SparkSession, sources: Sequence[Source]) -> tuple[SourceInfo, ...]:
    """Length and SHA-256 of each input file, in order.

    Files are read a second time for it: a range's digest says nothing of its file's.
    """
    rows = [(number, absolute(source.url), source.size_bytes) for number, source in enumerate(sources)]
    plan = planned(spark, rows, "number int, url string, bytes bigint")
    found = plan.mapInArrow(DigestSources(hadoop_settings()), DDL).collect()
    return infos_of(sources, [row.asDict() for row in found])


def infos_of(sources: Sequence[Source], found: Sequence[Mapping[str, Any]]) -> tuple[SourceInfo, ...]:
    """What the manifest says of the sources, from the rows of DDL in any order."""
    return tuple(
        SourceInfo(sources[row["number"]].url, row["bytes"], row["sha256"])
        for row in sorted(found, key=lambda row: row["number"])
    )


def digest_of(number: int, url: str, planned_bytes: int) -> dict[str, object]:
    """A row of DDL for one file. Raises DataError where it is not of the planned length."""
    digest, size = hashlib.sha256(), 0
    with filesystem(url).open_read(url) as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
            size += len(data)
    if size != planned_bytes:
        raise DataError(
            f"input {url} changed while it was read",
            got=f"{size} bytes",
            allowed=f"{planned_bytes} bytes as at the start",
            next_step="Run again when nothing writes to the input.",
        )
    return {"number": number, "url": url, "bytes": size, "sha256": digest.hexdigest()}
