"""SHA-256 of the input files, worked out in tasks."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa

from etl.input.ranges import DEFAULT_SPLIT_BYTES, Source
from etl.spark.session import described
from etl.spark.tasks import EachSlice, sliced
from lockstep.storage.dataset.manifest_entries import SourceInfo
from lockstep.storage.errors import DataError
from lockstep.storage.fs import filesystem
from lockstep.storage.settings import hadoop_settings
from lockstep.storage.urls import absolute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DDL = "number int, bytes bigint, sha256 string"
_READ_BYTES = 4 << 20
_SCHEMA = pa.schema([("number", pa.int32()), ("bytes", pa.int64()), ("sha256", pa.string())])


class DigestSources(EachSlice):
    """The function for mapInArrow: the number, URL and planned bytes of files in, rows of DDL out."""

    def batches_of(self, items: Sequence[Mapping[str, Any]]) -> Iterator[pa.RecordBatch]:
        """Raises DataError for a file whose length is not the planned one."""
        rows = [digest_of(item["number"], item["url"], item["bytes"]) for item in items]
        yield pa.RecordBatch.from_pylist(rows, schema=_SCHEMA)


def digest_sources(
    spark: SparkSession, sources: Sequence[Source], known: Sequence[Mapping[str, Any]] = ()
) -> tuple[SourceInfo, ...]:
    """Length and SHA-256 of each input file, in order.

    Files that are not `known` (rows of DDL) are read a second time for it: a range's digest says nothing of its file's.
    """
    numbers = sorted(set(range(len(sources))) - {row["number"] for row in known})
    found = list(known)
    if numbers:
        items = [
            {"number": number, "url": absolute(sources[number].url), "bytes": sources[number].size_bytes}
            for number in numbers
        ]
        plan = sliced(spark, items, [sources[number].size_bytes for number in numbers], DEFAULT_SPLIT_BYTES)
        with described(spark, "SHA-256 of the input files"):
            rows = plan.mapInArrow(DigestSources(hadoop_settings()), DDL).collect()
        found += [row.asDict() for row in rows]
    return infos_of(sources, found)


def infos_of(sources: Sequence[Source], found: Sequence[Mapping[str, Any]]) -> tuple[SourceInfo, ...]:
    """What the manifest says of the sources, from the rows of DDL in any order."""
    return tuple(
        SourceInfo(sources[row["number"]].url, row["bytes"], row["sha256"])
        for row in sorted(found, key=lambda row: row["number"])
    )


def digest_of(number: int, url: str, planned_bytes: int) -> dict[str, object]:
    """A row of DDL for one file. Raises DataError where it is not of the planned length."""
    with filesystem(url).open_read(url) as file, HashedFile(file) as hashed:
        return {"number": number, "bytes": planned_bytes, "sha256": hashed.whole(url, planned_bytes)}


class HashedFile(io.RawIOBase):
    """A file that is read from its start on, and hashed meanwhile."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file, self._digest, self._size = file, hashlib.sha256(), 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._digest.update(data)
        self._size += len(data)
        return data

    def whole(self, url: str, planned_bytes: int) -> str:
        """The SHA-256 of the file, the rest of which is read. Raises DataError where it is not as long as planned."""
        while self.read(_READ_BYTES):
            pass
        if self._size != planned_bytes:
            raise DataError(
                f"input {url} changed while it was read",
                got=f"{self._size} bytes",
                allowed=f"{planned_bytes} bytes as at the start",
                next_step="Run again when nothing writes to the input.",
            )
        return self._digest.hexdigest()
