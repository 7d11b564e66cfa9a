"""A proxy before an S3 that fails some requests, as stores and networks do, and may be as slow as a distant one.

Which request gets which fault follows from a seed and the request's number alone.
"""

from __future__ import annotations

import hashlib
import http.client
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

CHUNK_BYTES = 1 << 16
UPSTREAM_LIMIT_S = 60.0
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close sends RST
_KEPT = {"content-length", "connection", "transfer-encoding", "date", "server"}  # headers that this proxy writes itself


_KEY = re.compile(rb"<Key>.*?</Key>")


def _error(code: str) -> bytes:
    return f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>a drawn fault</Message></Error>'.encode()


REFUSALS = {
    "slow down": (503, "SlowDown"),
    "internal error": (500, "InternalError"),
    "expired": (403, "ExpiredToken"),
    "unknown key": (403, "InvalidAccessKeyId"),
    "clock": (403, "RequestTimeTooSkewed"),
}
"""Answers in place of the server's, which never sees the request."""
FATAL = ("unknown key", "clock")
"""Faults that end a job: to repeat the request would not help."""


def _any(method: str, target: str) -> bool:
    return True


def _lists(method: str, target: str) -> bool:
    return method == "GET" and "list-type=2" in target


FITS: Mapping[str, Callable[[str, str], bool]] = dict.fromkeys(REFUSALS, _any) | {
    "reset": _any,  # before the server sees the request
    "lost answer": _any,  # the server has done what was asked
    "late": _any,  # the server does it after the client has given up
    "outage": _any,  # nothing is served for a while
    "half body": lambda method, target: method == "GET",  # shorter than its Content-Length
    "cut listing": _lists,  # XML that ends in the middle, of the length that the headers say
    "error in 200": lambda method, target: method == "COPY" or (method == "POST" and "uploadId=" in target),
    "undeleted": lambda method, target: method == "POST" and target.endswith("?delete"),  # one of several, in a 200
}
"""All kinds of faults, and whether one fits a request, where COPY is a PUT that names a source."""
PASSING = tuple(kind for kind in FITS if kind not in FATAL)


