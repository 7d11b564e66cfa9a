"""Strangers at a rank's door: turned away, logged once, and never in the way of a rank."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from lockstep.training.comm import auth
from lockstep.training.comm.auth import MAX_CALLERS, Reception

KEY = b"k" * 32
PATIENCE_S = 120.0  # only against a hang
CROWD = 4 * MAX_CALLERS


class Door:
    """Rank 0 of generation 7; rank 1 may come, from 127.0.0.1 as everybody."""

    def __init__(self, listener: socket.socket) -> None:
        self.address = listener.getsockname()
        self.came: list[tuple[int, int]] = []
        self.reception = Reception("rank 0", self._examine, time.monotonic() + PATIENCE_S)
        threading.Thread(target=self.reception.serve, args=(listener,), daemon=True).start()

    def wait_for(self, done: Callable[[], object]) -> None:
        """The threads of the door end a moment after the caller has read the last word."""
        end = time.monotonic() + PATIENCE_S
        while not done() and time.monotonic() < end:
            time.sleep(0.01)

    def _examine(self, sock: socket.socket, until: float, proved: Callable[[], None]) -> None:
        self.came.append(auth.answer(sock, KEY, 7, 2, 0, (1,), until))
        sock.close()


@pytest.fixture
def door() -> Iterator[Door]:
    with socket.create_server(("127.0.0.1", 0), backlog=CROWD) as listener:
        door = Door(listener)
        yield door
        door.reception.close()


def call(door: Door) -> None:
    with socket.create_connection(door.address) as sock:
        auth.call(sock, KEY, 7, 2, 1, 0, 5, time.monotonic() + PATIENCE_S)


def test_a_silent_crowd_keeps_no_rank_out(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack, caplog.at_level(logging.WARNING):
        before = threading.active_count()
        began = time.monotonic()
        for _ in range(CROWD):
            stack.enter_context(socket.create_connection(door.address))
        call(door)
        door.wait_for(lambda: door.came)
        assert door.came == [(1, 5)]
        assert threading.active_count() - before <= MAX_CALLERS + 4, "the crowd is four times as many"
        seconds = time.monotonic() - began
        lines = [record.getMessage() for record in caplog.records]
        assert 1 <= len(lines) <= seconds + 2, "the log is as long as the crowd"
        assert all("rank 0 refused a caller from 127.0.0.1" in line for line in lines)
    assert door.reception.refused >= CROWD - MAX_CALLERS


def test_a_crowd_drives_out_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """The oldest of the address with most callers leaves, though a caller from elsewhere came before all of them."""
    gone: list[str] = []
    hold = threading.Event()

    def examine(sock: socket.socket, until: float, proved: Callable[[], None]) -> None:
        name = sock.recv(1).decode()
        while not hold.is_set():
            if sock.recv(1) == b"":
                gone.append(name)
                raise auth.HandshakeError("sent away")

    reception = Reception("rank 0", examine, time.monotonic() + PATIENCE_S)
    with ExitStack() as stack:
        for number in range(MAX_CALLERS + 3):
            ours, theirs = socket.socketpair()
            stack.enter_context(ours)
            stack.enter_context(theirs)
            ours.send(bytes([65 + number]))
            reception.admit(theirs, "10.0.0.9" if number == 0 else "10.0.0.1")
        end = time.monotonic() + PATIENCE_S
        while len(gone) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        assert gone == ["B", "C", "D"]
        hold.set()
        reception.close()


def test_a_recorded_handshake_is_worth_nothing(door: Door) -> None:
    """What a rank said once, said again by somebody who saw all of it."""
    recorded: list[bytes] = []

    class Tapped(socket.socket):
        def sendall(self, data: bytes, flags: int = 0) -> None:  # type: ignore[override] # as auth calls it
            recorded.append(data)
            super().sendall(data, flags)

    with Tapped() as sock:
        sock.connect(door.address)
        auth.call(sock, KEY, 7, 2, 1, 0, 5, time.monotonic() + PATIENCE_S)
    door.wait_for(lambda: door.came)
    assert len(recorded) == 2 and door.came == [(1, 5)]
    with socket.create_connection(door.address) as replay:
        replay.settimeout(PATIENCE_S)
        for data in recorded:
            replay.sendall(data)
        answer = b""
        while part := replay.recv(4096):
            answer += part
    assert len(answer) == 64  # a new nonce and its proof; not the word that it is let in
    door.wait_for(lambda: door.reception.last)
    assert door.came == [(1, 5)] and "does not have the key" in door.reception.last


def test_a_door_stays_open_when_accept_fails(caplog: pytest.LogCaptureFixture) -> None:
    """The kernel reports a caller's network errors there, and a process that has no descriptors left gets some back."""
    came: list[str] = []

    class Failing(socket.socket):
        failures = 2

        def accept(self) -> tuple[socket.socket, tuple[str, int]]:
            if self.failures:
                self.failures -= 1
                raise OSError(24, "Too many open files")
            return super().accept()

    def examine(sock: socket.socket, until: float, proved: Callable[[], None]) -> None:
        came.append(sock.recv(5).decode())
        sock.close()

    with Failing() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(5)
        thread = threading.Thread(
            target=Reception("rank 0", examine, time.monotonic() + PATIENCE_S).serve, args=(listener,)
        )
        thread.start()
        with socket.create_connection(listener.getsockname()) as sock:
            sock.sendall(b"hello")
            end = time.monotonic() + PATIENCE_S
            while not came and time.monotonic() < end:
                time.sleep(0.01)
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and came == ["hello"]
    assert "Too many open files" in caplog.text


