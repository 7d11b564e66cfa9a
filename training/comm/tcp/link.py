"""One connection to another rank: its socket, its counters, and the calls under way on it."""

from __future__ import annotations

import select
import socket
import ssl
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.training.comm.base import LinkUse
from lockstep.training.comm.frames import HEADER_BYTES
from lockstep.training.comm.tcp.schedule import Program, Receive, Send

PIECE_BYTES = 128 << 10  # of TLS at a time: eight records; see docs/decisions/044-links-between-hosts.md
# Fields of struct tcp_info (linux/tcp.h): tcpi_bytes_acked; tcpi_busy_time and tcpi_rwnd_limited in microseconds.
_ACKED, _ACKED_AT = struct.Struct("@Q"), 120
_BUSY, _BUSY_AT = struct.Struct("@QQ"), 168
HUNG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL


def send_some(sock: socket.socket, parts: Sequence[memoryview]) -> int:
    """Send the beginning of `parts`; returns how many bytes were taken, 0 where the socket takes none now.

    After a 0 the next call must begin with the same bytes: TLS has already encrypted some of them.
    Raises OSError when the connection is lost.
    """
    if not isinstance(sock, ssl.SSLSocket):
        try:
            return sock.sendmsg(parts)
        except BlockingIOError:
            return 0
    first = parts[0]
    if len(parts) > 1 and len(first) < PIECE_BYTES:  # or the header would be a record and a packet of its own
        first = memoryview(b"".join([first, parts[1][: PIECE_BYTES - len(first)]]))
    try:
        return sock.send(first[:PIECE_BYTES])
    except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
        return 0


def receive_some(sock: socket.socket, parts: Sequence[memoryview]) -> int | None:
    """Fill the beginning of `parts`; returns the bytes received, 0 at the end, None if nothing is there now.

    TLS decrypts whole records: call again until None (or ask `held`), since poll does not see what TLS holds. Raises
    OSError when the connection is lost.
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


def link_use(sock: socket.socket) -> LinkUse:
    """The use of a connection so far."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BUSY_AT + _BUSY.size)
    except OSError:  # it was closed, or is no TCP
        return LinkUse(0.0, 0.0)
    if len(info) < _BUSY_AT + _BUSY.size:
        return LinkUse(0.0, 0.0)
    busy, full = _BUSY.unpack_from(info, _BUSY_AT)
    return LinkUse(max(0, busy - full) / 1e6, _ACKED.unpack_from(info, _ACKED_AT)[0])


class Call:
    """One run of `program` over `buf`; the engine counts its remaining frames."""

    __slots__ = (
        "_copies",
        "_done",
        "buf",
        "counts",
        "frames",
        "left",
        "number",
        "program",
        "raw",
        "tag",
        "total",
        "ufunc",
        "what",
    )

    def __init__(
        self, what: str, tag: int, program: Program, buf: NDArray[Any], ufunc: np.ufunc, *, counts: bool = True
    ) -> None:
        self.what, self.tag, self.program, self.buf, self.ufunc = what, tag, program, buf, ufunc
        self.raw: NDArray[np.uint8] = buf.view(np.uint8)
        self.total = buf.nbytes
        """Bytes of the whole call, equal on all of its ranks; each frame states it."""
        self.counts = counts
        """Whether it is a collective, of all ranks."""
        self.number = 0
        """Collectives of the communicator before this one, modulo 2**32; set when it begins."""
        self.frames = self.left = len(program.sends) + len(program.receives)
        self._done = bytearray(len(program.receives))
        self._copies: dict[Send, NDArray[np.uint8]] | None = None

    def keep_copies(self) -> None:
        """Copy each frame from now on when it becomes ready: it may have to wait for the frames of another call."""
        self._copies = {}
        self._copy_ready(self.program.sends)

    def payload(self, send: Send) -> NDArray[np.uint8]:
        """What this frame carries, which is ready."""
        if self._copies is not None:
            return self._copies[send]
        return self.raw[send.start * self.buf.itemsize : send.stop * self.buf.itemsize]

    def received(self, number: int) -> None:
        """The receive of this number is done."""
        self._done[number] = 1
        self.left -= 1
        if self._copies is not None:
            self._copy_ready([send for send in self.program.sends if number in send.after])

    def may(self, after: tuple[int, ...]) -> bool:
        """Whether these receives are done."""
        for number in after:  # noqa: SIM110 - this is asked for every frame, and a generator costs as much as the rest
            if not self._done[number]:
                return False
        return True

    def _copy_ready(self, sends: Sequence[Send]) -> None:
        assert self._copies is not None
        for send in sends:
            if self.may(send.after):
                start, stop = send.start * self.buf.itemsize, send.stop * self.buf.itemsize
                self._copies[send] = self.raw[start:stop].copy()


