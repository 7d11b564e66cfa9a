"""What is said of a flag whose value cannot be right."""

from __future__ import annotations

from lockstep.storage.errors import ConfigError


def check_flag(good: bool, what: str, got: str, allowed: str) -> None:
    """Raise ConfigError, naming the flag `what`, unless its value is `good`."""
    if not good:
        raise ConfigError(
            f"{what} cannot be right",
            got=got or "nothing",
            allowed=allowed,
            next_step="Correct it; --help lists the flags.",
        )
