"""Runs programs: all frames of one rank, to and from any number of others, from one thread and one poll loop.

Since every direction of every connection is served by the same loop, no order of sizes can block it, and a frame that
has come in (and has been added) goes out while the following ones still arrive.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.comm.channel import Channel
from training.comm.frames import HEADER_BYTES, Expected, check_header, check_payload, is_word, pack_header
from training.comm.links import Link
from training.comm.mesh import Mesh
from training.comm.schedule import Program
from training.comm.wire import held, receive_some, send_some

TURN_BYTES = 64 << 10  # after a longer frame the others have their turn


class Engine(Channel):
    """Moves the frames of one collective at a time over the connections of a communicator."""

    def __init__(self, mesh: Mesh, channel: int, members: Sequence[int], rank: int) -> None:
        super().__init__(mesh, channel, members, rank)
        self._buf: NDArray[Any] = np.empty(0)
        self._raw: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._ufunc: np.ufunc = np.add
        self._keeps_sent = False
        self._has_tls = False
        self.calls = 0
        """Collectives before this one, modulo 2**32: ranks that differ in the order of calls notice by it."""

    def run(self, what: str, tag: int, program: Program, buf: NDArray[Any], ufunc: np.ufunc, deadline_s: float) -> None:
        """Send and receive all frames of `program`.

        Raises CommunicationError naming the rank that was waited for, was lost or sent something else.
        """
        self._begin(what, tag, deadline_s)
        missing = [peer for peer in program.peers if self._links[peer] is None]
        if missing:
            self._await(missing)
        self._buf, self._raw, self._ufunc, self._keeps_sent = buf, buf.view(np.uint8), ufunc, program.keeps_sent
        self._done, self._left = bytearray(len(program.receives)), len(program.sends) + len(program.receives)
        for peer, sends, receives in program.by_peer:
            link = self._links[peer]
            assert link is not None
            link.begin(sends, receives)
            if link.over or (link.closing and sends):
                raise self._lost(link)
            self._running.append(link)
            self._has_tls = self._has_tls or link.tls
        self._advance()
        while self._left:
            self._turn()

    def _fields(self, length: int, sequence: int) -> bytes:
        return Expected(length, self._tag, self._generation, sequence, self._buf.nbytes, self.calls).pack()

    def _turn(self) -> None:
        """One poll, and all that it brings."""
        left = self._until - time.monotonic()
        ripe = self._has_tls and any(link.active and held(link.sock) for link in self._running)
        self._serve(0.0 if ripe else max(0.0, left))
        if ripe:
            for link in self._running:
                if link.active and held(link.sock):
                    self._read(link)
        if self._left and left <= 0:
            raise self._deadline()

    def _advance(self) -> None:
        """Begin whatever does not wait for anything any more."""
        for link in self._running:
            if link.send_at < len(link.sends) and not link.outgoing:
                self._send(link)
            if not link.active and link.receive_at < len(link.receives):
                self._activate(link)

    def _send(self, link: Link) -> None:
        """Write frames until one must wait, the socket is full, or others should have their turn."""
        while link.outgoing or link.send_at < len(link.sends):
            if not link.outgoing:
                send = link.sends[link.send_at]
                if not self._may(send.after):
                    break
                item = self._buf.itemsize
                payload = self._raw[send.start * item : send.stop * item]
                header = pack_header(self._fields(payload.nbytes, link.sent), payload)
                whole = self._keeps_sent
                link.outgoing = (
                    [memoryview(header + payload.tobytes())] if whole else [memoryview(header), payload.data]
                )
            try:
                count = send_some(link.sock, link.outgoing)
            except OSError as error:
                raise self._lost(link) from error
            taken = count
            while link.outgoing and count >= len(link.outgoing[0]):
                count -= len(link.outgoing[0])
                del link.outgoing[0]
            if link.outgoing:
                if count:
                    link.outgoing[0] = link.outgoing[0][count:]
                if not taken or not link.tls:  # TLS takes one piece at a time
                    break
                continue
            link.sent += 1
            link.send_at += 1
            self._left -= 1
            if taken > TURN_BYTES:
                break
        self._watch(link)

    def _activate(self, link: Link) -> None:
        """Make the place for the frame that comes next, if all that comes before it is done."""
        receive = link.receives[link.receive_at]
        if not self._may(receive.after):
            return
        item = self._buf.itemsize
        start, stop = receive.start * item, receive.stop * item
        link.payload = self._raw[start:stop] if receive.combine == "copy" else link.scratch_for(stop - start)
        link.payload_left = link.payload.data
        link.expected = self._fields(stop - start, link.received)
        link.active = True
        if link.got == HEADER_BYTES:  # read ahead
            self._check(link, check_header(link.header, link.expected))
        self._watch(link)

    def _read(self, link: Link) -> None:
        """Read what is there, one frame at most; a header is read even where no frame is expected yet."""
        if link.got == HEADER_BYTES:
            if not link.active:
                return
            views = [link.payload_left]
        elif link.active:
            views = [link.header_view[link.got :], link.payload_left]
        else:
            views = [link.header_view[link.got :]]
        try:
            count = receive_some(link.sock, views)
        except OSError as error:
            raise self._lost(link) from error
        if count is None:
            return
        if count == 0:
            self._over(link)
            return
        if link.got < HEADER_BYTES:
            of_header = min(count, HEADER_BYTES - link.got)
            link.got += of_header
            count -= of_header
            if link.got < HEADER_BYTES:
                return
            if is_word(link.header):
                self._hear(link, bytes(link.payload[:count]) if link.active else b"")
                return
            if not link.active:
                self._watch(link)
                return
            self._check(link, check_header(link.header, link.expected))
        link.payload_left = link.payload_left[count:]
        if not link.payload_left:
            self._complete(link)

    def _complete(self, link: Link) -> None:
        """Check a frame that is whole, and use it."""
        self._check(link, check_payload(link.header, link.payload))
        receive = link.receives[link.receive_at]
        if receive.combine != "copy":
            own, frame = self._buf[receive.start : receive.stop], link.payload.view(self._buf.dtype)
            with np.errstate(all="ignore"):  # a sum that overflows is infinite, which the caller's check finds
                if receive.combine == "own_first":
                    self._ufunc(own, frame, out=own)
                else:
                    self._ufunc(frame, own, out=own)
        link.received += 1
        link.receive_at += 1
        link.got, link.active = 0, False
        self._done[receive.number] = 1
        self._left -= 1
        self._advance()
        self._watch(link)