NO_CALL = Call("", 0, Program((), ()), np.empty(0, np.uint8), np.add)


class Link:
    """The engine's state of one connection, which carries frames both ways and outlives the collectives."""

    def __init__(self, sock: socket.socket, peer: int, name: int) -> None:
        self.sock, self.fd = sock, sock.fileno()
        self.peer, self.name = peer, name  # its rank in the communicator, and in the whole world
        self.tls = isinstance(sock, ssl.SSLSocket)
        self.sent = self.received = 0  # whole frames, in all collectives
        self.mask = 0  # of poll
        self.closing = False  # the other side has closed: nothing can be sent, but frames may still arrive
        self.over = False  # and all of them have been read
        self.left = False  # the other side has sent LEFT
        self.sending = self.receiving = NO_CALL  # the calls whose frames are sent and received now
        self.sends: Sequence[Send] = ()
        self.receives: Sequence[Receive] = ()
        self.send_at = self.receive_at = 0
        self.sends_later: deque[tuple[Call, Sequence[Send]]] = deque()  # of calls that began after it
        self.receives_later: deque[tuple[Call, Sequence[Receive]]] = deque()
        self.outgoing: list[memoryview] = []  # the rest of the frame that is being sent
        self.header = bytearray(HEADER_BYTES)
        self.header_view = memoryview(self.header)
        self.got = 0  # bytes of the next header received so far
        self.active = False  # receives[receive_at] may be read
        self.expected = b""  # fields of the next frame
        self.scratch: NDArray[np.uint8] = np.empty(0, np.uint8)
        self.payload: NDArray[np.uint8] = self.scratch
        self.payload_left = memoryview(b"")

    def begin(self, call: Call, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        """Queue the frames of a new collective after those of earlier ones."""
        if sends and self.is_sending():
            self.sends_later.append((call, sends))
        elif sends:
            self.sending, self.sends, self.send_at = call, sends, 0
        if receives and self.is_receiving():
            self.receives_later.append((call, receives))
        elif receives:
            self.receiving, self.receives, self.receive_at = call, receives, 0

    def is_sending(self) -> bool:
        """Whether frames of a collective remain to be sent."""
        return self.send_at < len(self.sends)

    def is_receiving(self) -> bool:
        """Whether frames of a collective remain to be received."""
        return self.receive_at < len(self.receives)

    def sent_one(self) -> None:
        """A whole frame has been sent."""
        self.sent += 1
        self.send_at += 1
        self.sending.left -= 1
        if self.sends_later and not self.is_sending():
            (self.sending, self.sends), self.send_at = self.sends_later.popleft(), 0

    def received_one(self) -> None:
        """A whole frame has been received and used."""
        self.received += 1
        self.got, self.active = 0, False
        self.receiving.received(self.receives[self.receive_at].number)
        self.receive_at += 1
        if self.receives_later and not self.is_receiving():
            (self.receiving, self.receives), self.receive_at = self.receives_later.popleft(), 0

    def scratch_for(self, nbytes: int) -> NDArray[np.uint8]:
        """A buffer for a frame that is combined; the same one each time."""
        if self.scratch.nbytes < nbytes:
            self.scratch = np.empty(nbytes, np.uint8)
        return self.scratch[:nbytes]
