"""URLs and plain paths as text: taking them apart and putting them together, without asking a file system."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable

from lockstep.storage.errors import ConfigError

OBJECT_SCHEMES = ("s3", "s3a", "gs", "az")
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+):(//)?")


def split_url(url: str) -> tuple[str, str, str]:
    """Take a URL apart into (scheme, authority, path); a plain path has the scheme "file".

    Nothing is percent-decoded. Raises ConfigError for a URL without a path or host.
    """
    if not url or "\0" in url:
        raise ConfigError(
            "an empty or broken path", got=repr(url), allowed="a path or URL", next_step="Check the path."
        )
    found = _SCHEME.match(url)
    if found is None:
        return "file", "", url
    scheme = found.group(1).lower()
    rest = url[found.end() :]
    if found.group(2) is None:
        if scheme == "file" and rest.startswith("/"):
            return "file", "", rest
        if scheme in ("file", "hdfs", "webhdfs", "swebhdfs", *OBJECT_SCHEMES):
            where = "BUCKET" if scheme in OBJECT_SCHEMES else "HOST:PORT"
            raise ConfigError(f"{url} is not a URL", got=url, allowed=f"{scheme}://{where}/PATH", next_step="Add `//`.")
        return "file", "", url  # a plain file name with a colon in it
    authority, slash, path = rest.partition("/")
    if scheme == "file":
        if authority not in ("", "localhost") or not slash:
            raise ConfigError(
                f"{url} names a host", got=authority or url, allowed="file:///PATH", next_step="Write three slashes."
            )
        return "file", "", slash + path
    return scheme, authority, slash + path if slash else "/"


def absolute(url: str | os.PathLike[str]) -> str:
    """Return `url` with a relative local path made absolute: executors and ranks have another working folder than the
    call.
    """
    url = os.fspath(url)
    scheme, _, path = split_url(url)
    return os.path.abspath(path) if scheme == "file" and not path.startswith("/") else url


def several(names: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> tuple[str, ...]:
    """URLs or names as a tuple of texts; a single one becomes a tuple of one, never of its characters."""
    if isinstance(names, str | os.PathLike):
        return (os.fspath(names),)
    return tuple(os.fspath(name) if isinstance(name, os.PathLike) else name for name in names)


def join(url: str, *parts: str) -> str:
    """Append path parts to a URL or path."""
    return "/".join([url.rstrip("/") if url.strip("/") else "", *(part.strip("/") for part in parts)])


def basename(url: str) -> str:
    """The last part of a URL's path; "" for a root."""
    return split_url(url)[2].rstrip("/").rpartition("/")[2]


def parent(url: str) -> str:
    """The URL of the directory that holds `url`; a root is its own parent, and "." that of a bare name."""
    path = split_url(url)[2]
    head = url[: len(url) - len(path)]
    before, slash, _ = path.rstrip("/").rpartition("/")
    if not slash:
        return url if path.startswith("/") else "."
    return head + (before.rstrip("/") or "/")


def path_between(url: str, base: str) -> str | None:
    """The relative path from the directory `base` to `url`; None if they are on different storages."""
    (scheme, host, there), (other, other_host, here) = split_url(absolute(url)), split_url(absolute(base))
    return posixpath.relpath(there, here) if (scheme, host) == (other, other_host) else None


def at_path(base: str, path: str) -> str:
    """The URL that the relative `path` has from the directory `base`: the inverse of `path_between`."""
    base = absolute(base)
    here = split_url(base)[2]
    return base[: len(base) - len(here)] + posixpath.normpath(posixpath.join(here, path))
