"""The folder in which a dataset is built: signed by its job, kept alive, published by one rename or removed."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from types import TracebackType
from typing import Any, Self

from lockstep.storage.dataset.layout import DatasetPaths
from lockstep.storage.errors import LockstepError, NotFoundError, StorageError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import publish_directory, write_file
from lockstep.storage.sealed import seal, unseal_as
from lockstep.storage.urls import absolute, join

log = logging.getLogger(__name__)

SIGN_NAME = "_job.json"
KIND = "etl-staging"
BEAT_S = 30.0


class Staging:
    """A signed folder beside the dataset `url`, from `with` to its end; `publish` gives it the dataset's name.

    The sign names the job and is written anew every `beat_s` seconds, so that a folder whose sign is old is known to
    belong to nobody (etl.write.clean). Without `publish` the folder is removed at the end, whatever ended the block.
    What is published for the dataset `part_of` keeps its sign, which names that, until `keep`.
    """

    def __init__(self, url: str, beat_s: float = BEAT_S, mode: int = 0o755, part_of: str | None = None) -> None:
        self.url = absolute(url)
        self.fs: FileSystem = filesystem(self.url)
        self.job = f"etl-{secrets.token_hex(8)}"
        self.root = DatasetPaths(self.url).staging(self.job)
        self.attempts = join(self.root, ".attempts")
        """Where tasks put what the driver moves."""
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
        """Write the manifest (if there is to be one), last of all, and rename the folder.

        Raises ExistsError where the name is taken, and StorageError where the folder was taken away in the meantime.
        """
        self._stop()
        self.fs.delete(self.attempts, recursive=True)
        self._check()
        if manifest is not None:
            write_file(self.fs, DatasetPaths(self.root).manifest, manifest)
        self._check()  # a folder that was removed between would now hold a manifest and nothing else
        if self._part_of is None:
            self.fs.delete(self._sign)
        publish_directory(self.fs, self.root, self.url)
        self._published = True

    def keep(self) -> None:
        """Take the sign out of what was published: the dataset that it is part of is published too."""
        self.fs.discard(join(self.url, SIGN_NAME))

    def withdraw(self) -> None:
        """Remove what `publish` published: the job failed after all."""
        if self._published:
            self.fs.discard(self.url)

    def may_be_published(self, manifest: bytes) -> bool:
        """Whether the dataset `url` has this manifest; true too where that cannot be read."""
        try:
            return self.fs.read_bytes(DatasetPaths(self.url).manifest) == manifest
        except NotFoundError:
            return False
        except StorageError as error:
            log.warning("%s may have been published, which cannot be read: %s", self.url, error.what)
            return True

    def signed_ms(self) -> int:
        """When the sign was last written, in the file system's own time."""
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
            except LockstepError as error:  # the job itself meets the same storage, and raises
                log.warning("the sign of %s was not rewritten: %s", self.root, error.what)

    def _check(self) -> None:
        try:
            sign: dict[str, Any] | None = unseal_as(KIND, self.fs.read_bytes(self._sign), self._sign)
        except NotFoundError:
            sign = None
        if sign is None or sign.get("job") != self.job:
            raise StorageError(
                f"{self.root} was taken from this job",
                got="no sign of this job in it",
                allowed="a folder that nobody else touches",
                next_step="Run the job again; --clean of another job removes what has not been signed for a while.",
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
        told = {} if self._part_of is None else {"part_of": self._part_of}
        write_file(self.fs, self._sign, seal({**sign, **told}), exclusive=False)


def publish_beside(staging: Staging, manifest: bytes, apart: Staging | None) -> None:
    """Publish `apart` (a dataset's quarantine at a URL of its own) and then the dataset: both, or neither.

    Raises what Staging.publish raises. A dataset that was renamed before its publication failed, such as by a
    read-back without an answer, keeps its quarantine. A kill in between leaves a quarantine that etl.write.clean knows.
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