@dataclass(frozen=True, slots=True)
class Faults:
    """Which requests fail: each has one chance in `one_of`, and those in `always` fail for certain."""

    seed: int = 0
    one_of: int = 0
    """0 is never."""
    kinds: tuple[str, ...] = PASSING
    always: Collection[int] = ()
    most: int = 1 << 30
    """No more faults than this."""

    def at(self, number: int, method: str, target: str) -> str | None:
        """The fault of a request, numbered from 1; None for most."""
        drawn = int.from_bytes(hashlib.sha256(f"{self.seed} {number}".encode()).digest()[:8], "big")
        kinds = [kind for kind in self.kinds if FITS[kind](method, target)]
        struck = number in self.always or (self.one_of and drawn % self.one_of == 0)
        return kinds[drawn // max(1, self.one_of) % len(kinds)] if struck and kinds else None


@dataclass(frozen=True, slots=True)
class Link:
    """How far away the store is. A new connection takes one round trip; the slow start of TCP is left out."""

    round_trip_s: float = 0.0
    bytes_s: float = float("inf")
    """Of all answers together."""


@dataclass(slots=True)
class FaultyProxy:
    """A running proxy; `faults` may be replaced meanwhile, which begins to count from 1 again."""

    link: Link = field(default_factory=Link)
    late_s: float = 6.0
    outage_s: float = 2.0
    page_keys: int | None = None
    """So many names a page of a listing, with a token for the next."""
    endpoint: str = ""
    upstream: tuple[str, int] = ("", 0)
    struck: list[tuple[str, str]] = field(default_factory=list)
    """Each fault so far, and its request."""
    requests: int = 0
    most_at_once: int = 0
    """The most requests that were under way together."""
    _at_once: int = 0
    _faults: Faults = field(default_factory=Faults)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _out_until: float = 0.0
    _link_free_at: float = 0.0

    def begin(self, faults: Faults) -> None:
        """Let these faults happen from the next request on."""
        with self._lock:
            self._faults, self.requests, self.most_at_once = faults, 0, 0
            self.struck.clear()

    def draw(self, method: str, target: str) -> str | None:
        """The fault of the next request."""
        with self._lock:
            self.requests += 1
            if time.monotonic() < self._out_until:
                return "reset"
            if len(self.struck) >= self._faults.most:
                return None
            kind = self._faults.at(self.requests, method, target)
            if kind is not None:
                self.struck.append((kind, f"{method} {target}"))
            if kind == "outage":
                self._out_until = time.monotonic() + self.outage_s
            return kind

    def end_outage(self) -> None:
        """Serve again at once."""
        with self._lock:
            self._out_until = 0.0

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Count a request while it lasts."""
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            yield
        finally:
            with self._lock:
                self._at_once -= 1

    def pass_through_link(self, size: int) -> None:
        """Wait until the link has carried so many more bytes."""
        with self._lock:
            self._link_free_at = max(self._link_free_at, time.monotonic()) + size / self.link.bytes_s
            wait_s = self._link_free_at - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = CHUNK_BYTES
    proxy: FaultyProxy

    def setup(self) -> None:
        super().setup()
        time.sleep(self.proxy.link.round_trip_s)

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        with suppress(ConnectionError, TimeoutError):  # the client may leave at any time
            super().handle()

    def do_GET(self) -> None:
        with self.proxy.under_way():
            self._serve()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kind = self.proxy.draw("COPY" if "x-amz-copy-source" in self.headers else self.command, self.path)
        if kind in ("reset", "outage"):
            self._reset()
            return
        if kind == "late":
            time.sleep(self.proxy.late_s)
        time.sleep(self.proxy.link.round_trip_s)
        if kind in REFUSALS:
            status, code = REFUSALS[kind]
            self._answer(status, {"Content-Type": "application/xml"}, _error(code))
        elif kind == "error in 200":
            self._answer(200, {"Content-Type": "application/xml"}, _error("InternalError"))
        elif kind == "undeleted":
            found = _KEY.search(body)
            assert found is not None
            failed = _error("InternalError").replace(b"<Code>", found[0] + b"<Code>").partition(b"?>")[2]
            xml = b'<DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">%b</DeleteResult>' % failed
            self._answer(200, {"Content-Type": "application/xml"}, xml)
        else:
            self._forward(body, kind)

    def _forward(self, body: bytes, kind: str | None) -> None:
        target = self.path
        if _lists(self.command, target) and self.proxy.page_keys is not None:
            target += f"&max-keys={self.proxy.page_keys}"
        server = http.client.HTTPConnection(*self.proxy.upstream, timeout=UPSTREAM_LIMIT_S)
        try:
            server.request(self.command, target, body or None, dict(self.headers.items()))
            answer = server.getresponse()
            headers = {name: value for name, value in answer.getheaders() if name.lower() not in _KEPT}
            length = answer.getheader("Content-Length")
            if kind == "lost answer":
                answer.read()
                self._reset()
            elif kind == "half body":
                data = answer.read()
                self._answer(answer.status, headers, data[: len(data) // 2], length=len(data))
                self._reset()
            elif kind == "cut listing":
                data = answer.read()
                self._answer(answer.status, headers, data[: len(data) // 2])
            elif length is None:
                self._answer(answer.status, headers, answer.read())
            else:
                self._answer(answer.status, headers, b"", length=int(length))
                for data in iter(lambda: answer.read(CHUNK_BYTES), b""):
                    self._send(data)
                self.wfile.flush()
        finally:
            server.close()

    def _answer(self, status: int, headers: Mapping[str, str], body: bytes, *, length: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self._send(body)
        self.wfile.flush()

    def _send(self, data: bytes) -> None:
        self.proxy.pass_through_link(len(data))
        self.wfile.write(data)

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        pass  # a client that left, or a server that ended: the test sees it


@contextmanager
def faulty(endpoint: str, proxy: FaultyProxy | None = None) -> Iterator[FaultyProxy]:
    """Serve before `endpoint`, such as `http://127.0.0.1:9000`, until the block ends."""
    url = urlsplit(endpoint)
    assert url.hostname is not None and url.port is not None
    made = proxy or FaultyProxy()
    made.upstream = url.hostname, url.port
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": made}))
    made.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="faulty-proxy", daemon=True)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
