"""From rows in memory to shards at their places: how many there are, which row is in which, and what they came to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from etl import columns as c
from etl.spark.session import described
from etl.spark.tasks import by_partition, mapped
from etl.write.shards import RESULT_DDL, RUN_AGAIN, ShardTable, WriteShards
from lockstep.features.schema.fields import SAMPLE_ID, Field
from lockstep.storage.dataset.layout import DatasetPaths, index_path, shard_path
from lockstep.storage.dataset.manifest_entries import FileInfo
from lockstep.storage.dataset.manifest_shards import ShardInfo, SplitInfo
from lockstep.storage.errors import DataError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.urls import join, parent

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

BLOCK_BYTES = 2 << 20
# Labels that are counted class by class: booleans and small whole numbers, so that the driver gets few rows.
FEW_CLASSES = "^(true|false|[0-9]{1,3})$"
MIN_BLOCKS = 64  # docs/decisions/010-blocks-and-sizes.md


@dataclass(frozen=True, slots=True)
class Sizes:
    """What rows of etl.split.assign come to: `splits` are (records, encoded bytes) by split, `dropped` rows by reason,
    and `classes` the records of each class of the label by split.

    Classes are texts. A split that has several values of the label, some of them beyond FEW_CLASSES, has none here.
    """

    splits: Mapping[str, tuple[int, int]]
    dropped: Mapping[str, int]
    classes: Mapping[str, Mapping[str, int]]


def sizes_of(rows: DataFrame, label: Field | None = None) -> Sizes:
    """The sizes, in one pass; `label` is a column of `rows`, if they have one."""
    from pyspark.sql import functions as f

    value = f.lit(None).cast("string") if label is None else f.col(c.quoted(label.name)).cast("string")
    few = f.when(value.rlike(FEW_CLASSES), value).alias("few")
    sums = [f.count(f.lit(1)).alias("n"), f.sum(c.BYTES).alias("bytes")]
    ends = [f.min(value).alias("low"), f.max(value).alias("high")]
    splits: dict[str, tuple[int, int]] = {}
    dropped, classes = Counter[str](), dict[str, dict[str, int]]()
    many: set[str] = set()
    with described(rows.sparkSession, "make ids, splits and records"):
        grouped = rows.groupBy(c.SPLIT, c.DROPPED, few).agg(*sums, *ends).collect()
    for row in grouped:
        name, count = row[c.SPLIT], row["n"]
        if row[c.DROPPED] is not None:
            dropped[row[c.DROPPED]] += count
            continue
        before = splits.get(name, (0, 0))
        splits[name] = before[0] + count, before[1] + row["bytes"]
        if row["low"] == row["high"] is not None:
            classes.setdefault(name, {})[row["low"]] = count
        else:
            many.add(name)
    names = sorted(splits)
    known = {name: {} if name in many else dict(sorted(classes[name].items())) for name in names if label is not None}
    return Sizes({name: splits[name] for name in names}, dropped, known)


def plan_shards(
    sizes: Mapping[str, tuple[int, int]],
    shard_bytes: int,
    row_group_bytes: int | None = None,
    blocks: Mapping[str, int] | None = None,
    *,
    alike: bool = False,
) -> ShardTable:
    """The shards of each split from its (records, encoded bytes).

    `row_group_bytes` is the size of a block on average where it is asked for; `blocks` has the records of a block where
    they are settled already (an append takes them from its parent); `alike` gives all splits the smallest blocks, so
    that folds can be trained on together.
    """
    records = {name: block_records(count, size, row_group_bytes) for name, (count, size) in sizes.items()}
    if alike:
        records = dict.fromkeys(records, min(records.values()))
    records |= {name: n for name, n in (blocks or {}).items() if name in sizes}
    return ShardTable(tuple((name, -(-size // shard_bytes), records[name]) for name, (_, size) in sizes.items()))


def block_records(records: int, encoded_bytes: int, block_bytes: int | None = None) -> int:
    """Records in a block of a split: `block_bytes` on average; by default 2 MiB, but MIN_BLOCKS blocks or more, to have
    some to permute.
    """
    if block_bytes is not None:
        return max(1, block_bytes * records // max(encoded_bytes, 1))
    return max(1, min(BLOCK_BYTES * records // max(encoded_bytes, 1), -(-records // MIN_BLOCKS)))


def write_shards(
    fs: FileSystem, paths: DatasetPaths, rows: DataFrame, table: ShardTable, write: WriteShards
) -> tuple[dict[str, SplitInfo], dict[str, FileInfo]]:
    """Write the rows that are not dropped and move each shard and index to its place below `paths.root`."""
    names = [field.name for field in write.schema if field.name != SAMPLE_ID] if write.fmt == "parquet" else [c.RECORD]
    columns = (c.SHARD, c.KEY, c.SOURCE, c.POSITION, SAMPLE_ID, *names)
    with described(rows.sparkSession, "order the records and write the shards"):
        results = mapped(ordered(rows, table, columns), write, RESULT_DDL).collect()
    return placed(fs, paths, results, table, write.fmt)


def ordered(rows: DataFrame, table: ShardTable, columns: Sequence[str]) -> DataFrame:
    """`columns` of the rows that are not dropped, SHARD among them: a partition for each shard, in its order."""
    from pyspark.sql import functions as f

    base, shard = 0, None
    for name, count, _ in table.splits:
        here = f.col(c.SPLIT) == name
        number = (_shard_of(count) + base).cast("int")
        shard = f.when(here, number) if shard is None else shard.when(here, number)
        base += count
    assert shard is not None
    kept = rows.where(f.col(c.DROPPED).isNull()).withColumn(c.SHARD, shard)
    kept = kept.select(*(f.col(c.quoted(name)) for name in columns))
    return by_partition(kept, table.total, f.col(c.SHARD)).sortWithinPartitions(c.KEY, SAMPLE_ID)


def placed(
    fs: FileSystem, paths: DatasetPaths, results: Sequence[Row | Mapping[str, Any]], table: ShardTable, fmt: str
) -> tuple[dict[str, SplitInfo], dict[str, FileInfo]]:
    """Move the shards and indexes that tasks told of (rows of RESULT_DDL) to their places below `paths.root`."""
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
    for row in results:
        name, number, _, _ = table.locate(row["shard"])
        unpacked = row["unpacked"]
        relative = shard_path(name, number, fmt, None if unpacked is None else "gzip")
        move(fs, row["path"], join(paths.root, relative))
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
            move(fs, row["index_path"], paths.index(name, number))
            files[index_path(name, number)] = FileInfo(row["index_bytes"], row["index_sha256"])
    return {name: SplitInfo(size, tuple(shards[name])) for name, _, size in table.splits}, files


def _shard_of(count: int) -> Any:
    """floor(key * count / 2^64) in 64-bit SQL arithmetic; the stored key has its sign bit flipped."""
    from pyspark.sql import functions as f

    key = f.col(c.KEY).bitwiseXOR(f.lit(-(1 << 63)))
    high, low = f.shiftrightunsigned(key, 32), key.bitwiseAND(f.lit((1 << 32) - 1))
    return f.shiftrightunsigned(high * count + f.shiftrightunsigned(low * count, 32), 32)


def move(fs: FileSystem, source: str, target: str) -> None:
    """Give what a task wrote its place, in a folder that may not be there yet."""
    fs.mkdirs(parent(target))
    fs.rename_new(source, target)
