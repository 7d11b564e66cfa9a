"""Runs programs: all frames of one rank, to and from any number of others, from one thread and one poll loop.

Since every direction of every connection is served by the same loop, no order of sizes can block it, and a frame that
has come in (and has been added) goes out while the following ones still arrive.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.errors import CommunicationError
from training.comm.frames import ENDED, HEADER_BYTES, LEFT, Expected, check_header, check_payload, is_word, pack_header
from training.comm.links import HUNG_UP, Link
from training.comm.mesh import Mesh
from training.comm.parting import ask_around, last_word, rest_of_word, say_farewell
from training.comm.schedule import Program
from training.comm.wire import held, receive_some, send_some

LIFELINE_AFTER_S = 0.2  # of waiting for another rank's call
TURN_BYTES = 64 << 10  # after a longer frame the others have their turn


class Engine:
    """The connections of one channel: `members[i]` is the rank in the whole world of rank i of this communicator."""

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
        self._missing: dict[int, int] = {}  # connections that are waited for
        self._stalled: set[Link] = set()  # who said that its deadline has passed
        self.reason: str | None = None
        """What another rank said was the reason for the end."""
        self._what, self._tag, self._deadline_s, self._until = "", 0, 0.0, 0.0
        self._buf: NDArray[Any] = np.empty(0)
        self._raw: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._ufunc: np.ufunc = np.add
        self._keeps_sent = False
        self._done, self._left = bytearray(), 0

    def abort(self, reason: str) -> None:
        """Make `run` raise, from any thread."""
        self._abort_reason = self._abort_reason or reason
        self._wake()

    def connect(self, peers: Sequence[int], deadline_s: float) -> None:
        """Connect with these ranks now. Raises CommunicationError naming the one that could not be joined."""
        self._begin("joining", 0, deadline_s)
        self._await(peers)

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
        self._advance()
        while self._left:
            self._turn()

    def end(self, reason: str | None) -> None:
        """Close all, and tell the others: that this rank is done, or the reason why it gives up."""
        links = [link for link in self._links if link is not None]
        say_farewell(links, self._generation, reason)
        self.drop()

    def drop(self) -> None:
        """Close all without a word, as the kernel does for a rank that dies."""
        links = [link for link in self._links if link is not None]
        for link in links:
            link.sock.close()
        self._links = [None] * len(self._links)
        for sock in (self._woken, self._waker):
            sock.close()

    def _begin(self, what: str, tag: int, deadline_s: float) -> None:
        self._what, self._tag, self._deadline_s = what, tag, deadline_s
        self._until = time.monotonic() + deadline_s
        self._running.clear()
        self._left = 0

    def _await(self, peers: Sequence[int]) -> None:
        """Wait for connections."""
        self._missing = {self._members[peer]: peer for peer in peers}  # rank in the world -> here
        self._mesh.ask(self._channel, list(self._missing), self._wake, self._until)
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

    def _advance(self) -> None:
        """Begin whatever does not wait for anything any more."""
        for link in self._running:
            if link.send_at < len(link.sends) and not link.outgoing:
                self._send(link)
            if not link.active and link.receive_at < len(link.receives):
                self._activate(link)

    def _turn(self) -> None:
        """One poll, and all that it brings."""
        left = self._until - time.monotonic()
        ripe = any(link.tls and link.active and held(link.sock) for link in self._running)
        if not self._serve(0.0 if ripe else max(0.0, left)) and not ripe and left <= 0:
            raise self._deadline()
        if ripe:
            for link in self._running:
                if link.active and held(link.sock):
                    self._read(link)

    def _serve(self, timeout_s: float) -> bool:
        """Poll and serve what is ready; False if nothing was."""
        events = self._poll.poll(timeout_s * 1000)
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
        if self._stalled:
            raise self._deadline()
        return bool(events)

    def _watch(self, link: Link) -> None:
        """Poll for what this connection can make use of."""
        mask = 0 if link.closing else select.POLLRDHUP
        if link.outgoing or (link.send_at < len(link.sends) and self._may(link.sends[link.send_at].after)):
            mask |= select.POLLOUT
        if link.active or (link.got < HEADER_BYTES and not link.over):
            mask |= select.POLLIN
        if mask != link.mask:
            link.mask = mask
            if mask:
                self._poll.register(link.fd, mask)  # replaces the mask where it is registered
            else:
                self._poll.unregister(link.fd)  # a closed connection would be reported for ever

    def _may(self, after: tuple[int, ...]) -> bool:
        return all(self._done[number] for number in after)

    def _send(self, link: Link) -> None:
        """Write frames until one must wait, the socket is full, or others should have their turn."""
        while link.outgoing or link.send_at < len(link.sends):
            if not link.outgoing:
                send = link.sends[link.send_at]
                if not self._may(send.after):
                    break
                item = self._buf.itemsize
                payload = self._raw[send.start * item : send.stop * item]
                header = pack_header(
                    Expected(payload.nbytes, self._tag, self._generation, link.sent, self._buf.nbytes), payload
                )
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
        link.expected = Expected(stop - start, self._tag, self._generation, link.received, self._buf.nbytes)
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

    def _check(self, link: Link, wrong: str | None) -> None:
        if wrong is not None:
            raise CommunicationError(
                f"rank {self._name}: rank {link.name} sent a wrong frame during {self._what}",
                got=wrong,
                allowed="every rank calls the same collectives in the same order, generation and versions",
                next_step="Compare the ranks' logs; a checksum alone points at the network or memory.",
            )

    def _hear(self, link: Link, beginning: bytes) -> None:
        """A word instead of a frame: the other rank gives up."""
        word = rest_of_word(link, beginning, self._generation)
        if word is None:
            self._check(link, "a damaged word, or one of another generation")
        elif word[0] == ENDED:
            raise self._told(link, word[1])
        elif word[0] == LEFT:
            link.left = True
            if link.is_receiving() or link.is_sending():
                raise self._lost(link)
        else:
            self._stalled.add(link)

    def _over(self, link: Link) -> None:
        """The end of what comes from a rank: no error if it has finished before this one, and said so."""
        if link.is_receiving() or link.is_sending() or not link.left:
            raise self._lost(link)
        link.closing = link.over = True
        self._watch(link)

    def _hung_up(self, link: Link, event: int) -> None:
        if event & select.POLLIN and (link.active or link.got < HEADER_BYTES):
            return  # what came before the end is read first, a turn each
        if link.is_sending():
            raise self._lost(link)
        if link.active:
            self._read(link)  # nothing is there, so this ends in an error
            return
        link.closing = True
        self._watch(link)

    def _lost(self, link: Link) -> CommunicationError:
        """What to raise: the rank's own last word, if it left one."""
        word = last_word(link, self._generation)
        if word is not None and word[0] == ENDED:
            return self._told(link, word[1])
        return CommunicationError(
            f"rank {self._name}: lost rank {link.name} during {self._what}",
            got="it has left" if link.left else "its connection was closed or reset",
            next_step=f"Look at the log of rank {link.name}: it ended first.",
        )

    def _told(self, link: Link, text: str) -> CommunicationError:
        self.reason = text
        return CommunicationError(
            f"rank {self._name}: {self._what} was ended by rank {link.name}, which says: {text}",
            next_step="Look at the log of the rank that is named last.",
        )

    def _deadline(self) -> CommunicationError:
        """What to raise when this rank, or one that told so, has waited too long."""
        if self._missing:
            refused = self._mesh.last_refused
            return self._unjoined(min(self._missing), f"it did not call; refused: {refused or 'nobody'}")
        coming = [link for link in self._running if link.is_receiving()]
        begun = [link for link in coming if self._may(link.receives[link.receive_at].after)]
        begun.sort(key=lambda link: link.receives[link.receive_at].number)
        waited = next(iter([*begun, *(link for link in self._running if link.is_sending()), *coming]))
        seconds = time.monotonic() - self._until + self._deadline_s
        error = CommunicationError(
            f"rank {self._name}: {self._what} waited {seconds:.0f} s for rank {waited.name}",
            got=f"{self._left} of {sum(len(link.sends) + len(link.receives) for link in self._running)} frames missing",
            allowed="every rank in the same collective within the deadline",
            next_step=f"Look at the log of rank {waited.name}; if its steps are just slow, raise --stall-limit.",
        )
        return self._unless_known(error, waited)

    def _unless_known(self, error: CommunicationError, waited: Link | None) -> CommunicationError:
        """`error`, or the reason for it that another rank knows."""
        links = [link for link in self._links if link is not None]
        heard = ask_around(links, waited, self._generation, error.what, alive=waited in self._stalled)
        if heard is None:
            return error
        link, text = heard
        return self._lost(link) if text is None else self._told(link, text)

    def _unjoined(self, name: int, got: str) -> CommunicationError:
        error = CommunicationError(
            f"rank {self._name} could not join rank {name} at {self._mesh.address(name)}",
            got=got,
            allowed=f"rank {name} of {self._mesh.num_ranks}, generation {self._generation}, with that generation's key",
            next_step=f"Look at the log of rank {name}; a firewall or an older attempt may be in the way.",
        )
        return self._unless_known(error, None)

    def _wake(self) -> None:
        with suppress(OSError):  # full: it wakes anyway; closed: nobody is left to wake
            self._waker.send(b"!")
