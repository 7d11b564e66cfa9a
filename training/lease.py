"""The living driver's sign: a file with a counter, rewritten every few seconds.

It keeps two drivers from working on one run by mistake. It is no lock: what makes a stopped driver harmless is the
chain of claims.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from storage.canonical import canonical_bytes
from storage.errors import ConfigError, NotFoundError, StorageError
from storage.fs import FileSystem
from storage.publish import write_file

log = logging.getLogger(__name__)

REWRITE_EVERY_S = 5.0
WATCH_S = 15.0
LOOK_EVERY_S = 0.5


class Lease:
    """Held from `with` to its end; entering raises ConfigError when another driver's counter moves.

    A closed lease, and one whose driver ran on this host and is dead, is taken at once; any other is watched for
    `watch_s` seconds.
    """

    def __init__(self, fs: FileSystem, url: str, watch_s: float = WATCH_S, every_s: float = REWRITE_EVERY_S) -> None:
        self._fs, self._url, self._watch_s, self._every_s = fs, url, watch_s, every_s
        self._nonce = secrets.token_hex(8)
        self._counter = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def __enter__(self) -> Lease:
        self._wait_until_free()
        self._write(closed=False)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        try:
            if self._ours():
                self._write(closed=True)
        except StorageError as failure:
            log.warning("the lease is left open: %s", failure.what)  # the next driver watches it for a while

    def _wait_until_free(self) -> None:
        first = self._read()
        if first is None or first.get("closed") or _surely_dead(first):
            return
        log.warning("%s is open: watching for %.0f s whether its driver lives", self._url, self._watch_s)
        end = time.monotonic() + self._watch_s
        while time.monotonic() < end:
            time.sleep(LOOK_EVERY_S)
            now = self._read()
            if now is None or now.get("closed"):
                return
            if (now.get("nonce"), now.get("counter")) != (first.get("nonce"), first.get("counter")):
                raise ConfigError(
                    "another driver is at work on this run",
                    got=f"{self._url} is rewritten by process {now.get('pid')} on {now.get('host')}",
                    allowed="one driver at a time",
                    next_step="Wait for it to end, or stop it and start again.",
                )

    def _keep(self) -> None:
        while not self._ended.wait(self._every_s):
            try:
                if not self._ours():
                    return  # a successor took it while we were stopped: its claim decides, do not fight over a sign
                self._write(closed=False)
            except StorageError as error:
                log.warning("the lease was not rewritten: %s", error.what)

    def _ours(self) -> bool:
        document = self._read()
        return document is None or document.get("nonce") == self._nonce

    def _read(self) -> dict[str, Any] | None:
        try:
            document = json.loads(self._fs.read_bytes(self._url))
        except (NotFoundError, ValueError, RecursionError):
            return None  # no JSON is no living driver
        return document if isinstance(document, dict) else None

    def _write(self, *, closed: bool) -> None:
        self._counter += 1
        document = {
            "kind": "lease",
            "nonce": self._nonce,
            "counter": self._counter,
            "closed": closed,
            "host": socket.gethostname(),
            "boot": _boot_id(),
            "pid": os.getpid(),
            "started": _start_time(os.getpid()),
        }
        write_file(self._fs, self._url, canonical_bytes(document), exclusive=False)


def _surely_dead(lease: dict[str, Any]) -> bool:
    boot = _boot_id()
    if boot is None or lease.get("host") != socket.gethostname() or lease.get("boot") != boot:
        return False
    pid = lease.get("pid")
    return isinstance(pid, int) and (lease.get("started") is None or _start_time(pid) != lease["started"])


def _boot_id() -> str | None:
    # Of this boot and this process name space: in two containers of one host the same number is two processes.
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _start_time(pid: int) -> str | None:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return status.rpartition(")")[2].split()[19]
