"""The files of a table: their columns compared and merged by name, the types of partitions, times in nanoseconds.

Spark takes the columns of one file for those of all, and the values of partitions for numbers if they look like some.
Decision record: docs/decisions/061-splits-and-leakage.md.
"""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import orc

from lockstep.etl import columns as c
from lockstep.etl.input.footers import column_numbers, damaged, parquet_footer
from lockstep.etl.input.snapshots import Snapshot, SnapshotFile
from lockstep.etl.spark.session import with_settings
from lockstep.etl.table_json import check_json
from lockstep.etl.write.chance import nodes
from lockstep.storage.errors import ConfigError, DataError, LockstepError
from lockstep.storage.fs import filesystem

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType

log = logging.getLogger(__name__)
FORMATS = ("parquet", "orc", "json", "text")
"""Formats of Spark that are files below the paths given, whose folders may be partitions."""
THREADS = 16  # a footer is some kilobytes: reading one is waiting
NANOS = "TIMESTAMP(NANOS"  # how Parquet calls times in nanoseconds
_AS_TEXT = {"spark.sql.sources.partitionColumnTypeInference.enabled": "false"}
WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")
LONG, FRACTION = re.compile(r"0|-?[1-9][0-9]*"), re.compile(r"-?[0-9]+\.[0-9]+")
DATE = re.compile(r"[0-9]{4}-(0[1-9]|1[0-2])-([0-2][0-9]|3[01])")
MAX_DIGITS = 38  # of a decimal of Spark
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"  # Spark's name for null


@dataclass(frozen=True, slots=True)
class Found:
    """A column as one kind of file has it: its type, None if Spark cannot read it, and how the file calls its type."""

    name: str
    kind: DataType | None
    called: str

    @property
    def shown(self) -> str:
        """The type by which columns of two files are compared."""
        return self.called if self.kind is None or self.called.startswith(NANOS) else self.kind.simpleString()


@dataclass(frozen=True, slots=True)
class Kind:
    """Files with the same columns: the first one's URL, how many there are, and the columns by their names in lower
    case, which is how Spark compares names.
    """

    url: str
    files: int
    columns: dict[str, Found]


def read_files(
    spark: SparkSession,
    urls: Sequence[str],
    file_format: str,
    used: Callable[[str], bool],
    options: Mapping[str, str] | None = None,
) -> tuple[DataFrame, frozenset[str]]:
    """The rows of all files at `urls`, and the columns of Parquet and ORC that are left out, since they are not `used`.
    `options` are further ones of Spark's readers.

    Folders below are read too. A column that some files lack is null there. Raises ConfigError naming columns, types
    and files where a used column has several types, one that Spark cannot read, or the name of a partition, and where
    files are next to partitions; DataError for a damaged file and for JSON that Spark would not read whole.
    """
    from pyspark.sql import functions as f

    paths = list(urls)
    with with_settings(spark, _AS_TEXT):
        # This format has columns of its own, so that no file is opened to list them.
        listed = spark.read.options(**dict(options or {})).format("binaryFile").load(paths)
        folders = _names(_relations(listed)[0].partitionSchema())
        reader = spark.read.options(**dict(options or {}))
        if not folders:  # Spark reads folders below only if they are partitions or by this option
            reader = reader.option("recursiveFileLookup", "true")
            listed = reader.format("binaryFile").load(paths)
        location = _relations(listed)[0].location()
        _refuse_unread_files(location)
        files = files_of(listed)
        if file_format == "json":
            check_json(spark, _texts(location.rootPaths()))
        left_out: frozenset[str] = frozenset()
        nanos: list[Found] = []
        if file_format in ("parquet", "orc") and files and _is_ours_to_read(files[0]):
            merged, left_out = merged_columns(kinds_of(spark, files, file_format), used)
            _refuse_hidden_columns([column.name for column in merged], folders)
            nanos = [column for column in merged if column.called.startswith(NANOS)]
            df = reader.format(file_format).schema(_schema(merged)).load(paths)
        else:
            df = reader.format(file_format).option("mergeSchema", "true").load(paths)
            _refuse_hidden_columns(_names(_relations(df)[0].dataSchema()), folders)
    left_out -= set(folders)  # a name of both is still to be left out as a partition
    made = {name: _typed(name, partition_values(files, name)) for name in folders if name in df.columns}
    made |= {column.name: _micros(column) for column in nanos}
    if nanos:
        names = ", ".join(f"`{column.name}`" for column in nanos)
        log.warning("input: the times of %s are in nanoseconds, rounded down to microseconds", names)
    columns = [made.get(name, f.col(c.quoted(name))).alias(name) for name in df.columns]
    return df.select(*columns) if made else df, left_out


