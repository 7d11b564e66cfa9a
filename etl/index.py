"""A manifest and offset indexes for TFRecord files of other programs, next to them; the files stay unchanged."""

from __future__ import annotations

import gzip
import io
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, cast

from etl import VERSION
from etl.spark.errors import in_task, translated
from etl.spark.tasks import upload
from lockstep.features.shards.foreign_files import (
    ForeignFile,
    files_of_others,
    find_files,
    infer_columns,
    is_gzip,
    pieces,
    sample,
)
from lockstep.storage.dataset.indexed import INDEX_FOLDER, IndexedManifest, index_name, is_indexed
from lockstep.storage.dataset.layout import safe_relative
from lockstep.storage.dataset.manifest_entries import FileInfo, ShardInfo
from lockstep.storage.errors import ConfigError, DataError, ExistsError, NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.formats.tfrecord import FRAMING_BYTES, FramedWriter, record_offsets
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import MANIFEST_NAME, write_file
from lockstep.storage.settings import set_hadoop_settings
from lockstep.storage.urls import absolute, join, parent
from lockstep.storage.verify.check import CHUNK_BYTES, HashedReader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A file's manifest entry, whether it is gzip, the entry of its index, and the URL where this attempt wrote the index.
Scanned = tuple[ShardInfo, bool, FileInfo | None, str | None]
_FREE = f"a directory without {MANIFEST_NAME} and {INDEX_FOLDER}"
BLOCK_BYTES = 2 << 20  # as in our own shards: docs/decisions/010-sizes-blocks-and-ids.md


@dataclass(frozen=True)
class Scan:
    """Scans files: the root, the folder for indexes until all are made, and the records of a block."""

    root: str
    staging: str
    block_records: int
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
        fs = filesystem(url)
        if is_gzip(fs, url):
            with fs.open_read(url) as file:
                hashed = HashedReader(file, lambda count: None)
                counted = FramedWriter(_NOWHERE, _NOWHERE, self.block_records)
                _copy(cast(BinaryIO, gzip.GzipFile(fileobj=io.BufferedReader(hashed, CHUNK_BYTES))), url, counted)
                hashed.drain()
            info = ShardInfo(path, counted.records, hashed.bytes, hashed.sha256, hashed.crc32c, None, ())
            return info, True, None, None
        with tempfile.TemporaryFile(prefix="lockstep-index-") as index:
            written = FramedWriter(_NOWHERE, index, self.block_records)
            with fs.open_read(url) as file:
                _copy(file, url, written)
            # A unique name, so that a lost attempt does not block the next one.
            place = upload(self.staging, "index", index)
        blocks = tuple(written.block_offsets)
        info = ShardInfo(path, written.records, written.bytes, written.sha256, written.crc32c, None, blocks)
        return info, False, FileInfo(written.index_bytes, written.index_sha256), place


class _Nowhere:
    """A file that discards what is written."""

    def write(self, data: memoryview) -> int:
        """Discard the data."""
        return len(data)


_NOWHERE = _Nowhere()


def _copy(source: BinaryIO, url: str, target: FramedWriter) -> None:
    for piece in pieces(source, url):
        # Checked twice, which costs little: the writer cannot name the file in an error.
        record_offsets(piece.data, file=url, first_record=piece.first_record, base_offset=piece.base_offset)
        target.write(piece.data)


def check(url: str) -> None:
    """Raise ExistsError if there is a manifest or an index already, ConfigError if `url` is not a directory."""
    fs = filesystem(url)
    try:
        status = fs.stat(url)
    except NotFoundError as error:
        raise NotFoundError(
            f"no such directory {url}",
            got=error.got,
            allowed="a directory of TFRecord files",
            next_step="Check the path.",
        ) from None
    if not status.is_dir:
        raise ConfigError(
            f"{url} is a file", got="a file", allowed="a directory of TFRecord files", next_step="Give its directory."
        )
    manifest = join(url, MANIFEST_NAME)
    if fs.exists(manifest):
        raise _taken(url, manifest, fs.read_bytes(manifest))
    if fs.exists(join(url, INDEX_FOLDER)):
        raise ExistsError(
            f"{url} has a folder {INDEX_FOLDER} already",
            got=f"{INDEX_FOLDER} without {MANIFEST_NAME}",
            allowed=_FREE,
            next_step=f"If this is a dataset, restore its {MANIFEST_NAME}; if jobs.index left the folder, delete it.",
        )


