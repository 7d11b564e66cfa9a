"""Strict reading of JSON objects: known keys only, all of them there, each of its type."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from lockstep.storage.errors import DataError

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CRC32C = re.compile(r"[0-9a-f]{8}")


def obj(value: Any, keys: Iterable[str], *, where: str) -> dict[str, Any]:
    """`value` as an object with exactly `keys`; else DataError naming `where`."""
    found = mapping(value, where=where)
    wanted = set(keys)
    if set(found) != wanted:
        unknown, missing = sorted(set(found) - wanted), sorted(wanted - set(found))
        raise _bad(where, f"unknown keys {unknown}, missing keys {missing}", f"exactly {sorted(wanted)}")
    return found


def mapping(value: Any, *, where: str) -> dict[str, Any]:
    """`value` as an object with any keys."""
    if not isinstance(value, dict):
        raise _bad(where, _show(value), "an object")
    return value


def items(value: Any, *, where: str) -> list[Any]:
    """`value` as a list."""
    if not isinstance(value, list):
        raise _bad(where, _show(value), "a list")
    return value


def count(value: Any, *, where: str, least: int = 0) -> int:
    """`value` as an integer of at least `least` (and below 2^63); true and 1.0 are none."""
    if type(value) is not int or not least <= value < 1 << 63:
        raise _bad(where, _show(value), f"an integer from {least} up")
    return value


def number(value: Any, *, where: str) -> float:
    """`value` as a number that is not negative; true is none."""
    if type(value) not in (int, float) or not value >= 0:
        raise _bad(where, _show(value), "a number from 0 up")
    return float(value)


def string(value: Any, *, where: str, choices: Iterable[str] | None = None) -> str:
    """`value` as a string, one of `choices` if given."""
    if not isinstance(value, str) or (choices is not None and value not in choices):
        raise _bad(where, _show(value), "a string" if choices is None else f"one of {sorted(choices)}")
    return value


def null(value: Any, *, where: str) -> None:
    """`value` as null, where no other value has a meaning."""
    if value is not None:
        raise _bad(where, _show(value), "null")


def sha256(value: Any, *, where: str) -> str:
    """`value` as 64 lower-case hex digits."""
    return _digest(value, _SHA256, 64, where)


def crc32c(value: Any, *, where: str) -> str:
    """`value` as 8 lower-case hex digits."""
    return _digest(value, _CRC32C, 8, where)


def _digest(value: Any, pattern: re.Pattern[str], digits: int, where: str) -> str:
    if not isinstance(value, str) or pattern.fullmatch(value) is None:
        raise _bad(where, _show(value), f"{digits} lower-case hex digits")
    return value


def _bad(where: str, got: str, allowed: str) -> DataError:
    return DataError(
        f"{where} is not as it must be",
        got=got,
        allowed=allowed,
        next_step="It was written by another version or changed; build it anew or use the version that wrote it.",
    )


def _show(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"[:200]