def read_snapshot(
    spark: SparkSession, snapshot: Snapshot, used: Callable[[str], bool]
) -> tuple[DataFrame, frozenset[str]]:
    """The rows of a version of a Delta or Iceberg table, with its columns and partitions, and the columns left out, as
    read_files has them.

    Raises what read_files raises; DataError for a table without files, and for files in folders that do not name their
    partition, as Spark and deltalake write them.
    """
    from pyspark.sql import functions as f

    wrong = next(
        (file for file in snapshot.files if snapshot.kinds and partition_of(file.path) != file.partition), None
    )
    if wrong is not None or not snapshot.files:
        raise DataError(
            f"Spark cannot read the {snapshot.format} table {snapshot.url} by its files",
            got="no files" if wrong is None else f"{wrong.path}, whose partition is {dict(wrong.partition)}"[:500],
            allowed="a row or more, in folders that name the partition: NAME=VALUE",
            next_step=f"Read it by --table or --input-format {snapshot.format} with the format's jars.",
        )
    if snapshot.ids:
        with ThreadPoolExecutor(THREADS) as pool:
            for file, numbers in zip(snapshot.files, pool.map(_numbers, snapshot.files), strict=True):
                snapshot.check_columns(file.url, numbers)
    options = {"__globPaths__": "false"} | ({"basePath": snapshot.url} if snapshot.kinds else {})
    urls = [file.url for file in snapshot.files]
    df, left_out = read_files(spark, urls, "parquet", lambda name: name in snapshot.columns and used(name), options)
    kinds = snapshot.kinds
    columns = [
        f.col(c.quoted(name)).cast(kinds[name]) if name in kinds else f.col(c.quoted(name)) for name in df.columns
    ]
    return df.select(*(one.alias(n) for n, one in zip(df.columns, columns, strict=True))), left_out & snapshot.columns


def _numbers(file: SnapshotFile) -> dict[str, int | None]:
    return column_numbers(parquet_footer(file.url, file.bytes).schema.to_arrow_schema())


def files_of(df: DataFrame) -> list[str]:
    """The URLs of the files that a data frame reads, sorted."""
    return sorted(map(unquote, df.inputFiles()))


def _is_ours_to_read(url: str) -> bool:
    """Whether Lockstep has a file system for a URL that Spark reads; for others Spark itself merges the columns."""
    try:
        filesystem(url)
    except LockstepError:
        return False
    return True


def kinds_of(spark: SparkSession, files: Sequence[str], file_format: str) -> list[Kind]:
    """The kinds of files, in the order of their first files; every footer is read, the columns of one file a kind."""
    text = _parquet_text if file_format == "parquet" else _orc_text
    found: dict[str, list[str]] = defaultdict(list)
    with ThreadPoolExecutor(THREADS) as pool:
        for url, shown in zip(files, pool.map(text, files), strict=True):
            found[shown].append(url)
    columns_of = partial(_parquet_columns if file_format == "parquet" else _orc_columns, spark)
    kinds = []
    for alike in found.values():
        columns: dict[str, Found] = {}
        for column in columns_of(alike[0]):
            if (other := columns.setdefault(column.name.lower(), column)) is not column:
                raise ConfigError(
                    f"{alike[0]} has two columns that differ only in case",
                    got=f"{other.name} and {column.name}",
                    allowed="names that differ in more than case",
                    next_step="Rename one of them.",
                )
        kinds.append(Kind(alike[0], len(alike), columns))
    return kinds


