"""A manifest and offset indexes for TFRecord files of other programs, next to them; the files stay unchanged."""

from __future__ import annotations

import gzip
import io
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from lockstep.etl.index.directory import check, check_unchanged
from lockstep.etl.spark.errors import in_task, translating_errors
from lockstep.etl.spark.tasks import upload
from lockstep.features.examples.foreign import infer_schema, refuse_sequences
from lockstep.features.schema.schema import foreign_field
from lockstep.features.shards.foreign_files import (
    InferredColumn,
    Piece,
    all_columns,
    files_of_others,
    find_files,
    infer_columns,
    is_gzip,
    pieces,
    sample,
)
from lockstep.features.shards.read import Lenient, placed
from lockstep.process.installed import VERSION
from lockstep.storage.dataset.indexed import INDEX_FOLDER, IndexedManifest, index_name
from lockstep.storage.dataset.layout import safe_relative
from lockstep.storage.dataset.manifest_entries import FileInfo, ShardInfo
from lockstep.storage.digest import CHUNK_BYTES, HashedReader
from lockstep.storage.errors import CorruptionError, DataError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.formats.tfrecord import FRAMING_BYTES, FramedWriter, parse_records, record_offsets
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import MANIFEST_NAME, write_file
from lockstep.storage.settings import set_hadoop_settings
from lockstep.storage.urls import absolute, join, parent

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FREE = f"a directory without {MANIFEST_NAME} and {INDEX_FOLDER}"
BLOCK_BYTES = 2 << 20  # as in our own shards: docs/decisions/010-sizes-blocks-and-ids.md


@dataclass(frozen=True, slots=True)
class Scanned:
    """A file's manifest entry, whether it is gzip, the columns of its records together with those of the sample, the
    entry of its index, and the URL where this attempt wrote the index.
    """

    info: ShardInfo
    packed: bool
    columns: tuple[InferredColumn, ...]
    index: FileInfo | None = None
    place: str | None = None


@dataclass(frozen=True)
class Scan:
    """Scans files: the root, the folder for indexes until all are made, the records of a block, and the columns of a
    sample.
    """

    root: str
    staging: str
    block_records: int
    columns: tuple[InferredColumn, ...]
    settings: dict[str, str]

    @in_task
    def __call__(self, paths: Iterable[str]) -> Iterator[Scanned]:
        """Runs in a Spark task."""
        set_hadoop_settings(self.settings)
        for path in paths:
            with files_of_others():
                found = self.scan(path)
            yield found

    def scan(self, path: str) -> Scanned:
        """Read the file at `path` (relative) to its end and write its index. Raises CorruptionError naming the record
        and offset if the file is damaged.
        """
        url = join(self.root, path)
        fs, columns = filesystem(url), Columns(self.columns)
        if is_gzip(fs, url):
            with fs.open_read(url) as file:
                hashed = HashedReader(file)
                counted = FramedWriter(_NOWHERE, _NOWHERE, self.block_records)
                _copy(
                    cast(BinaryIO, gzip.GzipFile(fileobj=io.BufferedReader(hashed, CHUNK_BYTES))), url, counted, columns
                )
                hashed.drain()
            found = hashed.digest
            info = ShardInfo(path, counted.records, found.bytes, found.sha256, found.crc32c, None, ())
            return Scanned(info, True, tuple(columns.found))
        with tempfile.TemporaryFile(prefix="lockstep-index-") as index:
            written = FramedWriter(_NOWHERE, index, self.block_records)
            with fs.open_read(url) as file:
                _copy(file, url, written, columns)
            # A unique name, so that a lost attempt does not block the next one.
            place = upload(self.staging, "index", index)
        blocks = tuple(written.block_offsets)
        info = ShardInfo(path, written.records, written.bytes, written.sha256, written.crc32c, None, blocks)
        return Scanned(info, False, tuple(columns.found), FileInfo(written.index_bytes, written.index_sha256), place)


class _Nowhere:
    """A file that discards what is written."""

    def write(self, data: memoryview) -> int:
        """Discard the data."""
        return len(data)


_NOWHERE = _Nowhere()


