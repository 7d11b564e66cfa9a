"""One connection to another rank: its socket, its counters, and what is under way on it."""

from __future__ import annotations

import select
import socket
import ssl
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from training.comm.frames import HEADER_BYTES
from training.comm.tcp.call import NO_CALL, Call
from training.comm.tcp.schedule import Receive, Send

HUNG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL


class Link:
    """State that the engine keeps of a connection; it carries frames both ways and outlives the collectives."""

    def __init__(self, sock: socket.socket, peer: int, name: int) -> None:
        self.sock, self.fd = sock, sock.fileno()
        self.peer, self.name = peer, name  # its rank in the communicator, and in the whole world
        self.tls = isinstance(sock, ssl.SSLSocket)
        self.sent = self.received = 0  # whole frames, in all collectives
        self.mask = 0  # of poll
        self.closing = False  # the other side has closed: nothing can be sent, but frames may still be here
        self.over = False  # and all of them have been read
        self.left = False  # it has said so
        self.sending = self.receiving = NO_CALL  # whose frames leave and come now
        self.sends: Sequence[Send] = ()
        self.receives: Sequence[Receive] = ()
        self.send_at = self.receive_at = 0
        self.sends_later: deque[tuple[Call, Sequence[Send]]] = deque()  # of calls that began after it
        self.receives_later: deque[tuple[Call, Sequence[Receive]]] = deque()
        self.outgoing: list[memoryview] = []  # what is left of the frame that is leaving
        self.header = bytearray(HEADER_BYTES)
        self.header_view = memoryview(self.header)
        self.got = 0  # bytes of the header that comes or has come in
        self.active = False  # receives[receive_at] may be read
        self.expected = b""  # fields of the frame that comes next
        self.scratch: NDArray[np.uint8] = np.empty(0, np.uint8)
        self.payload: NDArray[np.uint8] = self.scratch
        self.payload_left = memoryview(b"")

    def begin(self, call: Call, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        """Take the frames of a new collective, behind those of the ones before."""
        if sends and self.is_sending():
            self.sends_later.append((call, sends))
        elif sends:
            self.sending, self.sends, self.send_at = call, sends, 0
        if receives and self.is_receiving():
            self.receives_later.append((call, receives))
        elif receives:
            self.receiving, self.receives, self.receive_at = call, receives, 0

    def is_sending(self) -> bool:
        """Whether frames of a collective have still to leave."""
        return self.send_at < len(self.sends)

    def is_receiving(self) -> bool:
        """Whether frames of a collective have still to come."""
        return self.receive_at < len(self.receives)

    def sent_one(self) -> None:
        """A whole frame is out."""
        self.sent += 1
        self.send_at += 1
        self.sending.left -= 1
        if self.sends_later and not self.is_sending():
            (self.sending, self.sends), self.send_at = self.sends_later.popleft(), 0

    def received_one(self) -> None:
        """A whole frame has come in and has been used."""
        self.received += 1
        self.got, self.active = 0, False
        self.receiving.received(self.receives[self.receive_at].number)
        self.receive_at += 1
        if self.receives_later and not self.is_receiving():
            (self.receiving, self.receives), self.receive_at = self.receives_later.popleft(), 0

    def scratch_for(self, nbytes: int) -> NDArray[np.uint8]:
        """A place for a frame that is combined; the same one each time."""
        if self.scratch.nbytes < nbytes:
            self.scratch = np.empty(nbytes, np.uint8)
        return self.scratch[:nbytes]
