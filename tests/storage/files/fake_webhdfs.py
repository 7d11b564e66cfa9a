"""A WebHDFS server over a dictionary, NameNode and DataNode in one, which fails where a test says so."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit


class FakeWebHdfs:
    """`files` by path, each on all `replicas`: names for data transfer and hosts for HTTP, of which a reader is
    sent to the first that it does not leave out. `before[op]` and `after[op]` hold functions of the handler, each run
    once, around an operation ("CREATE" at the NameNode, "CREATE data" at the DataNode): one that returns True has
    answered, or has left without an answer.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.before: dict[str, list[Callable[[Any], bool]]] = {}
        self.after: dict[str, list[Callable[[Any], bool]]] = {}
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.address = ""
        self.replicas = {"10.0.0.1:9866": "127.0.0.1"}

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def count(self, operation: str) -> int:
        return sum(name == operation for name, _ in self.asked)


@contextmanager
def serving() -> Iterator[FakeWebHdfs]:
    fake = FakeWebHdfs()

    class Handler(_Handler):
        pass

    Handler.fake = fake
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        fake.address = f"127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield fake
        server.shutdown()
        thread.join(10)


def gone(handler: Any) -> bool:
    """The connection breaks without an answer."""
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)
    return True


def refusing(java: str, text: str = "") -> Callable[[Any], bool]:
    """An answer that is Java's exception."""

    def answer(handler: Any) -> bool:
        handler.tell({"RemoteException": {"exception": java, "message": text}}, 403)
        return True

    return answer


def silent(seconds: float) -> Callable[[Any], bool]:
    """No answer for a while, as a frozen server; then none at all."""

    def wait(handler: Any) -> bool:
        time.sleep(seconds)
        return gone(handler)

    return wait


class _Handler(BaseHTTPRequestHandler):
    fake: FakeWebHdfs
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: pytest would print it."""

    def do_GET(self) -> None:
        self._serve()

    do_PUT = do_POST = do_DELETE = do_GET

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        asked = dict(parse_qsl(parts.query))
        path, op = unquote(parts.path).removeprefix("/webhdfs/v1") or "/", asked["op"]
        if "data" in asked or op not in ("CREATE", "APPEND", "OPEN"):
            body = self._body()
            name = op + (" data" if "data" in asked else "")
        else:
            body, name = b"", op
        self.fake.asked.append((name, asked))
        if self._hook(self.fake.before, name):
            return
        status, told, headers = self._do(name, path, asked, body)
        if not self._hook(self.fake.after, name):
            self.tell(told, status, headers)

    def _hook(self, hooks: dict[str, list[Callable[[Any], bool]]], name: str) -> bool:
        return bool(hooks.get(name)) and hooks[name].pop(0)(self)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pieces = []
        while size := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _do(self, name: str, path: str, asked: dict[str, str], body: bytes) -> tuple[int, Any, dict[str, str]]:
        files = self.fake.files
        if name in ("CREATE", "APPEND", "OPEN"):
            if name != "CREATE" and path not in files:
                return _fault("FileNotFoundException", path)
            left_out = asked.get("excludedatanodes", "").split(",")
            host = next((host for name, host in self.fake.replicas.items() if name not in left_out), None)
            if host is None:
                return _fault("IOException", "No active and not excluded nodes contain this block")
            return 307, b"", {"Location": f"http://{host}:{self.fake.port}{self.path}&data=1"}
        if name == "GET_BLOCK_LOCATIONS":
            nodes = [(host, *name.split(":")) for name, host in self.fake.replicas.items()]
            keys = ("hostName", "ipAddr", "xferPort")
            found = [{**dict(zip(keys, node, strict=True)), "infoPort": self.fake.port} for node in nodes]
            return 200, {"LocatedBlocks": {"locatedBlocks": [{"locations": found}]}}, {}
        if name == "CREATE data":
            if path in files and asked["overwrite"] == "false":
                return _fault("FileAlreadyExistsException", path)
            files[path] = body
            return 201, b"", {}
        if name == "APPEND data":
            files[path] += body
            return 200, b"", {}
        if name == "OPEN data":
            return 200, files[path][int(asked["offset"]) :][: int(asked["length"])], {}
        if name == "GETFILESTATUS":
            if path != "/" and path not in files:
                return _fault("FileNotFoundException", path)
            size = len(files.get(path, b""))
            kind = "FILE" if path in files else "DIRECTORY"
            return 200, {"FileStatus": {"type": kind, "length": size, "modificationTime": 1, "pathSuffix": ""}}, {}
        if name == "RENAME":
            if path not in files:
                return _fault("FileNotFoundException", path)
            if asked["destination"] in files and asked["renameoptions"] == "NONE":
                return _fault("FileAlreadyExistsException", path)
            files[asked["destination"]] = files.pop(path)
            return 200, b"", {}
        assert name == "DELETE", name
        return 200, {"boolean": files.pop(path, None) is not None}, {}

    def tell(self, told: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = told if isinstance(told, bytes) else json.dumps(told).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)


def _fault(java: str, path: str) -> tuple[int, Any, dict[str, str]]:
    return 404, {"RemoteException": {"exception": java, "message": f"{path}\n\tat org.apache.hadoop.X"}}, {}
