"""The course of a job that reads files: parse, count, refuse too much bad input, label, write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from lockstep.etl.input.files import Source
from lockstep.etl.spark.errors import translating_errors
from lockstep.etl.spark.session import tuned, watched
from lockstep.etl.write.carried import Carry
from lockstep.etl.write.checks import Target
from lockstep.etl.write.config import OutputConfig
from lockstep.etl.write.dataset import write_rows
from lockstep.etl.write.late import LateImages
from lockstep.etl.write.quarantine import Origin
from lockstep.etl.write.refusal import Look, check_bad
from lockstep.etl.write.shards import RECORDS_STEP, SHARDS_STEP
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.dataset.manifest_entries import SourceInfo

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How many records were read, how many of them are rejected, the bytes of these that are kept, and how many were
    left out by each rule; where a record may be several lines, also how many lines all and the rejected ones are.
    """

    read: int
    bad: int
    raw_bytes: int
    dropped: Mapping[str, int]
    lines: int | None = None
    bad_lines: int | None = None

    @property
    def judged(self) -> int:
        """The number of records of which --max-bad is a share."""
        return self.read


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """Rows for the writer; what the manifest says of the files and the configuration; images that are made late; what
    the rows leave for appends.
    """

    rows: DataFrame
    target: Target
    id_columns: tuple[str, ...]
    sources: tuple[SourceInfo, ...]
    created_config: Mapping[str, Any]
    late: LateImages | None = None
    carry: Carry | None = None
    files: bool = False
    """Whether rows have lockstep.etl.columns.FILE."""


C = TypeVar("C", bound=Counts)


class Input(ABC, Generic[C]):
    """The files of a job, and how they become rows with labels."""

    what: ClassVar[str]
    """The name of the input in an error."""
    label: ClassVar[str]
    """The name of the job in the progress line."""
    is_rejected: ClassVar[str]
    """A condition in SQL that holds for the rejected records among the rows of `parsed`."""
    first_step: ClassVar[str]
    """What `counted` does, as its progress calls it."""
    config: OutputConfig

    @property
    @abstractmethod
    def sources(self) -> Sequence[Source]:
        """The input files."""

    @abstractmethod
    def parsed(self, spark: SparkSession) -> DataFrame:
        """The rows of the first pass; rejected records have the columns lockstep.etl.columns.REJECTED."""

    @abstractmethod
    def counted(self, parsed: DataFrame) -> C:
        """What the first pass read. Raises DataError for input that contradicts itself."""

    @abstractmethod
    def labelled(self, parsed: DataFrame, counts: C) -> Labelled:
        """The records with their labels. Raises DataError for labels that cannot be given."""

    def look(self, rejected: Sequence[Row]) -> Look:
        """What the first rejected records show, for the error that ends a job with too many."""
        return Look()

    def write(self, spark: SparkSession) -> DatasetManifest:
        """Parse, count, label, split and publish."""
        config, urls = self.config, [source.url for source in self.sources]
        parsed = self.parsed(spark).persist()
        try:
            counts = self.counted(parsed)
            rejected = parsed.where(self.is_rejected)
            lines = None if counts.lines is None or counts.bad_lines is None else (counts.bad_lines, counts.lines)
            check_bad(config, rejected, urls, counts.bad, counts.judged, lines=lines, look=self.look)
            found = self.labelled(parsed, counts)
            origin = Origin(
                sources=found.sources,
                read=counts.read + (0 if found.carry is None else found.carry.reopened),
                dropped=counts.dropped,
                quarantined=counts.bad,
                quarantined_raw_bytes=counts.raw_bytes,
                quarantine=rejected,
                created_config=found.created_config,
            )
            return write_rows(
                found.rows, found.target, found.id_columns, origin, found.late, found.carry, files=found.files
            )
        finally:
            parsed.unpersist()


def run(spark: SparkSession, job: Input[Any]) -> DatasetManifest:
    """Run a job in a session whose settings suit its input, with progress; errors of Spark become our own."""
    reading = translating_errors(spark, f"reading the {job.what}")
    steps = (job.first_step, RECORDS_STEP, SHARDS_STEP)
    with reading, tuned(spark, job.sources), watched(spark, f"etl {job.label}", steps):
        return job.write(spark)
