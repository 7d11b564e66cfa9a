"""Canonical JSON and digests: one value has one text, so that a digest over the text is a digest of the value."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import google_crc32c

from lockstep.storage.errors import CorruptionError, DataError


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
    """Decode canonical JSON. Raises CorruptionError where `data` is not byte for byte what we would have written."""
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
            "not JSON that we write",
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


def crc32c_hex(data: bytes | bytearray | memoryview, crc: int = 0) -> str:
    """CRC-32C (Castagnoli, unmasked) as 8 lower-case hex digits; `crc` continues an earlier value."""
    return f"{google_crc32c.extend(crc, bytes(data)):08x}"


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
