"""The stand-in kubelet's answer to `kubectl logs`: what a pod's container has printed so far."""

from __future__ import annotations

import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlparse

FOLLOW_S = 0.3


def serve_logs(address: str, folder: Path) -> int:
    """Serve pods' logs below `folder` over HTTPS, in a thread; returns the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answer /containerLogs/NAMESPACE/POD/CONTAINER, with follow=true until the pod is gone."""
            url = urlparse(self.path)
            place = url.path.removeprefix("/containerLogs/")
            path = folder / "pod-logs" / f"{place}.log"
            if not path.is_file():
                self.send_error(404)
                return
            self.send_response(200)
            self.end_headers()
            follow = parse_qs(url.query).get("follow") == ["true"]
            with path.open("rb") as log:
                while True:
                    ended = not any(folder.glob(f"pods/*/{place.rpartition('/')[2]}"))
                    self.wfile.write(log.read())
                    self.wfile.flush()
                    if ended or not follow:
                        return
                    time.sleep(FOLLOW_S)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer((address, 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificates = folder / "certificates"
    context.load_cert_chain(certificates / "apiserver.crt", certificates / "apiserver.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, name="logs", daemon=True).start()
    return int(server.server_address[1])
