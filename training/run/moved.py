"""Where a model or dataset is now that a document names by its old URL, after folders were moved or copied together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.storage.documents import sha256_hex
from lockstep.storage.errors import LockstepError, NotFoundError
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import MANIFEST_NAME
from lockstep.storage.urls import join, split_url
from lockstep.training.plan.datasets import open_data


def where_now(url: str, was: str, now: str, sha256: str | None) -> str:
    """Return where the model or checkpoint is that a document named `url` when its own folder was at `was`; the folder
    is read at `now`.

    If both lay in one folder that was moved or copied, it is the one in there, provided that the SHA-256 of its
    manifest is `sha256`. Without a digest, as in older documents, it is that one only if nothing is at `url` any more.
    """
    moved = _moved_with(url, was, now)
    if moved is None or moved == url:
        return url
    there = manifest_digest(moved)
    if there is None or (there != sha256 if sha256 is not None else filesystem(url).exists(url)):
        return url
    return moved


def data_now(config: Mapping[str, Any], was: str, now: str, digest: object) -> list[str] | None:
    """Return where the datasets of `config`, the options in a run.json, are if they were moved or copied together with
    the run from `was` to `now`; None if they were not. What is there must have the run's `digest`.
    """
    urls = config.get("datasets")
    if not isinstance(urls, list) or not all(isinstance(url, str) and url for url in urls):
        return None
    try:
        moved = [_moved_with(url, was, now) or url for url in urls]
        if moved == urls:
            return None
        there = open_data(moved, config["split"], config.get("mix"), tasks=config.get("tasks") is not None)[1]
    except (LockstepError, AttributeError, KeyError, TypeError, ValueError):  # who reads the options refuses odd ones
        return None
    return moved if there.digest == digest else None


def manifest_digest(url: str) -> str | None:
    """The SHA-256 (hex) of the manifest of the model or checkpoint at `url`; None if it has none."""
    try:
        return sha256_hex(filesystem(url).read_bytes(join(url, MANIFEST_NAME)))
    except (NotFoundError, NotADirectoryError):
        return None


def _moved_with(url: str, was: str, now: str) -> str | None:
    """`url` in the folder at which the paths of `now` and `was` begin to be alike; None if it was not in there."""
    old, new = _parts(was), _parts(now)
    while old and new and old[-1] == new[-1]:
        old.pop()
        new.pop()
    parts = _parts(url)
    if split_url(url)[:2] != split_url(was)[:2] or parts[: len(old)] != old:
        return None
    root = now[: len(now) - len(split_url(now)[2])]
    return f"{root}/{'/'.join([*new, *parts[len(old) :]])}"


def _parts(url: str) -> list[str]:
    return [part for part in split_url(url)[2].split("/") if part]
