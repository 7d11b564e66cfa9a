"""Orders on their way to a supervisor that stays: they hold a generation's key and a rank's certificate.

Frames of the control channel are authenticated and not encrypted. An order is: AES-256-GCM under a key of one
supervisor, derived from the session's secret, which reached the supervisor with its task (docs/security.md).
"""

from __future__ import annotations

import base64
import hmac
import json
import os
import zlib
from typing import Any

NONCE_BYTES = 12


def seal_order(secret: bytes, rank: int, order: dict[str, Any]) -> str:
    """`order` as text that only the supervisor of `rank` can read. Equal orders give different texts."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # 60 ms that no rank needs to pay

    nonce = os.urandom(NONCE_BYTES)
    # Compressed, since a script of a MiB must fit into a frame; nobody else chooses a part of what lies beside secrets.
    plain = zlib.compress(json.dumps(order, ensure_ascii=False, allow_nan=False).encode("utf-8", "surrogatepass"))
    return base64.b64encode(nonce + AESGCM(_key(secret, rank)).encrypt(nonce, plain, None)).decode()


def open_order(secret: bytes, rank: int, sealed: str) -> dict[str, Any]:
    """The inverse of `seal_order`; raises ValueError for a text that was made with another secret or rank."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    data = base64.b64decode(sealed)
    try:
        plain = AESGCM(_key(secret, rank)).decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], None)
    except InvalidTag:
        raise ValueError(f"an order that is not for the supervisor of rank {rank} of this session") from None
    order: dict[str, Any] = json.loads(zlib.decompress(plain).decode("utf-8", "surrogatepass"))
    return order


def _key(secret: bytes, rank: int) -> bytes:
    return hmac.digest(secret, b"orders of the supervisor of rank %d" % rank, "sha256")
