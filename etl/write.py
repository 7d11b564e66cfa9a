"""write_dataset: the one writer behind every ETL job, from a data frame to a published dataset."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from etl import VERSION
from etl import columns as c
from etl.assign import Assign
from etl.fit import fit_vocabularies
from etl.leakage import leak_key
from etl.quarantine import write_quarantine
from etl.shards import RESULT_DDL, ShardTable, WriteShards
from etl.splits import TEST, TRAIN, SplitSpec
from features.fitted import Vocabulary
from features.schema import SAMPLE_ID, Schema
from storage.canonical import canonical_bytes, sha256_hex
from storage.errors import ConfigError, DataError, ExistsError
from storage.fs import FileSystem, absolute, filesystem, join, parent
from storage.layout import DatasetPaths, fitted_path, index_path, shard_path
from storage.manifest import Counts, DatasetManifest, FileInfo, ShardInfo, SourceInfo, SplitInfo
from storage.publish import occupied, publish_directory, write_file
from storage.settings import hadoop_settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BLOCK_BYTES = 2 << 20
MIN_BLOCKS = 64  # docs/decisions/010-blocks-and-sizes.md


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a data frame's rows come from, for counts, quarantine and the manifest."""

    sources: tuple[SourceInfo, ...]
    read: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    quarantined: int = 0
    quarantined_raw_bytes: int = 0
    quarantine: DataFrame | None = None
    created_config: Mapping[str, Any] = field(default_factory=dict)


def refuse_existing(url: str) -> None:
    """Raise ExistsError where the output, or a file in place of a directory above it, is there already.

    Asked before Spark starts, so that nobody waits for what cannot be published.
    """
    fs, above = filesystem(url), parent(absolute(url))
    if fs.exists(url):
        raise occupied(url)
    while not fs.exists(above) and parent(above) != above:
        above = parent(above)
    if fs.exists(above) and not fs.stat(above).is_dir:
        raise ExistsError(
            f"{url} cannot be made: {above} is a file",
            got="a file",
            allowed="directories above the output",
            next_step="Correct --output.",
        )


def write_dataset(
    df: DataFrame,
    url: str,
    *,
    schema: Schema,
    id_columns: Sequence[str],
    fmt: str,
    split: SplitSpec,
    shard_bytes: int,
    seed: int,
    origin: Origin,
) -> DatasetManifest:
    """Split, order, encode and publish the rows of `df` as the dataset `url`.

    `df` holds the schema's fields but the sample id, the id columns, `_source` (int), `_position` (bigint), and
    may hold `_occurrence` (bigint; worked out when missing), `_dropped` (string: why a row is not written) and,
    for the split `given`, `_split`. Nothing is seen at `url` before all of it is there. Raises ExistsError for an
    existing output, ConfigError for columns that do not fit, DataError where a split would be empty or two
    records have one id.
    """
    refuse_existing(url)
    url = absolute(url)
    df = _with_occurrence(_checked(df, schema, id_columns, split), id_columns)
    df = df.withColumn(c.LEAK, leak_key(df, split, schema))
    assign = Assign(schema, tuple(id_columns), split, seed, fmt)
    rows = df.mapInArrow(assign, assign.ddl()).persist()
    fs, paths = filesystem(url), DatasetPaths(url)
    staging = paths.staging(f"etl-{secrets.token_hex(8)}")
    try:
        fs.mkdirs(join(staging, ".attempts"))
        manifest = _build(fs, staging, rows, schema, fmt, shard_bytes, seed, origin)
        publish_directory(fs, staging, url)
    except BaseException:
        fs.discard(staging)
        raise
    finally:
        rows.unpersist()
    return manifest


