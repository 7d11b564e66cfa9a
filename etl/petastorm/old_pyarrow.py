"""pyarrow.localfs, pyarrow.hdfs and pyarrow.parquet.ParquetDataset as Petastorm expects them, over our storage."""

from __future__ import annotations

import getpass
import io
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from types import TracebackType
from typing import Any, BinaryIO, ClassVar, Literal, ParamSpec, TypeVar
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.storage.errors import ConfigError, DataError, LockstepError, NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.settings import hadoop_settings, set_hadoop_settings

P = ParamSpec("P")
T = TypeVar("T")
NULL = "__HIVE_DEFAULT_PARTITION__"
METADATA = ("_metadata", "_common_metadata")
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
    "in": lambda value, wanted: value in wanted,
    "not in": lambda value, wanted: value not in wanted,
}


def connect(host: str = "default", port: int = 8020, user: str | None = None) -> HadoopFileSystem:
    """The file system of a NameNode, of a name service, or of fs.defaultFS ("default").

    A NameNode of a name service in HADOOP_CONF_DIR is replaced by the service, so that readers survive a failover.
    Raises ConfigError for another `user` than the one that this process is.
    """
    settings = hadoop_settings()
    who = os.environ.get("HADOOP_USER_NAME") or getpass.getuser()
    if user not in (None, who) and settings.get("hadoop.security.authentication", "simple") == "simple":
        raise ConfigError(
            "Petastorm's HDFS files are read as the user of this process",
            got=str(user),
            allowed=who,
            next_step="Set HADOOP_USER_NAME before the first call.",
        )
    if host == "default":
        return HadoopFileSystem("")
    services = [key.removeprefix("dfs.ha.namenodes.") for key in settings if key.startswith("dfs.ha.namenodes.")]
    for service in services:
        nodes = [value for key, value in settings.items() if key.startswith(f"dfs.namenode.rpc-address.{service}.")]
        if host.lower() == service.lower() or f"{host}:{port}" in nodes:  # URLs lose the case of their host
            return HadoopFileSystem(service)
    return HadoopFileSystem(f"{host}:{port}")


def _as_os_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Turns errors of storage into OSError, which Petastorm expects."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except NotFoundError as error:
            raise FileNotFoundError(str(error)) from error
        except LockstepError as error:
            raise OSError(str(error)) from error

    return call


class _Files:
    """The part of fsspec's interface that Petastorm uses; each error is an OSError."""

    _scheme: ClassVar[str]

    def __init__(self, authority: str = "") -> None:
        self._authority = authority

    @_as_os_errors
    def open(self, path: str, mode: str = "rb") -> BinaryIO:
        """Open a file to read ("rb"), or to write a new one ("wb")."""
        fs, url = self._place(path)
        if mode == "rb":
            return fs.open_read(url)
        if mode != "wb":
            raise ValueError(f"mode {mode!r} of {url}: only rb and wb are supported")
        return _Written(fs, url)

    @_as_os_errors
    def exists(self, path: str) -> bool:
        """Whether a file or directory exists."""
        fs, url = self._place(path)
        return fs.exists(url)

    @_as_os_errors
    def isdir(self, path: str) -> bool:
        """Whether it is a directory."""
        fs, url = self._place(path)
        return fs.exists(url) and fs.stat(url).is_dir

    @_as_os_errors
    def isfile(self, path: str) -> bool:
        """Whether it is a file."""
        fs, url = self._place(path)
        return fs.exists(url) and not fs.stat(url).is_dir

    @_as_os_errors
    def ls(self, path: str, detail: bool = True) -> list[Any]:
        """The entries of a directory: {"name": PATH, "type": "file" or "directory", "size": bytes}, or their paths."""
        fs, url = self._place(path)
        entries = [
            {
                "name": f"{path.rstrip('/')}/{entry.name}",
                "type": "directory" if entry.is_dir else "file",
                "size": entry.size_bytes,
            }
            for entry in fs.list(url)
        ]
        return entries if detail else [entry["name"] for entry in entries]

    @_as_os_errors
    def delete(self, path: str, recursive: bool = False) -> None:
        """Delete a file or directory; a missing one is ignored."""
        fs, url = self._place(path)
        fs.delete(url, recursive=recursive)

    rm = delete

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self._authority, hadoop_settings())

    def _place(self, path: str) -> tuple[FileSystem, str]:
        url = f"{self._scheme}://{self._authority}{path}"
        return filesystem(url), url


