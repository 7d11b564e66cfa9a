"""The last pass, in tasks: each partition is written as a shard, under a unique name until the driver renames it.

Decision record: docs/decisions/010-sizes-blocks-and-ids.md.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from lockstep.etl import columns as c
from lockstep.etl.spark.errors import SameIdError
from lockstep.etl.spark.session import job_description, sized
from lockstep.etl.spark.tasks import by_partition, mapped, partition_of_task, upload
from lockstep.etl.split.splits import are_folds
from lockstep.features.arrow import flat
from lockstep.features.sample_id import shard_of
from lockstep.features.schema.fields import SAMPLE_ID, Field
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.layout import DatasetPaths, files_path, index_path, shard_path
from lockstep.storage.dataset.manifest_entries import FileInfo, ShardInfo, SplitInfo
from lockstep.storage.digest import digest_of
from lockstep.storage.documents import sha256_hex
from lockstep.storage.errors import DataError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.formats.gzip_blocks import GzipWriter
from lockstep.storage.formats.parquet_footer import read_footer
from lockstep.storage.formats.tfrecord import FramedWriter
from lockstep.storage.urls import join, parent

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

RUN_AGAIN = "Run the job again; if it fails again, the session changes what Spark does with rows: report its settings."
RESULT = pa.schema(
    [
        ("shard", pa.int32()),
        ("path", pa.string()),
        ("records", pa.int64()),
        ("bytes", pa.int64()),
        ("sha256", pa.string()),
        ("crc32c", pa.string()),
        ("footer_sha256", pa.string()),
        ("blocks", pa.list_(pa.int64())),
        ("unpacked", pa.list_(pa.int64())),
        ("index_path", pa.string()),
        ("index_bytes", pa.int64()),
        ("index_sha256", pa.string()),
        ("files_path", pa.string()),
        ("files_bytes", pa.int64()),
        ("files_sha256", pa.string()),
        ("keys", pa.int64()),  # exclusive or of the records' keys; null if nothing counted them before
    ]
)
_FILES = pa.schema([pa.field(SAMPLE_ID, pa.int64(), nullable=False), pa.field("file", pa.string(), nullable=False)])
RECORDS_STEP, SHARDS_STEP = "make ids, splits and records", "order the records and write the shards"
BLOCK_BYTES = 2 << 20
# Labels that are counted class by class: booleans and small whole numbers, so that few rows reach the driver.
FEW_CLASSES, MOST_CLASSES = "^(true|false|[0-9]{1,3})$", 1000
MIN_BLOCKS = 64  # docs/decisions/010-sizes-blocks-and-ids.md


def write_parquet(file: IO[bytes], schema: Schema, batches: Iterable[pa.RecordBatch], block_records: int) -> int:
    """Write rows as row groups of `block_records`; returns how many rows."""
    arrow, records = schema.arrow_schema(), 0
    with pq.ParquetWriter(file, arrow, **parquet_options(schema)) as writer:
        for block in _blocks(batches, arrow, block_records):
            writer.write_table(block, row_group_size=block_records)
            records += block.num_rows
    return records


def parquet_options(schema: Schema) -> dict[str, Any]:
    """Options of Parquet files: zstd, a checksum for each page, nothing that depends on time or host.

    No dictionary for tensors: they are pixels or embeddings, which a dictionary does not make smaller.
    """
    plain = [field.name for field in schema if not field.is_tensor]
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": plain or False,
        "write_page_checksum": True,
        "write_statistics": True,
        "version": "2.6",
    }


def _blocks(batches: Iterable[pa.RecordBatch], arrow: pa.Schema, block_records: int) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        held.append(pa.RecordBatch.from_arrays([batch.column(f.name).cast(f.type) for f in arrow], schema=arrow))
        rows += batch.num_rows
        if rows < block_records:
            continue
        table = pa.Table.from_batches(held, arrow)
        whole = rows // block_records * block_records
        for start in range(0, whole, block_records):
            yield table.slice(start, block_records)
        held, rows = table.slice(whole).to_batches(), rows - whole
    if rows:
        yield pa.Table.from_batches(held, arrow)


def digests_of(file: IO[bytes]) -> tuple[int, str, str, str]:
    """Length, SHA-256 and CRC-32C of a Parquet file, and the SHA-256 of its footer."""
    file.seek(0)
    digest = digest_of(file)
    footer = read_footer(lambda offset, length: _range(file, offset, length), digest.bytes, "a new shard")
    return digest.bytes, digest.sha256, digest.crc32c, sha256_hex(footer)


def _range(file: IO[bytes], offset: int, length: int) -> bytes:
    file.seek(offset)
    return file.read(length)


@dataclass(frozen=True)
class ShardTable:
    """Which partition is which shard, split by split: name of the split, number of its shards, records of a block."""

    splits: tuple[tuple[str, int, int], ...]

    @property
    def total(self) -> int:
        """Shards of all splits, which is the number of partitions."""
        return sum(count for _, count, _ in self.splits)

    def locate(self, partition: int) -> tuple[str, int, int, int]:
        """(split, shard in it, shards of it, block_records) of a partition."""
        for name, count, block_records in self.splits:
            if partition < count:
                return name, partition, count, block_records
            partition -= count
        raise AssertionError(f"no shard {partition} after {self.splits}")


class _NamedFiles:
    """Collects the ids and files of a shard's records, and writes them (lockstep.storage.dataset.layout.files_path)."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._folders = pa.array([f"{url.rstrip('/')}/" for url in urls], pa.string())
        self._parts: list[pa.RecordBatch] = []

    def of(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The batches themselves, collected as they pass."""
        for batch in batches:
            file = pc.binary_join_element_wise(
                self._folders.take(batch.column(c.SOURCE)), batch.column(c.FILE).cast(pa.string()), ""
            )
            self._parts.append(pa.RecordBatch.from_arrays([batch.column(SAMPLE_ID), file], schema=_FILES))
            yield batch

    def upload(self, attempts: str, name: str) -> dict[str, Any]:
        """Write the file; returns its part of RESULT."""
        with tempfile.TemporaryFile(prefix="lockstep-files-") as file:
            table = pa.Table.from_batches(self._parts, _FILES).combine_chunks()
            pq.write_table(table, file, compression="zstd", write_page_checksum=True, use_dictionary=False)
            file.seek(0)
            digest = digest_of(file)
            path = upload(attempts, name, file)
        return {"files_path": path, "files_bytes": digest.bytes, "files_sha256": digest.sha256}


@dataclass(frozen=True)
class WriteShards:
    """The function for mapInArrow: a partition's sorted rows in, one row of RESULT out.

    Raises SameIdError for two rows with one sample id, naming both.
    """

    schema: Schema
    fmt: str
    table: ShardTable
    attempts: str
    source_urls: tuple[str, ...]
    compression: str | None = None
    files: bool = False
    """Whether rows have FILE, and a file of these names is written for each shard."""

    @property
    def files_column(self) -> tuple[str, ...]:
        """The column FILE, if rows have it."""
        return (c.FILE,) if self.files else ()

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the shard of this partition, also an empty one."""
        yield self.write(partition_of_task(), batches)

    def write(self, partition: int, batches: Iterable[pa.RecordBatch]) -> pa.RecordBatch:
        """Write the shard of `partition`; returns its row."""
        _, shard, count, block_records = self.table.locate(partition)
        keys = np.zeros(1, np.int64)
        named = _NamedFiles(self.source_urls) if self.files else None
        rows = self._checked(partition, shard, count, batches if named is None else named.of(batches), keys)
        tfrecord = self._write_tfrecord if self.compression is None else self._write_gzip
        write = tfrecord if self.fmt == "tfrecord" else self._write_parquet
        with tempfile.TemporaryFile(prefix="lockstep-shard-") as file:
            result = {"shard": partition, **write(f"{partition:05d}", file, rows, block_records), "keys": int(keys[0])}
        if named is not None:
            result |= named.upload(self.attempts, f"files-{partition:05d}")
        return pa.RecordBatch.from_pylist([result], schema=RESULT)

    def _write_tfrecord(
        self, name: str, file: IO[bytes], rows: Iterable[pa.RecordBatch], block_records: int
    ) -> dict[str, Any]:
        with tempfile.TemporaryFile(prefix="lockstep-index-") as index:
            writer = FramedWriter(file, index, block_records)
            for batch in rows:
                writer.write(flat(batch.column(c.RECORD))[1])
            return {
                **self._shard(name, file, writer),
                "index_path": upload(self.attempts, f"index-{name}", index),
                "index_bytes": writer.index_bytes,
                "index_sha256": writer.index_sha256,
            }

    def _shard(self, name: str, file: IO[bytes], writer: FramedWriter | GzipWriter) -> dict[str, Any]:
        return {
            "path": upload(self.attempts, f"shard-{name}", file),
            "records": writer.records,
            "bytes": writer.bytes,
            "sha256": writer.sha256,
            "crc32c": writer.crc32c,
            "blocks": writer.block_offsets,
        }

    def _write_gzip(
        self, name: str, file: IO[bytes], rows: Iterable[pa.RecordBatch], block_records: int
    ) -> dict[str, Any]:
        writer = GzipWriter(file, block_records)
        for batch in rows:
            writer.write(flat(batch.column(c.RECORD))[1])
        writer.finish()
        return {
            **self._shard(name, file, writer),
            "unpacked": writer.unpacked_offsets,
        }

    def _write_parquet(
        self, name: str, file: IO[bytes], rows: Iterable[pa.RecordBatch], block_records: int
    ) -> dict[str, Any]:
        records = write_parquet(file, self.schema, rows, block_records)
        size, sha256, crc32c, footer_sha256 = digests_of(file)
        return {
            "path": upload(self.attempts, f"shard-{name}", file),
            "records": records,
            "bytes": size,
            "sha256": sha256,
            "crc32c": crc32c,
            "footer_sha256": footer_sha256,
            "blocks": list(range(0, records, block_records)),
        }

    def _checked(
        self, partition: int, shard: int, count: int, batches: Iterable[pa.RecordBatch], seen: NDArray[np.int64]
    ) -> Iterator[pa.RecordBatch]:
        last: tuple[int, int, int] | None = None
        for batch in batches:
            if not batch.num_rows:
                continue
            stored = np.asarray(batch.column(c.KEY))
            seen ^= np.bitwise_xor.reduce(stored)
            keys = stored.view(np.uint64) ^ np.uint64(1 << 63)
            ends = [int(keys[0]), int(keys[-1])]  # keys are sorted, so the ends are enough
            inside = all(shard_of(key, count) == shard for key in ends)
            named = pc.min_max(batch.column(c.SHARD)).as_py()
            if not inside or (keys[1:] < keys[:-1]).any() or named != {"min": partition, "max": partition}:
                raise DataError(
                    f"partition {partition} is not the shard that it is written as",
                    got=f"rows of shards {named['min']} to {named['max']}, keys {ends[0]:016x} to {ends[1]:016x}",
                    allowed=f"rows of shard {partition}, {shard} of the {count} of its split, in order of their keys",
                    next_step=RUN_AGAIN,
                )
            ids = np.asarray(batch.column(SAMPLE_ID))
            first = (int(ids[0]), batch.column(c.SOURCE)[0].as_py(), batch.column(c.POSITION)[0].as_py())
            if last is not None and last[0] == first[0]:
                raise self._collision(*last, *first[1:])
            same = np.flatnonzero(ids[1:] == ids[:-1])
            if len(same):
                at = int(same[0])
                place = [(batch.column(c.SOURCE)[i].as_py(), batch.column(c.POSITION)[i].as_py()) for i in (at, at + 1)]
                raise self._collision(int(ids[at]), *place[0], *place[1])
            last = (int(ids[-1]), batch.column(c.SOURCE)[-1].as_py(), batch.column(c.POSITION)[-1].as_py())
            yield batch

    def _collision(self, sample: int, source: int, position: int, other: int, other_position: int) -> SameIdError:
        return SameIdError(
            f"two records have one sample id, {sample & (1 << 64) - 1:016x}",
            got=f"{self.source_urls[source]} at {position}, {self.source_urls[other]} at {other_position}",
            allowed="a sample id for each record of a dataset",
            next_step="Name more id columns, or remove one of the two records.",
        )


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of rows of lockstep.etl.split.assign: `splits` are (records, encoded bytes) by split, `dropped` is the
    number of rows by reason, `classes` the records of each class of the label by split, `keys` the exclusive or of the
    keys of each split's records, by which those written are compared with those counted.

    Classes are texts. A split with several values of the label, of which some do not match FEW_CLASSES, has no classes.
    """

    splits: Mapping[str, tuple[int, int]]
    dropped: Mapping[str, int]
    classes: Mapping[str, Mapping[str, int]]
    keys: Mapping[str, int]


def sizes_of(rows: DataFrame, label: Field | None = None) -> Sizes:
    """The sizes, in one pass; `label` is a column of `rows`, if they have one."""
    from pyspark.sql import functions as f

    texts = label is not None and label.dtype == "string"
    value = f.lit(None).cast("bigint") if label is None else f.col(c.quoted(label.name))
    # Spark sorts all rows to find the least of texts, but not that of numbers.
    number = f.xxhash64(value) if texts else value.cast("bigint")
    few = f.when(value.rlike(FEW_CLASSES) if texts else number.between(0, MOST_CLASSES - 1), value).alias("few")
    sums = [f.count(f.lit(1)).alias("n"), f.sum(c.BYTES).alias("bytes")]
    ends = [f.min(number).alias("low"), f.max(number).alias("high"), f.count(value).alias("labelled")]
    ends.append(f.bit_xor(c.KEY).alias("keys"))
    splits: dict[str, tuple[int, int]] = {}
    keys = Counter[str]()
    dropped, classes = Counter[str](), dict[str, dict[str, int]]()
    many: set[str] = set()
    # Of few groups, each task leaves few rows to add up.
    with job_description(rows.sparkSession, RECORDS_STEP), sized(rows.sparkSession, 0):
        grouped = rows.groupBy(c.SPLIT, c.DROPPED, few).agg(*sums, *ends).collect()
    for row in grouped:
        name, count = row[c.SPLIT], row["n"]
        if row[c.DROPPED] is not None:
            dropped[row[c.DROPPED]] += count
            continue
        before = splits.get(name, (0, 0))
        splits[name] = before[0] + count, before[1] + row["bytes"]
        keys[name] ^= row["keys"]
        if row["low"] == row["high"] and row["labelled"]:
            found = row["few"]
            if found is None:  # one value that is not among the few
                of_split = rows.where((f.col(c.SPLIT) == name) & f.col(c.DROPPED).isNull() & value.isNotNull())
                found = of_split.select(value).head(1)[0][0]
            classes.setdefault(name, {})[str(found).lower() if isinstance(found, bool) else str(found)] = count
        else:
            many.add(name)
    names = sorted(splits)
    known = {name: {} if name in many else dict(sorted(classes[name].items())) for name in names if label is not None}
    return Sizes({name: splits[name] for name in names}, dropped, known, keys)


def plan_shards(
    sizes: Mapping[str, tuple[int, int]],
    shard_bytes: int,
    row_group_bytes: int | None = None,
    blocks: Mapping[str, int] | None = None,
) -> ShardTable:
    """The shards of each split from its (records, encoded bytes).

    `row_group_bytes` is the average size of a block, if it is set; `blocks` has the records of a block for splits where
    they are fixed (an append takes them from its parent). All folds get the smallest blocks, so that they can be
    trained on together.
    """
    records = {name: block_records(count, size, row_group_bytes) for name, (count, size) in sizes.items()}
    if are_folds(sizes):
        records = dict.fromkeys(records, min(records.values()))
    records |= {name: n for name, n in (blocks or {}).items() if name in sizes}
    return ShardTable(tuple((name, -(-size // shard_bytes), records[name]) for name, (_, size) in sizes.items()))


def block_records(records: int, encoded_bytes: int, block_bytes: int | None = None) -> int:
    """Records in a block of a split: `block_bytes` on average; by default 2 MiB, with at least MIN_BLOCKS blocks, so
    that there are enough to permute.
    """
    if block_bytes is not None:
        return max(1, block_bytes * records // max(encoded_bytes, 1))
    return max(1, min(BLOCK_BYTES * records // max(encoded_bytes, 1), -(-records // MIN_BLOCKS)))


def write_shards(
    fs: FileSystem, paths: DatasetPaths, rows: DataFrame, table: ShardTable, write: WriteShards, keys: Mapping[str, int]
) -> tuple[dict[str, SplitInfo], dict[str, FileInfo]]:
    """Write the rows that are not dropped, and rename each shard and index to its place below `paths.root`. Raises
    DataError unless they are the rows of `keys`, which are those of Sizes.
    """
    names = [field.name for field in write.schema if field.name != SAMPLE_ID] if write.fmt == "parquet" else [c.RECORD]
    columns = (c.SHARD, c.KEY, c.SOURCE, c.POSITION, SAMPLE_ID, *names, *write.files_column)
    if not table.total:
        return placed(fs, paths, [], table, write.fmt)
    with job_description(rows.sparkSession, SHARDS_STEP, table.total):
        results = mapped(ordered(rows, table, columns), write, RESULT).collect()
    check_keys(results, table, keys)
    return placed(fs, paths, results, table, write.fmt)


def check_keys(results: Sequence[Row], table: ShardTable, keys: Mapping[str, int]) -> None:
    """Raise DataError unless the tasks (rows of RESULT) wrote the records that were counted."""
    written = Counter[str]()
    for row in results:
        written[table.locate(row["shard"])[0]] ^= row["keys"]
    for name, _, _ in table.splits:
        if written[name] != keys[name]:
            raise other_rows(f"other sample ids in split {name} than were counted")


def other_rows(got: str) -> DataError:
    """The error for an input that was computed twice, with other rows the second time."""
    return DataError(
        "the input gave other rows when it was read again",
        got=got,
        allowed="the same rows each time: statistics, weights and sizes are those of the rows that are written",
        next_step="Write when no other program changes the input, or store its rows first, as a table or Parquet.",
    )


def ordered(rows: DataFrame, table: ShardTable, columns: Sequence[str]) -> DataFrame:
    """`columns`, SHARD among them, of the rows that are not dropped: a sorted partition for each shard."""
    from pyspark.sql import functions as f

    base, numbers = 0, []
    for name, count, _ in table.splits:
        numbers.append(f"WHEN {name!r} THEN {_shard_of(count)} + {base}")
        base += count
    kept = rows.where(f"{c.DROPPED} IS NULL").selectExpr(
        f"CAST(CASE {c.SPLIT} {' '.join(numbers)} END AS INT) AS {c.SHARD}",
        *(c.quoted(name) for name in columns if name != c.SHARD),
    )
    return by_partition(kept, table.total, f.col(c.SHARD)).sortWithinPartitions(c.KEY, SAMPLE_ID)


def placed(
    fs: FileSystem, paths: DatasetPaths, results: Sequence[Row | Mapping[str, Any]], table: ShardTable, fmt: str
) -> tuple[dict[str, SplitInfo], dict[str, FileInfo]]:
    """Rename the shards and indexes that tasks wrote (rows of RESULT) to their places below `paths.root`."""
    results = sorted(results, key=lambda row: row["shard"])
    numbers = [row["shard"] for row in results]
    if numbers != list(range(table.total)):
        raise DataError(
            "the tasks did not write each shard once",
            got=f"shards {', '.join(map(str, numbers))}"[:500],
            allowed=f"0 to {table.total - 1}",
            next_step=RUN_AGAIN,
        )
    shards: dict[str, list[ShardInfo]] = {name: [] for name, _, _ in table.splits}
    files: dict[str, FileInfo] = {}
    moves: list[tuple[str, str]] = []
    for row in results:
        name, number, _, _ = table.locate(row["shard"])
        unpacked = row["unpacked"]
        relative = shard_path(name, number, fmt, None if unpacked is None else "gzip")
        moves.append((row["path"], join(paths.root, relative)))
        shards[name].append(
            ShardInfo(
                path=relative,
                records=row["records"],
                bytes=row["bytes"],
                sha256=row["sha256"],
                crc32c=row["crc32c"],
                footer_sha256=row["footer_sha256"],
                block_offsets=tuple(row["blocks"]),
                unpacked_offsets=None if unpacked is None else tuple(unpacked),
            )
        )
        if row["index_path"] is not None:
            moves.append((row["index_path"], paths.index(name, number)))
            files[index_path(name, number)] = FileInfo(row["index_bytes"], row["index_sha256"])
        if row["files_path"] is not None:
            moves.append((row["files_path"], paths.files(name, number)))
            files[files_path(name, number)] = FileInfo(row["files_bytes"], row["files_sha256"])
    with ThreadPoolExecutor(fs.calls_at_once, thread_name_prefix="shard-move") as pool:
        list(pool.map(lambda pair: move(fs, *pair), moves))  # in a store each takes seven round trips
    return {name: SplitInfo(size, tuple(shards[name])) for name, _, size in table.splits}, files


def _shard_of(count: int) -> str:
    """floor(key * count / 2^64) in 64-bit SQL arithmetic; the stored key has its sign bit flipped."""
    key = f"({c.KEY} ^ shiftleft(1L, 63))"
    high, low = f"shiftrightunsigned({key}, 32)", f"({key} & {(1 << 32) - 1}L)"
    return f"shiftrightunsigned({high} * {count}L + shiftrightunsigned({low} * {count}L, 32), 32)"


def move(fs: FileSystem, source: str, target: str) -> None:
    """Rename a file that a task wrote; makes the folder if it does not exist."""
    fs.mkdirs(parent(target))
    fs.rename_new(source, target)
