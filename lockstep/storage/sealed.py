"""Sealed JSON: canonical JSON that carries its own SHA-256, so that a flipped byte in a manifest is seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.storage.documents import canonical_bytes, parse_canonical, sha256_hex
from lockstep.storage.errors import CorruptionError, DataError

SEAL = "manifest_sha256"


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


def unseal_as(kind: str, data: bytes, where: str, *, version: int | tuple[int, ...] = 1) -> dict[str, Any]:
    """`unseal`, for a document that says its kind; raises DataError for another kind or a version unknown here."""
    doc = unseal(data, where)
    told, known = doc.get("format_version"), (version,) if isinstance(version, int) else version
    if doc.get("kind") != kind or told not in known or type(told) is not int:  # Python takes true and 1.0 for 1
        raise DataError(
            f"{where} is no {kind} that this version reads",
            got=f"kind {doc.get('kind')!r}, format_version {told!r}",
            allowed=f"kind {kind!r}, format_version {' or '.join(map(str, known))}",
            next_step=f"Give a {kind} of this version of Lockstep.",
        )
    return doc