def merged_columns(kinds: Sequence[Kind], used: Callable[[str], bool]) -> tuple[list[Found], frozenset[str]]:
    """The columns of all files by name, in the order in which they come first, and those left out, as read_files has
    them; logs a line for each column that files lack.
    """
    names = dict.fromkeys(name for kind in kinds for name in kind.columns)
    total, merged, left_out = sum(kind.files for kind in kinds), [], set()
    for name in names:
        having = [(kind, kind.columns[name]) for kind in kinds if name in kind.columns]
        first_kind, first = having[0]
        other = next(((kind, column) for kind, column in having if column.shown != first.shown), None)
        if not used(first.name):
            left_out.add(first.name)
            continue
        if other is not None and (wide := _wide_decimal([column for _, column in having])) is not None:
            first, other = replace(first, kind=wide), None
        if other is None and first.kind is not None:
            merged.append(first)
        elif other is not None:
            raise ConfigError(
                f"column `{first.name}` has two types",
                got=f"{first.shown} in {first_kind.url}, {other[1].shown} in {other[0].url}",
                allowed="one type in all files; files that lack the column have nulls there",
                next_step="Write those files with one type, leave the column out by --exclude, or cast it in a"
                " --query over each part: SELECT ... UNION ALL SELECT ...",
            )
        else:
            raise ConfigError(
                f"column `{first.name}` cannot be read",
                got=f"{first.called} in {first_kind.url}",
                allowed="types that Spark can read",
                next_step="Leave it out by --exclude, or write the files with another type.",
            )
        there = sum(kind.files for kind, _ in having)
        if there < total:
            lacking = next(kind.url for kind in kinds if name not in kind.columns)
            log.warning(
                "input: column `%s` is null in %d of %d files, which lack it, such as %s",
                first.name, total - there, total, lacking,
            )  # fmt: skip
    return merged, frozenset(left_out)


def _wide_decimal(columns: Sequence[Found]) -> DataType | None:
    """The decimal that has all digits of decimals of several sizes, as pandas writes them by the values of each file;
    None if it is larger than Spark's, or a column is no decimal.
    """
    from pyspark.sql.types import DecimalType

    kinds = [column.kind for column in columns if isinstance(column.kind, DecimalType)]
    scale = max((kind.scale for kind in kinds), default=0)
    precision = scale + max((kind.precision - kind.scale for kind in kinds), default=0)
    return DecimalType(precision, scale) if len(kinds) == len(columns) and precision <= MAX_DIGITS else None


def _schema(columns: Sequence[Found]) -> Any:
    from pyspark.sql.types import StructField, StructType

    return StructType([StructField(column.name, column.kind) for column in columns if column.kind is not None])


def _parquet_text(url: str) -> str:
    metadata = parquet_footer(url, filesystem(url).stat(url).size_bytes)
    return str(metadata.schema).partition("\n")[2]  # the first line has an address in memory


def _orc_text(url: str) -> str:
    with filesystem(url).open_read(url) as file:
        try:
            return str(orc.ORCFile(pa.PythonFile(file, mode="r")).schema)
        except (pa.ArrowException, OSError) as error:
            raise damaged(url, "ORC", error) from None


def _orc_columns(spark: SparkSession, url: str) -> Iterator[Found]:
    for field in spark.read.orc(url).schema.fields:
        yield Found(field.name, field.dataType, field.dataType.simpleString())


