"""The file system for a URL, by its scheme, and the names that all rooms import."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

from lockstep.storage.errors import ConfigError, NotFoundError
from lockstep.storage.files.interface import FileStat, FileSystem, Listing, Writer
from lockstep.storage.urls import OBJECT_SCHEMES, absolute, basename, join, parent, split_url

__all__ = [
    "FileStat", "FileSystem", "Listing", "Writer",
    "absolute", "basename", "filesystem", "join", "parent", "split_url", "walk",
]  # fmt: skip


def filesystem(url: str) -> FileSystem:
    """The backend for a URL, cached for each scheme, authority and Hadoop settings.

    Raises ConfigError for a scheme that has no backend.
    """
    scheme, authority, _ = split_url(url)
    if scheme == "file":
        from lockstep.storage.files.local import LocalFileSystem

        return _cached(("file", "", ""), LocalFileSystem)
    if scheme == "hdfs":
        from lockstep.storage.files.hdfs import HdfsFileSystem
        from lockstep.storage.settings import hadoop_settings

        settings = hadoop_settings()
        key = ("hdfs", authority, repr(sorted(settings.items())))
        return _cached(key, lambda: HdfsFileSystem(authority, settings))
    if scheme in ("webhdfs", "swebhdfs"):
        from lockstep.storage.files.webhdfs import WebHdfsFileSystem
        from lockstep.storage.settings import hadoop_settings, hadoop_user, webhdfs_token

        settings, user, token = hadoop_settings(), hadoop_user(), webhdfs_token(authority)
        key = (scheme, authority, repr((sorted(settings.items()), user, token)))
        return _cached(key, lambda: WebHdfsFileSystem(authority, settings, user=user, token=token, scheme=scheme))
    if scheme in OBJECT_SCHEMES:
        from lockstep.storage.files.object_clients import object_settings
        from lockstep.storage.files.object_store import ObjectStore
        from lockstep.storage.settings import hadoop_settings

        kind = "s3" if scheme == "s3a" else scheme
        chosen = object_settings(hadoop_settings())
        return _cached((kind, authority, repr(sorted(chosen.items()))), lambda: ObjectStore(kind, authority, chosen))
    raise ConfigError(
        f"no file system for {scheme}:// URLs",
        got=url,
        allowed="a local path, file:///PATH, hdfs://HOST:PORT/PATH, hdfs://NAMESERVICE/PATH,"
        " webhdfs://HOST:HTTP_PORT/PATH, swebhdfs://HOST:HTTPS_PORT/PATH, s3://BUCKET/PATH, gs://BUCKET/PATH,"
        " az://CONTAINER/PATH",
        next_step="Check the URL.",
    )


def walk(fs: FileSystem, url: str, *, may_vanish: bool = False) -> Iterator[FileStat]:
    """All files below a directory, depth first, sorted by name in each directory.

    A link to a directory is yielded and not entered: links lead elsewhere, or in circles. Raises NotFoundError for a
    directory that is missing or goes meanwhile, which counts as an empty one with `may_vanish`.
    """

    def entries(directory: str) -> Listing:
        try:
            return fs.list(directory)[::-1]
        except NotFoundError:
            if may_vanish:
                return []
            raise

    pending = entries(url)  # no recursion: a path may have more levels than Python has frames
    while pending:
        entry = pending.pop()
        if entry.is_dir and not entry.is_special:
            pending += entries(entry.url)
        else:
            yield entry


_cache: dict[tuple[str, str, str], FileSystem] = {}
_of_the_parent: list[object] = []
_lock = threading.Lock()


def _cached(key: tuple[str, str, str], make: Callable[[], FileSystem]) -> FileSystem:
    with _lock:
        if key not in _cache:
            _cache[key] = make()
        return _cache[key]


def _forget_after_fork() -> None:
    # A forked child has none of its parent's threads: a client that depends on them would wait forever, and so would
    # its destructor. So the parent's clients are neither used nor dropped here.
    global _lock, _cache
    _lock = threading.Lock()
    _of_the_parent.append(_cache)
    _cache = {}


os.register_at_fork(after_in_child=_forget_after_fork)