class LocalFileSystem(_Files):
    """pyarrow.filesystem.LocalFileSystem."""

    _scheme = "file"


class HadoopFileSystem(_Files):
    """pyarrow.hdfs.HadoopFileSystem; `authority` is HOST:PORT, a name service, or "" for fs.defaultFS."""

    _scheme = "hdfs"


def _rebuild(kind: type[_Files], authority: str, settings: Mapping[str, str]) -> _Files:
    set_hadoop_settings(settings)  # a worker of the process pool gets the settings of this process
    return kind(authority)


class _Written(io.BytesIO):
    """A small file that is written when it is closed, and not at all after an exception inside `with`."""

    def __init__(self, fs: FileSystem, url: str) -> None:
        super().__init__()
        self._fs, self._url = fs, url

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            super().close()
        self.close()

    @_as_os_errors
    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            super().close()
            write_file(self._fs, self._url, data, exclusive=False)


Keys = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class PartitionSet:
    """A column in directory names: `split=train` is the value `train` of `split`. `keys` are in order of paths."""

    name: str
    keys: list[str] = field(default_factory=list)

    @property
    def dictionary(self) -> pa.Array:
        """The values: int64 if all of them are whole numbers, else strings."""
        values = [None if key == NULL else key for key in self.keys]
        try:
            return pa.array([None if value is None else int(value) for value in values], type=pa.int64())
        except ValueError:
            return pa.array(values, type=pa.string())


class ParquetPartitions:
    """The partition columns of a dataset, outermost directory first."""

    def __init__(self) -> None:
        self.levels: list[PartitionSet] = []

    @property
    def partition_names(self) -> set[str]:
        """The names of the columns."""
        return {level.name for level in self.levels}

    def key(self, depth: int, name: str, value: str) -> tuple[str, int]:
        """The index of a value in its column, to which a new value is added."""
        if depth == len(self.levels):
            self.levels.append(PartitionSet(name))
        level = self.levels[depth]
        if level.name != name:
            raise DataError(
                f"directories of one level are named {level.name}=... and {name}=...",
                got=f"{name}={value}",
                allowed=f"{level.name}=VALUE",
                next_step="Give one of the directories.",
            )
        if value not in level.keys:
            level.keys.append(value)
        return name, level.keys.index(value)

    def __len__(self) -> int:
        return len(self.levels)

    def __iter__(self) -> Iterator[PartitionSet]:
        return iter(self.levels)

    def __getitem__(self, index: int) -> PartitionSet:
        return self.levels[index]


class ParquetDatasetPiece:
    """A file, or one row group of it, with the indices of its directories' values in the partitions."""

    def __init__(
        self,
        path: str,
        open_file_func: Callable[[str], Any],
        row_group: int | None = None,
        partition_keys: Sequence[tuple[str, int]] = (),
    ) -> None:
        self.path, self.open_file_func = path, open_file_func
        self.row_group, self.partition_keys = row_group, tuple(partition_keys)

    def get_metadata(self) -> pq.FileMetaData:
        """The footer of the file."""
        with self.open_file_func(self.path) as file:
            return pq.read_metadata(file)

    def read(
        self, columns: Any = None, use_threads: bool = True, partitions: ParquetPartitions | None = None
    ) -> pa.Table:
        """Columns (all by default), in the order of the file; then the partition columns, each one value repeated."""
        with self.open_file_func(self.path) as source, pq.ParquetFile(source) as file:
            names = None if columns is None else [name for name in file.schema_arrow.names if name in columns]
            if self.row_group is None:
                table = file.read(columns=names, use_threads=use_threads)
            else:
                table = file.read_row_group(self.row_group, columns=names, use_threads=use_threads)
        for depth, (name, place) in enumerate(self.partition_keys):
            if partitions is None:
                raise ValueError(f"{self.path} is in partitions; give `partitions` to read it")
            value = partitions[depth].dictionary[place]
            table = table.append_column(name, pa.repeat(value, table.num_rows))
        return table

    def __repr__(self) -> str:
        group = "" if self.row_group is None else f", row group {self.row_group}"
        return f"ParquetDatasetPiece({self.path}{group}, {dict(self.partition_keys)})"


