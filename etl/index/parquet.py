"""A manifest for Parquet files of other programs, next to them: a dataset whose shards are the files as they are."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from lockstep.etl.choices import LAKES
from lockstep.etl.index.directory import check, check_unchanged
from lockstep.etl.index.partitions import kinds_of, partitions_of, splits_of
from lockstep.etl.input.footers import column_numbers, damaged, parquet_footer
from lockstep.etl.input.snapshots import Snapshot, open_snapshot
from lockstep.etl.spark.errors import in_task, translating_errors
from lockstep.etl.table_files import LONG, THREADS, Partition
from lockstep.etl.write.frame import UINT64, fault_of, schema_of
from lockstep.features.schema.declare import load_schema
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema
from lockstep.features.shards.foreign_files import ForeignFile, find_files
from lockstep.features.shards.indexed_parquet import IndexedRows, as_declared
from lockstep.process.installed import VERSION
from lockstep.storage.dataset.indexed import PARQUET_GLOB
from lockstep.storage.dataset.layout import foreign_relative
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.dataset.manifest_entries import Counts, ShardInfo, SplitInfo
from lockstep.storage.digest import digest_of
from lockstep.storage.documents import sha256_hex
from lockstep.storage.errors import ConfigError, DataError, nearest, require
from lockstep.storage.formats.parquet_footer import read_footer
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import MANIFEST_NAME, write_file
from lockstep.storage.settings import set_hadoop_settings
from lockstep.storage.urls import absolute, join

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)
LARGE_BLOCK_BYTES = 64 << 20  # sixteen times the largest block of our own shards: more is read badly in turn
_WIDEST = {"tinyint": "bigint", "smallint": "bigint", "int": "bigint"}
_SPARK = {
    "int8": "tinyint", "int16": "smallint", "int32": "int", "int64": "bigint",
    "uint8": "smallint", "uint16": "int", "uint32": "bigint", "uint64": UINT64,
    "halffloat": "float", "bool": "boolean", "date32[day]": "date",
    "large_string": "string", "string_view": "string", "large_binary": "binary", "binary_view": "binary",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ParquetIndexConfig:
    """What `lockstep index --format parquet` makes of the files below `url`."""

    url: str
    """The directory; its files stay as they are."""
    pattern: str = PARQUET_GLOB
    """The names of the files, in any folder."""
    id_columns: tuple[str, ...] = ()
    """Columns that make the sample ids, unique together; none: each file's path and the row's number."""
    label: str | None = None
    """The column to predict."""
    exclude: tuple[str, ...] = ()
    """Columns that are not read."""
    schema: str | None = None
    """File of a declared schema; None takes the columns' own types."""
    split_by: str | None = None
    """The partition whose values are the names of splits; None puts all files into the split train."""
    table: str | None = None
    """The format of the table whose files these are, one of lockstep.etl.choices.LAKES; None: all files."""
    table_version: int | None = None
    """With `table`: the version of a Delta table or the id of an Iceberg snapshot; None is the newest."""

    def __post_init__(self) -> None:
        ids = self.id_columns
        require(all(ids) and len(set(ids)) == len(ids), "--id-columns", ",".join(ids) or "none", "each column once")
        one = self.schema is None or not (self.exclude or self.label)
        require(one, "--schema", "together with --exclude or --label", "without them: the file declares both")
        allowed = ", ".join(LAKES)
        require(self.table in (None, *LAKES), "the table", str(self.table), allowed)
        require(
            self.table_version is None or self.table is not None, "--table-version", str(self.table_version), allowed
        )

    def to_json(self, snapshot: Snapshot | None) -> dict[str, Any]:
        """The settings that decide the content of the manifest, but for the place of the files, and the version of the
        table.
        """
        left_out = ("url", "table", "table_version", *(() if snapshot is None else ("pattern",)))
        settings = {n: list(v) if isinstance(v, tuple) else v for n, v in asdict(self).items() if n not in left_out}
        return {"job": "index", **settings, **({} if snapshot is None else {"table": snapshot.to_json()})}


@dataclass(frozen=True, slots=True)
class Footer:
    """What the end of a file says: its columns by name, the numbers of columns that Iceberg wrote, its rows, and its
    largest row group in rows and bytes.
    """

    file: ForeignFile
    columns: Mapping[str, pa.DataType]
    numbers: Mapping[str, int | None]
    rows: int
    group_rows: int
    group_bytes: int

    @classmethod
    def read(cls, file: ForeignFile) -> Footer:
        """Raises DataError for other files than Parquet, and for two columns of one name."""
        metadata = parquet_footer(file.url, file.bytes)
        try:
            schema = metadata.schema.to_arrow_schema()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise damaged(file.url, "Parquet", error) from None
        if len(set(schema.names)) < len(schema.names):
            raise DataError(
                f"{file.url} has two columns of one name",
                got=", ".join(schema.names)[:500],
                allowed="each name once",
                next_step="Write the file again with other names.",
            )
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        return cls(
            file,
            {field.name: field.type for field in schema},
            column_numbers(schema),
            metadata.num_rows,
            max((group.num_rows for group in groups), default=0),
            max((group.total_byte_size for group in groups), default=0),
        )


