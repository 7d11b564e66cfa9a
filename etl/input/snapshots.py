"""A version of a Delta or Iceberg table as the Parquet files that hold its rows, found by deltalake and pyiceberg.

Both packages are optional (requirements-lake.txt). Files whose rows are not the table's as they are, since some were
deleted or columns renamed, are refused by name.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from urllib.parse import unquote

from lockstep.etl.choices import LAKES
from lockstep.storage.errors import ConfigError, DataError, LockstepError
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import absolute, join, split_url

"""The formats, and the package that reads each."""
_KINDS = {"long": "bigint", "integer": "bigint", "short": "bigint", "byte": "bigint", "float": "double"}
_METADATA = re.compile(r"v?(\d+)(?:-[0-9a-fA-F-]+)?(?:\.gz)?\.metadata\.json")


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """One file: its URL, its path below the table, its length, and names and texts of its partition columns."""

    url: str
    path: str
    bytes: int
    partition: tuple[tuple[str, str | None], ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A version of a table: a number of Delta, or the id of a snapshot of Iceberg.

    `columns` are the names of the table's columns; `kinds` the types of its partition columns, which the files lack, in
    Spark's notation; `ids` the numbers by which Iceberg knows columns, `elsewhere` those whose values are not null
    where a file lacks them: the table has a default, or the partition names them.
    """

    format: str
    url: str
    version: int
    files: tuple[SnapshotFile, ...]
    columns: frozenset[str]
    kinds: Mapping[str, str]
    ids: Mapping[str, int] = field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()

    def to_json(self) -> dict[str, Any]:
        """The table as a manifest names it."""
        return {"format": self.format, "version": self.version}

    def check_columns(self, url: str, found: Mapping[str, int | None]) -> None:
        """Check a file by the names of its columns and their numbers. Raises ConfigError for a column that had another
        name when the file was written, or that the file lacks and the table gives a value there.
        """
        numbers = {number: name for name, number in found.items() if number is not None}
        for name, number in self.ids.items():
            known = found.get(name) if name in found else number
            if numbers and known is not None and (known != number or numbers.get(number, name) != name):
                raise _refused(
                    f"column `{name}` had another name when {url} was written",
                    f"`{numbers.get(number, name)}` in the file",
                    "columns that were never renamed, or dropped and added again",
                )
            if name in self.elsewhere and name not in found:
                raise _refused(
                    f"{url} lacks column `{name}`",
                    "a value for it in the table: a default, or that of the partition",
                    "files with all columns that have a default or are partitions",
                )


def open_snapshot(table_format: str, url: str, version: int | None) -> Snapshot:
    """The files of a version of the table at `url`; None is the newest one.

    Raises ConfigError if the package is not installed, for a table or version that it cannot read, and for files whose
    rows are not the table's as they are.
    """
    package = LAKES[table_format]
    try:
        import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"reading {table_format} tables needs the package {package}",
            got=str(error),
            allowed=f"an environment with {package}",
            next_step="pip install -r requirements-lake.txt",
        ) from None
    url = absolute(url)
    return _delta(url, version) if table_format == "delta" else _iceberg(url, version)


@contextmanager
def _readable(url: str, table_format: str, version: int | None) -> Iterator[None]:
    try:
        yield
    except LockstepError:
        raise
    except Exception as error:  # each package raises errors of many libraries
        said = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise ConfigError(
            f"{url} cannot be read as a table of {table_format}",
            got=f"{type(error).__name__}: {said}",
            allowed="the folder of a table" + ("" if version is None else ", and one of its versions"),
            next_step="Correct the URL or --table-version.",
        ) from None


def _delta(url: str, version: int | None) -> Snapshot:
    import pyarrow as pa
    from deltalake import DeltaTable

    with _readable(url, "delta", version):
        table = DeltaTable(url, version=version)
        mapping = table.metadata().configuration.get("delta.columnMapping.mode", "none")
        if mapping != "none":
            allowed = "tables without column mapping"
            raise _refused(f"columns of {url} have other names in its files", f"columnMapping.mode {mapping}", allowed)
        features = table.protocol().reader_features or []
        deleted = (
            list(pa.table(table.deletion_vectors())["filepath"].to_pylist()) if "deletionVectors" in features else []
        )
        if deleted:
            raise _refused(
                f"rows of {len(deleted)} files of {url} are deleted",
                f"a deletion vector of {unquote(deleted[0])}",
                "files without deletion vectors",
                "Rewrite these files by REORG TABLE ... APPLY (PURGE) in Spark, or write a dataset by"
                " lockstep etl_table --table with Delta's jars.",
            )
        actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
        names = table.metadata().partition_columns
        kinds = {one.name: getattr(one.type, "type", str(one.type)) for one in table.schema().fields}
        number = table.version()
    files = []
    for action in actions:
        path = unquote(action["path"])
        if split_url(path)[0] != "file" or path.startswith(("/", "file:")):
            path = _below(url, path)
        partition = tuple((name, _text(action[f"partition.{name}"])) for name in names)
        files.append(SnapshotFile(join(url, path), path, int(action["size_bytes"]), partition))
    return Snapshot(
        "delta",
        url,
        number,
        tuple(sorted(files, key=lambda file: file.path)),
        frozenset(kinds) - {*names},
        {name: _KINDS.get(kinds[name], kinds[name]) for name in names},
    )


