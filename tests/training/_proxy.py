"""Somebody on the wire between two ranks, who passes bytes on and may change one bit."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType


class Proxy:
    """Passes connections to `address` on, but for the first `drop`, which it hangs up on.

    Flips the lowest bit of byte `flip_at` that each caller sends.
    """

    def __init__(
        self, address: tuple[str, int], *, flip_at: int | None = None, drop: int = 0, listen_on: str = "127.0.0.1"
    ) -> None:
        self._target, self._flip_at, self._drop = address, flip_at, drop
        self._listener = socket.create_server((listen_on, 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._socks: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        for sock in self._socks:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            if self._drop:
                self._drop -= 1
                caller.close()
                continue
            try:
                listener = socket.create_connection(self._target)
            except OSError:
                caller.close()  # as if the rank itself had refused it
                continue
            self._socks += [caller, listener]
            for source, sink, flip_at in ((caller, listener, self._flip_at), (listener, caller, None)):
                threading.Thread(target=_pass_on, args=(source, sink, flip_at), daemon=True).start()


def _pass_on(source: socket.socket, sink: socket.socket, flip_at: int | None) -> None:
    passed = 0
    try:
        while data := source.recv(1 << 16):
            if flip_at is not None and passed <= flip_at < passed + len(data):
                changed = bytearray(data)
                changed[flip_at - passed] ^= 1
                data = bytes(changed)
            passed += len(data)
            sink.sendall(data)
    except OSError:  # one side was reset: the other hears of it as of an end
        pass
    finally:
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