def index_parquet(
    config: ParquetIndexConfig, *, spark: SparkSession | None = None, settings: Mapping[str, str] | None = None
) -> DatasetManifest:
    """Read every file once, check that its rows fit the schema, and write `_manifest.json` next to the files. With
    `spark` a task reads each file. Files without rows are left out. Memory on the driver: 16 bytes a record.

    Raises what `check` raises; ConfigError for columns, types and partitions that do not fit, naming file and column;
    DataError for damaged files, values that no field holds, and for two rows with one id.
    """
    check(config.url, config.table or "Parquet")
    url = absolute(config.url)
    table = None if config.table is None else open_snapshot(config.table, url, config.table_version)
    if table is None:
        files = find_files(url, config.pattern, "Parquet")
    else:
        files = [ForeignFile(file.url, file.path, file.bytes) for file in table.files]
    for file in files:
        foreign_relative(file.path, where=url)
    with ThreadPoolExecutor(THREADS) as pool:
        footers = [footer for footer in pool.map(Footer.read, files) if footer.rows]
    if not footers:
        raise DataError(
            f"the Parquet files in {url} hold no row",
            got=f"{len(files)} files without rows",
            allowed="a row or more",
            next_step="Check the path, and the program that wrote the files.",
        )
    if table is None:
        partitions = partitions_of([footer.file for footer in footers])
        kinds = kinds_of(partitions)
    else:
        footers = [_of_table(footer, table) for footer in footers]
        by_path = {file.path: file.partition for file in table.files}
        partitions, kinds = [by_path[footer.file.path] for footer in footers], dict(table.kinds)
    schema = _schema(config, footers, partitions, kinds)
    splits = splits_of([footer.file for footer in footers], partitions, config.split_by)
    scan = Scan(url, schema, config.id_columns, dict(settings or {}))
    found = _each(scan, [(footer.file.path, part) for footer, part in zip(footers, partitions, strict=True)], spark)
    check_unchanged([footer.file for footer in footers], [one.info for one in found])
    _refuse_same_ids(found, config.id_columns)
    return _publish(config, table, schema, footers, splits, [one.info for one in found])


def _of_table(footer: Footer, table: Snapshot) -> Footer:
    """The footer with the columns that the table has: older files may have others."""
    table.check_columns(footer.file.url, footer.numbers)
    return replace(footer, columns={name: kind for name, kind in footer.columns.items() if name in table.columns})


def _publish(
    config: ParquetIndexConfig,
    table: Snapshot | None,
    schema: Schema,
    footers: Sequence[Footer],
    splits: Sequence[str],
    infos: list[ShardInfo],
) -> DatasetManifest:
    # One number for all splits, so that several can be read as one.
    block_records = max(footer.group_rows for footer in footers)
    largest = max(footers, key=lambda footer: footer.group_bytes)
    if largest.group_bytes > LARGE_BLOCK_BYTES:
        log.warning(
            "%s has a row group of %d MiB: training reads and permutes row groups as a whole, so memory grows with them"
            " and neighbours stay near each other; lockstep etl_table writes smaller ones",
            largest.file.url, largest.group_bytes >> 20,
        )  # fmt: skip
    shards: dict[str, list[ShardInfo]] = {}
    for name, info in sorted(zip(splits, infos, strict=True), key=lambda one: (one[0], one[1].path)):
        starts = tuple(range(0, info.records, block_records))
        shards.setdefault(name, []).append(replace(info, block_offsets=starts))
    rows = sum(info.records for info in infos)
    manifest = DatasetManifest.build(
        format="parquet",
        created_by={"version": VERSION, "config": config.to_json(table), "seed": 0},
        schema=schema.to_json(),
        splits={name: SplitInfo(block_records, tuple(of)) for name, of in shards.items()},
        files={},
        counts=Counts(read=rows, written=rows, quarantined=0, dropped={}),
        source=(),
        indexed=config.id_columns,
    )
    write_file(filesystem(config.url), join(config.url, MANIFEST_NAME), manifest.to_bytes())
    return manifest


