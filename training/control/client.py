"""A rank's or supervisor's end of the control channel: what its heartbeat says, its reports, the driver's orders."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from lockstep.storage.errors import CommunicationError, LockstepError
from lockstep.storage.tokens import hold
from lockstep.training.control.last_words import LastWords
from lockstep.training.control.protocol import (
    SESSION,
    STARTING,
    Channel,
    ConnectionLostError,
    Role,
    Tag,
    error_from_json,
    json_safe,
    present,
    result_parts,
)
from lockstep.training.control.roster import open_order

DRIVER = "the driver's control server"


def open_channel(
    address: tuple[str, int], key: bytes, generation: int, role: Role, rank: int, deadline_s: float
) -> Channel:
    """Connect and prove the key. Raises CommunicationError when that fails for `deadline_s` seconds."""
    end = time.monotonic() + deadline_s
    while True:
        try:
            sock = socket.create_connection(address, timeout=max(0.1, min(5.0, end - time.monotonic())))
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                channel = present(sock, key, generation, role, rank, DRIVER)
                sock.settimeout(None)
                return channel
            except BaseException:
                sock.close()
                raise
        except (OSError, ConnectionLostError) as error:  # also a driver that is busy with too many handshakes
            if time.monotonic() + 0.2 > end:
                raise CommunicationError(
                    f"{DRIVER} at {address[0]}:{address[1]} cannot be reached",
                    got=f"{str(error).splitlines()[0]}, for {deadline_s:.0f} s",
                    allowed="a TCP connection from this host",
                    next_step="Open the network from executors to driver, or set spark.driver.host to what they reach.",
                ) from error
            time.sleep(0.2)


class ControlClient:
    """A rank's control channel: a thread sends heartbeats, requests have deadlines.

    `host` is the address at which other ranks reach this one. Thread-safe.
    """

    def __init__(
        self,
        channel: Channel,
        host: str,
        beat_s: float = 1.0,
        leaving: threading.Event | None = None,
        last_words: LastWords | None = None,
    ) -> None:
        self.host = host
        self.last_words = last_words
        """What the supervisor reports if this process dies; None: nothing."""
        self.lost = threading.Event()
        self.leaving = leaving or threading.Event()
        """Set when all ranks are to write a checkpoint and end: by the driver, or by a signal to this rank."""
        self.saving = threading.Event()
        """Set when the driver asks for a checkpoint; the rank clears it when it has passed that on."""
        self._channel, self._beat_s = channel, beat_s
        self.step, self.phase = 0, STARTING
        self._entered_at = 0  # the step at which this phase began
        self._news = threading.Event()
        self._lock = threading.Lock()
        self._next_id = 0
        self._waiting: dict[int, queue.SimpleQueue[dict[str, Any] | None]] = {}
        threading.Thread(target=self._read, name="control-read", daemon=True).start()
        threading.Thread(target=self._beats, name="control-beat", daemon=True).start()

    def rendezvous(self, host: str, port: int, deadline_s: float = 120.0) -> list[tuple[str, int]]:
        """Report where this rank listens; returns every rank's (host, port) once all have reported theirs.

        A collective: the n-th call of one rank belongs to the n-th call of all. Raises CommunicationError naming the
        ranks that are missing after `deadline_s` seconds.
        """
        reply = self.request("rendezvous", deadline_s + 5.0, host=host, port=port, within_s=deadline_s)
        return [(str(host), int(port)) for host, port in reply["table"]]

    def beat(self, step: int, phase: str) -> None:
        """Record this rank's progress: optimizer steps done, and a word for what it does.

        The heartbeat thread reports a new phase, and the first step in it, at once; later steps go with the next beat,
        so that a step costs no message.
        """
        news = phase != self.phase or (step != self.step and self.step == self._entered_at)
        if phase != self.phase:
            self._entered_at = step
        self.step, self.phase = step, phase
        if self.last_words is not None:
            self.last_words.did(step)
        if news:
            self._news.set()

    def reads(self, what: str | range) -> None:
        """Record which records this rank reads now, "" for none, or which batches (from 0) it decodes: they are named
        if this kills the process.
        """
        if self.last_words is not None:
            self.last_words.reads(what)

    def request(self, kind: str, deadline_s: float, **fields: Any) -> dict[str, Any]:
        """Send a request to the driver and wait for its reply.

        Raises the driver's error if it refused, CommunicationError if it has ended or is silent for `deadline_s`.
        """
        box: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        with self._lock:
            number = self._next_id
            self._next_id += 1
            self._waiting[number] = box
        try:
            if self.lost.is_set():
                raise self._lost(kind)
            self.send(Tag.REQUEST, {"id": number, "kind": kind, "fields": json_safe(fields)})
            reply = box.get(timeout=deadline_s)
        except queue.Empty:
            raise CommunicationError(
                f"the driver did not answer the request `{kind}`",
                got=f"silence for {deadline_s:.0f} s",
                allowed="an answer",
                next_step="Look at the driver's log: the driver or its storage hangs.",
            ) from None
        finally:
            with self._lock:
                self._waiting.pop(number, None)
        if reply is None:
            raise self._lost(kind)
        if "error" in reply:
            raise error_from_json(reply["error"])
        found: dict[str, Any] = reply["reply"]
        return found

    def notify(self, kind: str, **fields: Any) -> None:
        """Send the driver a message without an answer; a loss that is not finite arrives as the string "nan"."""
        self.send(Tag.NOTICE, {"kind": kind, "fields": json_safe(fields)})

    def give_result(self, result: dict[str, Any]) -> None:
        """Send what the rank's entry returned, of any size; a rank's last message."""
        for part in result_parts(result):
            self.send(Tag.RESULT, part)

    def send(self, tag: Tag, document: dict[str, Any]) -> None:
        """Send a frame; each one carries the rank's step and phase."""
        self._channel.send(tag, {"step": self.step, "phase": self.phase, **document})

    def close(self) -> None:
        """End the channel."""
        self._channel.close()

    def _lost(self, kind: str) -> CommunicationError:
        return CommunicationError(
            f"the control channel was lost before `{kind}` was answered",
            got="the end of the connection",
            allowed="a living driver",
            next_step="Look at the driver's log for why it ended or stopped this rank.",
        )

    def _read(self) -> None:
        try:
            while True:
                tag, document = self._channel.receive()
                if tag is Tag.REPLY:
                    with self._lock:
                        box = self._waiting.get(document["id"])
                    if box is not None:
                        box.put(document)
                elif tag is Tag.LEAVE:
                    self.leaving.set()
                elif tag is Tag.SAVE:
                    self.saving.set()
        except LockstepError:
            pass  # the requests that wait, and later ones, raise it: see below
        finally:
            with self._lock:
                self.lost.set()
                self._news.set()
                for box in self._waiting.values():
                    box.put(None)

    def _beats(self) -> None:
        while not self.lost.is_set():
            try:
                self.send(Tag.BEAT, {})
            except LockstepError:
                return  # the reading thread sees the same end and reports it
            self._news.wait(self._beat_s)
            self._news.clear()


