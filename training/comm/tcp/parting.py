"""How a rank gives up: it first asks the others for the cause, then sends them the reason.

When a deadline passes, the rank that is waited for may itself be waiting for a third one. So each rank sends its
neighbours the rank it waits for, upon which they do the same; a rank that answers is alive and passes on what it
learns, and the one that does not answer is named in the error.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Mapping, Sequence

from lockstep.training.comm.frames import ENDED, HEADER_BYTES, LEFT, STALLED, WORD_BYTES, is_word, pack_word, read_word
from lockstep.training.comm.tcp.link import HUNG_UP, Link, receive_some, send_some

GRACE_S = 0.5  # for a rank to answer that it is alive
LINGER_S = 0.25  # for a last word to arrive
DRAIN_BYTES = 256 << 10


def say_farewell(reasons: Mapping[Link, str | None], generation: int) -> None:
    """Send the last word on each connection, for LINGER_S at most in all.

    If there is a reason, incoming bytes are read and dropped until the others have closed: closing a socket with unread
    bytes would destroy the word on its way.
    """
    poll, until = select.poll(), time.monotonic() + LINGER_S
    open_links = {}
    for link, reason in reasons.items():
        if not link.over:
            word, text = (LEFT, "") if reason is None else (ENDED, reason)
            link.outgoing.append(memoryview(pack_word(word, generation, link.sent, text)))
            open_links[link.fd] = link
            poll.register(link.fd, select.POLLIN | select.POLLOUT if reason is not None else select.POLLOUT)
    space = [memoryview(bytearray(DRAIN_BYTES))] if open_links else []
    while open_links and (left := until - time.monotonic()) > 0:
        for fd, event in poll.poll(left * 1000):
            link = open_links[fd]
            try:
                ended = False
                if event & select.POLLOUT and _write(link):
                    link.sock.shutdown(socket.SHUT_WR)
                    poll.modify(fd, select.POLLIN)
                    ended = reasons[link] is None
                if event & (select.POLLIN | HUNG_UP) and not ended:
                    ended = receive_some(link.sock, space) == 0
            except OSError:
                ended = True
            if ended:
                poll.unregister(fd)
                del open_links[fd]


def ask_around(
    links: Sequence[Link], waited: Link | None, generation: int, text: str, *, alive: bool
) -> tuple[Link, str | None] | None:
    """Send `text`, which names the rank that this one waits for, to all; returns (connection, reason) of the first rank
    that knows a reason, None if no rank does.

    A rank that dies meanwhile is the reason itself: (its connection, None). `alive`: the rank that is waited for has
    already reported that it waits too.
    """
    poll, listening = select.poll(), {}
    for link in links:
        if not link.over:
            _post(link, pack_word(STALLED, generation, link.sent, text))
            listening[link.fd] = link
            # After the beginning of a frame only the last word can be read, once the other side has closed.
            poll.register(link.fd, select.POLLIN if link.got < HEADER_BYTES else select.POLLRDHUP)
    until = time.monotonic() + (4 * GRACE_S if alive else GRACE_S)
    while listening and (left := until - time.monotonic()) > 0:
        for fd, _ in poll.poll(left * 1000):
            link = listening[fd]
            word = last_word(link, generation) if link.got == HEADER_BYTES else _next_word(link, generation)
            if word is not None and word[0] == ENDED:
                return link, word[1]
            link.left = link.left or (word is not None and word[0] == LEFT)
            if link.over and not link.left:
                return link, None
            if link.over or link.left:
                poll.unregister(fd)
                del listening[fd]
            elif link.got == HEADER_BYTES:
                poll.modify(fd, select.POLLRDHUP)
            elif word is not None and link is waited and not alive:
                alive, until = True, time.monotonic() + 4 * GRACE_S
    return None


def last_word(link: Link, generation: int) -> tuple[int, str] | None:
    """Read the rest of a closed connection; returns the word at its end, if there is one."""
    tail, space = b"", memoryview(bytearray(DRAIN_BYTES))
    if link.got < HEADER_BYTES:
        tail = bytes(link.header[: link.got])
    try:
        while count := receive_some(link.sock, [space]):
            tail = (tail + bytes(space[:count]))[-HEADER_BYTES - WORD_BYTES :]
    except OSError:  # reset: nothing more arrives
        count = 0
    link.closing = link.over = True
    return read_word(tail, generation)


def rest_of_word(link: Link, beginning: bytes, generation: int) -> tuple[int, str] | None:
    """Read the word whose header, and perhaps `beginning`, has been read; None if it is damaged."""
    frame, until = bytes(link.header) + beginning, time.monotonic() + GRACE_S
    space = memoryview(bytearray(WORD_BYTES))
    while (missing := HEADER_BYTES + WORD_BYTES - len(frame)) and time.monotonic() < until:
        try:
            count = receive_some(link.sock, [space[:missing]])
        except OSError:
            break
        if count == 0:
            break
        if count is None:
            select.select([link.fd], [], [], 0.05)
            continue
        frame += space[:count]
    link.received += 1
    link.got, link.active = 0, False
    return read_word(frame, generation)


def _next_word(link: Link, generation: int) -> tuple[int, str] | None:
    """The next word; None if nothing, a frame or the end comes instead."""
    try:
        count = receive_some(link.sock, [link.header_view[link.got :]])
    except OSError:
        count = 0
    if count is None:
        return None
    link.over = count == 0
    link.got += count
    if link.got < HEADER_BYTES or not is_word(link.header):
        return None
    return rest_of_word(link, b"", generation)


def _post(link: Link, frame: bytes) -> None:
    """Begin to send a frame, unless another one is being sent."""
    if not link.outgoing:
        link.outgoing = [memoryview(frame)]
        link.sent += 1
        try:
            _write(link)
        except OSError:
            link.outgoing = []


def _write(link: Link) -> bool:
    """Send what the socket takes; True once all is sent."""
    while link.outgoing:
        count = send_some(link.sock, link.outgoing)
        if count == 0:
            return False
        while link.outgoing and count >= len(link.outgoing[0]):
            count -= len(link.outgoing[0])
            del link.outgoing[0]
        if count:
            link.outgoing[0] = link.outgoing[0][count:]
    return True