def _parquet_columns(spark: SparkSession, url: str) -> Iterator[Found]:
    """Each column by Spark's own rules: its inference fails for a file with one column that it cannot read."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import AnalysisException
    from pyspark.sql.types import LongType, StructType

    jvm, session = spark.sparkContext._jvm, spark._jsparkSession
    assert jvm is not None
    parquet, state = jvm.org.apache.parquet, session.sessionState()
    path = jvm.org.apache.hadoop.fs.Path(url)
    reader = parquet.hadoop.ParquetFileReader.open(
        parquet.hadoop.util.HadoopInputFile.fromPath(path, state.newHadoopConf())
    )
    try:
        fields = reader.getFooter().getFileMetaData().getSchema().getFields()
    finally:
        reader.close()
    convert = jvm.org.apache.spark.sql.execution.datasources.parquet.ParquetToSparkSchemaConverter(state.conf())
    for field in fields:
        name, called = field.getName(), _called(field)
        if field.isPrimitive() and called.startswith(NANOS):
            yield Found(name, LongType(), called)
            continue
        one = jvm.java.util.ArrayList()
        one.add(field)
        try:
            found = StructType.fromJson(json.loads(convert.convert(parquet.schema.MessageType("root", one)).json()))
        except (AnalysisException, Py4JJavaError):
            yield Found(name, None, called)
        else:
            kind = found.fields[0].dataType
            readable = not kind.simpleString().startswith("time(")  # a type of Spark, but not in its readers
            yield Found(name, kind if readable else None, called)


def _called(field: Any) -> str:
    """What Parquet calls the type of a field."""
    logical = field.getLogicalTypeAnnotation()
    if logical is not None:
        return str(logical.toString())
    return str(field.getPrimitiveTypeName().toString()) if field.isPrimitive() else "group"


def _micros(column: Found) -> Column:
    """Turn nanoseconds since 1970 into Spark's time, rounded down."""
    from pyspark.sql import functions as f

    micros = f.expr(f"({c.quoted(column.name)} - pmod({c.quoted(column.name)}, 1000)) div 1000")
    if column.called.endswith("true)"):
        return f.timestamp_micros(micros)
    return f.timestamp_add("MICROSECOND", micros, f.lit("1970-01-01").cast("timestamp_ntz"))


Partition = tuple[tuple[str, str | None], ...]


def partition_of(path: str) -> Partition:
    """Names and values of the partition folders in a file's path, decoded as URLs are; None for null."""
    folders = [folder.partition("=") for folder in path.split("/")[:-1] if "=" in folder]
    return tuple((unquote(name), None if value == NO_VALUE else unquote(value)) for name, _, value in folders)


def partition_values(files: Sequence[str], name: str) -> set[str | None]:
    """The values of a partition column in the folders' names: None for null."""
    part = re.compile(rf"/{re.escape(name)}=([^/]*)/")
    found = {unquote(values[-1]) for url in files if (values := part.findall(url))}
    return {None if value == NO_VALUE else value for value in found}


def text_of_partition(kind: str, value: str) -> bool:
    """Whether a value of a partition is the text of a number or date of `kind`, in Spark's notation, so that nothing is
    lost: 007 is not the text of 7. Other kinds lose nothing.
    """
    if kind in c.WHOLE or kind.startswith("decimal"):
        return (WHOLE if kind in c.WHOLE else LONG).fullmatch(value) is not None
    if kind == "double":
        return FRACTION.fullmatch(value) is not None and repr(float(value)) == value
    return kind != "date" or DATE.fullmatch(value) is not None


def _typed(name: str, values: Collection[str | None]) -> Column:
    """A partition column, which Spark read as text, as a number or a date if every value is the text of one."""
    from pyspark.sql import functions as f

    column, known = f.col(c.quoted(name)), [value for value in values if value is not None]
    for kind in ("bigint", "double", "date"):
        if known and all(text_of_partition(kind, value) for value in known):
            return column.cast(kind)
    return column


