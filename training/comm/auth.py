"""Mutual proof of the generation's key between two ranks, before anything else is read or allocated.

    caller -> listener   magic, generation, channel, num_ranks, caller's rank, listener's rank, nonce     (fixed size)
    listener -> caller   nonce, HMAC(key, "listener" + all bytes so far)
    caller -> listener   HMAC(key, "caller" + all bytes so far)
    listener -> caller   HMAC(key, "ready" + all bytes so far)

Fresh nonces on both sides make a recorded handshake worthless; the ranks stand inside the HMAC, so that a rank
cannot be taken for another one; the labels keep an answer from being reflected. The channel says which communicator
of the two ranks (the whole one or a group) the connection belongs to.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Container

_HELLO = struct.Struct("<8sQQIII32s")
_MAGIC = b"LOCKSTP2"
_NONCE_BYTES = 32
_MAC_BYTES = 32


class HandshakeError(Exception):
    """The other side did not prove that it is the expected rank of this generation."""


class DrivenOutError(HandshakeError):
    """The other side hung up before it had said what is wrong: a crowd at its door may be all that is."""


def call(
    sock: socket.socket, key: bytes, generation: int, num_ranks: int, rank: int, peer: int, channel: int, until: float
) -> None:
    """Prove to the listener that this is `rank`, and let it prove that it is `peer`, before monotonic time `until`.

    Raises HandshakeError or OSError; the socket is then of no use.
    """
    talk = _HELLO.pack(_MAGIC, generation, channel, num_ranks, rank, peer, secrets.token_bytes(_NONCE_BYTES))
    _send(sock, talk, until)
    talk += _receive(sock, _NONCE_BYTES, until)
    _expect(sock, key, b"listener", talk, until)
    _send(sock, _mac(key, b"caller", talk), until)
    _expect(sock, key, b"ready", talk, until)


def answer(
    sock: socket.socket, key: bytes, generation: int, num_ranks: int, rank: int, peers: Container[int], until: float
) -> tuple[int, int]:
    """The listener's side of `call`: accepts one of `peers` calling `rank` of this generation, nobody else.

    Returns (the caller's rank, the channel that it asks for).
    """
    hello = _receive(sock, _HELLO.size, until)
    magic, their_generation, channel, their_ranks, their_rank, called, _ = _HELLO.unpack(hello)
    if magic != _MAGIC:
        raise HandshakeError("it does not speak this protocol")
    if (their_generation, their_ranks, called) != (generation, num_ranks, rank) or their_rank not in peers:
        raise HandshakeError(
            f"it says rank {their_rank} of {their_ranks}, generation {their_generation}, calling rank {called}"
        )
    nonce = secrets.token_bytes(_NONCE_BYTES)
    talk = hello + nonce
    _send(sock, nonce + _mac(key, b"listener", talk), until)
    _expect(sock, key, b"caller", talk, until)
    _send(sock, _mac(key, b"ready", talk), until)
    return int(their_rank), int(channel)


def _mac(key: bytes, label: bytes, talk: bytes) -> bytes:
    return hmac.digest(key, label + b"\0" + talk, "sha256")


def _expect(sock: socket.socket, key: bytes, label: bytes, talk: bytes, until: float) -> None:
    if not hmac.compare_digest(_receive(sock, _MAC_BYTES, until), _mac(key, label, talk)):
        raise HandshakeError("it does not have the key of this generation")


def _send(sock: socket.socket, data: bytes, until: float) -> None:
    sock.settimeout(_left(until))
    sock.sendall(data)


def _receive(sock: socket.socket, size: int, until: float) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(_left(until))
        part = sock.recv(size - len(data))
        if not part:
            raise DrivenOutError("it closed the connection during the handshake")
        data += part
    return data


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("the handshake took too long")
    return left