def _taken(url: str, manifest: str, data: bytes) -> ExistsError:
    """The error for a directory whose manifest is `data`; only an index of ours may be made again."""
    try:
        indexed = is_indexed(data, manifest)
    except DataError as error:
        return ExistsError(
            f"{url} has a {MANIFEST_NAME} that cannot be read",
            got=error.got or error.what,
            allowed=_FREE,
            next_step="Delete nothing: `python -m jobs.verify URL` says what it is and what is damaged.",
        )
    if indexed:
        return ExistsError(
            f"{url} is indexed already",
            got=f"the {MANIFEST_NAME} of an earlier jobs.index",
            allowed=_FREE,
            next_step=f"If files changed, delete {MANIFEST_NAME} and {INDEX_FOLDER} there, and run jobs.index again.",
        )
    return ExistsError(
        f"{url} has a manifest already and needs no index",
        got=f"a {MANIFEST_NAME} that jobs.index has not made, such as that of a published dataset",
        allowed="a directory of TFRecord files of other programs",
        next_step="Read it without an index: jobs.describe URL, jobs.train, spark.read.format('tfrecord').",
    )


def index_directory(
    url: str, *, pattern: str, sample_records: int, spark: SparkSession | None, settings: dict[str, str]
) -> IndexedManifest:
    """Read every file below `url` that matches `pattern` once, and write `_index/` and `_manifest.json` there.

    With `spark` a task reads each file, else they are read one after another. A failed call leaves nothing behind.
    Raises what `check` raises; DataError for names that a manifest cannot hold and for records that are not Examples,
    CorruptionError for a damaged file.
    """
    check(url)
    url = absolute(url)
    fs = filesystem(url)
    files = find_files(url, pattern)
    for file in files:
        safe_relative(file.path, where=url)
    records = sample(files, sample_records)
    columns = infer_columns(files, records)
    mean_bytes = sum(map(len, records)) // len(records) + FRAMING_BYTES
    staging = join(url, f"_staging-index-{secrets.token_hex(8)}")
    scan = Scan(url, staging, max(1, BLOCK_BYTES // mean_bytes), settings)
    try:
        fs.mkdirs(staging)
        found = _each(scan, [file.path for file in files], spark)
        _unchanged(files, [info for info, *_ in found])
        manifest = IndexedManifest(
            version=VERSION,
            sampled=len(records),
            columns=tuple(columns),
            block_records=scan.block_records,
            files=tuple(info for info, *_ in found),
            gzip=frozenset(info.path for info, packed, *_ in found if packed),
            indexes={info.path: index for info, _, index, _ in found if index is not None},
        )
        _publish(fs, url, staging, manifest, {info.path: place for info, *_, place in found if place is not None})
    finally:
        fs.discard(staging)
    return manifest


def _publish(fs: FileSystem, url: str, staging: str, manifest: IndexedManifest, places: Mapping[str, str]) -> None:
    """Rename the indexes, at `places` by the paths of their files, and write the manifest; or leave neither."""
    if places:
        ready = join(staging, "ready")
        for path, place in places.items():
            target = join(ready, index_name(path))
            fs.mkdirs(parent(target))
            fs.rename_new(place, target)
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
    with translated(spark, "reading the files"):
        rows = spark.sparkContext.parallelize(paths, len(paths)).mapPartitions(scan).collect()
    return sorted(rows, key=lambda row: row[0].path)


def _unchanged(files: Iterable[ForeignFile], infos: Iterable[ShardInfo]) -> None:
    for file, info in zip(files, infos, strict=True):
        if file.bytes != info.bytes:
            raise DataError(
                f"{file.url} changed while it was read",
                got=f"{info.bytes} bytes",
                allowed=f"{file.bytes} bytes, as at the start",
                next_step="Run jobs.index when no other program writes there.",
            )
