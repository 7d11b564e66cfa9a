"""A manifest and offset indexes for TFRecord files of somebody else, beside them; the files stay as they are."""

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
from lockstep.storage.digest import CHUNK_BYTES, HashedReader
from lockstep.storage.errors import ConfigError, DataError, ExistsError, NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.formats.tfrecord import FRAMING_BYTES, FramedWriter, record_offsets
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import MANIFEST_NAME, write_file
from lockstep.storage.settings import set_hadoop_settings
from lockstep.storage.urls import absolute, join, parent

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A file's entry, whether it is gzip, its index's entry, the URL of that index as this attempt wrote it.
Scanned = tuple[ShardInfo, bool, FileInfo | None, str | None]
_FREE = f"a directory without {MANIFEST_NAME} and {INDEX_FOLDER}"
BLOCK_BYTES = 2 << 20  # as in our own shards: docs/decisions/010-blocks-and-sizes.md


@dataclass(frozen=True)
class Scan:
    """What a worker needs to scan one file: the root, where indexes go until all are made, records of a block."""

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
        """Read the file at `path` (relative) to its end and write its index; returns what `Scanned` says. Raises
        CorruptionError naming the record and offset where it is not whole.
        """
        url = join(self.root, path)
        fs = filesystem(url)
        if is_gzip(fs, url):
            with fs.open_read(url) as file:
                hashed = HashedReader(file)
                counted = FramedWriter(_NOWHERE, _NOWHERE, self.block_records)
                _copy(cast(BinaryIO, gzip.GzipFile(fileobj=io.BufferedReader(hashed, CHUNK_BYTES))), url, counted)
                hashed.drain()
            found = hashed.digest
            info = ShardInfo(path, counted.records, found.bytes, found.sha256, found.crc32c, None, ())
            return info, True, None, None
        with tempfile.TemporaryFile(prefix="lockstep-index-") as index:
            written = FramedWriter(_NOWHERE, index, self.block_records)
            with fs.open_read(url) as file:
                _copy(file, url, written)
            # A name of its own: an attempt that was lost must not stand in the way of the next.
            place = upload(self.staging, "index", index)
        blocks = tuple(written.block_offsets)
        info = ShardInfo(path, written.records, written.bytes, written.sha256, written.crc32c, None, blocks)
        return info, False, FileInfo(written.index_bytes, written.index_sha256), place


class _Nowhere:
    """Where the records go that are only looked at."""

    def write(self, data: memoryview) -> int:
        """Take nothing of it."""
        return len(data)


_NOWHERE = _Nowhere()


def _copy(source: BinaryIO, url: str, target: FramedWriter) -> None:
    for piece in pieces(source, url):
        # Looked at twice, which costs little: the writer does not know the file that an error has to name.
        record_offsets(piece.data, file=url, first_record=piece.first_record, base_offset=piece.base_offset)
        target.write(piece.data)


def check(url: str) -> None:
    """Raise ExistsError where a manifest or index is there already, ConfigError for something that is no directory."""
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
    """What to say of a directory whose manifest is `data`: only an index of ours may be made anew."""
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
            next_step=f"If files have changed since, delete {MANIFEST_NAME} and {INDEX_FOLDER} there, and index anew.",
        )
    return ExistsError(
        f"{url} has a manifest already and needs no index",
        got=f"a {MANIFEST_NAME} that jobs.index has not made, such as that of a published dataset",
        allowed="a directory of TFRecord files of somebody else",
        next_step="Leave it as it is, and read it: jobs.describe URL, jobs.train, spark.read.format('tfrecord').",
    )


def index_directory(
    url: str, *, pattern: str, sample_records: int, spark: SparkSession | None, settings: dict[str, str]
) -> IndexedManifest:
    """Read every file that fits `pattern` below `url` once, and write `_index/` and `_manifest.json` there.

    With `spark` the files are read by its tasks, one each, else one after another. Nothing is left where it fails.
    Raises what `check` raises; DataError for names that a manifest cannot hold and for records that are no Examples,
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
    """Give the indexes, by the paths of their files in `places`, their names, and write the manifest; or leave none."""
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
        if places:  # else what is there, if anything, is not of this call
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
                f"{file.url} has changed while it was read",
                got=f"{info.bytes} bytes",
                allowed=f"{file.bytes} bytes, as at the start",
                next_step="Run jobs.index when nobody writes there.",
            )
