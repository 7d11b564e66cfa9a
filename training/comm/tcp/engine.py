"""Runs programs: all frames of one rank, to and from any number of others, from one thread and one poll loop.

Since every direction of every connection is served by the same loop, no order of sizes can block it, and a frame that
has come in (and has been added) goes out while the following ones still arrive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from training.comm.frames import HEADER_BYTES, Expected, check_header, check_payload, is_word, pack_header
from training.comm.tcp.channel import Channel
from training.comm.tcp.link import Call, Link, held, receive_some, send_some
from training.comm.tcp.mesh import Mesh

CALLS_AT_A_TIME = 4  # two large ones, and small ones between them
TURN_BYTES = 64 << 10  # after a longer frame the others have their turn


class Engine(Channel):
    """Moves the frames of collectives over the connections of a communicator."""

    def __init__(self, mesh: Mesh, channel: int, members: Sequence[int], rank: int) -> None:
        super().__init__(mesh, channel, members, rank)
        self._has_tls = False
        self._is_taking = False
        self.calls = 0
        """Collectives before this one, modulo 2**32: ranks that differ in the order of calls notice by it."""

    def run(self, call: Call, deadline_s: float) -> None:
        """Send and receive all frames of `call`.

        Raises CommunicationError naming the rank that was waited for, was lost or sent something else.
        """
        self._begin(call.what, deadline_s)
        self._start(call)
        while call.left:
            self._turn()
        self._calls.clear()

    def run_each(
        self, take: Callable[[], Call | None], done: Callable[[], None], deadline_s: Callable[[], float]
    ) -> None:
        """Run what `take` gives, until it has none and all are done; `done` is called for each, in their order.

        Up to CALLS_AT_A_TIME are under way: the frames of a call follow those of the one before on each connection, so
        a link does not rest until the last frame of a call has arrived everywhere. Ranks may take them at different
        times: the order on each connection is the same, and no frame waits for one of a later call. A deadline is
        counted from the end of the call before. Raises as `run` does.
        """
        self._begin("all_reduce", deadline_s())
        self._is_taking = True
        try:
            taken = take()
            while taken is not None or self._calls:
                if taken is not None and (not self._calls or not self._missing_for(taken)):
                    if not self._calls:
                        self._new_deadline(taken.what, deadline_s())
                    self._start(taken)
                    taken = None
                if self._calls[0].left:
                    self._turn()
                while self._calls and not self._calls[0].left:
                    self._calls.popleft()
                    done()
                    if self._calls:
                        self._new_deadline(self._calls[0].what, deadline_s())
                if taken is None and len(self._calls) < CALLS_AT_A_TIME:
                    taken = take()
        finally:
            self._is_taking = False

    def look_again(self) -> None:
        """Let `run_each`, where it runs, ask once more for a call; from any thread."""
        if self._is_taking:
            self._wake()

    def _start(self, call: Call) -> None:
        missing = self._missing_for(call)
        if missing:
            self._await(missing)
        call.number = self.calls
        if call.counts:
            self.calls = (self.calls + 1) & 0xFFFFFFFF
        if self._calls and call.program.keeps_sent:
            call.keep_copies()
        self._calls.append(call)
        for peer, sends, receives in call.program.by_peer:
            link = self._links[peer]
            assert link is not None
            link.begin(call, sends, receives)
            if link.over or (link.closing and sends):
                raise self._lost(link)
            if link not in self._running:
                self._running.append(link)
            self._has_tls = self._has_tls or link.tls
        self._advance()

    def _missing_for(self, call: Call) -> list[int]:
        """Ranks that it needs and that are not connected yet."""
        return [peer for peer in call.program.peers if self._links[peer] is None]

    def _fields(self, call: Call, length: int, sequence: int) -> bytes:
        return Expected(length, call.tag, self._generation, sequence, call.buf.nbytes, call.number).pack()

    def _turn(self) -> None:
        """One poll, and all that it brings."""
        left = self._until - time.monotonic()
        ripe = self._has_tls and any(link.active and held(link.sock) for link in self._running)
        self._serve(0.0 if ripe else max(0.0, left))
        if ripe:
            for link in self._running:
                if link.active and held(link.sock):
                    self._read(link)
        if left <= 0 and self._calls[0].left:
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
                send, call = link.sends[link.send_at], link.sending
                if not call.may(send.after):
                    break
                payload = call.payload(send)
                header = pack_header(self._fields(call, payload.nbytes, link.sent), payload)
                whole = call.program.keeps_sent
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
            link.sent_one()
            if taken > TURN_BYTES:
                break
        self._watch(link)

    def _activate(self, link: Link) -> None:
        """Make the place for the frame that comes next, if all that comes before it is done."""
        receive, call = link.receives[link.receive_at], link.receiving
        if not call.may(receive.after):
            return
        item = call.buf.itemsize
        start, stop = receive.start * item, receive.stop * item
        link.payload = call.raw[start:stop] if receive.combine == "copy" else link.scratch_for(stop - start)
        link.payload_left = link.payload.data
        link.expected = self._fields(call, stop - start, link.received)
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
        receive, call = link.receives[link.receive_at], link.receiving
        if receive.combine != "copy":
            own, frame = call.buf[receive.start : receive.stop], link.payload.view(call.buf.dtype)
            with np.errstate(all="ignore"):  # a sum that overflows is infinite, which the caller's check finds
                if receive.combine == "own_first":
                    call.ufunc(own, frame, out=own)
                else:
                    call.ufunc(frame, own, out=own)
        link.received_one()
        self._advance()
        self._watch(link)