class Columns:
    """The columns of a sample, and what all records add to them: features, lists, bytes that are no text."""

    def __init__(self, columns: Sequence[InferredColumn]) -> None:
        self.found = list(columns)
        self._decode = self._decoder()

    def add(self, piece: Piece, url: str) -> None:
        """Raises DataError for a feature of another type than before, and for a record that is not an Example."""
        try:
            self._decode(piece.data, url, piece.first_record, piece.base_offset)
        except CorruptionError:
            raise
        except DataError:  # what is new is found by the slow way, which knows the rest of the file then
            place: dict[str, Any] = {"file": url, "first_record": piece.first_record, "base_offset": piece.base_offset}
            records = [bytes(record) for record in parse_records(piece.data.data, **place)]
            with placed(url, piece.first_record):
                refuse_sequences(records)
                more = infer_schema(records)
            self.found = all_columns(self.found, more, url)
            self._decode = self._decoder()

    def _decoder(self) -> Lenient:
        return Lenient([foreign_field(*column) for column in self.found], [name for name, *_ in self.found])


def _copy(source: BinaryIO, url: str, target: FramedWriter, columns: Columns) -> None:
    for piece in pieces(source, url):
        # Checked twice, which costs little: the writer cannot name the file in an error.
        record_offsets(piece.data, file=url, first_record=piece.first_record, base_offset=piece.base_offset)
        columns.add(piece, url)
        target.write(piece.data)


def index_directory(
    url: str, *, pattern: str, sample_records: int, spark: SparkSession | None, settings: dict[str, str]
) -> IndexedManifest:
    """Read every file below `url` that matches `pattern` once, and write `_index/` and `_manifest.json` there. The
    columns are those of all records; `sample_records` are looked at first.

    With `spark` a task reads each file, else they are read one after another. A failed call leaves nothing behind.
    Raises what `check` raises; DataError for names that a manifest cannot hold and for records that are not Examples,
    CorruptionError for a damaged file.
    """
    check(url, "TFRecord")
    url = absolute(url)
    fs = filesystem(url)
    files = find_files(url, pattern)
    for file in files:
        safe_relative(file.path, where=url)
    records = sample(files, sample_records)
    columns = infer_columns(files, records)
    mean_bytes = sum(map(len, records)) // len(records) + FRAMING_BYTES
    staging = join(url, f"_staging-index-{secrets.token_hex(8)}")
    scan = Scan(url, staging, max(1, BLOCK_BYTES // mean_bytes), tuple(columns), settings)
    try:
        fs.mkdirs(staging)
        found = _each(scan, [file.path for file in files], spark)
        check_unchanged(files, [one.info for one in found])
        for one in found:
            columns = all_columns(columns, one.columns, join(url, one.info.path))
        manifest = IndexedManifest(
            version=VERSION,
            sampled=sum(one.info.records for one in found),
            columns=tuple(columns),
            block_records=scan.block_records,
            files=tuple(one.info for one in found),
            gzip=frozenset(one.info.path for one in found if one.packed),
            indexes={one.info.path: one.index for one in found if one.index is not None},
        )
        _publish(fs, url, staging, manifest, {one.info.path: one.place for one in found if one.place})
    finally:
        fs.discard(staging)
    return manifest


def _publish(fs: FileSystem, url: str, staging: str, manifest: IndexedManifest, places: Mapping[str, str]) -> None:
    """Rename the indexes, at `places` by the paths of their files, and write the manifest; or leave neither."""
    whole = fs.promises.atomic_rename  # else each index is copied to its place, where only the manifest makes it count
    if places:
        ready = join(staging, "ready") if whole else join(url, INDEX_FOLDER)
        for path, place in places.items():
            target = join(ready, index_name(path))
            fs.mkdirs(parent(target))
            fs.rename_new(place, target)
        if whole:
            fs.rename_new(ready, join(url, INDEX_FOLDER))
    try:
        write_file(fs, join(url, MANIFEST_NAME), manifest.to_bytes())
    except BaseException:
        if places:  # else an index there is not from this call
            fs.discard(join(url, INDEX_FOLDER))
        raise


def _each(scan: Scan, paths: list[str], spark: SparkSession | None) -> list[Scanned]:
    if spark is None:
        with files_of_others():
            return list(map(scan.scan, paths))
    with translating_errors(spark, "reading the files"):
        rows = spark.sparkContext.parallelize(paths, len(paths)).mapPartitions(scan).collect()
    return sorted(rows, key=lambda row: row.info.path)
