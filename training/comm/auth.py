"""Two ranks prove to each other that they have the generation's key, before anything else is read or allocated.

    caller -> listener   magic, generation, channel, num_ranks, caller's rank, listener's rank, nonce     (fixed size)
    listener -> caller   nonce, HMAC(key, "listener" + all bytes so far)
    caller -> listener   HMAC(key, "caller" + all bytes so far)
    listener -> caller   HMAC(key, "ready" + all bytes so far)

Fresh nonces on both sides make a recorded handshake worthless; the HMAC covers the ranks, so that no rank can pass for
another; the labels keep an answer from being reflected. The channel says to which communicator of the two ranks (the
whole one or a group) the connection belongs.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Container
from contextlib import suppress

_HELLO = struct.Struct("<8sQQIII32s")
_MAGIC = b"LOCKSTP2"
_NONCE_BYTES = 32
_MAC_BYTES = 32
HANDSHAKE_S = 5.0  # for one caller; a rank needs milliseconds
PATIENCE_S = 0.25  # no caller has to make room for others before that: of many ranks at once each gets its turn
ACCEPT_S = 0.2  # a closed listener does not wake accept() everywhere
MAX_CALLERS = 32  # at once, a thread and one fixed-size hello each
BACKLOG = 1024  # callers that the kernel queues meanwhile; those beyond would try again after a second
LOG_EVERY_S = 1.0
_CREDENTIALS = struct.Struct("3i")  # of SO_PEERCRED: process, user, group


class HandshakeError(Exception):
    """The other side did not prove that it is the expected rank of this generation."""


class DrivenOutError(HandshakeError):
    """The other side hung up without a reason: it may only have had too many callers."""


def call(
    sock: socket.socket, key: bytes, generation: int, num_ranks: int, rank: int, peer: int, channel: int, until: float
) -> None:
    """Prove to the listener that this is `rank`, and let it prove that it is `peer`, before monotonic time `until`.

    Raises HandshakeError or OSError; the socket is then unusable.
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
    """The listener's side of `call`: accepts only `peers` of this generation that call `rank`.

    Returns (the caller's rank, the channel that it requests).
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


log = logging.getLogger(__name__)
Examine = Callable[[socket.socket, float, Callable[[], None]], None]


class Reception:
    """Authenticates each caller in a thread of its own.

    `examine(sock, until, proved)` calls `proved()` when the caller has proved its identity, and only then hands the
    socket on: up to that call the socket may be hung up on at any moment, after it never. It raises HandshakeError or
    OSError, as `proved` does for a caller already hung up on; the socket is then closed and the refusal logged. While
    MAX_CALLERS are examined, a new caller replaces the oldest one of the address with the most callers: an attacker
    with hundreds of connections displaces its own.
    """

    def __init__(self, whom: str, examine: Examine, until: float) -> None:
        self._whom, self._examine, self._until = whom, examine, until
        self._callers: dict[socket.socket, tuple[str, float]] = {}  # address, time; in the order in which they came
        self._slots = threading.BoundedSemaphore(MAX_CALLERS)
        self._lock = threading.Lock()
        self._logged_at, self._unlogged = -LOG_EVERY_S, 0
        self.refused = 0
        """Callers refused so far."""
        self.last = ""
        """Address and reason of the last refusal; empty before that."""

    def serve(self, listener: socket.socket) -> None:
        """Admit all callers, until `listener` is closed."""
        with suppress(OSError):  # closed before this thread began
            listener.settimeout(ACCEPT_S)
        while listener.fileno() >= 0:
            try:
                sock, address = listener.accept()
                self.admit(sock, address[0] if address else f"process {peer_of(sock)[0]}")
            except TimeoutError:
                continue
            except OSError as error:
                if listener.fileno() >= 0:  # still open: the network failed, or the process is out of descriptors
                    self._refuse("somewhere", str(error))
                    time.sleep(ACCEPT_S)

    def admit(self, sock: socket.socket, address: str) -> None:
        """Begin to examine a caller; returns at once, or as soon as another caller has made room."""
        wait_s = 0.0
        while not self._slots.acquire(timeout=wait_s):
            wait_s = self._make_room()
        handle: socket.socket | None = None
        try:
            handle = sock.dup()  # wrapping the caller's own socket in TLS detaches it
            with self._lock:
                self._callers[handle] = address, time.monotonic()
            threading.Thread(target=self._run, args=(sock, handle, address), name="handshake", daemon=True).start()
        except (OSError, RuntimeError) as error:  # out of descriptors or threads
            sock.close()
            self._done_with(handle)
            raise OSError(str(error)) from error

    def close(self) -> None:
        """Hang up on all callers that have not proved their identity."""
        with self._lock:
            for handle in self._callers:
                _hang_up(handle)
            self._callers.clear()

    def _make_room(self) -> float:
        """Hang up on one caller, if it has had its time; returns how many seconds to wait for a slot."""
        with self._lock:
            crowd = Counter(address for address, _ in self._callers.values()).most_common(1)
            for handle, (address, came_at) in self._callers.items():
                if address == crowd[0][0]:
                    left = came_at + PATIENCE_S - time.monotonic()
                    if left > 0:
                        return left
                    _hang_up(handle)
                    del self._callers[handle]
                    break
        return 0.5  # for its thread to end

    def _run(self, sock: socket.socket, handle: socket.socket, address: str) -> None:
        def proved() -> None:
            with self._lock:
                if self._callers.pop(handle, None) is None:
                    raise DrivenOutError("it was hung up on at the end of its handshake")

        try:
            self._examine(sock, min(self._until, time.monotonic() + HANDSHAKE_S), proved)
        except (OSError, HandshakeError) as error:
            sock.close()
            self._refuse(address, str(error) or type(error).__name__)
        finally:
            self._done_with(handle)

    def _done_with(self, handle: socket.socket | None) -> None:
        if handle is not None:
            with self._lock:
                self._callers.pop(handle, None)
            handle.close()
        self._slots.release()

    def _refuse(self, address: str, reason: str) -> None:
        with self._lock:
            self.refused += 1
            self.last = f"{address}: {reason}"
            now = time.monotonic()
            if now - self._logged_at < LOG_EVERY_S:
                self._unlogged += 1
                return
            more, self._logged_at, self._unlogged = self._unlogged, now, 0
        and_more = f" ({more} more before it)" if more else ""
        log.warning("%s refused a caller from %s%s", self._whom, self.last, and_more)


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return (process, user) at the other end of a Unix socket, which has no addresses."""
    process, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return process, user


def _hang_up(handle: socket.socket) -> None:
    with suppress(OSError):  # it has hung up itself
        handle.shutdown(socket.SHUT_RDWR)
