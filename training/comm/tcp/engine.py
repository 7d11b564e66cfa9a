"""Runs programs: all frames of one rank, to and from any number of others, from one thread and one poll loop.

Since one loop serves every direction of every connection, no order of sizes can block it, and a frame that has come in
(and has been added) goes out while the following ones still arrive. The engine makes its connections when a call first
needs them, and finds out what it means when one of them ends.
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np

from lockstep.storage.errors import CommunicationError
from lockstep.training.comm.base import LinkUse
from lockstep.training.comm.frames import (
    ENDED,
    HEADER_BYTES,
    LEFT,
    Expected,
    check_header,
    check_payload,
    is_word,
    pack_header,
)
from lockstep.training.comm.tcp.link import HUNG_UP, Call, Link, held, link_use, receive_some, send_some
from lockstep.training.comm.tcp.mesh import Mesh
from lockstep.training.comm.tcp.parting import ask_around, last_word, rest_of_word, say_farewell

CALLS_AT_A_TIME = 4  # two large ones, and small ones between them
TURN_BYTES = 64 << 10  # after a longer frame, other connections get their turn
LIFELINE_AFTER_S = 0.2  # of waiting for another rank's call
LONGEST_S = 3600.0  # of one wait: the system takes at most 24 days, and a deadline may be any number


class Engine:
    """Moves the frames of a communicator's collectives. `members[i]` is the rank in the whole world of its rank i;
    errors name the former.
    """

    def __init__(self, mesh: Mesh, channel: int, members: Sequence[int], rank: int) -> None:
        self._mesh, self._channel, self._members = mesh, channel, tuple(members)
        self._generation, self._name = mesh.generation, members[rank]
        self._links: list[Link | None] = [None] * len(members)
        self._by_fd: dict[int, Link] = {}
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)
        self._abort_reason: str | None = None
        self._running: list[Link] = []
        self._missing: dict[int, int] = {}  # ranks whose connections are awaited
        self._stalled: set[Link] = set()  # ranks that reported that their deadline has passed
        self.reason: str | None = None
        """The reason for the end, as another rank reported it."""
        self._what, self._deadline_s, self._until = "", 0.0, 0.0
        self._calls: deque[Call] = deque()  # under way, in the order in which they began
        self._has_tls = False
        self._is_taking = False
        self.sent_bytes = 0
        """Bytes sent on all connections so far, headers included."""
        self.calls = 0
        """Collectives so far, modulo 2**32: by it ranks notice that they make calls in different orders."""

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
        """Run the calls that `take` returns, until it returns None and all are done; call `done` for each, in order.

        Up to CALLS_AT_A_TIME are under way: on each connection the frames of a call follow those of the one before, so
        a link is not idle until the last frame of a call has arrived everywhere. Ranks may take calls at different
        times: the order on each connection is the same, and no frame waits for one of a later call. A deadline counts
        from the end of the call before. Raises like `run`. docs/decisions/040-communicator.md.
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
        """Make `run_each`, if it runs, call `take` again; from any thread."""
        if self._is_taking:
            self._wake()

    def abort(self, reason: str) -> None:
        """Make `run` raise, from any thread."""
        self._abort_reason = self._abort_reason or reason
        self._wake()

    def connect(self, peers: Sequence[int], deadline_s: float) -> None:
        """Connect with these ranks now. Raises CommunicationError naming the one that could not be joined."""
        self._begin("joining", deadline_s)
        self._await(peers)

    def look(self, what: str) -> None:
        """Read what has arrived between two calls, without waiting. Raises CommunicationError if a rank has ended."""
        self._begin(what, 0.0)
        self._serve(0.0)

    def links(self) -> dict[int, LinkUse]:
        """Return the use of each link, as a Communicator does; any thread may call this."""
        return {link.name: link_use(link.sock) for link in self._links if link is not None}

    @staticmethod
    def end(reasons: Mapping[Engine, str | None], generation: int) -> None:
        """Close engines of one mesh together, after a last word to the other ranks: done, or why it gives up."""
        words: dict[Link, str | None] = {}
        for engine, reason in reasons.items():
            unused = engine._mesh.forget(engine._channel, reason)
            words |= dict.fromkeys((*unused, *(link for link in engine._links if link is not None)), reason)
        say_farewell(words, generation)
        for link in words:
            link.sock.close()
        for engine in reasons:
            engine.drop()

    def drop(self) -> None:
        """Close all connections without a last word, as the kernel does for a rank that dies."""
        links = [link for link in self._links if link is not None]
        for link in links:
            link.sock.close()
        self._links = [None] * len(self._links)
        for sock in (self._woken, self._waker):
            sock.close()
        for link in self._mesh.forget(self._channel, self.reason):
            link.sock.close()

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
        """Ranks that the call needs and that are not connected yet."""
        return [peer for peer in call.program.peers if self._links[peer] is None]

    def _fields(self, call: Call, length: int, sequence: int) -> bytes:
        return Expected(length, call.tag, self._generation, sequence, call.total, call.number).pack()

    def _turn(self) -> None:
        """Poll once and serve all that is ready."""
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
        """Begin all frames that wait for nothing any more."""
        for link in self._running:
            if link.send_at < len(link.sends) and not link.outgoing:
                self._send(link)
            if not link.active and link.receive_at < len(link.receives):
                self._activate(link)

    def _send(self, link: Link) -> None:
        """Write frames until one must wait, the socket is full, or others get their turn."""
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
            self.sent_bytes += count
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
        """Prepare to read the next frame, if all that it must wait for is done."""
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
        """Read what is there, one frame at most; a header is read even if no frame is expected yet."""
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
                self._read_word(link, bytes(link.payload[:count]) if link.active else b"")
                return
            if not link.active:
                self._watch(link)
                return
            self._check(link, check_header(link.header, link.expected))
        link.payload_left = link.payload_left[count:]
        if not link.payload_left:
            self._complete(link)

    def _complete(self, link: Link) -> None:
        """Check a whole frame and use it."""
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

    def _begin(self, what: str, deadline_s: float) -> None:
        self._new_deadline(what, deadline_s)
        self._running.clear()
        self._calls.clear()

    def _new_deadline(self, what: str, deadline_s: float) -> None:
        """Start the deadline of `what`: the only call, or the oldest one under way."""
        self._what, self._deadline_s = what, deadline_s
        self._until = time.monotonic() + deadline_s

    def _await(self, peers: Sequence[int]) -> None:
        """Wait for connections."""
        self._missing = {self._members[peer]: peer for peer in peers}  # rank in the world -> here
        self._mesh.ask(self._channel, list(self._missing), self._wake, min(self._until, time.monotonic() + LONGEST_S))
        watch_at = time.monotonic() + LIFELINE_AFTER_S
        while True:
            for name in sorted(self._missing):
                found = self._mesh.take(self._channel, name)
                if isinstance(found, str):
                    raise self._unjoined(name, found)
                if found is not None:
                    self._add(Link(found, self._missing.pop(name), name))
            if not self._missing:
                return
            now = time.monotonic()
            if now >= self._until:
                raise self._deadline()
            if now >= watch_at:
                for name in self._missing:
                    if name < self._name:
                        self._mesh.watch(name)
            self._serve(min(LIFELINE_AFTER_S, self._until - now))

    def _add(self, link: Link) -> None:
        self._links[link.peer] = self._by_fd[link.fd] = link
        link.mask = select.POLLIN | select.POLLRDHUP
        self._poll.register(link.fd, link.mask)

    def _serve(self, timeout_s: float) -> None:
        """Poll once and serve what is ready."""
        events = self._poll.poll(min(timeout_s, LONGEST_S) * 1000)
        if self._abort_reason is not None:
            raise CommunicationError(f"rank {self._name}: {self._what} was ended: {self._abort_reason}")
        for fd, event in events:
            link = self._by_fd.get(fd)
            if link is None:
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
                continue
            if event & select.POLLIN:
                self._read(link)
            if event & select.POLLOUT:
                self._send(link)
            if event & HUNG_UP:
                self._hung_up(link, event)
        if self._stalled and (self._missing or self._oldest() is not None):
            raise self._deadline()

    def _watch(self, link: Link) -> None:
        """Poll for the events that this connection can use."""
        mask = 0 if link.closing else select.POLLRDHUP
        if link.outgoing or (link.send_at < len(link.sends) and link.sending.may(link.sends[link.send_at].after)):
            mask |= select.POLLOUT
        if link.active or (link.got < HEADER_BYTES and not link.over):
            mask |= select.POLLIN
        if mask != link.mask:
            link.mask = mask
            if mask:
                self._poll.register(link.fd, mask)  # replaces the mask where it is registered
            else:
                self._poll.unregister(link.fd)  # a closed connection would be reported in every poll

    def _check(self, link: Link, wrong: str | None) -> None:
        if wrong is not None:
            raise CommunicationError(
                f"rank {self._name}: rank {link.name} sent a wrong frame during {self._what}",
                got=wrong,
                allowed="the same collectives in the same order on every rank, of one generation and version",
                next_step="Compare the ranks' logs; if only a checksum is wrong, suspect the network or memory.",
            )

    def _read_word(self, link: Link, beginning: bytes) -> None:
        """Read a word that has come instead of a frame."""
        word = rest_of_word(link, beginning, self._generation)
        if word is None:
            self._check(link, "a damaged word, or one of another generation")
        elif word[0] == ENDED:
            raise self._ended_by(link, word[1])
        elif word[0] == LEFT:
            link.left = True
            if link.is_receiving() or link.is_sending():
                raise self._lost(link)
        else:
            self._stalled.add(link)

    def _over(self, link: Link) -> None:
        """A rank sends nothing more: no error if it has left in order and this rank waits for nothing from it."""
        if link.is_receiving() or link.is_sending() or not link.left:
            raise self._lost(link)
        link.closing = link.over = True
        self._watch(link)

    def _hung_up(self, link: Link, event: int) -> None:
        if event & select.POLLIN and (link.active or link.got < HEADER_BYTES):
            return  # first read what came before the end, a frame each turn
        if link.is_sending():
            raise self._lost(link)
        if link.active:
            self._read(link)  # nothing is there, so this raises
            return
        link.closing = True
        self._watch(link)

    def _lost(self, link: Link) -> CommunicationError:
        """The error to raise for a lost rank: its own last word, if it sent one."""
        word = last_word(link, self._generation)
        if word is not None and word[0] == ENDED:
            return self._ended_by(link, word[1])
        error = CommunicationError(
            f"rank {self._name}: lost rank {link.name} during {self._what}",
            got="it has left" if link.left else "its connection was closed or reset",
            next_step=f"Look at the log of rank {link.name}: it ended first.",
        )
        error.left, error.of_another = link.name if link.left else None, not link.left
        return error

    def _ended_by(self, link: Link, text: str) -> CommunicationError:
        self.reason = text
        error = CommunicationError(
            f"rank {self._name}: {self._what} was ended by rank {link.name}, which says: {text}",
            next_step="Look at the log of the rank named last.",
        )
        error.of_another = True
        return error

    def _deadline(self) -> CommunicationError:
        """The error to raise when this rank, or one that reported it, has waited too long."""
        if self._missing:
            refused = self._mesh.last_refused
            return self._unjoined(min(self._missing), f"it did not call; refused: {refused or 'no caller'}")
        call = self._oldest()
        assert call is not None, "no wait without a call under way"
        coming = [link for link in self._running if link.is_receiving() and link.receiving is call]
        begun = [link for link in coming if call.may(link.receives[link.receive_at].after)]
        begun.sort(key=lambda link: link.receives[link.receive_at].number)
        leaving = [link for link in self._running if link.is_sending() and link.sending is call]
        waited = next(iter([*begun, *leaving, *coming]))
        seconds = time.monotonic() - self._until + self._deadline_s
        error = CommunicationError(
            f"rank {self._name}: {call.what} waited {seconds:.0f} s for rank {waited.name}",
            got=f"{call.left} of {call.frames} frames missing",
            allowed="every rank in the same collective within the deadline",
            next_step=f"Look at the log of rank {waited.name}; if its steps are just slow, raise --stall-limit.",
        )
        return self._unless_known(error, waited)

    def _oldest(self) -> Call | None:
        """The first call under way that still has frames to move; later ones wait for the same ranks, or fewer."""
        return next((call for call in self._calls if call.left), None)

    def _unless_known(self, error: CommunicationError, waited: Link | None) -> CommunicationError:
        """Return `error`, or the cause of it that another rank knows."""
        links = [link for link in self._links if link is not None]
        heard = ask_around(links, waited, self._generation, error.what, alive=waited in self._stalled)
        if heard is None:
            return error
        link, text = heard
        return self._lost(link) if text is None else self._ended_by(link, text)

    def _unjoined(self, name: int, got: str) -> CommunicationError:
        error = CommunicationError(
            f"rank {self._name} could not join rank {name} at {self._mesh.address(name)}",
            got=got,
            allowed=f"rank {name} of {self._mesh.num_ranks}, generation {self._generation}, with that generation's key",
            next_step=f"Look at the log of rank {name}; a firewall or an older attempt may be in the way.",
        )
        return self._unless_known(error, None)

    def _wake(self) -> None:
        with suppress(OSError):  # full: it wakes anyway; closed: the engine has ended
            self._waker.send(b"!")
