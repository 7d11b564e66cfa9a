"""Moves frames out to the next rank and in from the previous one at the same time, from one thread.

Both directions run from one poll loop, so no order of sizes can deadlock, and a chunk that has come in (and has been
added) goes out while the following ones still arrive.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from storage.errors import CommunicationError
from training.comm.frames import HEADER_BYTES, Expected, check_header, check_payload, pack_header

Flat = NDArray[Any]  # a contiguous slice of the collective's buffer


class Incoming(NamedTuple):
    """Where a chunk from the previous rank goes: copied into `target`, or combined into it by `ufunc`."""

    target: Flat
    ufunc: np.ufunc | None


class Pump:
    """The state of one rank's two connections: counters, deadline and what woke it."""

    def __init__(
        self, to_next: socket.socket, from_previous: socket.socket, rank: int, num_ranks: int, generation: int
    ) -> None:
        self._out, self._in = to_next, from_previous
        self._rank, self._generation = rank, generation
        self._next, self._previous = (rank + 1) % num_ranks, (rank - 1) % num_ranks
        self._sent = self._received = 0  # frames, in all collectives
        self._woken, self._waker = socket.socketpair()
        self._abort_reason: str | None = None
        self._scratch = np.empty(0, np.uint8)

    def abort(self, reason: str) -> None:
        """Wake `run` from another thread and make it raise."""
        self._abort_reason = self._abort_reason or reason
        try:
            self._waker.send(b"!")
        except OSError:  # closed: nobody is left to wake
            return

    def close(self) -> None:
        for sock in (self._out, self._in, self._woken, self._waker):
            sock.close()

    def run(
        self,
        what: str,
        tag: int,
        total: int,
        sends: Sequence[Flat],
        receives: Sequence[Incoming],
        lag: int,
        deadline_s: float,
    ) -> None:
        """Send and receive all chunks; send j may leave once more than j - lag chunks have come in.

        Raises CommunicationError naming the rank that was waited for, was lost or sent something else.
        """
        until = time.monotonic() + deadline_s
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        out_fd, in_fd = self._out.fileno(), self._in.fileno()
        # The next rank never sends: what can be read from it is its end or its reset, which must be noticed at once
        # while it still has to receive from us. After that it may have finished, and closed, before we have.
        out_mask, in_mask = -1, 0
        poll.register(in_fd, 0)
        sent = received = 0
        outgoing: list[memoryview] = []
        arriving = _Arriving(self)
        if receives:
            arriving.begin(receives[0], tag, total)
        while sent < len(sends) or received < len(receives):
            if not outgoing and sent < len(sends) and sent < received + lag:
                payload = sends[sent].view(np.uint8)
                header = pack_header(Expected(payload.nbytes, tag, self._generation, self._sent, total), payload)
                outgoing = [memoryview(header), payload.data] if payload.nbytes else [memoryview(header)]
            want_out = select.POLLIN | select.POLLOUT if outgoing else select.POLLIN
            want_in = select.POLLIN if received < len(receives) else 0
            if sent == len(sends):
                want_out = -1
            if want_out != out_mask:
                if want_out == -1:
                    poll.unregister(out_fd)
                else:
                    poll.register(out_fd, want_out)  # replaces the mask where it is registered
                out_mask = want_out
            if want_in != in_mask:
                poll.modify(in_fd, want_in)
                in_mask = want_in
            left = until - time.monotonic()
            events = poll.poll(max(0.0, left) * 1000)
            if self._abort_reason is not None:
                raise CommunicationError(f"rank {self._rank}: {what} was ended: {self._abort_reason}")
            if not events:
                waited = self._previous if received < len(receives) else self._next
                raise CommunicationError(
                    f"rank {self._rank}: {what} waited {deadline_s:.0f} s for rank {waited}",
                    got=f"{received} of {len(receives)} chunks in, {sent} of {len(sends)} out",
                    allowed="every rank in the same collective within the deadline",
                    next_step=f"Look at the log of rank {waited}; if its steps are just slow, raise --stall-limit.",
                )
            for fd, event in events:
                if fd == in_fd:
                    if arriving.read(self._in, what):
                        received += 1
                        if received < len(receives):
                            arriving.begin(receives[received], tag, total)
                elif fd == out_fd:
                    if event & ~select.POLLOUT:
                        raise self._lost(self._next, what)
                    outgoing = self._write(outgoing, what)
                    sent += not outgoing

    def _write(self, outgoing: list[memoryview], what: str) -> list[memoryview]:
        try:
            count = self._out.sendmsg(outgoing)
        except BlockingIOError:
            return outgoing
        except OSError as error:
            raise self._lost(self._next, what) from error
        while outgoing and count >= len(outgoing[0]):
            count -= len(outgoing[0])
            outgoing = outgoing[1:]
        if outgoing:
            return [outgoing[0][count:], *outgoing[1:]]
        self._sent += 1
        return outgoing

    def _lost(self, peer: int, what: str) -> CommunicationError:
        return CommunicationError(
            f"rank {self._rank}: lost rank {peer} during {what}",
            got="its connection was closed or reset",
            next_step=f"Look at the log of rank {peer}: it ended first.",
        )

    def _scratch_like(self, target: Flat) -> Flat:
        if self._scratch.nbytes < target.nbytes:
            self._scratch = np.empty(target.nbytes, np.uint8)
        return self._scratch[: target.nbytes].view(target.dtype)


class _Arriving:
    """The frame that comes next: header and payload are read together, both checked before use."""

    def __init__(self, pump: Pump) -> None:
        self._pump = pump
        self._header = bytearray(HEADER_BYTES)

    def begin(self, incoming: Incoming, tag: int, total: int) -> None:
        pump = self._pump
        self._incoming = incoming
        self._into = incoming.target if incoming.ufunc is None else pump._scratch_like(incoming.target)
        self._payload = self._into.view(np.uint8)
        self._expected = Expected(self._payload.nbytes, tag, pump._generation, pump._received, total)
        self._header_left, self._payload_left = memoryview(self._header), self._payload.data

    def read(self, sock: socket.socket, what: str) -> bool:
        """Read what is there; True once the chunk is complete, right and in place."""
        pump = self._pump
        try:
            if self._header_left:
                count = sock.recvmsg_into([self._header_left, self._payload_left])[0]
            else:
                count = sock.recv_into(self._payload_left)
        except BlockingIOError:
            return False
        except OSError as error:
            raise pump._lost(pump._previous, what) from error
        if count == 0:
            raise pump._lost(pump._previous, what)
        if self._header_left:
            of_header = min(count, len(self._header_left))
            self._header_left = self._header_left[of_header:]
            count -= of_header
            if self._header_left:
                return False
            self._check(check_header(bytes(self._header), self._expected), what)
        self._payload_left = self._payload_left[count:]
        if self._payload_left:
            return False
        self._check(check_payload(bytes(self._header), self._payload), what)
        target, ufunc = self._incoming
        if ufunc is not None:
            with np.errstate(all="ignore"):  # a sum that overflows is infinite, which the caller's check finds
                ufunc(target, self._into, out=target)
        pump._received += 1
        return True

    def _check(self, wrong: str | None, what: str) -> None:
        if wrong is not None:
            pump = self._pump
            raise CommunicationError(
                f"rank {pump._rank}: rank {pump._previous} sent a wrong frame during {what}",
                got=wrong,
                allowed="every rank calls the same collectives in the same order, generation and versions",
                next_step="Compare the ranks' logs; a checksum alone points at the network or memory.",
            )
