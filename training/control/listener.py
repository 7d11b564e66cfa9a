"""A port of the driver: each peer that proves the key is served by its own thread."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable

from lockstep.storage.errors import CommunicationError
from lockstep.training.comm.auth import BACKLOG, HandshakeError, Reception
from lockstep.training.control.protocol import Channel, Role, greet

SEND_DEADLINE_S = 10


class Listener:
    """Listens until `close`; calls `serve(role, rank, channel)` for each peer of `generation`."""

    def __init__(
        self, bind_host: str, key: bytes, generation: int, num_ranks: int, serve: Callable[[Role, int, Channel], None]
    ) -> None:
        self._key, self._generation, self._num_ranks, self._serve = key, generation, num_ranks, serve
        self._reception = Reception("the driver", self._greet, float("inf"))
        self._socket = socket.create_server((bind_host, 0), backlog=BACKLOG)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._reception.serve, args=(self._socket,), name="control-accept", daemon=True).start()

    @property
    def open(self) -> bool:
        """Whether new peers are accepted."""
        return self._socket.fileno() >= 0

    def close(self) -> None:
        """Accept no more peers; open connections stay."""
        self._socket.close()

    def _greet(self, sock: socket.socket, until: float, proved: Callable[[], None]) -> None:
        address = sock.getpeername()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            role, rank, channel = greet(
                sock, self._key, self._generation, self._num_ranks, f"{address[0]}:{address[1]}"
            )
        except CommunicationError as error:
            raise HandshakeError(str(error).replace("\n", ";")) from error
        proved()
        sock.settimeout(None)
        # Reads wait as long as heartbeats allow; a write to a peer that reads nothing must not block the driver.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_DEADLINE_S, 0))
        threading.Thread(
            target=self._serve, args=(role, rank, channel), name=f"control-{channel.whom}", daemon=True
        ).start()
