"""How a process reads a split: how much ahead, through which cache, and what is checked at the start."""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass, replace
from typing import Self

from lockstep.storage.errors import ConfigError
from training.config import TrainConfig
from training.reading.cache import BlockCache
from training.reading.fetch import READ_AHEAD_BYTES

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """Raises ConfigError for numbers that cannot be."""

    read_ahead_bytes: int = READ_AHEAD_BYTES
    """Bytes of shards that are on their way or wait to be decoded."""
    cache: str | None = None
    """A folder on a disk of this host, shared by all processes that name it; None is no cache."""
    cache_bytes: int = 0
    """The most that the folder holds, of all datasets and processes together."""
    ranks: int = 1
    """How many processes read the split, each its part."""

    def __post_init__(self) -> None:
        if self.cache == "":
            raise ConfigError(
                "cache cannot be right", got="an empty path", allowed="a folder", next_step="Correct --cache."
            )
        for name, least in (("read_ahead_bytes", 1), ("cache_bytes", 1 if self.cache else 0), ("ranks", 1)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"{name} cannot be right",
                    got=str(getattr(self, name)),
                    allowed=f"{least} or more",
                    next_step=f"Correct --{name.replace('_', '-')}.",
                )

    @classmethod
    def of(cls, config: TrainConfig, ranks: int) -> Self:
        """Those of a run's rank."""
        return cls(
            read_ahead_bytes=config.read_ahead_bytes, cache=config.cache, cache_bytes=config.cache_bytes, ranks=ranks
        )

    def shared_by(self, readers: int) -> ReadOptions:
        """The same for each of so many readers of one process: together they read as much ahead."""
        return replace(self, read_ahead_bytes=max(1, self.read_ahead_bytes // readers))

    def open_cache(self) -> BlockCache | None:
        """The cache; None where none is asked for, or its disk is full, which is told. Raises ConfigError for a folder
        that cannot be used.
        """
        if self.cache is None:
            return None
        try:
            return BlockCache(self.cache, self.cache_bytes)
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            told = error.strerror if isinstance(error, OSError) else None
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                log.warning("no cache in %s: %s; all is read from the dataset", self.cache, told)
                return None
            raise ConfigError(
                f"{self.cache!r} cannot be a cache",
                got=told or str(error),
                allowed="a folder on a local disk that this user may write, with locks (flock)",
                next_step="Give --cache another folder.",
            ) from error
