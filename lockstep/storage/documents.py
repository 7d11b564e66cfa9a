"""JSON documents: canonical text, a seal by digest, and strict reading of each value.

Each value has exactly one text, so a digest of the text is a digest of the value.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from lockstep.storage.errors import CorruptionError, DataError

SEAL = "manifest_sha256"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CRC32C = re.compile(r"[0-9a-f]{8}")


def canonical_bytes(value: Any) -> bytes:
    """Encode a JSON value: keys sorted by code point, no spaces, UTF-8 unescaped, no trailing newline.

    Raises DataError for what JSON cannot hold unambiguously: NaN, infinities, keys that are no strings, lone
    surrogates, other types.
    """
    _check_keys(value)
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            "a value has no canonical JSON form",
            got=str(error).splitlines()[0],
            allowed="objects with string keys, lists, strings, finite numbers, true, false, null",
            next_step="Convert the value before it is written.",
        ) from error


def parse_canonical(data: bytes, *, file: str) -> Any:
    """Decode canonical JSON. Raises CorruptionError unless `data` is byte for byte the canonical form."""
    try:
        value = json.loads(data.decode("utf-8"))
        same = canonical_bytes(value) == data
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        place = error.start if isinstance(error, UnicodeDecodeError) else error.pos
        raise CorruptionError(
            "not JSON in UTF-8", file=file, offset=place, got=str(error), allowed="the exact bytes that were written"
        ) from None
    except (ValueError, RecursionError, DataError) as error:
        raise CorruptionError(
            "not JSON in our canonical form",
            file=file,
            got=str(error).splitlines()[0],
            allowed="the exact bytes that were written",
        ) from None
    if not same:
        raise CorruptionError(
            "JSON that is not in canonical form",
            file=file,
            got="other spacing, key order, number form or repeated keys",
            allowed="the exact bytes that were written",
        )
    return value


def sha256_hex(data: bytes | bytearray | memoryview) -> str:
    """SHA-256 as 64 lower-case hex digits."""
    return hashlib.sha256(data).hexdigest()


def _check_keys(value: Any) -> None:
    # json.dumps would turn the key 1 into "1" in silence, so that two values share one text.
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            for key in item:
                if not isinstance(key, str):
                    raise DataError(
                        "a JSON object has a key that is not a string",
                        got=repr(key),
                        allowed="string keys",
                        next_step="Convert the key before it is written.",
                    )
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)


def seal(doc: Mapping[str, Any]) -> bytes:
    """Canonical JSON of `doc` with the key `manifest_sha256` added, the digest of the JSON without it."""
    if SEAL in doc:
        raise DataError(
            f"a document holds {SEAL} already", got=repr(doc[SEAL]), allowed="no such key", next_step="Seal it once."
        )
    return canonical_bytes({**doc, SEAL: sha256_hex(canonical_bytes(dict(doc)))})


def unseal(data: bytes, where: str) -> dict[str, Any]:
    """The document that `seal` wrote, without the seal. Raises CorruptionError naming `where` if it was changed."""
    doc = parse_canonical(data, file=where)
    if not isinstance(doc, dict) or not isinstance(doc.get(SEAL), str):
        raise CorruptionError(
            "a manifest without its digest", file=where, got=type(doc).__name__, allowed=f"a key {SEAL}"
        )
    stated = doc.pop(SEAL)
    actual = sha256_hex(canonical_bytes(doc))
    if actual != stated:
        raise CorruptionError(
            "a manifest does not match its own digest", file=where, got=f"sha256 {actual}", allowed=f"sha256 {stated}"
        )
    return doc


def unseal_as(kind: str, data: bytes, where: str, *, version: int = 1) -> dict[str, Any]:
    """Read a document that names its kind, as `unseal` does; raises DataError for another kind or version."""
    doc = unseal(data, where)
    found = doc.get("format_version")
    if doc.get("kind") != kind or found != version or type(found) is not int:  # Python takes true and 1.0 for 1
        raise DataError(
            f"{where} is no {kind} that this version reads",
            got=f"kind {doc.get('kind')!r}, format_version {found!r}",
            allowed=f"kind {kind!r}, format_version {version}",
            next_step=f"Give a {kind} of this version of Lockstep.",
        )
    return doc


def obj(value: Any, keys: Iterable[str], *, where: str) -> dict[str, Any]:
    """Return `value` as an object with exactly `keys`; else raise DataError naming `where`."""
    found = mapping(value, where=where)
    wanted = set(keys)
    if set(found) != wanted:
        unknown, missing = sorted(set(found) - wanted), sorted(wanted - set(found))
        raise _bad(where, f"unknown keys {unknown}, missing keys {missing}", f"exactly {sorted(wanted)}")
    return found


def mapping(value: Any, *, where: str) -> dict[str, Any]:
    """Return `value` as an object with any keys."""
    if not isinstance(value, dict):
        raise _bad(where, _show(value), "an object")
    return value


def items(value: Any, *, where: str) -> list[Any]:
    """Return `value` as a list."""
    if not isinstance(value, list):
        raise _bad(where, _show(value), "a list")
    return value


def count(value: Any, *, where: str, least: int = 0) -> int:
    """Return `value` as an integer of at least `least` (and below 2^63); true and 1.0 are none."""
    if type(value) is not int or not least <= value < 1 << 63:
        raise _bad(where, _show(value), f"an integer from {least} up")
    return value


def number(value: Any, *, where: str) -> float:
    """Return `value` as a number that is not negative; true is none."""
    if type(value) not in (int, float) or not value >= 0:
        raise _bad(where, _show(value), "a number from 0 up")
    return float(value)


def string(value: Any, *, where: str, choices: Iterable[str] | None = None) -> str:
    """Return `value` as a string, one of `choices` if given."""
    if not isinstance(value, str) or (choices is not None and value not in choices):
        raise _bad(where, _show(value), "a string" if choices is None else f"one of {sorted(choices)}")
    return value


def null(value: Any, *, where: str) -> None:
    """Check that `value` is null, the only value allowed there."""
    if value is not None:
        raise _bad(where, _show(value), "null")


def sha256(value: Any, *, where: str) -> str:
    """Return `value` as 64 lower-case hex digits."""
    return _digest(value, _SHA256, 64, where)


def crc32c(value: Any, *, where: str) -> str:
    """Return `value` as 8 lower-case hex digits."""
    return _digest(value, _CRC32C, 8, where)


def _digest(value: Any, pattern: re.Pattern[str], digits: int, where: str) -> str:
    if not isinstance(value, str) or pattern.fullmatch(value) is None:
        raise _bad(where, _show(value), f"{digits} lower-case hex digits")
    return value


def _bad(where: str, got: str, allowed: str) -> DataError:
    return DataError(
        f"{where} has an invalid value",
        got=got,
        allowed=allowed,
        next_step="It was changed, or written by another version: build it again, or use the version that wrote it.",
    )


def _show(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"[:200]
