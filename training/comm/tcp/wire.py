"""Bytes to and from a non-blocking socket, plain or TLS, in the same words."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence

PIECE_BYTES = 128 << 10  # of TLS at a time: eight records; see docs/decisions/044-links-between-hosts.md


def send_some(sock: socket.socket, parts: Sequence[memoryview]) -> int:
    """Send the beginning of `parts`; returns how many bytes were taken, 0 where the socket takes none now.

    After a 0 the next call must begin with the same bytes (TLS has encrypted some of them already).
    Raises OSError when the connection is lost.
    """
    if not isinstance(sock, ssl.SSLSocket):
        try:
            return sock.sendmsg(parts)
        except BlockingIOError:
            return 0
    first = parts[0]
    if len(parts) > 1 and len(first) < PIECE_BYTES:  # a header alone would be a record and a packet of its own
        first = memoryview(b"".join([first, parts[1][: PIECE_BYTES - len(first)]]))
    try:
        return sock.send(first[:PIECE_BYTES])
    except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
        return 0


def receive_some(sock: socket.socket, parts: Sequence[memoryview]) -> int | None:
    """Fill the beginning of `parts`; returns the bytes that came, 0 at the end, None where nothing is there now.

    TLS hands over whole records: ask again until None (or `held`), since poll knows nothing of what TLS holds already.
    Raises OSError when the connection is lost.
    """
    if not isinstance(sock, ssl.SSLSocket):
        try:
            return sock.recvmsg_into(parts)[0]
        except BlockingIOError:
            return None
    total = 0
    for part in parts:
        while part:
            try:
                count = sock.recv_into(part)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return total or None
            if count == 0:
                return total
            total += count
            part = part[count:]
    return total


def held(sock: socket.socket) -> bool:
    """Whether decrypted bytes wait in TLS itself, for which poll would never wake."""
    return isinstance(sock, ssl.SSLSocket) and sock.pending() > 0
