"""moto's S3 as a process of its own, from an environment of its own (`make stores-venv`)."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-stores" / "bin" / "python"
BUCKET = "lockstep-tests"
KEY = "lockstep-test-key"
SECRET = "secret-that-no-file-may-hold"
START_LIMIT_S = 60.0

# moto's threads check a condition, and then write: two writers may both find a name free, as S3 never lets them.
# And it takes any key: with KEYS, a file of JSON, each key is good until the second that the file names, as of STS.
PROGRAM = """
import functools, json, os, re, threading, time
from moto.moto_server.werkzeug_app import DomainDispatcherApplication as Application
from moto.s3.responses import S3Response
from moto.server import main

one_by_one = threading.RLock()

def alone(handle):
    @functools.wraps(handle)
    def call(*args, **options):
        with one_by_one:
            return handle(*args, **options)
    return call

for name in ("put_object", "copy_object", "_key_response_post"):
    setattr(S3Response, name, alone(getattr(S3Response, name)))

serve, refusal = Application.__call__, b"<Error><Code>ExpiredToken</Code></Error>"

def with_living_keys(self, environ, start_response):
    key = re.search("Credential=([^/]+)", environ.get("HTTP_AUTHORIZATION", ""))
    with open(os.environ["KEYS"]) as file:
        if key is None or time.time() < json.load(file).get(key[1], 0):
            return serve(self, environ, start_response)
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    start_response("400 Bad Request", [("Content-Type", "application/xml")])
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [refusal]

if "KEYS" in os.environ:
    Application.__call__ = with_living_keys
main()
"""


@dataclass(frozen=True, slots=True)
class ObjectServer:
    """A running server with one bucket, `url`; `log` has a line for each request."""

    endpoint: str
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    """What makes any process of Lockstep use it."""
    url: str = f"s3://{BUCKET}"

    def requests(self) -> list[str]:
        """The requests until now, such as `PUT /lockstep-tests/x`."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line.split('"')[1].removesuffix(" HTTP/1.1") for line in lines if ' HTTP/1.1" ' in line]


@contextmanager
def serving(folder: Path, port: int = 0) -> Iterator[ObjectServer]:
    """Start a server, create the bucket, and end the server afterwards."""
    port = free_port(port)
    log = folder / "s3.log"
    endpoint = f"http://127.0.0.1:{port}"
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(PYTHON), "-c", PROGRAM, "-H", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=own)
    try:
        end = time.monotonic() + START_LIMIT_S
        while not _created(endpoint):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, f"moto did not serve {endpoint} in {START_LIMIT_S:.0f} s: {log.read_text()}"
            time.sleep(0.1)
        yield ObjectServer(endpoint, log, environment_of(endpoint))
    finally:
        process.kill()
        process.wait(30)


def _created(endpoint: str) -> bool:
    try:
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT"), timeout=10).close()
    except urllib.error.HTTPError:
        raise
    except OSError:
        return False
    return True


def environment_of(endpoint: str) -> dict[str, str]:
    """What makes any process of Lockstep use the S3 at this URL."""
    return {
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }


def free_port(port: int = 0) -> int:
    """The port, or any free one for 0. Raises OSError if it is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        return int(probe.getsockname()[1])