@pytest.mark.parametrize("lacking", ["descriptors", "threads"])
def test_a_door_stays_open_when_a_caller_cannot_be_examined(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More such callers than there are places: each must give its place back."""
    came: list[str] = []
    turned_away: list[int] = []
    real = threading.Thread.start

    def dup(self: socket.socket) -> socket.socket:
        raise OSError(24, "Too many open files")

    def start(self: threading.Thread) -> None:
        if self.name == "handshake":
            raise RuntimeError("can't start new thread")
        real(self)

    def examine(sock: socket.socket, until: float, proved: Callable[[], None]) -> None:
        came.append("one")
        sock.close()

    reception = Reception("rank 0", examine, time.monotonic() + PATIENCE_S)
    patch: tuple[type, str, Any] = (socket.socket, "dup", dup)
    if lacking == "threads":
        patch = (threading.Thread, "start", start)

    def crowd() -> None:
        for _ in range(MAX_CALLERS + 1):
            ours, theirs = socket.socketpair()
            with ours, pytest.raises(OSError, match=r"Too many|can't start"):
                reception.admit(theirs, "10.0.0.1")
            turned_away.append(theirs.fileno())

    with monkeypatch.context() as lack:
        lack.setattr(*patch)
        thread = threading.Thread(target=crowd, daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
    assert turned_away == [-1] * (MAX_CALLERS + 1), "it waits for a place that nobody gives back"
    ours, theirs = socket.socketpair()
    with ours:
        reception.admit(theirs, "10.0.0.1")
        ours.settimeout(PATIENCE_S)
        assert ours.recv(1) == b"" and came == ["one"]


@pytest.mark.parametrize("how", ["closed", "crowded out"])
def test_a_caller_that_has_proved_itself_is_never_hung_up_on(how: str) -> None:
    """Its socket is in other hands while its examiner's thread still ends: a hang-up would break a working link."""
    handed, over = threading.Event(), threading.Event()

    def examine(sock: socket.socket, until: float, proved: Callable[[], None]) -> None:
        if sock.recv(1) == b"r":
            proved()
            handed.set()
            over.wait(PATIENCE_S)
        elif sock.recv(1) == b"":
            raise auth.HandshakeError("sent away")

    reception = Reception("rank 0", examine, time.monotonic() + PATIENCE_S)
    with ExitStack() as stack:

        def come(word: bytes) -> socket.socket:
            ours, theirs = socket.socketpair()
            stack.enter_context(ours)
            stack.enter_context(theirs)
            ours.sendall(word)
            reception.admit(theirs, "10.0.0.1")
            return ours

        rank = come(b"r")
        assert handed.wait(PATIENCE_S)
        if how == "closed":
            reception.close()
        else:
            for _ in range(MAX_CALLERS):
                come(b"s")
        rank.setblocking(False)
        with pytest.raises(BlockingIOError):  # open and silent
            rank.recv(1)
        over.set()
        reception.close()


def test_a_caller_hung_up_on_before_its_proof_is_handed_to_no_one() -> None:
    answered: list[str] = []
    begun, go = threading.Event(), threading.Event()

    def examine(sock: socket.socket, until: float, proved: Callable[[], None]) -> None:
        begun.set()
        go.wait(PATIENCE_S)
        proved()
        answered.append("handed on")

    reception = Reception("rank 0", examine, time.monotonic() + PATIENCE_S)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reception.admit(theirs, "10.0.0.1")
        assert begun.wait(PATIENCE_S)
        reception.close()
        go.set()
        end = time.monotonic() + PATIENCE_S
        while not reception.last and time.monotonic() < end:
            time.sleep(0.01)
    assert "hung up on" in reception.last and not answered
