"""The directory of another program that gets a manifest: that it has none yet, and does not change meanwhile."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.features.shards.foreign_files import ForeignFile
from lockstep.storage.dataset.indexed import INDEX_FOLDER, KIND
from lockstep.storage.dataset.manifest_entries import ShardInfo
from lockstep.storage.documents import unseal
from lockstep.storage.errors import ConfigError, DataError, ExistsError, NotFoundError
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import MANIFEST_NAME
from lockstep.storage.urls import join

_FREE = f"a directory without {MANIFEST_NAME} and {INDEX_FOLDER}"


def check(url: str, kind: str) -> None:
    """Raise ExistsError if the directory of files of a `kind` has a manifest or an index already, ConfigError if `url`
    is not a directory.
    """
    fs = filesystem(url)
    try:
        status = fs.stat(url)
    except NotFoundError as error:
        raise NotFoundError(
            f"no such directory {url}",
            got=error.got,
            allowed=f"a directory of {kind} files",
            next_step="Check the path.",
        ) from None
    if not status.is_dir:
        raise ConfigError(
            f"{url} is a file", got="a file", allowed=f"a directory of {kind} files", next_step="Give its directory."
        )
    manifest = join(url, MANIFEST_NAME)
    if fs.exists(manifest):
        raise _taken(url, manifest, fs.read_bytes(manifest))
    if fs.exists(join(url, INDEX_FOLDER)):
        raise ExistsError(
            f"{url} has a folder {INDEX_FOLDER} already",
            got=f"{INDEX_FOLDER} without {MANIFEST_NAME}",
            allowed=_FREE,
            next_step=f"If this is a dataset, restore its {MANIFEST_NAME}; if `lockstep index` left it, delete it.",
        )


def _taken(url: str, manifest: str, data: bytes) -> ExistsError:
    """The error for a directory whose manifest is `data`; only an index of ours may be made again."""
    try:
        doc = unseal(data, manifest)
        indexed = doc.get("kind") == KIND or "indexed" in doc
    except DataError as error:
        return ExistsError(
            f"{url} has a {MANIFEST_NAME} that cannot be read",
            got=error.got or error.what,
            allowed=_FREE,
            next_step="Delete nothing: `lockstep verify URL` reports what it is and what is damaged.",
        )
    if indexed:
        return ExistsError(
            f"{url} is indexed already",
            got=f"the {MANIFEST_NAME} of an earlier lockstep index",
            allowed=_FREE,
            next_step=f"If files changed, delete {MANIFEST_NAME} (and {INDEX_FOLDER}), and run lockstep index again.",
        )
    return ExistsError(
        f"{url} has a manifest already and needs no index",
        got=f"a {MANIFEST_NAME} that lockstep index has not made, such as that of a published dataset",
        allowed="a directory of files of other programs",
        next_step="Read it without an index: lockstep describe URL, lockstep train, spark.read.format('tfrecord').",
    )


def check_unchanged(files: Iterable[ForeignFile], infos: Iterable[ShardInfo]) -> None:
    """Raise DataError for a file whose length is not the one found at the start."""
    for file, info in zip(files, infos, strict=True):
        if file.bytes != info.bytes:
            raise DataError(
                f"{file.url} changed while it was read",
                got=f"{info.bytes} bytes",
                allowed=f"{file.bytes} bytes, as at the start",
                next_step="Run lockstep index when no other program writes there.",
            )
