"""A client with hdfs-native's calls over a dictionary, which fails where a test says so."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class FakeClient:
    """`before[call]` and `after[call]` hold functions, each run once, around a call: one that raises loses the call
    or its answer.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.folders: set[str] = {"/"}
        self.created: list[str] = []
        self.before: dict[str, list[Callable[[], object]]] = {}
        self.after: dict[str, list[Callable[[], object]]] = {}
        self.lose_bytes = 0

    def _hook(self, hooks: dict[str, list[Callable[[], object]]], name: str) -> None:
        if hooks.get(name):
            hooks[name].pop(0)()

    def get_file_info(self, path: str) -> Any:
        self._hook(self.before, "get_file_info")
        if path not in self.files and path not in self.folders:
            raise FileNotFoundError(path)
        size = len(self.files.get(path, b""))
        return SimpleNamespace(path=path, isdir=path in self.folders, length=size, modification_time=size, blocksize=9)

    def create(self, path: str, options: Any) -> FakeWriter:
        self._hook(self.before, "create")
        if path in self.files and not options.overwrite:
            raise FileExistsError(path)
        self.files[path] = b""
        self.created.append(path)
        self._hook(self.after, "create")
        return FakeWriter(self, path)

    def read(self, path: str) -> Any:
        data = self.files[path]
        return SimpleNamespace(file_length=lambda: len(data), read_range=lambda start, n: data[start : start + n])

    def mkdirs(self, path: str, mode: int, create_parent: bool) -> None:
        self._hook(self.before, "mkdirs")
        self.folders.add(path)

    def delete(self, path: str, recursive: bool) -> bool:
        return self.files.pop(path, None) is not None

    def rename(self, source: str, target: str, overwrite: bool) -> None:
        self._hook(self.before, "rename")
        if source not in self.files:
            raise FileNotFoundError(f"rename source {source} is not found.")
        if target in self.files and not overwrite:
            raise FileExistsError(target)
        self.files[target] = self.files.pop(source)
        self._hook(self.after, "rename")


class FakeWriter:
    """The writer of FakeClient."""

    def __init__(self, client: FakeClient, path: str) -> None:
        self._client, self._path = client, path

    def write(self, data: bytes) -> int:
        self._client._hook(self._client.before, "write")
        self._client.files[self._path] += data
        return len(data)

    def hsync(self) -> None:
        self._client._hook(self._client.before, "hsync")

    def close(self) -> None:
        self._client._hook(self._client.before, "close")
        data = self._client.files[self._path]
        self._client.files[self._path] = data[: len(data) - self._client.lose_bytes]
