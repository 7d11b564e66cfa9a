"""What jobs.profile_run feeds: batches whose blocks are near, and batches whose blocks were not read before."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.storage.errors import ConfigError
from lockstep.storage.urls import split_url
from training.batches.training_set import Feed, TrainingSet
from training.config import TrainConfig
from training.plan.planning import lane_groups
from training.reading.read_options import ReadOptions
from training.world import World


class ProfileData(AbstractContextManager["ProfileData"]):
    """One rank's. `near` is the feed to read the same batches from again and again: out of the page cache where the
    dataset lies on this host's disk and no --cache is named, else out of a cache of blocks in a folder that goes again.

    Raises ConfigError for a --cache that cannot be written, DataError where the payload's plan is another dataset's.
    """

    def __init__(self, config: TrainConfig, world: World, identity: dict[str, Any]) -> None:
        self._config, self._world = config, world
        self._stack = ExitStack()
        self._folder: str | None = None
        self._far: TrainingSet | None = None
        self._far_folder: str | None = None
        self.local = all(split_url(url)[0] == "file" for url in config.datasets)
        """Whether all shards lie on this host's disk."""
        try:
            if config.cache is not None or not self.local:
                self._folder = self._stack.enter_context(_folder_on(config.cache))
            opened = self._open(self._folder and f"{self._folder}/near")
            self.plan = opened.plan(identity)
            self.signature = opened.encoder.signature
            self.near = self._feed(opened)
        except BaseException:
            self._stack.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def far(self) -> Feed:
        """A feed whose blocks are in no cache of this host, so far as that can be had: the shards' pages are given back
        where they are local, and a cache is an empty one, which is filled as in a run's first epoch. What an earlier
        call gave is used no more.
        """
        if self._far is None or self._config.cache is not None:
            self._let_go()
            cache = None
            if self._config.cache is not None:
                assert self._folder is not None
                cache = self._far_folder = tempfile.mkdtemp(prefix="far-", dir=self._folder)
            self._far = self._open(cache)
        if self.local:
            for reader in self._far.readers:
                for _, url, _ in reader.stored:
                    drop_pages(split_url(url)[2])
        return self._feed(self._far)

    def _let_go(self) -> None:
        if self._far is not None:
            for reader in self._far.readers:
                reader.close()
        if self._far_folder is not None:
            shutil.rmtree(self._far_folder)  # each cold round has as much room as a run

    def _feed(self, opened: TrainingSet) -> Feed:
        return opened.feed(self.plan, self._world, groups=lane_groups(self._config))

    def _open(self, cache: str | None) -> TrainingSet:
        config = self._config
        options = replace(ReadOptions.of(config, self._world.num_ranks), cache=cache, cache_bytes=config.cache_bytes)
        opened = TrainingSet.at(config.datasets, config.split, config.mix, options)
        for reader in opened.readers:
            self._stack.callback(reader.close)
        return opened.skipping_bad_images() if config.bad_images == "skip" else opened


def drop_pages(path: str) -> None:
    """Have the kernel forget what it keeps of a file; what was not written to the disk yet is written first."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(descriptor)  # only pages that are on the disk can be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _folder_on(cache: str | None) -> tempfile.TemporaryDirectory[str]:
    """A folder of this rank on the disk of --cache (in the nearest folder above it that is there), else where temporary
    files lie.
    """
    place = None if cache is None else next(str(p) for p in (Path(cache), *Path(cache).parents) if p.is_dir())
    try:
        return tempfile.TemporaryDirectory(prefix="lockstep-profile-", dir=place)
    except OSError as error:
        raise ConfigError(
            f"{place or 'the folder of temporary files'} cannot hold a cache",
            got=error.strerror or str(error),
            allowed="a folder on a local disk that this user may write",
            next_step="Give --cache another folder, or set TMPDIR.",
        ) from error
