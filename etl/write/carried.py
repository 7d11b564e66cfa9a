"""`_carried/`: what a dataset keeps, next to its shards, for the appends that continue it; only its owner may read it.

Two kinds of rows: open records, whose label is not known yet, come back as records of the next append; the others say
what features of later records need to know of the past. Decision record: docs/decisions/012-web-log.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.etl import columns as c
from lockstep.etl.spark.session import job_description
from lockstep.etl.spark.tasks import by_partition, mapped, partition_of_task, upload
from lockstep.etl.write.append import Parent
from lockstep.etl.write.shards import RUN_AGAIN, move
from lockstep.etl.write.staging import Staging
from lockstep.storage.dataset.layout import CARRIED_FOLDER, DatasetPaths
from lockstep.storage.dataset.manifest import DatasetManifest, read_checked
from lockstep.storage.dataset.manifest_entries import FileInfo
from lockstep.storage.digest import digest_of
from lockstep.storage.documents import canonical_bytes, sha256_hex
from lockstep.storage.errors import ConfigError, CorruptionError, DataError
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import join

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CARRIED = "carried"  # in created_by.config: Carried as JSON
ROWS_PER_FILE = 500_000  # about 20 MiB; a task of the append reads a whole file
GROUP_ROWS = 50_000
OPEN = "open"
"""The column (bool) that says whether a row is an open record."""
_RESULT = pa.schema(
    [
        ("part", pa.int32()),
        ("path", pa.string()),
        ("rows", pa.int64()),
        ("open", pa.int64()),
        ("bytes", pa.int64()),
        ("sha256", pa.string()),
    ]
)


@dataclass(frozen=True, kw_only=True)
class Carry:
    """How rows are carried: `schema` has the fields of the column lockstep.etl.columns.CARRIED, OPEN among them; `key`
    names the one by whose hash rows are placed in files, `order` those that sort them.
    """

    schema: pa.Schema
    key: str
    order: tuple[str, ...]
    log_end: int
    """The latest time of any record so far, in the unit of the label."""
    hold_s: int
    """A record is open while its time + hold_s is after log_end."""
    reopened: int = 0
    """How many open records of the parent are records of this dataset again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Carried:
    """What a manifest says of the rows that a dataset carries."""

    log_end: int
    hold_s: int
    open: int
    """Open records."""
    past: int
    """Rows that say what features need to know of the past."""
    reopened: int
    """Open records of the parent, which the counts of this dataset count as read again."""
    parent_sha256: str | None
    """The digest of what the parent carried, since the parent's own digest does not cover it."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {name: getattr(self, name) for name in self.__slots__}


def carried_in(manifest: DatasetManifest, url: str) -> Carried | None:
    """What the dataset carries, None if nothing. Raises ConfigError for an entry that cannot be read."""
    stored = manifest.created_by["config"].get(CARRIED)
    if stored is None:
        return None
    names = Carried.__slots__
    numbers = names[:-1]
    if (
        isinstance(stored, dict)
        and set(stored) == set(names)
        and all(type(stored[name]) is int for name in numbers)
        and isinstance(stored["parent_sha256"], str | None)
    ):
        return Carried(**stored)
    raise ConfigError(
        f"{url} cannot be continued: its manifest has a created_by.config.{CARRIED} that cannot be read",
        got=repr(stored)[:500],
        allowed=f"an object with {', '.join(names)}",
        next_step="Make the dataset again.",
    )


def carried_files(manifest: DatasetManifest) -> dict[str, FileInfo]:
    """The files of the rows that a dataset carries, by path."""
    return {path: info for path, info in manifest.files.items() if path.startswith(f"{CARRIED_FOLDER}/")}


def digest_of_carried(manifest: DatasetManifest) -> str:
    """The SHA-256 over canonical JSON of the entries of those files."""
    files = {path: {"bytes": info.bytes, "sha256": info.sha256} for path, info in carried_files(manifest).items()}
    return sha256_hex(canonical_bytes(files))


def check_carried(parent: Parent) -> Carried:
    """What the parent carries. Raises ConfigError if it carries nothing, DataError if an earlier dataset of the chain
    carries something else than what its append was made of.
    """
    found = [carried_in(manifest, url) for url, manifest in parent.chain]
    first = found[0]
    if first is None:
        raise ConfigError(
            f"{parent.url} cannot be continued: it does not carry what an append needs of the past",
            got=f"no {CARRIED_FOLDER}/, as with a --label that looks at other requests",
            allowed="a dataset of a log whose --label an append can continue (docs/formats.md, More data later)",
            next_step="Make one dataset of all files without --append-to.",
        )
    for (url, _), mine, (above, manifest) in zip(parent.chain, found, parent.chain[1:], strict=False):
        if mine is None or mine.parent_sha256 != digest_of_carried(manifest):
            raise DataError(
                f"{above} is not the dataset that {url} continues: it carries other requests",
                got=f"{CARRIED_FOLDER}/ of digest {digest_of_carried(manifest)}",
                allowed=f"digest {None if mine is None else mine.parent_sha256}",
                next_step=f"Restore that dataset, or make {url} and those after it again.",
            )
    return first


def read_carried(spark: SparkSession, parent: Parent, schema: pa.Schema) -> DataFrame:
    """The rows that the parent carries: the columns of `schema`, which may be some of them."""
    files = tuple(sorted(carried_files(parent.manifest).items()))
    planned = spark.range(0, len(files), 1, max(1, len(files)))
    return mapped(planned, ReadCarried(parent.url, files, schema), schema)


@dataclass(frozen=True)
class ReadCarried:
    """The function for mapInArrow: numbers of `files` (path, manifest entry) below `url` in, their rows out.

    Memory: one file. Raises CorruptionError for a file that is damaged, and what the storage raises.
    """

    url: str
    files: tuple[tuple[str, FileInfo], ...]
    schema: pa.Schema

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column("id").to_pylist():
                path, info = self.files[number]
                data = read_checked(filesystem(self.url), self.url, path, info)
                try:
                    table = pq.read_table(pa.BufferReader(data), columns=self.schema.names).cast(self.schema)
                except (pa.ArrowException, OSError, ValueError) as error:
                    raise CorruptionError(
                        "carried rows cannot be read",
                        file=join(self.url, path),
                        got=str(error).splitlines()[0],
                        allowed=f"Parquet with {', '.join(self.schema.names)}",
                    ) from None
                yield from table.to_batches(max_chunksize=GROUP_ROWS)


def place_carried(
    staging: Staging, rows: DataFrame, count: int, carry: Carry, parent: Parent | None
) -> tuple[dict[str, FileInfo], Carried]:
    """Write the `count` carried rows among `rows` of lockstep.etl.split.assign to `_carried/`, which only its owner may
    read; returns the manifest's entries.

    The number of files follows from `count`, a row's file from a hash of its key, and rows are sorted: the same bytes
    however Spark cuts the work.
    """
    from pyspark.sql import functions as f

    parts = max(1, -(-count // ROWS_PER_FILE))
    write = WriteCarried(staging.attempts, carry.schema)
    if count:
        left = rows.where(f.col(c.DROPPED) == c.PAST).select(f"{c.CARRIED}.*")
        part = f.pmod(f.xxhash64(carry.key), f.lit(parts)).cast("int")
        placed = by_partition(left, parts, part).sortWithinPartitions(*carry.order)
        with job_description(rows.sparkSession, "write what the next append needs"):
            results = [row.asDict() for row in mapped(placed, write, _RESULT).collect()]
    else:
        results = write.write(0, iter(())).to_pylist()
    found = sum(row["rows"] for row in results)
    if found != count or sorted(row["part"] for row in results) != list(range(parts)):
        raise DataError(
            "the carried rows that were written are not those that were counted",
            got=f"{found} rows in {len(results)} files",
            allowed=f"{count} rows in {parts} files",
            next_step=RUN_AGAIN,
        )
    staging.fs.mkdirs(DatasetPaths(staging.root).carried, mode=0o700)
    files = {}
    for row in sorted(results, key=lambda row: row["part"]):
        path = f"{CARRIED_FOLDER}/part-{row['part']:05d}.parquet"
        move(staging.fs, row["path"], join(staging.root, path))
        files[path] = FileInfo(row["bytes"], row["sha256"])
    still_open = sum(row["open"] for row in results)
    return files, Carried(
        log_end=carry.log_end,
        hold_s=carry.hold_s,
        open=still_open,
        past=count - still_open,
        reopened=carry.reopened,
        parent_sha256=None if parent is None else digest_of_carried(parent.manifest),
    )


@dataclass(frozen=True)
class WriteCarried:
    """The function for mapInArrow: a partition's sorted rows in, one row of _RESULT out."""

    attempts: str
    schema: pa.Schema

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the file of this partition, also an empty one."""
        yield self.write(partition_of_task(), batches)

    def write(self, part: int, batches: Iterable[pa.RecordBatch]) -> pa.RecordBatch:
        """Write the file of partition `part`; returns its row."""
        rows = still_open = 0
        with tempfile.TemporaryFile(prefix="lockstep-carried-") as file:
            with pq.ParquetWriter(file, self.schema, compression="zstd", write_page_checksum=True) as writer:
                for table in _groups(batches, self.schema):
                    writer.write_table(table, row_group_size=GROUP_ROWS)
                    rows += table.num_rows
                    still_open += table.column(OPEN).to_numpy().sum()
            file.seek(0)
            digest = digest_of(file)
            path = upload(self.attempts, f"carried-{part:05d}", file)
        row = {"part": part, "path": path, "rows": rows, "open": int(still_open)}
        return pa.RecordBatch.from_pylist([{**row, "bytes": digest.bytes, "sha256": digest.sha256}], schema=_RESULT)


def _groups(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    """Rows in groups of GROUP_ROWS for any batches that Spark delivers: the bytes of the file depend on the groups."""
    held = pa.Table.from_batches([], schema)
    for batch in batches:
        held = pa.concat_tables([held, pa.Table.from_batches([batch]).cast(schema)])
        while held.num_rows >= GROUP_ROWS:
            yield held.slice(0, GROUP_ROWS).combine_chunks()
            held = held.slice(GROUP_ROWS)
    if held.num_rows:
        yield held.combine_chunks()
