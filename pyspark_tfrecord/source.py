"""The data source that Spark finds: it chooses the reader or writer for a path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceWriter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType


class DefaultSource(DataSource):
    """`format("tfrecord")`. Reads a published dataset by its manifest, any other TFRecord files by inference or by a
    schema that the call gives; writes plain TFRecord files.
    """

    # The columns that `schema` found; None if the call gives a schema, which may leave out some. Spark pickles this
    # object between the two calls.
    _known: tuple[str, ...] | None = None

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "tfrecord"

    def schema(self) -> StructType:
        """The columns at the path: from its manifest, else inferred from `sampleRecords` records.

        Raises ConfigError or DataError as in docs/reading-elsewhere.md.
        """
        from pyspark_tfrecord.reading import open_input, selected
        from pyspark_tfrecord.types import spark_schema

        found = open_input(self.options)
        self._known = tuple(found.arrow_schema().names)
        return spark_schema(selected(found))

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of exactly the columns of `schema`, inferred or given by the call."""
        from pyspark_tfrecord.reading import Reader, open_input

        return Reader(open_input(self.options, schema, self._known), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A writer of plain TFRecord files; raises ConfigError where a column has a type that cannot be written."""
        from pyspark_tfrecord.writing import FileWriter

        return FileWriter.of(self.options, schema, overwrite)


def register(spark: SparkSession) -> None:
    """Register the format by hand: for a session whose Java process was started without this package on its Python
    path (`--py-files` in client mode, a notebook that only extends sys.path). Executors must be able to import it.
    """
    spark.dataSource.register(DefaultSource)