def of_query(spark: SparkSession, query: str) -> DataFrame:
    """The rows of a query. Files that it reads by their paths have all columns that any of them has, merged by Spark.

    Raises ConfigError where the query reads partitions as numbers or dates of other text than the folders' names have,
    or where Spark would leave out files or columns below such a path; DataError as read_files for JSON.
    """
    merging = {f"spark.sql.{name}.mergeSchema": "true" for name in ("parquet", "orc")}
    with with_settings(spark, merging):
        df = spark.sql(query)
    for relation in _relations(df):
        # A catalog declares its types and which files are its own.
        if relation.location().getClass().getSimpleName() == "InMemoryFileIndex":
            _check_partitions(relation)
            _refuse_unread_files(relation.location())
            _refuse_hidden_columns(_names(relation.dataSchema()), _names(relation.partitionSchema()))
            is_lines = relation.fileFormat().getClass().getSimpleName() == "JsonFileFormat"
            if is_lines and not relation.options().contains("multiline"):
                check_json(spark, _texts(relation.location().rootPaths()))
    return df


def _relations(df: DataFrame) -> list[Any]:
    """What a data frame reads from files by their paths, as Spark's objects."""
    found = []
    for node in nodes(df._jdf.queryExecution().analyzed()):
        if node.nodeName() == "LogicalRelation" and node.catalogTable().isEmpty():
            relation = node.relation()
            if relation.getClass().getSimpleName() == "HadoopFsRelation":
                found.append(relation)
    return found


def _names(schema: Any) -> list[str]:
    return [field["name"] for field in json.loads(schema.json())["fields"]]


def _texts(paths: Any) -> list[str]:
    """Paths of Spark in one call, since each call takes a tenth of a millisecond."""
    text = paths.mkString("\0")
    return text.split("\0") if text else []


def _refuse_unread_files(location: Any) -> None:
    """Raise ConfigError for files below the paths that Spark lists and then leaves out: next to partitions, and in
    plain folders if those are not asked for.
    """
    files, partitions = _texts(location.leafFiles().keysIterator()), location.partitionSpec().partitions()
    if location.partitionSpec().partitionColumns().isEmpty():
        if len(location.inputFiles()) == len(files):
            return
        read = set(_texts(location.rootPaths()))
        unread = [file for file in files if not {file, file.rpartition("/")[0]} & read]
    else:
        if partitions.size() == len({file.rpartition("/")[0] for file in files}):
            return
        read = {partitions.apply(number).path().toString() for number in range(partitions.size())}
        unread = [file for file in files if file.rpartition("/")[0] not in read]
    if unread:
        names = ", ".join(sorted(unread)[:3])
        raise ConfigError(
            "Spark would leave out files of the input",
            got=f"{len(unread)} of {len(files)} files: {names}",
            allowed="all files in partitions (day=1/...), or none; in a query no folders that are not partitions",
            next_step="Move those files into partitions or out of the folder, or give folders without partitions by"
            " --input, which reads all files below.",
        )


def _refuse_hidden_columns(columns: Sequence[str], folders: Sequence[str]) -> None:
    """Raise ConfigError for a column of files that Spark replaces by a partition, whatever the case of its name."""
    by_name = {name.lower(): name for name in folders}
    for name in columns:
        if (folder := by_name.get(name.lower())) is not None:
            raise ConfigError(
                f"column `{name}` of the files is also the name of folders",
                got=f"column {name} and folders {folder}=..., whose values would replace those of the column",
                allowed="folders and columns with names that differ in more than case",
                next_step=f"Rename the folders {folder}=..., or read one at a time: --input .../{folder}=VALUE.",
            )


def _check_partitions(relation: Any) -> None:
    location, fields = relation.location(), json.loads(relation.partitionSchema().json())["fields"]
    files = [unquote(url) for url in location.inputFiles()]
    for field in fields:
        name, kind = field["name"], {"integer": "int", "long": "bigint"}.get(field["type"], field["type"])
        values = sorted(value for value in partition_values(files, name) if value is not None)
        other = next((value for value in values if not text_of_partition(kind, value)), None)
        if other is not None:
            raise ConfigError(
                f"Spark reads the folders' names {name}=... as {kind}, which changes them",
                got=f"{name}={other}",
                allowed="names that are the text of a number or date, such as 7 and 2024-01-31",
                next_step="Give the folder by --input, which keeps them as text; or keep all such names as text by"
                " spark-submit --conf spark.sql.sources.partitionColumnTypeInference.enabled=false.",
            )