def _build(
    fs: FileSystem, staging: str, rows: DataFrame, schema: Schema, fmt: str, shard_bytes: int, seed: int, origin: Origin
) -> DatasetManifest:
    attempts, paths = join(staging, ".attempts"), DatasetPaths(staging)
    urls = tuple(source.url for source in origin.sources)
    sizes, late_drops = _sizes(rows)
    table = _plan(sizes, shard_bytes, origin)
    fitted = fit_vocabularies(rows, schema)
    splits, files = _write_shards(
        fs, paths, rows, table, WriteShards(schema, fmt, table, attempts, urls, hadoop_settings())
    )
    files |= _write_fitted(fs, paths, schema, fitted)
    if origin.quarantine is not None:
        files |= _place_quarantine(fs, paths, origin, attempts, urls)
    dropped = dict(sorted({**origin.dropped, **late_drops}.items()))
    written = sum(info.records for info in splits.values())
    counted = written + origin.quarantined + sum(dropped.values())
    assert origin.read == counted, f"{origin.read} records read, but {counted} accounted for"
    manifest = DatasetManifest.build(
        format=fmt,
        created_by={"version": VERSION, "config": dict(origin.created_config), "seed": seed},
        schema=schema.to_json(),
        splits=splits,
        files=files,
        counts=Counts(origin.read, written, origin.quarantined, dropped),
        source=origin.sources,
    )
    fs.delete(attempts, recursive=True)
    write_file(fs, paths.manifest, manifest.to_bytes())
    return manifest


def _checked(df: DataFrame, schema: Schema, id_columns: Sequence[str], split: SplitSpec) -> DataFrame:
    """`df` with just the columns that are used. Raises ConfigError for a missing one or one of another type."""
    have = dict(df.dtypes)
    wanted = {field.name: c.ddl_type(field) for field in schema if field.name != SAMPLE_ID}
    wanted |= {c.SOURCE: "int", c.POSITION: "bigint"}
    wanted |= {c.SPLIT: "string"} if split.given else {}
    wanted |= {name: have.get(name, "a column") for name in id_columns}
    if split.column is not None:
        wanted.setdefault(split.column, have.get(split.column, "a column"))
    for name, kind in wanted.items():
        if have.get(name) != kind:
            raise ConfigError(
                f"column `{name}` cannot be used",
                got=have.get(name, "no such column"),
                allowed=kind,
                next_step=f"Columns are: {', '.join(have)}.",
            )
    optional = [name for name in (c.OCCURRENCE, c.DROPPED) if name in have]
    return df.select(*wanted, *optional)


def _with_occurrence(df: DataFrame, id_columns: Sequence[str]) -> DataFrame:
    if c.OCCURRENCE in df.columns:
        return df
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    order = Window.partitionBy(*id_columns).orderBy(c.SOURCE, c.POSITION)
    return df.withColumn(c.OCCURRENCE, (f.row_number().over(order) - 1).cast("bigint"))


def _sizes(rows: DataFrame) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """(records, encoded bytes) of each split, and how many rows each reason dropped."""
    from pyspark.sql import functions as f

    found = rows.groupBy(c.SPLIT, c.DROPPED).agg(f.count(f.lit(1)).alias("n"), f.sum(c.BYTES).alias("bytes")).collect()
    sizes = {row[c.SPLIT]: (row["n"], row["bytes"]) for row in found if row[c.DROPPED] is None}
    return {name: sizes[name] for name in sorted(sizes)}, {
        row[c.DROPPED]: row["n"] for row in found if row[c.DROPPED] is not None
    }


