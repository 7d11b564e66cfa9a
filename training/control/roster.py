"""The supervisors of a session, as the driver sees them: which are connected, which wait for an order."""

from __future__ import annotations

import base64
import hmac
import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.storage.errors import CommunicationError
from lockstep.storage.tokens import held
from lockstep.training.control.listener import Listener
from lockstep.training.control.protocol import SESSION, Channel, Role, Tag, try_send

log = logging.getLogger(__name__)
PING_EVERY_S = 2.0
NONCE_BYTES = 12


def seal_order(secret: bytes, rank: int, order: dict[str, Any]) -> str:
    """Return `order` as text that only the supervisor of `rank` can read. Equal orders become different texts."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # 60 ms that no rank needs to pay

    nonce = os.urandom(NONCE_BYTES)
    # Compressed, since a script of a MiB must fit into a frame. That leaks nothing: no attacker chooses a part of what
    # is compressed together with the secrets.
    plain = zlib.compress(json.dumps(order, ensure_ascii=False, allow_nan=False).encode("utf-8", "surrogatepass"))
    return base64.b64encode(nonce + AESGCM(_key(secret, rank)).encrypt(nonce, plain, None)).decode()


def open_order(secret: bytes, rank: int, sealed: str) -> dict[str, Any]:
    """The inverse of `seal_order`; raises ValueError for a text that was made with another secret or rank."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    data = base64.b64decode(sealed)
    try:
        plain = AESGCM(_key(secret, rank)).decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], None)
    except InvalidTag:
        raise ValueError(f"an order that is not for the supervisor of rank {rank} of this session") from None
    order: dict[str, Any] = json.loads(zlib.decompress(plain).decode("utf-8", "surrogatepass"))
    return order


def _key(secret: bytes, rank: int) -> bytes:
    return hmac.digest(secret, b"orders of the supervisor of rank %d" % rank, "sha256")


class Roster:
    """One connection to each supervisor of a session; thread-safe. `on_lost(rank)` is called when one breaks.

    A broken connection is not replaced: its supervisor finishes the order that it has, and gets no other.
    """

    def __init__(self, secret: bytes, num_ranks: int, bind_host: str, on_lost: Callable[[int], None]) -> None:
        self._secret, self._num_ranks, self._on_lost = secret, num_ranks, on_lost
        self._lines: dict[int, Channel] = {}
        self._came: set[int] = set()
        self._idle: set[int] = set()
        self._orders: dict[int, dict[str, object]] = {}  # not sent yet
        self._closed = False
        self._changed = threading.Condition()
        self._listener = Listener(bind_host, secret, SESSION, num_ranks, self._serve)
        self.port = self._listener.port
        threading.Thread(target=self._ping, name="roster-ping", daemon=True).start()

    def give(self, orders: Sequence[dict[str, object]]) -> None:
        """Send each supervisor its order, by rank; one that is not connected yet gets it when it connects.

        `on_lost` is called again for each supervisor that is lost by now, since it will never take its order.
        """
        with self._changed:
            self._orders = dict(enumerate(orders))
            gone = self._gone()
            ready = {rank: self._lines[rank] for rank in self._idle & self._lines.keys()}
        for rank in gone:
            self._on_lost(rank)
        for rank, line in ready.items():
            self._hand_out(rank, line)

    def came(self, wait_s: float) -> bool:
        """Whether all supervisors have connected, after at most `wait_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._came) == self._num_ranks, wait_s)

    def whole(self, wait_s: float) -> bool:
        """Whether all supervisors wait for an order, after at most `wait_s` seconds."""
        everyone = set(range(self._num_ranks))
        with self._changed:
            self._changed.wait_for(lambda: self._idle == everyone or self._gone(), wait_s)
            return self._idle == everyone and not self._gone()

    def close(self) -> None:
        """Send all supervisors the end of orders; they end after their ranks."""
        with self._changed:
            self._closed = True
            lines = list(self._lines.values())
        for line in lines:
            try_send(line, Tag.END, {})
        self._listener.close()

    def gone(self) -> set[int]:
        """The ranks whose supervisors were connected and are lost."""
        with self._changed:
            return self._gone()

    def _gone(self) -> set[int]:
        return self._came - self._lines.keys()

    def _hand_out(self, rank: int, line: Channel) -> None:
        with self._changed:
            order = self._orders.pop(rank, None)
            if order is None:
                return
            self._idle.discard(rank)
        try_send(line, Tag.ORDER, {"order": seal_order(self._secret, rank, order)})

    def _serve(self, role: Role, rank: int, line: Channel) -> None:
        with self._changed:
            refused = role is not Role.SUPERVISOR or rank in self._came
            closed = self._closed
            if not refused:
                self._came.add(rank)
                self._lines[rank] = line
                self._idle.add(rank)
                self._changed.notify_all()
        if refused:
            log.warning("refused a second connection of %s", line.whom)
            line.close()
            return
        if closed:
            try_send(line, Tag.END, {})
        try:
            self._hand_out(rank, line)  # if it fails, the supervisor is lost: it would wait for an order for ever
            while True:
                tag, _ = line.receive()
                if tag is Tag.IDLE:
                    with self._changed:
                        self._idle.add(rank)
                        self._changed.notify_all()
        except CommunicationError as error:
            if not self._closed:
                log.info("%s", str(error).replace("\n", ";"))
        finally:
            with self._changed:
                self._lines.pop(rank, None)
                self._idle.discard(rank)
                self._changed.notify_all()
            line.close()
            if not self._closed:
                self._on_lost(rank)

    def _ping(self) -> None:
        sent: dict[int, str] = {}  # delegation tokens by rank; orders have those of their time
        while self._listener.open:
            with self._changed:
                lines = dict(self._lines)
            for rank, line in lines.items():
                try_send(line, Tag.PING, {})
                if (tokens := held()) != sent.get(rank, ""):
                    try_send(line, Tag.TOKENS, {"tokens": seal_order(self._secret, rank, {"tokens": tokens})})
                    sent[rank] = tokens
            time.sleep(PING_EVERY_S)
