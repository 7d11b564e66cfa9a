"""Plain TFRecord files from a data frame: tasks write them into a staging folder, the driver gives them their names."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import foreign_field
from lockstep.storage.errors import ConfigError, ExistsError, LockstepError, NotFoundError, StorageError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import MANIFEST_NAME, occupied, write_file
from lockstep.storage.settings import set_hadoop_settings
from lockstep.storage.urls import join, parent
from pyspark_tfrecord.options import WriteOptions
from pyspark_tfrecord.types import columns_of

if TYPE_CHECKING:
    import pyarrow as pa

SUCCESS_NAME = "_SUCCESS"  # what Spark's own writers leave when all files are there
_PART = re.compile(r"part-(\d{5,})\.tfrecord(\.gz)?")


class NotRestoredError(StorageError):
    """The old data of a job that failed to replace them are in its staging folder, which therefore stays."""


@dataclass
class Written(WriterCommitMessage):
    """What one task wrote: its partition and the URL of its file, None where it had no row."""

    partition: int
    url: str | None


@dataclass(frozen=True)
class FileWriter(DataSourceArrowWriter):
    """Writes `part-NNNNN.tfrecord` for each partition that has rows, in the order of the partitions.

    Nothing appears at the path before all tasks are done. A new directory, or one that replaces another, appears by one
    rename; files that are added to a directory appear one by one.
    """

    options: WriteOptions
    fields: tuple[Field, ...]
    overwrite: bool
    staging: str

    @classmethod
    def of(cls, options: Mapping[str, str], schema: StructType, overwrite: bool) -> Self:
        """Check the options and make the staging folder. Raises ConfigError for a column that cannot be written,
        ExistsError for a path that must not be written to.
        """
        write = WriteOptions.of(options)
        set_hadoop_settings(write.hadoop)
        fields = _fields(schema, write)
        fs = filesystem(write.path)
        _refuse(fs, write, overwrite)
        # A sibling, so that no reader of the path ever sees its content.
        staging = join(parent(write.path), f"_staging-tfrecord-{secrets.token_hex(8)}")
        fs.mkdirs(staging)
        return cls(write, fields, overwrite, staging)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Runs in a task: one file for its rows, under a name that no other attempt has."""
        from pyspark import TaskContext

        from pyspark_tfrecord.part_file import write_part

        context = TaskContext.get()
        assert context is not None
        set_hadoop_settings(self.options.hadoop)
        number = context.partitionId()
        url = join(self.staging, f"attempt-{number:05d}-{context.taskAttemptId()}")
        return Written(number, url if write_part(url, iterator, self.fields, self.options) else None)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Runs on the driver when all tasks are done. Raises ExistsError where the path has changed meanwhile."""
        set_hadoop_settings(self.options.hadoop)
        done = sorted((m for m in messages if isinstance(m, Written) and m.url is not None), key=lambda m: m.partition)
        fs = filesystem(self.options.path)
        try:
            _refuse(fs, self.options, self.overwrite)
            if fs.exists(self.options.path) and not self.overwrite:
                self._add(fs, [m.url for m in done if m.url is not None])
            else:
                self._place(fs, [m.url for m in done if m.url is not None])
        except NotRestoredError:
            raise  # the staging folder holds the only copy of the old data
        except BaseException:
            fs.discard(self.staging)
            raise
        fs.discard(self.staging)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Runs on the driver when a task or the commit has failed: removes all but data that could not be restored."""
        set_hadoop_settings(self.options.hadoop)
        fs = filesystem(self.options.path)
        if not fs.exists(self._old):
            fs.discard(self.staging)

    @property
    def _old(self) -> str:
        """Where a directory is kept while it is being replaced."""
        return join(self.staging, "replaced")

    def _place(self, fs: FileSystem, urls: Sequence[str]) -> None:
        """Make a directory of the files and give it the path's name, in place of one that it replaces."""
        path, ready = self.options.path, join(self.staging, "ready")
        fs.mkdirs(ready)
        for number, url in enumerate(urls):
            fs.rename_new(url, join(ready, self._name(number)))
        if not urls:  # a data frame without rows is a file without records
            write_file(fs, join(ready, self._name(0)), b"")
        write_file(fs, join(ready, SUCCESS_NAME), b"")
        try:
            if fs.exists(path):
                fs.rename_new(path, self._old)
            fs.rename_new(ready, path)
        except BaseException as error:
            self._restore(fs, error)
            raise

    def _restore(self, fs: FileSystem, cause: BaseException) -> None:
        """Give the replaced directory its name back. Raises NotRestoredError if that fails too."""
        try:
            # Look, since a rename whose answer was lost may have happened.
            if fs.exists(self._old):
                fs.rename_new(self._old, self.options.path)
        except BaseException as error:
            raise NotRestoredError(
                f"{self.options.path} could not be replaced, and its old data could not be restored",
                got=f"{cause}; then {error}",
                allowed="a rename that succeeds",
                next_step=f"Its data, if not at the path, is whole in {self._old}: rename that to the path.",
            ) from cause

    def _add(self, fs: FileSystem, urls: Sequence[str]) -> None:
        """Add the files with the numbers after the existing ones; fails if another job takes one of these first."""
        path = self.options.path
        matches = (_PART.fullmatch(entry.name) for entry in fs.list(path))
        first = max((int(match.group(1)) + 1 for match in matches if match), default=0)
        moved: list[str] = []
        try:
            for number, url in enumerate(urls, first):
                target = join(path, self._name(number))
                fs.rename_new(url, target)
                moved.append(target)
        except LockstepError:
            for target in moved:
                fs.discard(target)
            raise
        if not fs.exists(join(path, SUCCESS_NAME)):
            write_file(fs, join(path, SUCCESS_NAME), b"")

    def _name(self, number: int) -> str:
        return f"part-{number:05d}.tfrecord" + (".gz" if self.options.compression == "gzip" else "")


