"""What killed jobs left beside an output: found by its sign and its age, removed whole; nothing else is touched."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from etl.write.staging import KIND, SIGN_NAME
from lockstep.storage.dataset.layout import MANIFEST_NAME, DatasetPaths
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import DataError, ExistsError, NotFoundError, StorageError
from lockstep.storage.files.interface import FileStat, FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.sealed import unseal_as
from lockstep.storage.urls import absolute, join, parent

log = logging.getLogger(__name__)

# A job signs every 30 s. Twenty signs missed is longer than a NameNode's failover or a paused JVM.
DEAD_AFTER_S = 600.0
_FOLDER = re.compile(r"_staging-(?P<job>etl-[0-9a-f]{16})(?P<dead>[.]dead)?")
_DEAD = ".dead"


@dataclass(frozen=True, slots=True)
class Leftover:
    """A staging folder whose job is gone: its URL, the output it was for ("" where only the manifest is left), and
    for how many seconds it has not been signed.
    """

    url: str
    output: str
    silent_s: float


def leftovers(fs: FileSystem, output: str, now_ms: int, dead_after_s: float = DEAD_AFTER_S) -> list[Leftover]:
    """What lies beside `output` in a folder of the name and with the sign of an ETL job, unsigned for `dead_after_s`
    seconds. `now_ms` is the time by the clock of that file system.
    """
    folder = parent(absolute(output))
    found = []
    for entry in fs.list(folder) if fs.exists(folder) else []:
        if not entry.is_dir or entry.is_special:
            continue
        named = _FOLDER.fullmatch(entry.name)
        signed = named and _signed(fs, entry, named["job"])
        if signed and now_ms - signed[1] >= dead_after_s * 1000:
            found.append(Leftover(entry.url, signed[0], (now_ms - signed[1]) / 1000))
    return found


def clean(fs: FileSystem, output: str, now_ms: int, dead_after_s: float = DEAD_AFTER_S) -> list[Leftover]:
    """Remove the leftovers beside `output` and say which; returns those removed.

    Each is renamed first: should its job live after all, it loses the folder at one moment and ends with an error,
    and publishes nothing. One that the storage does not let us read or remove is logged and stays.
    """
    removed = []
    for item in leftovers(fs, output, now_ms, dead_after_s):
        if _removed(fs, item.url, item.url if item.url.endswith(_DEAD) else item.url + _DEAD):
            log.warning("clean: removed %s (for %s, unsigned for %.0f s)", item.url, item.output, item.silent_s)
            removed.append(item)
    return removed


def is_unfinished(fs: FileSystem, url: str, output: str) -> bool:
    """Whether a quarantine at a place of its own was published by a job that was killed before its dataset `output`
    was.
    """
    return _unfinished(fs, url, output) is not None


def clean_quarantine(fs: FileSystem, url: str, output: str, now_ms: int, dead_after_s: float = DEAD_AFTER_S) -> None:
    """Remove such a quarantine from `url`, where it was not signed for `dead_after_s` seconds, and say so. One that the
    storage does not let us remove is logged and stays.
    """
    found = _unfinished(fs, url, output)
    if found is None or now_ms - found[1] < dead_after_s * 1000:
        return
    # The name of a staging folder: should this be killed too, the rest is found beside the next output.
    dead = DatasetPaths(absolute(url)).staging(found[0]) + _DEAD
    if _removed(fs, url, dead):
        log.warning("clean: removed %s, the rejected input of a dataset that was never published", url)


def remove_refused(fs: FileSystem, url: str, output: str) -> None:
    """Remove what an earlier job, refused for too much bad input, kept for `output` at `url`. What is there of anybody
    else stays, and so does what the storage does not let us read or remove, which is logged.
    """
    try:
        found = _part_of(fs, url, output)
    except StorageError as error:  # such as another user's folder, mode 0700
        log.warning("%s was not removed: %s", url, error.what)
        return
    if found is not None:
        _removed(fs, url, DatasetPaths(absolute(url)).staging(found[0]) + _DEAD)


def _removed(fs: FileSystem, url: str, dead: str) -> bool:
    """Rename a folder to `dead`, delete it, and return whether this job did: another may have been faster, and the
    storage may refuse it, which is logged.
    """
    try:
        if url != dead:
            fs.rename_new(url, dead)
        return fs.delete(dead, recursive=True)
    except (NotFoundError, ExistsError):
        return False  # another job cleans too
    except StorageError as error:
        log.warning("clean: %s could not be removed: %s", url, error.what)
        return False


def _unfinished(fs: FileSystem, url: str, output: str) -> tuple[str, int] | None:
    """The job that its sign names and when it was signed (ms); None for anything else, and where the dataset is."""
    found, dataset = _part_of(fs, url, output), absolute(output)
    return None if found is None or filesystem(dataset).exists(dataset) else found


def _part_of(fs: FileSystem, url: str, output: str) -> tuple[str, int] | None:
    """The job that signed a folder for the dataset `output`, and when (ms); None for anything else.

    Whoever can write there can name any dataset in a sign: one that is not `output` is not asked for, wherever it lies.
    """
    sign = join(url, SIGN_NAME)
    try:
        found = unseal_as(KIND, fs.read_bytes(sign), sign)
        job = str(found.get("job"))
        ours = found.get("output") == absolute(url) and _FOLDER.fullmatch(f"_staging-{job}")
        return (job, fs.stat(sign).mtime_ms) if ours and found.get("part_of") == absolute(output) else None
    except (NotFoundError, DataError):
        return None


def _signed(fs: FileSystem, folder: FileStat, job: str) -> tuple[str, int] | None:
    """The output that a folder's sign names and when it was signed (ms); None for a folder that is not ours.

    A job's last steps are manifest, removal of the sign, rename: a folder without a sign but with a whole manifest of
    ours is such a one.
    """
    sign, manifest = join(folder.url, SIGN_NAME), join(folder.url, MANIFEST_NAME)
    try:
        if fs.exists(sign):
            found = unseal_as(KIND, fs.read_bytes(sign), sign)
            good = found.get("job") == job and isinstance(found.get("output"), str)
            return (found["output"], fs.stat(sign).mtime_ms) if good else None
        DatasetManifest.from_bytes(fs.read_bytes(manifest), manifest)
        return "", fs.stat(manifest).mtime_ms
    except (NotFoundError, DataError):
        return None
    except StorageError as error:  # such as another user's folder, mode 0700
        log.warning("clean: %s was passed over: %s", folder.url, error.what)
        return None