def spark_kind(kind: pa.DataType) -> str:
    """An Arrow type in the notation of Spark, which reads unsigned numbers as wider ones."""
    if pa.types.is_dictionary(kind):
        return spark_kind(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return f"array<{spark_kind(kind.value_type)}>"
    if pa.types.is_fixed_size_binary(kind):
        return "binary"
    if pa.types.is_timestamp(kind):
        return "timestamp" if kind.tz else "timestamp_ntz"
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    text = str(kind)
    return _SPARK.get(text, text)


def _schema(
    config: ParquetIndexConfig, footers: Sequence[Footer], partitions: Sequence[Partition], folders: Mapping[str, str]
) -> Schema:
    """The declared or inferred schema, checked against the columns of each file and against the partitions."""
    there = {name: footer.file.url for footer in reversed(footers) for name in footer.columns}
    for name in folders:
        if name in there:
            raise ConfigError(
                f"`{name}` is a column and a partition",
                got=f"a column in {there[name]}, and folders {name}=...",
                allowed="each name once",
                next_step="Write the files without the column, or move them out of these folders.",
            )
    for name in config.id_columns:
        lacking = next((f.file.url for f in footers if name not in f.columns), None)
        if name not in folders and lacking is not None:
            raise _no_column("--id-columns", name, lacking, [*there, *folders])
    if config.schema is None:
        schema = _inferred(config, footers, folders)
    else:
        schema = load_schema(config.schema)
        if schema.fitted_fields:
            raise ConfigError(
                f"--schema {config.schema}: an encoding needs statistics of the training data, which no index has",
                got=", ".join(f"`{field.name}`" for field in schema.fitted_fields)[:500],
                allowed="encodings without statistics: number with values, hash, sequences of them, ignore",
                next_step="Declare these fields otherwise, or build a dataset by lockstep etl_table.",
            )
    for field in schema:
        if field.kind != "id":
            _check_field(field, footers, partitions, [*there, *folders])
    return schema


def _inferred(config: ParquetIndexConfig, footers: Sequence[Footer], folders: Mapping[str, str]) -> Schema:
    kinds: dict[str, tuple[str, str]] = {}  # the type of a column, and the file that has it first
    exclude = [*config.exclude, *([] if config.split_by is None else [config.split_by])]
    for footer in footers:
        for name, arrow in footer.columns.items():
            kind = spark_kind(arrow)
            kind = _WIDEST.get(kind, kind)
            first, url = kinds.setdefault(name, (kind, footer.file.url))
            if first != kind and name not in exclude:
                raise ConfigError(
                    f"column `{name}` has two types",
                    got=f"{first} in {url}, {kind} in {footer.file.url}",
                    allowed="one type in all files; files that lack the column have nulls there",
                    next_step="Write those files with one type, or leave the column out by --exclude.",
                )
    kinds |= {name: (kind, f"folders {name}=...") for name, kind in folders.items()}
    for name, (kind, place) in kinds.items():
        fault = None if name in exclude else fault_of(name, kind)
        if fault is None:
            continue
        step = f"Leave it out by --exclude {name}; or build a dataset by lockstep etl_table --query. {fault.next_step}"
        if name in folders:
            step = f"Give --split-by {name}, leave it out by --exclude {name}, or declare a string in a --schema."
        raise ConfigError(f"{place}: {fault.what}", got=fault.got, allowed=fault.allowed, next_step=step)
    have = {name: kind for name, (kind, _) in kinds.items()}
    exclude = [name for name in exclude if name in have or name in config.exclude]
    return schema_of(have, dict.fromkeys(have, True), config.label, exclude, config.id_columns)


def _check_field(
    field: Field, footers: Sequence[Footer], partitions: Sequence[Partition], there: Sequence[str]
) -> None:
    """Raise ConfigError for a field that is in no file, in too few, or of another type in one."""
    if partitions[0] and field.name in dict(partitions[0]):
        texts = {dict(partition)[field.name] for partition in partitions}
        wrong = sorted(text for text in texts if text is not None and not _holds(field, text))
        null = None in texts and not field.nullable
        if null or wrong:
            raise ConfigError(
                f"partition `{field.name}` does not fit its field",
                got="null" if null else f"{field.name}={wrong[0]}",
                allowed=f"{field.dtype}, one value; partitions are int64, float64 or string",
                next_step="Declare the field as string, nullable if there are nulls, or leave it out by --exclude.",
            )
        return
    lacking = next((footer.file.url for footer in footers if field.name not in footer.columns), None)
    if lacking is not None and (not field.nullable or not any(field.name in f.columns for f in footers)):
        raise _no_column("the schema" if field.kind != "label" else "the label", field.name, lacking, there)
    if lacking is not None:
        few = sum(field.name not in footer.columns for footer in footers)
        log.warning("column `%s` is null in %d of %d files, which lack it, such as %s", field.name, few,
                    len(footers), lacking)  # fmt: skip
    for footer in footers:
        kind = footer.columns.get(field.name)
        if kind is None:
            continue
        try:
            as_declared(field, pa.array([], kind.value_type if pa.types.is_dictionary(kind) else kind))
        except (DataError, pa.ArrowException) as error:
            fault = error if isinstance(error, DataError) else None
            raise ConfigError(
                f"{footer.file.url}: {fault.what if fault else f'column `{field.name}` cannot be read'}",
                got=str(kind) if fault is None else fault.got,
                allowed=f"{field.arrow_type}" if fault is None else fault.allowed,
                next_step="Declare the field otherwise, leave it out, or cast it in lockstep etl_table --query.",
            ) from None


def _holds(field: Field, text: str) -> bool:
    """Whether a field holds the value of a partition."""
    if field.shape or field.dtype not in ("int64", "float64", "string"):
        return False
    if field.dtype == "int64":
        return LONG.fullmatch(text) is not None and -(1 << 63) <= int(text) < 1 << 63
    try:
        return field.dtype == "string" or float(text) == float(text)
    except ValueError:
        return False


def _no_column(where: str, name: str, url: str, there: Iterable[str]) -> ConfigError:
    return ConfigError(
        f"{where}: {url} has no column `{name}`{nearest(name, there)}",
        got=", ".join(there)[:500],
        allowed="a column of each file, or a partition; only nullable features may be missing in some",
        next_step="Correct the name, or leave these files out by --pattern.",
    )


@dataclass(frozen=True, slots=True)
class Scanned:
    """A file's manifest entry without blocks, and the sample ids of its rows as bytes of int64."""

    info: ShardInfo
    ids: bytes


@dataclass(frozen=True)
class Scan:
    """Reads files to their end: digests, sample ids, and whether each row fits the schema."""

    root: str
    schema: Schema
    id_columns: tuple[str, ...]
    settings: dict[str, str]

    @in_task
    def __call__(self, parts: Iterable[tuple[str, Partition]]) -> Iterator[Scanned]:
        """Runs in a Spark task."""
        set_hadoop_settings(self.settings)
        for path, partition in parts:
            yield self.scan(path, partition)

    def scan(self, path: str, partition: Partition) -> Scanned:
        """Read the file at `path` (relative). Raises DataError naming it."""
        url = join(self.root, path)
        fs = filesystem(url)
        rows = IndexedRows(self.schema, self.id_columns, url, path, dict(partition))
        with fs.open_read(url) as file:
            digest = digest_of(file)
        footer = read_footer(lambda at, size: fs.read_range(url, at, size), digest.bytes, url)
        ids, first = [np.zeros(0, np.int64)], 0
        with fs.open_read(url) as file:
            try:
                metadata = pq.read_metadata(pa.BufferReader(footer))
                reader = pq.ParquetFile(file, metadata=metadata, page_checksum_verification=True)
                names = rows.columns(reader.schema_arrow.names)
                for group in range(metadata.num_row_groups):
                    batch = rows.batch(reader.read_row_group(group, columns=names), first)
                    ids.append(np.asarray(batch.column(self.schema.id_field.name)))
                    first += len(batch)
            except (pa.ArrowException, OSError) as error:
                raise damaged(url, "Parquet", error) from None
        info = ShardInfo(
            path, first, digest.bytes, digest.sha256, digest.crc32c, sha256_hex(footer), (), partition=partition
        )
        return Scanned(info, np.concatenate(ids).tobytes())


def _each(scan: Scan, parts: Sequence[tuple[str, Partition]], spark: SparkSession | None) -> list[Scanned]:
    if spark is None:
        return [scan.scan(path, partition) for path, partition in parts]
    with translating_errors(spark, "reading the files"):
        rows = spark.sparkContext.parallelize(parts, len(parts)).mapPartitions(scan).collect()
    return sorted(rows, key=lambda row: row.info.path)


def _refuse_same_ids(found: Sequence[Scanned], id_columns: Sequence[str]) -> None:
    """Raise DataError naming two rows with one sample id."""
    ids: NDArray[np.int64] = np.concatenate([np.frombuffer(one.ids, np.int64) for one in found])
    order = np.argsort(ids, kind="stable")
    same = np.flatnonzero(ids[order[1:]] == ids[order[:-1]])
    if not len(same):
        return
    ends = np.cumsum([one.info.records for one in found])
    named = []
    for place in order[[same[0], same[0] + 1]].tolist():
        file = int(np.searchsorted(ends, place, side="right"))
        named.append(f"row {place - int(ends[file]) + found[file].info.records} of {found[file].info.path}")
    raise DataError(
        f"{len(same)} rows have the sample id of another row",
        got=" and ".join(named),
        allowed=f"{', '.join(id_columns)} unique together" if id_columns else "another name of one of the files",
        next_step="Name more --id-columns, or none: then file and row are the id." if id_columns else "Rename a file.",
    )
