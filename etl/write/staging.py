"""Staging folders, in which datasets are built: signed by the job, published by one rename or removed; and --clean."""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from lockstep.storage.dataset.layout import DatasetPaths
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.documents import seal, unseal_as
from lockstep.storage.errors import DataError, ExistsError, LockstepError, NotFoundError, StorageError
from lockstep.storage.files.interface import FileStat, FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import MANIFEST_NAME, publish_directory, write_file
from lockstep.storage.urls import absolute, join, parent

log = logging.getLogger(__name__)
SIGN_NAME = "_job.json"
KIND = "etl-staging"
BEAT_S = 30.0
_DISOWNED = -1
# A job signs every 30 s. Twenty missed signs are longer than a NameNode's failover or a JVM's pause.
DEAD_AFTER_S = 600.0
_FOLDER = re.compile(r"_staging-(?P<job>etl-[0-9a-f]{16})(?P<dead>[.]dead)?")
_DEAD = ".dead"


class Staging:
    """A context with a signed folder next to the dataset `url`; `publish` renames it to the dataset's name.

    The sign names the job and is rewritten every `beat_s` seconds: a folder with an old sign belongs to a dead job and
    may be cleaned. Without `publish` the folder is removed at the end of the context. A folder that is published as a
    part of the dataset `part_of` keeps its sign, which names the dataset, until `keep`.
    """

    def __init__(self, url: str, beat_s: float = BEAT_S, mode: int = 0o755, part_of: str | None = None) -> None:
        self.url = absolute(url)
        self.fs: FileSystem = filesystem(self.url)
        self.job = f"etl-{secrets.token_hex(8)}"
        self.root = DatasetPaths(self.url).staging(self.job)
        self.attempts = join(self.root, ".attempts")
        """Where tasks write files that the driver renames."""
        self._sign = join(self.root, SIGN_NAME)
        self._beat_s, self._mode, self._beats, self._published = beat_s, mode, 0, False
        self._part_of = None if part_of is None else absolute(part_of)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lockstep-staging", daemon=True)

    def __enter__(self) -> Self:
        try:
            self.fs.mkdirs(self.root, mode=self._mode)
            self._write()
            self.fs.mkdirs(self.attempts)
        except BaseException:
            self.fs.discard(self.root)
            raise
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        if not self._published:
            self.fs.discard(self.root)

    def publish(self, manifest: bytes | None) -> None:
        """Write the manifest (if there is one) last, and rename the folder.

        Raises ExistsError if the name is taken, StorageError if the folder was removed meanwhile.
        """
        self._stop()
        self.fs.delete(self.attempts, recursive=True)
        self._check()
        if manifest is not None:
            write_file(self.fs, DatasetPaths(self.root).manifest, manifest)
        self._check()  # if the folder was removed in between, it would now hold only a manifest
        if self._part_of is None:
            self.fs.delete(self._sign)
        publish_directory(self.fs, self.root, self.url)
        self._published = True

    def keep(self) -> None:
        """Remove the sign of the published folder, after the dataset that it is part of was published."""
        self.fs.discard(join(self.url, SIGN_NAME))

    def withdraw(self) -> None:
        """Remove the published folder: the job failed after `publish`."""
        if self._published:
            self.fs.discard(self.url)

    def may_be_published(self, manifest: bytes) -> bool:
        """Whether the dataset `url` has this manifest; also True if that cannot be read."""
        try:
            return self.fs.read_bytes(DatasetPaths(self.url).manifest) == manifest
        except NotFoundError:
            return False
        except StorageError as error:
            log.warning("%s may have been published, which cannot be read: %s", self.url, error.what)
            return True

    def signed_ms(self) -> int:
        """When the sign was last written, by the clock of the file system."""
        return self.fs.stat(self._sign).mtime_ms

    def _stop(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _keep(self) -> None:
        while not self._ended.wait(self._beat_s):
            try:
                self._check()
                self._write()
            except LockstepError as error:  # the job uses the same storage, and raises
                log.warning("the sign of %s was not rewritten: %s", self.root, error.what)

    def _check(self) -> None:
        try:
            sign: dict[str, Any] | None = unseal_as(KIND, self.fs.read_bytes(self._sign), self._sign)
        except NotFoundError:
            sign = None
        if sign is None or sign.get("job") != self.job or sign.get("beats") == _DISOWNED:
            raise StorageError(
                f"{self.root} was removed while this job used it",
                got="no sign of this job in it",
                allowed="a folder that only this job changes",
                next_step="Run the job again; --clean of another job removes folders that were not signed for a while.",
            )

    def _write(self) -> None:
        self._beats += 1
        sign = {
            "kind": KIND,
            "format_version": 1,
            "job": self.job,
            "output": self.url,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "beats": self._beats,
        }
        if self._part_of is not None:
            sign["part_of"] = self._part_of
        write_file(self.fs, self._sign, seal(sign), exclusive=False)


def publish_beside(staging: Staging, manifest: bytes, apart: Staging | None) -> None:
    """Publish `apart` (the quarantine at a separate URL) and then the dataset: both, or neither.

    Raises what Staging.publish raises. If the publication fails after the dataset was renamed, such as when the
    read-back gets no answer, the quarantine stays. A kill in between leaves a quarantine that is_unfinished recognises.
    """
    if apart is not None:
        apart.publish(None)
    try:
        staging.publish(manifest)
    except BaseException:
        if apart is not None and not staging.may_be_published(manifest):
            apart.withdraw()
        raise
    if apart is not None:
        apart.keep()


@dataclass(frozen=True, slots=True)
class Leftover:
    """A staging folder of a dead job: its URL, the output that it was for ("" if only the manifest remains), and the
    seconds since it was last signed.
    """

    url: str
    output: str
    silent_s: float


def leftovers(fs: FileSystem, output: str, now_ms: int, dead_after_s: float = DEAD_AFTER_S) -> list[Leftover]:
    """The folders next to `output` that have the name and the sign of an ETL job and were not signed for `dead_after_s`
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
    """Remove the leftovers next to `output` and log them; returns those removed.

    Each is renamed first: if its job is still alive, it loses the folder at one moment, ends with an error and
    publishes nothing. A folder that storage does not let us read or remove is logged and stays.
    """
    removed = []
    for item in leftovers(fs, output, now_ms, dead_after_s):
        if _removed(fs, item.url, item.url if item.url.endswith(_DEAD) else item.url + _DEAD):
            log.warning("clean: removed %s (for %s, unsigned for %.0f s)", item.url, item.output, item.silent_s)
            removed.append(item)
    return removed


def is_unfinished(fs: FileSystem, url: str, output: str) -> bool:
    """Whether the quarantine at a separate URL was published by a job that was killed before it published its dataset
    `output`.
    """
    return _unfinished(fs, url, output) is not None


def clean_quarantine(fs: FileSystem, url: str, output: str, now_ms: int) -> None:
    """Remove such a quarantine from `url` if it was not signed for DEAD_AFTER_S seconds, and log it. If storage does
    not let us remove it, that is logged and it stays.
    """
    found = _unfinished(fs, url, output)
    if found is None or now_ms - found[1] < DEAD_AFTER_S * 1000:
        return
    # The name of a staging folder: if this job is killed too, --clean of a later job finds the rest.
    dead = DatasetPaths(absolute(url)).staging(found[0]) + _DEAD
    if _removed(fs, url, dead):
        log.warning("clean: removed %s, the rejected input of a dataset that was never published", url)


def remove_refused(fs: FileSystem, url: str, output: str) -> None:
    """Remove what an earlier job, which failed for too much bad input, kept for `output` at `url`. Anything else there
    stays; so does what storage does not let us read or remove, which is logged.
    """
    try:
        found = _part_of(fs, url, output)
    except StorageError as error:  # such as another user's folder, mode 0700
        log.warning("%s was not removed: %s", url, error.what)
        return
    if found is not None:
        _removed(fs, url, DatasetPaths(absolute(url)).staging(found[0]) + _DEAD)


def _removed(fs: FileSystem, url: str, dead: str) -> bool:
    """Rename a folder to `dead` and delete it. Returns False if another job was faster, or if storage refused it, which
    is logged. On an object store its sign is replaced instead, by which its job notices.
    """
    try:
        if not fs.promises.atomic_rename:
            return _disowned(fs, url)
        if url != dead:
            fs.rename_new(url, dead)
        return fs.delete(dead, recursive=True)
    except (NotFoundError, ExistsError):
        return False  # another job cleans too
    except StorageError as error:
        log.warning("clean: %s could not be removed: %s", url, error.what)
        return False


def _disowned(fs: FileSystem, url: str) -> bool:
    """Sign a folder as that of no living job, and delete it with the sign last, so that a killed call is repeated."""
    sign = join(url, SIGN_NAME)
    with suppress(NotFoundError):  # between the removal of its sign and the publication
        found = unseal_as(KIND, fs.read_bytes(sign), sign)
        write_file(fs, sign, seal(found | {"beats": _DISOWNED}), exclusive=False)
    for entry in fs.list(url):
        if entry.name != SIGN_NAME:
            fs.delete(entry.url, recursive=True)
    return fs.delete(sign)


def _unfinished(fs: FileSystem, url: str, output: str) -> tuple[str, int] | None:
    """The job in the sign and when it was signed (ms); None for any other folder, and if the dataset exists."""
    found, dataset = _part_of(fs, url, output), absolute(output)
    return None if found is None or filesystem(dataset).exists(dataset) else found


def _part_of(fs: FileSystem, url: str, output: str) -> tuple[str, int] | None:
    """The job that signed a folder for the dataset `output`, and when (ms); None for anything else.

    Any user who can write there can name any dataset in a sign, so one that is not `output` is never opened.
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
    """The output in a folder's sign and when it was signed (ms); None for a folder that is not ours.

    The last steps of a job are: write the manifest, remove the sign, rename. So a folder without a sign but with a
    valid manifest is also ours.
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