def _fields(schema: StructType, options: WriteOptions) -> tuple[Field, ...]:
    fields = []
    for column in columns_of(schema):
        if column.dtype == "float64" and options.doubles == "refuse":
            raise ConfigError(
                f"column `{column.name}` is a double, and the numbers of a TFRecord file have 32 bits",
                got="double",
                allowed='float, or .option("doubles", "float32") to have all doubles rounded',
                next_step="Cast the column, or write a dataset (lockstep.write_dataset), which keeps 64 bits.",
            )
        dtype = "float32" if column.dtype == "float64" else column.dtype
        fields.append(foreign_field(column.name, dtype, column.is_list))
    names = [field.name for field in fields]
    if not names or len(set(names)) != len(names):
        raise ConfigError(
            "the columns have no names, or the same name twice",
            got=", ".join(names) or "no columns",
            allowed="at least one column, each name once",
            next_step="Rename them.",
        )
    return tuple(fields)


def _refuse(fs: FileSystem, options: WriteOptions, overwrite: bool) -> None:
    """Raise ExistsError for a path that must not be written to."""
    try:
        status = fs.stat(options.path)
    except NotFoundError:
        return
    if not status.is_dir or options.must_be_new:
        raise occupied(options.path)
    names = [entry.name for entry in fs.list(options.path)]
    if MANIFEST_NAME in names:
        raise ExistsError(
            f"{options.path} is a published dataset or an indexed directory, which nothing is added to",
            got=MANIFEST_NAME,
            allowed="a new path, or a directory of plain TFRecord files",
            next_step="Choose another path.",
        )
    others = [name for name in names if not name.startswith(("_", ".")) and ".tfrecord" not in name]
    if overwrite and others:
        raise ExistsError(
            f"{options.path} holds more than TFRecord files, which overwriting would delete",
            got=", ".join(others[:5]),
            allowed="a directory of TFRecord files",
            next_step="Choose another path, or delete it yourself.",
        )