def _plan(sizes: Mapping[str, tuple[int, int]], shard_bytes: int, origin: Origin) -> ShardTable:
    missing = [name for name in (TRAIN, TEST) if name not in sizes]
    if missing:
        records = sum(count for count, _ in sizes.values())
        raise DataError(
            "no record was left to write" if not sizes else f"split {missing[0]} would be empty",
            got=f"{records} records to write of {origin.read} read ({origin.quarantined} quarantined)",
            allowed=f"records in each of {', '.join((TRAIN, TEST))}",
            next_step="Look at the input and the label; give more input or another --split.",
        )
    return ShardTable(
        tuple((name, -(-size // shard_bytes), block_records(count, size)) for name, (count, size) in sizes.items())
    )


def block_records(records: int, encoded_bytes: int) -> int:
    """Records in a block of a split: 2 MiB on average, but MIN_BLOCKS blocks or more, to have some to permute."""
    return max(1, min(BLOCK_BYTES * records // max(encoded_bytes, 1), -(-records // MIN_BLOCKS)))


def _write_shards(
    fs: FileSystem, paths: DatasetPaths, rows: DataFrame, table: ShardTable, write: WriteShards
) -> tuple[dict[str, SplitInfo], dict[str, FileInfo]]:
    from pyspark.sql import functions as f

    base, shard = 0, None
    for name, count, _ in table.splits:
        here = f.col(c.SPLIT) == name
        number = (_shard_of(count) + base).cast("int")
        shard = f.when(here, number) if shard is None else shard.when(here, number)
        base += count
    assert shard is not None
    placed = rows.where(f.col(c.DROPPED).isNull()).withColumn(c.SHARD, shard).drop(c.SPLIT, c.DROPPED, c.BYTES)
    if write.fmt == "tfrecord":
        placed = placed.select(c.SHARD, c.KEY, c.SOURCE, c.POSITION, c.RECORD, SAMPLE_ID)
    ordered = placed.repartitionById(table.total, c.SHARD).sortWithinPartitions(c.KEY, SAMPLE_ID)
    results = sorted(ordered.mapInArrow(write, RESULT_DDL).collect(), key=lambda row: row["shard"])
    assert [row["shard"] for row in results] == list(range(table.total)), "each partition gives one shard"
    shards: dict[str, list[ShardInfo]] = {name: [] for name, _, _ in table.splits}
    files: dict[str, FileInfo] = {}
    for row in results:
        name, number, _, _ = table.locate(row["shard"])
        relative = shard_path(name, number, write.fmt)
        _move(fs, row["path"], join(paths.root, relative))
        shards[name].append(
            ShardInfo(
                path=relative,
                records=row["records"],
                bytes=row["bytes"],
                sha256=row["sha256"],
                crc32c=row["crc32c"],
                footer_sha256=row["footer_sha256"],
                block_offsets=tuple(row["blocks"]),
            )
        )
        if row["index_path"] is not None:
            _move(fs, row["index_path"], paths.index(name, number))
            files[index_path(name, number)] = FileInfo(row["index_bytes"], row["index_sha256"])
    return {name: SplitInfo(size, tuple(shards[name])) for name, _, size in table.splits}, files


def _shard_of(count: int) -> Any:
    """floor(key * count / 2^64) in 64-bit SQL arithmetic; the stored key has its sign bit flipped."""
    from pyspark.sql import functions as f

    key = f.col(c.KEY).bitwiseXOR(f.lit(-(1 << 63)))
    high, low = f.shiftrightunsigned(key, 32), key.bitwiseAND(f.lit((1 << 32) - 1))
    return f.shiftrightunsigned(high * count + f.shiftrightunsigned(low * count, 32), 32)


def _write_fitted(
    fs: FileSystem, paths: DatasetPaths, schema: Schema, fitted: Mapping[str, Vocabulary]
) -> dict[str, FileInfo]:
    files = {}
    for name, vocabulary in sorted(fitted.items()):
        encoding = schema[name].encoding
        assert encoding is not None
        data = canonical_bytes(vocabulary.to_json())
        write_file(fs, paths.fitted(encoding["file"]), data)
        files[fitted_path(encoding["file"])] = FileInfo(len(data), sha256_hex(data))
    return files


def _place_quarantine(
    fs: FileSystem, paths: DatasetPaths, origin: Origin, attempts: str, urls: tuple[str, ...]
) -> dict[str, FileInfo]:
    assert origin.quarantine is not None
    fs.mkdirs(paths.quarantine, mode=0o700)
    written = write_quarantine(
        origin.quarantine,
        count=origin.quarantined,
        raw_bytes=origin.quarantined_raw_bytes,
        attempts=attempts,
        source_urls=urls,
    )
    files = {}
    for number, (attempt, info) in enumerate(written):
        name = f"part-{number:05d}.parquet"
        _move(fs, attempt, join(paths.quarantine, name))
        files[f"_quarantine/{name}"] = info
    return files


def _move(fs: FileSystem, source: str, target: str) -> None:
    fs.mkdirs(parent(target))
    fs.rename_new(source, target)
