"""The connections of one communicator: made when they are needed, watched all together, and what their ends mean."""

from __future__ import annotations

import select
import socket
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

from lockstep.storage.errors import CommunicationError
from training.comm.frames import ENDED, HEADER_BYTES, LEFT
from training.comm.tcp.link import HUNG_UP, Call, Link
from training.comm.tcp.mesh import Mesh
from training.comm.tcp.parting import ask_around, last_word, rest_of_word, say_farewell

LIFELINE_AFTER_S = 0.2  # of waiting for another rank's call
LONGEST_S = 3600.0  # of one wait: the system takes no more than 24 days, and a deadline may be any number


class Channel(ABC):
    """`members[i]` is the rank in the whole world of rank i of this communicator; errors name the former."""

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
        self._what, self._deadline_s, self._until = "", 0.0, 0.0
        self._calls: deque[Call] = deque()  # under way, in the order in which they began

    def abort(self, reason: str) -> None:
        """Make `run` raise, from any thread."""
        self._abort_reason = self._abort_reason or reason
        self._wake()

    def connect(self, peers: Sequence[int], deadline_s: float) -> None:
        """Connect with these ranks now. Raises CommunicationError naming the one that could not be joined."""
        self._begin("joining", deadline_s)
        self._await(peers)

    def look(self, what: str) -> None:
        """Between calls: take in what has come, without waiting. Raises CommunicationError where a rank has ended."""
        self._begin(what, 0.0)
        self._serve(0.0)

    @staticmethod
    def end(reasons: Mapping[Channel, str | None], generation: int) -> None:
        """Close channels of one mesh and tell the others, all at once: that this rank is done, or why it gives up."""
        words: dict[Link, str | None] = {}
        for channel, reason in reasons.items():
            unused = channel._mesh.forget(channel._channel, reason)
            words |= dict.fromkeys((*unused, *(link for link in channel._links if link is not None)), reason)
        say_farewell(words, generation)
        for link in words:
            link.sock.close()
        for channel in reasons:
            channel.drop()

    def drop(self) -> None:
        """Close all without a word, as the kernel does for a rank that dies."""
        links = [link for link in self._links if link is not None]
        for link in links:
            link.sock.close()
        self._links = [None] * len(self._links)
        for sock in (self._woken, self._waker):
            sock.close()
        for link in self._mesh.forget(self._channel, self.reason):
            link.sock.close()

    def _begin(self, what: str, deadline_s: float) -> None:
        self._new_deadline(what, deadline_s)
        self._running.clear()
        self._calls.clear()

    def _new_deadline(self, what: str, deadline_s: float) -> None:
        """`what` is waited for from now on: what begins alone, or the oldest call under way."""
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

    @abstractmethod
    def _read(self, link: Link) -> None:
        """Read what has come in on a connection."""

    @abstractmethod
    def _send(self, link: Link) -> None:
        """Write what may go out on a connection."""

    def _watch(self, link: Link) -> None:
        """Poll for what this connection can make use of."""
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
                self._poll.unregister(link.fd)  # a closed connection would be reported for ever

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
        call = self._oldest()
        assert call is not None, "without a call under way nobody is waited for"
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
        """The first call under way that still has frames to move; those behind it wait for the same, or for less."""
        return next((call for call in self._calls if call.left), None)

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
