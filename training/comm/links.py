"""The two authenticated connections of a rank in the ring: to the next rank and from the previous one."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable

from storage.errors import CommunicationError
from training.comm import auth

HANDSHAKE_S = 5.0  # for one caller: a stranger that says nothing must not hold the place of the real rank
MAX_HANDSHAKES = 16
RETRY_S = 0.05
SOCKET_BUFFER_BYTES = 4 << 20  # measured on loopback, see docs/decisions/040-communicator.md


def join(
    rank: int,
    num_ranks: int,
    generation: int,
    rendezvous: Callable[[str, int], list[tuple[str, int]]],
    key: bytes,
    deadline_s: float,
    host: str,
) -> tuple[socket.socket, socket.socket]:
    """Returns (socket to rank + 1, socket from rank - 1), both authenticated, non-blocking.

    Raises CommunicationError naming the rank that is missing or is not who it says.
    """
    until = time.monotonic() + deadline_s
    following, previous = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    listener = socket.create_server((host, 0), backlog=MAX_HANDSHAKES)
    door = _Door(listener, key, generation, num_ranks, rank, previous, until)
    to_next: socket.socket | None = None
    try:
        table = rendezvous(host, listener.getsockname()[1])
        if len(table) != num_ranks:
            raise CommunicationError(
                f"rank {rank}: the rendezvous returned a wrong table",
                got=f"{len(table)} addresses",
                allowed=f"{num_ranks}",
                next_step="Start the run again.",
            )
        to_next = _call(table[following], key, generation, num_ranks, rank, following, until)
        from_previous = door.wait()
    except BaseException:
        if to_next is not None:
            to_next.close()
        raise
    finally:
        door.close()
    for sock in (to_next, from_previous):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setblocking(False)
    return to_next, from_previous


def _buffers(sock: socket.socket) -> None:
    """Ask for large buffers; must come before the connection, or TCP's window scale is fixed too small for them."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)


def _call(
    address: tuple[str, int], key: bytes, generation: int, num_ranks: int, rank: int, peer: int, until: float
) -> socket.socket:
    host, port = address
    while True:
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            _buffers(sock)
            sock.settimeout(max(0.01, until - time.monotonic()))
            sock.connect((host, port))
            auth.call(sock, key, generation, num_ranks, rank, peer, 0, until)
            return sock
        except (OSError, auth.HandshakeError) as error:
            sock.close()
            refused = isinstance(error, ConnectionRefusedError)
            if refused and time.monotonic() + RETRY_S < until:
                time.sleep(RETRY_S)
                continue
            raise CommunicationError(
                f"rank {rank} could not join rank {peer} at {host}:{port}",
                got=str(error) or type(error).__name__,
                allowed=f"rank {peer} of {num_ranks}, generation {generation}, with the key of that generation",
                next_step=f"Look at the log of rank {peer}; a firewall or an older attempt may be in the way.",
            ) from error


class _Door:
    """Accepts callers until one proves to be the previous rank; strangers are turned away and do not block it."""

    def __init__(
        self, listener: socket.socket, key: bytes, generation: int, num_ranks: int, rank: int, peer: int, until: float
    ) -> None:
        self._listener, self._until = listener, until
        self._who = (key, generation, num_ranks, rank, peer)
        self._proved: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._slots = threading.Semaphore(MAX_HANDSHAKES)
        self._refused = ""
        self._lock = threading.Lock()
        self._closed = False
        _buffers(listener)  # accepted sockets inherit them
        threading.Thread(target=self._accept, name="ring-door", daemon=True).start()

    def wait(self) -> socket.socket:
        _, generation, num_ranks, rank, peer = self._who
        try:
            return self._proved.get(timeout=max(0.01, self._until - time.monotonic()))
        except queue.Empty:
            raise CommunicationError(
                f"rank {rank} waited for rank {peer} to join the ring, and it did not",
                got=f"the last caller was refused: {self._refused}" if self._refused else "no caller",
                allowed=f"rank {peer} of {num_ranks}, generation {generation}",
                next_step=f"Look at the log of rank {peer}.",
            ) from None

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._listener.close()
        while not self._proved.empty():  # a second caller with the key: not needed
            self._proved.get().close()

    def _accept(self) -> None:
        self._listener.settimeout(0.2)  # a closed listener does not wake accept() everywhere
        while time.monotonic() < self._until:
            self._slots.acquire()
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                self._slots.release()
                if self._closed:
                    return
                continue
            except OSError:  # the door was closed
                return
            threading.Thread(target=self._examine, args=(sock,), name="ring-handshake", daemon=True).start()

    def _examine(self, sock: socket.socket) -> None:
        key, generation, num_ranks, rank, peer = self._who
        try:
            until = min(self._until, time.monotonic() + HANDSHAKE_S)
            auth.answer(sock, key, generation, num_ranks, rank, (peer,), until)
        except (OSError, auth.HandshakeError) as error:
            self._refused = str(error)
            sock.close()
        else:
            with self._lock:
                if self._closed:
                    sock.close()
                else:
                    self._proved.put(sock)
        finally:
            self._slots.release()
