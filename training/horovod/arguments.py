"""Horovod's arguments that have no meaning here: refused by name, unless they are hints that change no value."""

from __future__ import annotations

from typing import Any, NoReturn

from lockstep.storage.errors import ConfigError

HINTS = {
    "device_dense": str,
    "device_sparse": str,
    "device": str,
    "use_locking": bool,
    "num_groups": int,
    "groups": int | list,
}
"""Where, and how many at a time, Horovod sends tensors; what is summed is the same without. Their types."""


def check(call: str, **given: Any) -> None:
    """Take hints, and the set of all ranks as `process_set`; refuse any other argument that is not at its default.

    None, "", False, 0 and empty lists are defaults. Raises ConfigError for an argument that has no meaning here, and
    for a hint that cannot be one: a value that was meant for another argument.
    """
    for name, value in given.items():
        if value is None or (name == "process_set" and getattr(value, "process_set_id", None) == 0):
            continue
        if name not in HINTS:
            if value not in ("", False, 0, []):
                absent(f"{call}({name}=...)", repr(value))
        elif not isinstance(value, HINTS[name]):
            raise ConfigError(
                f"hvd.{call} got a `{name}` that cannot be right",
                got=repr(value),
                allowed=f"{getattr(HINTS[name], '__name__', HINTS[name])}, which changes nothing here",
                next_step="Pass arguments by keyword: Horovod's modules have them in different orders.",
            )


def absent(what: str, got: str = "", instead: str = "") -> NoReturn:
    """Raise ConfigError for a part of Horovod that is not here."""
    raise ConfigError(
        f"training.horovod has no {what}",
        got=got or what,
        allowed="what docs/launch.md lists",
        next_step=instead or "Leave it out, or see docs/launch.md for what stands in its place.",
    )
