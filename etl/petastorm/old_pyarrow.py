"""pyarrow.localfs and pyarrow.hdfs as Petastorm knew them, over this project's own storage."""

from __future__ import annotations

import getpass
import io
import os
from collections.abc import Callable, Mapping
from functools import wraps
from types import TracebackType
from typing import Any, BinaryIO, ClassVar, ParamSpec, TypeVar

from lockstep.storage.errors import ConfigError, LockstepError, NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.settings import hadoop_settings, set_hadoop_settings

P = ParamSpec("P")
T = TypeVar("T")


def connect(host: str = "default", port: int = 8020, user: str | None = None) -> HadoopFileSystem:
    """The file system of a NameNode, of a name service, or of fs.defaultFS ("default").

    A NameNode of a name service that HADOOP_CONF_DIR describes stands for the service, so that a failover is survived.
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
    """Petastorm looks for OSError where a file system fails."""

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
    """Files by their paths, in fsspec's manner as far as Petastorm asks for it; each error is an OSError."""

    _scheme: ClassVar[str]

    def __init__(self, authority: str = "") -> None:
        self._authority = authority

    @_as_os_errors
    def open(self, path: str, mode: str = "rb") -> BinaryIO:
        """Open a file to read ("rb"), or to write anew ("wb")."""
        fs, url = self._place(path)
        if mode == "rb":
            return fs.open_read(url)
        if mode != "wb":
            raise ValueError(f"mode {mode!r} of {url}: rb and wb are there")
        return _Written(fs, url)

    @_as_os_errors
    def exists(self, path: str) -> bool:
        """Whether a file or directory is there."""
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
        """Delete a file or directory; what is not there is left so."""
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
    set_hadoop_settings(settings)  # a worker of the process pool gets those that this process was handed
    return kind(authority)


class _Written(io.BytesIO):
    """A small file, put in its place whole when it is closed, and not at all after an exception inside `with`."""

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
