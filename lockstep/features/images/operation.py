"""What an operation of augmentation is, and how its settings are refused."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.features.images.augment import Draws
from lockstep.storage.errors import ConfigError

Images = NDArray[np.uint8]  # (n, H, W, C)


class Operation(ABC):
    """A random change of single images; a frozen dataclass of its settings."""

    __slots__ = ()

    def check(self, shape: tuple[int, int, int]) -> None:  # noqa: B027 - most operations take any shape
        """Raise ConfigError where images of `shape` (H, W, C) cannot be changed so."""

    @abstractmethod
    def apply(self, images: Images, draws: Draws) -> Images:
        """Changed images, a new array: (n, H, W, C) uint8, C-contiguous -> the same shape and dtype."""


def name_of(operation: Any) -> str:
    """The word of an operation in --augment."""
    return type(operation).__name__.lower()


def need(operation: Any, right: bool, allowed: str) -> None:
    """Raise ConfigError with the operation's settings unless they are right."""
    if not right:
        settings = [str(getattr(operation, field.name)) for field in fields(operation)]
        raise ConfigError(
            f"--augment {name_of(operation)} cannot be done",
            got=":".join([name_of(operation), *settings]),
            allowed=allowed,
            next_step="Correct --augment.",
        )
