"""A rank's listener and its connections to other ranks, made when a collective first needs them.

In a pair the lower rank calls. A connection belongs to a channel, the whole communicator or one of its groups, which
the handshake names; one that arrives before this rank asks for it is kept. A rank that waits for another one's call
holds a lifeline to it meanwhile: an idle connection whose end shows at once that that rank has ended.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from lockstep.storage.errors import CommunicationError
from lockstep.training.comm import auth
from lockstep.training.comm.auth import BACKLOG, Reception
from lockstep.training.comm.tcp.link import Link
from lockstep.training.comm.tcp.parting import say_farewell
from lockstep.training.comm.tls import Tls

SOCKET_BUFFER_BYTES = 4 << 20  # measured on loopback, see docs/decisions/040-communicator.md
LIFELINE = (1 << 64) - 1  # the channel of lifelines
RETRY_S = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)  # pauses, when the other rank had too many callers
ANSWER_S = 30.0  # for a lifeline; then this rank calls again


class Mesh:
    """Listens from the start; `rendezvous` then exchanges addresses. Several threads may use it."""

    def __init__(
        self, rank: int, num_ranks: int, generation: int, key: bytes, host: str, tls: Tls | None = None
    ) -> None:
        self.rank, self.num_ranks, self.generation = rank, num_ranks, generation
        self._key, self._tls = key, tls
        self._addresses: list[tuple[str, int]] = []
        self._lock = threading.Lock()
        self._arrived: dict[tuple[int, int], socket.socket] = {}
        self._failed: dict[tuple[int, int], str] = {}
        self._asked: set[tuple[int, int]] = set()
        self._gone: dict[int, str] = {}
        self._ended: dict[int, str | None] = {}  # channels, and the reason if they failed
        self._lifelines: list[socket.socket] = []
        self._wakers: dict[int, Callable[[], None]] = {}
        self._closed = False
        self._reception = Reception(f"rank {rank}", self._examine, float("inf"))
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        _buffers(self._listener)  # accepted sockets inherit them
        threading.Thread(target=self._reception.serve, args=(self._listener,), name="mesh-door", daemon=True).start()

    def rendezvous(self, exchange: Callable[[str, int], list[tuple[str, int]]]) -> None:
        """Exchange addresses: send this rank's, get all in rank order. Raises CommunicationError for a wrong table."""
        table = exchange(*self._listener.getsockname()[:2])
        if len(table) != self.num_ranks:
            raise CommunicationError(
                f"rank {self.rank}: the rendezvous returned a wrong table",
                got=f"{len(table)} addresses",
                allowed=f"{self.num_ranks}",
                next_step="Start the run again.",
            )
        self._addresses = table

    def ask(self, channel: int, peers: Sequence[int], wake: Callable[[], None], until: float) -> None:
        """Begin to connect with `peers` on `channel`; another thread calls `wake` when one has connected or failed."""
        with self._lock:
            self._wakers[channel] = wake
            fresh = [peer for peer in peers if peer > self.rank and (channel, peer) not in self._asked]
            self._asked.update((channel, peer) for peer in fresh)
        for peer in fresh:
            threading.Thread(target=self._call, args=(channel, peer, until), name="mesh-call", daemon=True).start()

    def take(self, channel: int, peer: int) -> socket.socket | str | None:
        """The connection; or the reason why there will be none; or None while neither is known."""
        with self._lock:
            sock = self._arrived.pop((channel, peer), None)
            return sock or self._failed.get((channel, peer)) or self._gone.get(peer)

    def watch(self, peer: int) -> None:
        """Hold a lifeline to `peer` from now on."""
        with self._lock:
            if (LIFELINE, peer) in self._asked:
                return
            self._asked.add((LIFELINE, peer))
        threading.Thread(target=self._hold, args=(peer,), name="mesh-lifeline", daemon=True).start()

    def address(self, peer: int) -> str:
        """Return host:port of a rank, for errors."""
        host, port = self._addresses[peer]
        return f"{host}:{port}"

    @property
    def last_refused(self) -> str:
        """The address and reason of the last refused caller; empty if there was none."""
        return self._reception.last

    def close(self) -> None:
        """Stop listening and close connections that no communicator has taken. Safe to call twice."""
        with self._lock:
            self._closed = True
            kept = [*self._arrived.values(), *self._lifelines]
            self._arrived.clear()
        self._listener.close()
        self._reception.close()
        for sock in kept:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def forget(self, channel: int, reason: str | None) -> list[Link]:
        """A communicator has ended: answer later callers with `reason`, and return the connections it has not taken."""
        with self._lock:
            self._ended.setdefault(channel, reason)
            self._wakers.pop(channel, None)
            self._asked = {asked for asked in self._asked if asked[0] != channel}
            left = [key for key in self._arrived if key[0] == channel]
            return [Link(self._arrived.pop(key), 0, key[1]) for key in left]

    def let_go(self) -> None:
        """Close this forked process's copies of the sockets, which stay open in the rank."""
        self._lock, self._closed = threading.Lock(), True  # a thread that does not exist here may hold the old lock
        for sock in (self._listener, *self._arrived.values(), *self._lifelines):
            sock.close()

    def _call(self, channel: int, peer: int, until: float) -> None:
        try:
            self._keep(channel, peer, self._connect(channel, peer, until))
        except (OSError, auth.HandshakeError) as error:
            with self._lock:
                self._failed[channel, peer] = str(error) or type(error).__name__
        self._wake(channel)

    def _hold(self, peer: int) -> None:
        reason = ""
        while not reason and not self._closed:
            try:
                sock = self._connect(LIFELINE, peer, time.monotonic() + ANSWER_S)
                with self._lock:
                    self._lifelines.append(sock)
                    if self._closed:  # meanwhile, so `close` did not see this one
                        sock.close()
                        return
                sock.settimeout(None)
                sock.recv(1)  # the other side sends nothing; this returns at its end
                reason = "its connection was closed or reset"
            except TimeoutError:  # frozen, not dead
                continue
            except (OSError, auth.HandshakeError) as error:
                reason = str(error) or type(error).__name__
        with self._lock:
            self._gone[peer] = reason
            channels = list(self._wakers)
        for channel in channels:
            self._wake(channel)

    def _connect(self, channel: int, peer: int, until: float) -> socket.socket:
        for pause_s in RETRY_S:
            try:
                return self._connect_once(channel, peer, until)
            except (auth.DrivenOutError, ConnectionResetError, BrokenPipeError):
                if self._closed or time.monotonic() + pause_s > until:
                    raise
                time.sleep(pause_s)
        return self._connect_once(channel, peer, until)

    def _connect_once(self, channel: int, peer: int, until: float) -> socket.socket:
        host, port = self._addresses[peer]
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            _buffers(sock)
            sock.settimeout(max(0.01, until - time.monotonic()))
            sock.connect((host, port))
            if self._tls is not None:
                sock = self._tls.call(sock, peer, until)
            auth.call(sock, self._key, self.generation, self.num_ranks, self.rank, peer, channel, until)
        except BaseException:
            sock.close()
            raise
        return sock

    def _examine(self, sock: socket.socket, until: float, proved: Callable[[], None]) -> None:
        if self._tls is not None:
            sock = self._tls.answer(sock, until)
        peers = [peer for peer in range(self.num_ranks) if peer != self.rank]
        try:
            peer, channel = auth.answer(sock, self._key, self.generation, self.num_ranks, self.rank, peers, until)
            if self._tls is not None:
                self._tls.check_caller(sock, peer)
            if peer > self.rank and channel != LIFELINE:
                raise auth.HandshakeError(f"rank {peer} must be called, not call")
            proved()
        except BaseException:
            sock.close()  # TLS has replaced the socket that our caller would close
            raise
        if channel == LIFELINE:
            with self._lock:
                if self._closed:
                    sock.close()
                self._lifelines.append(sock)
            return
        self._keep(channel, peer, sock)
        self._wake(channel)

    def _keep(self, channel: int, peer: int, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setblocking(False)
        with self._lock:
            ended = self._closed or channel in self._ended
            if not ended:
                former = self._arrived.pop((channel, peer), None)
                if former is not None:  # a caller that was cut off after its handshake calls again
                    former.close()
                self._arrived[channel, peer] = sock
        if ended:  # this may be the only way for the other rank to learn the reason, and not to blame this rank
            say_farewell({Link(sock, 0, peer): self._ended.get(channel)}, self.generation)
            sock.close()
            raise auth.HandshakeError("this rank, or its part in the group, has ended")

    def _wake(self, channel: int) -> None:
        with self._lock:
            wake = self._wakers.get(channel)
        if wake is not None:
            wake()


def _buffers(sock: socket.socket) -> None:
    """Ask for large buffers; must come before the connection, or TCP's window scale is fixed too small for them."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