class SupervisorClient:
    """A supervisor's control channel: it sends reports and receives the order to stop.

    It reconnects until the driver has been silent for `lost_s` seconds.
    """

    def __init__(self, connect: Callable[[], Channel], lost_s: float) -> None:
        self.stop = threading.Event()
        self.stacks = threading.Event()
        """Set when the driver asks where the rank's threads are."""
        self.dead = threading.Event()
        self._connect, self._lost_s = connect, lost_s
        self._channel = connect()
        self._last = time.monotonic()
        self._lasting: dict[Tag, dict[str, Any]] = {}  # the last reports that hold until the next one
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._read, name="supervisor-read", daemon=True)
        self._thread.start()

    def report(self, tag: Tag, document: dict[str, Any]) -> bool:
        """Send one report; False if the driver cannot be reached now. STARTED and the last STOPPED are repeated at
        reconnection.
        """
        with self._lock:
            if tag in (Tag.STARTED, Tag.STOPPED):
                self._lasting[tag] = document
            channel = self._channel
        try:
            channel.send(tag, document)
        except LockstepError:
            return False
        return True

    def silent_s(self) -> float:
        """Seconds since the driver was last heard."""
        return time.monotonic() - self._last

    def close(self) -> None:
        """End the channel."""
        self._closed = True
        self.dead.set()  # for a thread that repeats its report until it arrives
        self._channel.close()

    def _read(self) -> None:
        while not self._closed:
            try:
                tag, _ = self._channel.receive()
                self._last = time.monotonic()
                if tag is Tag.STOP:
                    self.stop.set()
                elif tag is Tag.STACKS:
                    self.stacks.set()
                continue
            except LockstepError:
                pass  # reconnect below, as long as the driver may come back
            self._channel.close()
            while not self._closed:
                if self.silent_s() > self._lost_s:
                    self.dead.set()
                    return
                try:
                    channel = self._connect()
                    with self._lock:  # or an older report could follow a newer one
                        self._channel = channel
                        if self._closed:  # meanwhile, so `close` did not see this one
                            channel.close()
                            return
                        for tag, document in self._lasting.items():
                            channel.send(tag, document)
                    break
                except (OSError, LockstepError):
                    time.sleep(min(1.0, self._lost_s / 10))


class RosterClient:
    """A supervisor's connection to the driver's roster, which sends orders; open until `close`.

    Raises CommunicationError when the driver cannot be reached within `deadline_s`.
    """

    def __init__(self, address: tuple[str, int], secret: bytes, rank: int, *, deadline_s: float, lost_s: float) -> None:
        self._secret, self._rank, self._lost_s = secret, rank, lost_s
        self._orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._channel = open_channel(address, secret, SESSION, Role.SUPERVISOR, rank, deadline_s)
        self._heard_at = time.monotonic()
        threading.Thread(target=self._read, name="orders-read", daemon=True).start()

    def next_order(self) -> dict[str, Any] | None:
        """Wait for the next order; None if none follows: the driver says so, has ended, or is silent for `lost_s`."""
        while True:
            left = self._heard_at + self._lost_s - time.monotonic()
            try:
                return self._orders.get(timeout=max(0.0, left))
            except queue.Empty:
                if time.monotonic() - self._heard_at >= self._lost_s:
                    return None

    def ended(self, wait_s: float) -> bool:
        """Whether no order follows (`next_order`), after at most `wait_s` seconds; for a line that gets none."""
        with contextlib.suppress(queue.Empty):
            self._orders.get(timeout=wait_s)
            return True
        return time.monotonic() - self._heard_at >= self._lost_s

    def say_idle(self) -> None:
        """Report that the order is done and all processes of its rank have ended."""
        with contextlib.suppress(LockstepError):  # the reading thread sees the same end, and no order follows
            self._channel.send(Tag.IDLE, {})

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def _read(self) -> None:
        try:
            while True:
                tag, document = self._channel.receive()
                self._heard_at = time.monotonic()
                if tag is Tag.ORDER:
                    self._orders.put(open_order(self._secret, self._rank, str(document["order"])))
                elif tag is Tag.TOKENS:
                    hold(open_order(self._secret, self._rank, str(document["tokens"]))["tokens"])
                elif tag is Tag.END:
                    return
        except LockstepError:
            pass  # the driver has ended: no order follows
        finally:
            self._orders.put(None)