class ParquetDataset:
    """The Parquet files of a directory, or those of a list, in the order of their paths.

    Names that begin with `_` or `.` are left out, but the footers `_metadata` and `_common_metadata` of the directory
    are `metadata` and `common_metadata` (None where they are not there). `filters` choose by partition columns:
    [(column, operator, value), ...], all of which must hold, or a list of such lists, one of which must.
    Raises OSError for missing paths, DataError for files next to directories, ConfigError for other filters.
    """

    def __init__(
        self,
        path_or_paths: str | list[str],
        filesystem: Any = None,
        validate_schema: Literal[False] = False,
        metadata_nthreads: int = 1,
        filters: Any = None,
    ) -> None:
        self.fs = _fsspec_like(filesystem)
        self.paths = path_or_paths
        self.partitions: ParquetPartitions | None = None
        self.metadata = self.common_metadata = None
        self.metadata_path = self.common_metadata_path = None
        paths = path_or_paths if isinstance(path_or_paths, list) else [path_or_paths]
        if len(paths) == 1 and self.fs.isdir(paths[0]):
            self.partitions = ParquetPartitions()
            self._read_metadata(paths[0].rstrip("/"))
            self.pieces = list(self._visit(paths[0], ()))
        else:
            absent = [path for path in paths if not self.fs.isfile(path)]
            if absent or not paths:
                raise OSError(f"not a Parquet file or a directory of them: {absent[:3]}")
            self.pieces = [ParquetDatasetPiece(path, self.fs.open) for path in paths]
        if filters:
            self._filter(filters)

    def _read_metadata(self, root: str) -> None:
        for name in METADATA:
            path = f"{root}/{name}"
            if self.fs.isfile(path):
                with self.fs.open(path) as file:
                    setattr(self, name[1:], pq.read_metadata(file))
                setattr(self, f"{name[1:]}_path", path)

    def _visit(self, folder: str, keys: Keys) -> Iterator[ParquetDatasetPiece]:
        assert self.partitions is not None
        found = sorted((entry["name"].rstrip("/"), entry["type"]) for entry in self.fs.ls(folder, detail=True))
        seen = [(path, path.rpartition("/")[2], kind) for path, kind in found]
        seen = [entry for entry in seen if not entry[1].startswith(("_", "."))]
        if len({kind for _, _, kind in seen}) > 1:
            raise DataError(
                f"{folder} holds files next to directories",
                got=", ".join(name for _, name, _ in seen[:5]),
                allowed="Parquet files, or directories of them",
                next_step="Give one of the directories, or a list of files.",
            )
        for path, name, kind in seen:
            if kind == "file":
                yield ParquetDatasetPiece(path, self.fs.open, partition_keys=keys)
                continue
            column, is_partition, value = name.partition("=")
            key = (self.partitions.key(len(keys), column, unquote(value)),) if is_partition else ()
            yield from self._visit(path, (*keys, *key))

    def _filter(self, filters: Any) -> None:
        either = [filters] if isinstance(filters[0], tuple) else filters
        names = self.partitions.partition_names if self.partitions else set()
        for column, sign, _ in (condition for all_of in either for condition in all_of):
            if column not in names or sign not in _OPERATORS:
                raise ConfigError(
                    f"{self.paths} cannot be filtered by `{column} {sign}`",
                    got=f"column `{column}`, operator {sign!r}",
                    allowed=f"partition columns ({', '.join(sorted(names)) or 'none'}), {', '.join(_OPERATORS)}",
                    next_step="For other columns give a predicate.",
                )
        self.pieces = [piece for piece in self.pieces if any(self._meets(piece, all_of) for all_of in either)]

    def _meets(self, piece: ParquetDatasetPiece, conditions: Sequence[tuple[str, str, Any]]) -> bool:
        assert self.partitions is not None
        places = {name: (depth, place) for depth, (name, place) in enumerate(piece.partition_keys)}
        for column, sign, wanted in conditions:
            depth, place = places[column]
            value = self.partitions[depth].keys[place]
            sample = next(iter(wanted)) if sign in ("in", "not in") else wanted
            if value == NULL or not _OPERATORS[sign](type(sample)(value), wanted):
                return False
        return True


def _fsspec_like(filesystem: Any) -> Any:
    """A file system with the ls, isdir, isfile and open of fsspec: ours, fsspec's, or one of pyarrow's, wrapped."""
    import pyarrow.fs as pafs

    if filesystem is None:
        return LocalFileSystem()
    if isinstance(filesystem, pafs.FileSystem):
        # fsspec has no types
        from fsspec.implementations.arrow import ArrowFSWrapper  # type: ignore[import-untyped]

        return ArrowFSWrapper(filesystem)
    return filesystem
