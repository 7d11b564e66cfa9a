"""Increments: datasets that continue one another; in a folder of increments they are named by number, 000001 first."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from lockstep.storage.dataset.layout import DatasetPaths
from lockstep.storage.dataset.manifest import DatasetManifest, load_chain
from lockstep.storage.errors import ConfigError, NotFoundError
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import absolute, basename, join

_NAME = re.compile(r"[0-9]{6}")


def newest_in(folder: str) -> str | None:
    """The URL of the newest dataset of a folder of increments; None if it has none, or does not exist.

    Raises ConfigError for a file, and for a folder that is itself a dataset.
    """
    fs = filesystem(folder)
    if fs.exists(DatasetPaths(folder).manifest):
        raise _no_folder(folder, "a dataset")
    try:
        if not fs.stat(folder).is_dir:
            raise _no_folder(folder, "a file")
        names = sorted(entry.name for entry in fs.list(folder) if _NAME.fullmatch(entry.name))
    except NotFoundError:
        return None
    # On an object store a publication that was cut off leaves a folder without a manifest.
    found = (join(folder, name) for name in reversed(names))
    return next((url for url in found if fs.exists(DatasetPaths(url).manifest)), None)


def next_in(folder: str, newest: str | None) -> str:
    """The URL of the dataset that follows `newest` in a folder of increments."""
    return join(folder, f"{1 if newest is None else int(basename(newest)) + 1:06d}")


def datasets_since(url: str, since: str) -> tuple[str, ...]:
    """The URLs of the dataset at `url`, or the newest of a folder of increments, and of those that it continues after
    `since`, oldest first.

    `since` is a dataset that it continues, or a time in ISO 8601 (UTC if it names no zone): then they are those of web
    logs with a request after it. Raises ConfigError where `since` is neither, or nothing comes after it.
    """
    url = absolute(url)
    if not filesystem(url).exists(DatasetPaths(url).manifest):
        url = newest_in(url) or url
    chain, mark = load_chain(url), absolute(since).rstrip("/")
    urls = [one.rstrip("/") for one, _ in chain]
    if mark in urls:
        after = urls[: urls.index(mark)]
    else:
        limit = _seconds(since, urls)
        after = [one for one, (_, manifest) in zip(urls, chain, strict=True) if _log_end(one, manifest) > limit]
    if not after:
        raise ConfigError(
            f"no dataset comes after --since {since}",
            got=f"{urls[0]} is the newest",
            allowed="a dataset that it continues, or an earlier time",
            next_step="Make the next increment first, or correct --since.",
        )
    return tuple(reversed(after))


def _seconds(since: str, urls: list[str]) -> float:
    try:
        time = datetime.fromisoformat(since)
    except ValueError:
        raise ConfigError(
            f"--since {since} is neither a time nor a dataset that {urls[0]} continues",
            got=since,
            allowed=f"a time such as 2026-01-31T06:00, or one of {', '.join(urls[1:]) or 'none'}"[:1000],
            next_step="Correct --since.",
        ) from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def _log_end(url: str, manifest: DatasetManifest) -> float:
    carried = manifest.created_by["config"].get("carried")
    end = carried.get("log_end") if isinstance(carried, dict) else None
    if not isinstance(end, int):
        raise ConfigError(
            f"--since with a time does not go with {url}",
            got="a dataset that does not say until when its records are",
            allowed="datasets of a web log",
            next_step="Give --since a dataset.",
        )
    return end


def _no_folder(folder: str, got: str) -> ConfigError:
    return ConfigError(
        f"{folder} is not a folder of increments",
        got=got,
        allowed="a folder with datasets 000001, 000002 ..., an empty one or none",
        next_step="Give --increment an --output of its own; --append-to continues a dataset of another name.",
    )