def _iceberg(url: str, version: int | None) -> Snapshot:
    from pyiceberg.table import StaticTable
    from pyiceberg.transforms import IdentityTransform

    with _readable(url, "iceberg", version):
        table = StaticTable.from_metadata(_newest_metadata(url))
        snapshot = table.current_snapshot() if version is None else table.snapshot_by_id(version)
        if snapshot is None:
            known = ", ".join(str(one.snapshot_id) for one in table.snapshots()) or "none: the table is empty"
            raise ConfigError(
                f"{url} has no such snapshot",
                got="none" if version is None else str(version),
                allowed=known[:500],
                next_step="Correct --table-version.",
            )
        # The newest rows have the table's columns of today, an older snapshot those of its time.
        scan = table.scan(snapshot_id=version)
        tasks, schema = list(scan.plan_files()), scan.projection()
        elsewhere = {one.name for one in schema.fields if one.initial_default is not None}
        for spec in table.specs().values():
            sources = (part.source_id for part in spec.fields if isinstance(part.transform, IdentityTransform))
            elsewhere |= {name for number in sources if (name := schema.find_column_name(number)) is not None}
    files = []
    for task in tasks:
        place = task.file.file_path
        if task.delete_files:
            raise _refused(
                f"rows of {place} are deleted",
                f"{len(task.delete_files)} delete files",
                "files without delete files",
                "Rewrite these files by Iceberg's rewrite_data_files, or write a dataset by lockstep etl_table --table"
                " with Iceberg's jar.",
            )
        if task.file.file_format.value.lower() != "parquet":
            raise _refused(f"{place} is no Parquet file", str(task.file.file_format.value), "tables of Parquet files")
        path = _below(url, place)
        files.append(SnapshotFile(join(url, path), path, task.file.file_size_in_bytes))
    return Snapshot(
        "iceberg",
        url,
        snapshot.snapshot_id,
        tuple(sorted(files, key=lambda file: file.path)),
        frozenset(one.name for one in schema.fields),
        {},
        {one.name: one.field_id for one in schema.fields},
        frozenset(elsewhere),
    )


def _newest_metadata(url: str) -> str:
    """The metadata file of an Iceberg table: the one that version-hint.text names, or that has the highest number."""
    fs, folder = filesystem(url), join(url, "metadata")
    if fs.exists(join(folder, "version-hint.text")):
        return url  # pyiceberg reads it
    numbered = [(int(found[1]), entry.url) for entry in fs.list(folder) if (found := _METADATA.fullmatch(entry.name))]
    newest = sorted(place for number, place in numbered if number == max(one for one, _ in numbered))
    if len(newest) != 1:
        raise ConfigError(
            f"{url}: which metadata file is the table's cannot be seen",
            got=", ".join(newest) or f"no NNNNN-UUID.metadata.json in {folder}",
            allowed="one with the highest number, or a version-hint.text",
            next_step="Delete the metadata file that the table's catalog does not name.",
        )
    return newest[0]


def _below(root: str, place: str) -> str:
    """The path of a file below the table's folder. Raises ConfigError for files elsewhere, as clones have them."""
    top, found = (split_url(one) for one in (root, place))
    if top[:2] == found[:2] and found[2].startswith(top[2].rstrip("/") + "/"):
        return found[2].removeprefix(top[2].rstrip("/") + "/")
    raise _refused(f"{place} is not below the table's folder", place, f"files below {root}")


def _text(value: Any) -> str | None:
    """A partition's value as Spark writes it."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    return value.isoformat() if isinstance(value, dt.date) else str(value)


def _refused(what: str, got: str, allowed: str, step: str | None = None) -> DataError:
    way = "Write a dataset by lockstep etl_table --table with the jars of Delta or Iceberg, or another table."
    return DataError(what, got=got[:500], allowed=allowed, next_step=step or way)
