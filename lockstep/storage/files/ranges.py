"""Ranges of bytes of a file: what may be asked for, and the error where the file is too short for it."""

from __future__ import annotations

from lockstep.storage.errors import ConfigError, CorruptionError


def check_range(url: str, offset: int, length: int) -> None:
    """Raise ConfigError for a range with a negative start or length."""
    if offset < 0 or length < 0:
        raise ConfigError(
            f"a range of {url} cannot be read",
            got=f"offset {offset}, length {length}",
            allowed="numbers from 0 up",
            next_step="This is a fault of the caller.",
        )


def short_file(url: str, offset: int, length: int, size: int) -> CorruptionError:
    """The error for a file that ends before the bytes that must be there."""
    return CorruptionError(
        "file is shorter than it must be (cut off, or never closed by its writer)",
        file=url,
        offset=min(offset + length, size),
        got=f"{size} readable bytes",
        allowed=f"bytes {offset} to {offset + length}",
    )
