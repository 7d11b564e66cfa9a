"""A driver's ownership of its run, by lease and claims, and how a new driver disarms older ones (decision 081).

HDFS has no compare-and-swap: a driver that is paused between its last check and a rename still renames when it resumes.
So a driver publishes in three steps: it writes under a temporary name (or into its generation's staging directory),
checks, and renames. A driver that takes over claims first, and then removes those sources. A later rename of the older
driver finds nothing; an earlier one happened before the new driver looked at the run.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.storage.documents import canonical_bytes, sha256_hex
from lockstep.storage.errors import ConfigError, LockstepError, NotFoundError, StorageError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.publish import read_replaced, sweep_temporaries, write_file
from lockstep.storage.urls import join, parent
from lockstep.training.run.lineage import (
    CheckpointRef,
    Claim,
    SupersededError,
    check_newest,
    claim_next,
    newest_claimed,
    superseded,
)
from lockstep.training.run.paths import RunPaths, generation_of

log = logging.getLogger(__name__)
REWRITE_EVERY_S = 5.0
WATCH_S = 15.0
LEASE_LOOK_S = 0.5
# Nonces of leases of this process that no driver holds, though the storage may show them open.
_ended_here: set[str] = set()


def _nothing() -> None:
    """Do nothing: the default of `look`."""


class Lease:
    """The file lease.json, held within `with`; entering raises ConfigError when another driver's counter moves.

    A closed lease, and one whose driver ran on this host and has ended, is taken at once. Any other is watched for
    `watch_s` seconds, or with `take_over` not at all. Each taker increments `turn`, so that two drivers that see each
    other's lease agree on which came later: that one rewrites it, and the other one ends.

    `look` is called each time the lease is rewritten; it raises SupersededError for other signs of a newer driver.
    """

    def __init__(
        self,
        fs: FileSystem,
        url: str,
        watch_s: float = WATCH_S,
        every_s: float = REWRITE_EVERY_S,
        *,
        take_over: bool = False,
        look: Callable[[], None] = _nothing,
    ) -> None:
        self._fs, self._url, self._watch_s, self._every_s = fs, url, watch_s, every_s
        self._take_over, self._look = take_over, look
        self._nonce = secrets.token_hex(8)
        self._turn = self._counter = 0
        self._lost: SupersededError | None = None
        self._ended = threading.Event()
        self._io = threading.Lock()  # keeps `sweep` from our own temporary files
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def __enter__(self) -> Lease:
        found = self._wait_until_free()
        self._turn = _turn_of(found) + 1
        try:
            self._write(closed=False, confirm=partial(self._check_same, found))
        except NotFoundError:  # a driver that started since has swept it away
            raise self._at_work(self._read() or {}) from None
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        _ended_here.add(self._nonce)
        self._thread.join(0.0 if self._fs.away else None)
        if self._fs.away:
            return  # it is left open, as by a driver that was killed
        try:
            document = self._read()
            if document is None or document.get("nonce") == self._nonce:
                self._write(closed=True, confirm=self.check_held)
        except LockstepError as failure:
            log.warning("the lease is left open: %s", failure.what)  # the next driver watches it for a while

    @property
    def lost(self) -> SupersededError | None:
        """The error with which this driver must end; None while no newer driver is known."""
        return self._lost

    def check_held(self) -> None:
        """Read the lease; raise SupersededError if a later driver holds it."""
        if self._lost is not None:
            raise self._lost
        document = self._read()
        # A lease of an earlier taker, which was paused in the middle of its write, is overwritten.
        if document is not None and (_turn_of(document), str(document.get("nonce"))) > (self._turn, self._nonce):
            whom = f"process {document.get('pid')} on {document.get('host')}"
            raise superseded(parent(self._url), f"{self._url}, rewritten by {whom}")

    def check_not_lost(self) -> None:
        """Check as `check_held` does; but a lease that cannot be read is no sign of a later driver, whose claim would
        show it.
        """
        try:
            self.check_held()
        except StorageError as error:
            log.warning("the lease cannot be read, so the claims decide: %s", error.what)

    def sweep(self) -> None:
        """Delete temporary files that paused older drivers would still rename into the lease's directory.

        Call it after the claim, when they have lost the right to do so.
        """
        with self._io:
            sweep_temporaries(self._fs, parent(self._url))

    def _wait_until_free(self) -> dict[str, Any] | None:
        first = self._read()
        if first is None or first.get("closed") or _surely_dead(first):
            return first
        if self._take_over:
            log.warning("%s: taken over from process %s on %s", self._url, first.get("pid"), first.get("host"))
            return first
        log.warning("%s is open: watching for %.0f s whether its driver lives", self._url, self._watch_s)
        now: dict[str, Any] | None = first
        end = time.monotonic() + self._watch_s
        while time.monotonic() < end:
            time.sleep(LEASE_LOOK_S)
            now = self._read()
            if now is None or now.get("closed") or _surely_dead(now):
                break
            if (now.get("nonce"), now.get("counter")) != (first.get("nonce"), first.get("counter")):
                raise self._at_work(now)
        return now

    def _check_same(self, found: dict[str, Any] | None) -> None:
        """Raise ConfigError if another driver has taken the lease since it was found free."""
        now = self._read()
        if now is not None and now.get("nonce") != (found or {}).get("nonce"):
            raise self._at_work(now)

    def _at_work(self, lease: dict[str, Any]) -> ConfigError:
        return ConfigError(
            "another driver is working on this run",
            got=f"{self._url} is rewritten by process {lease.get('pid')} on {lease.get('host')}",
            allowed="one driver at a time",
            next_step="Wait for it to end, or stop it and start again; with --take-over this call replaces it, and "
            "that driver ends.",
        )

    def _keep(self) -> None:
        while not self._ended.wait(self._every_s):
            try:
                self._look()
                self._write(closed=False, confirm=self._check_kept)  # heals a lease whose blocks are lost
            except SupersededError as error:
                self._lost = error  # write no more: two drivers must not overwrite each other's lease
                return
            except NotFoundError:
                continue  # a later taker swept it away while this process was paused: checked next time
            except LockstepError as error:
                log.warning("the lease was not rewritten: %s", error.what)

    def _check_kept(self) -> None:
        if self._ended.is_set():
            raise StorageError(
                "the lease is not rewritten: its driver ended while the storage was away",
                got=self._url,
                allowed="a driver at work",
                next_step="Nothing: the next driver of this run takes the lease.",
            )
        self.check_not_lost()

    def _read(self) -> dict[str, Any] | None:
        return read_lease(self._fs, self._url)

    def _write(self, *, closed: bool, confirm: Callable[[], None]) -> None:
        self._counter += 1
        document = {
            "kind": "lease",
            "nonce": self._nonce,
            "turn": self._turn,
            "counter": self._counter,
            "closed": closed,
            "host": socket.gethostname(),
            "boot": _boot_id(),
            "pid": os.getpid(),
            "started": _start_time(os.getpid()),
        }
        with self._io:
            write_file(self._fs, self._url, canonical_bytes(document), exclusive=False, confirm=confirm)


def read_lease(fs: FileSystem, url: str) -> dict[str, Any] | None:
    """The content of lease.json; None if there is none, or one that no living driver writes."""
    try:
        document = json.loads(read_replaced(fs, url))
    except (NotFoundError, ValueError, RecursionError):
        return None  # no living driver writes anything but JSON
    return document if isinstance(document, dict) else None


def driver_lives(lease: dict[str, Any] | None) -> bool | None:
    """Whether the driver that wrote a lease lives; None for one of another host, whose lease must be read again: a
    living driver rewrites it every REWRITE_EVERY_S.
    """
    if lease is None or lease.get("closed") or _surely_dead(lease):
        return False
    boot = _boot_id()
    here = boot is not None and lease.get("host") == socket.gethostname() and lease.get("boot") == boot
    return True if here else None


def _turn_of(lease: dict[str, Any] | None) -> int:
    turn = (lease or {}).get("turn")
    return turn if isinstance(turn, int) else 0


def _surely_dead(lease: dict[str, Any]) -> bool:
    if str(lease.get("nonce")) in _ended_here:
        return True
    boot = _boot_id()
    if boot is None or lease.get("host") != socket.gethostname() or lease.get("boot") != boot:
        return False
    pid = lease.get("pid")
    return isinstance(pid, int) and (lease.get("started") is None or _start_time(pid) != lease["started"])


def _boot_id() -> str | None:
    # Includes the PID namespace: in two containers of one host, the same PID means two processes.
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


def staging_folder(fs: FileSystem, directory: str, kind: str) -> str:
    """The URL of a new folder in `directory`, where this process prepares an output; makes nothing.

    Removes those of the same kind that killed processes of this host have left there: their names say which process
    made them.
    """
    here = sha256_hex(f"{socket.gethostname()} {_boot_id()}".encode())[:12]
    ours = re.compile(rf"_staging-{kind}-{here}-(?P<pid>[0-9]+)-(?P<started>[0-9]+)-[0-9a-f]{{8}}")
    try:
        found = [(entry.url, ours.fullmatch(entry.name)) for entry in fs.list(directory)]
    except NotFoundError:
        found = []
    for url, match in found:
        if match is not None and _start_time(int(match["pid"])) != match["started"]:
            fs.discard(url)
    pid = os.getpid()
    return join(directory, f"_staging-{kind}-{here}-{pid}-{_start_time(pid) or 0}-{secrets.token_hex(4)}")


class Ownership:
    """Lease and claims of one driver, held within `with`.

    Entering raises what Lease raises. Leaving with an error that a newer driver caused raises SupersededError instead.
    """

    def __init__(
        self,
        fs: FileSystem,
        paths: RunPaths,
        watch_s: float = WATCH_S,
        every_s: float = REWRITE_EVERY_S,
        *,
        take_over: bool = False,
    ) -> None:
        self._fs, self._paths = fs, paths
        self._lease = Lease(fs, paths.lease, watch_s, every_s, take_over=take_over, look=self._check_claims)
        self._newest: int | None = None
        self._claiming = False

    def __enter__(self) -> Ownership:
        self._lease.__enter__()
        self._newest = newest_claimed(self._fs, self._paths)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            known = isinstance(error, SupersededError | StorageError) or self._fs.away
            if isinstance(error, LockstepError) and not known:
                self.confirm()  # files that a newer driver has swept away look like an error of this one
        except StorageError as away:  # the run ends with its own error, which the storage may have caused too
            log.warning("cannot find out whether another driver has taken the run over: %s", away.what)
        finally:
            self._lease.__exit__(kind, error, trace)

    def overtaken(self) -> SupersededError | None:
        """The error with which this driver must end, once its lease shows a newer one."""
        return self._lease.lost

    def confirm(self) -> None:
        """Read lease and claims; raises SupersededError if either shows a newer driver, StorageError if the claims
        cannot be read.
        """
        self._lease.check_not_lost()
        self._check_claims()

    def claim(
        self,
        parent: CheckpointRef | None,
        *,
        epochs: int,
        num_ranks: int,
        data_ranks: int | None = None,
        shares: tuple[int, ...] | None = None,
    ) -> Claim | None:
        """Claim the next generation, which starts from `parent`.

        None if a driver that this one has overtaken has just claimed it: the caller then looks up the tip again. Raises
        SupersededError if this driver is the one that was overtaken.
        """
        self._lease.check_held()  # after the look-up of the newest claim: a later claim shows by its number
        self._claiming = True
        try:
            asked: dict[str, Any] = {"epochs": epochs, "num_ranks": num_ranks, "shares": shares}
            claim = claim_next(self._fs, self._paths, parent, **asked, data_ranks=data_ranks, after=self._newest)
            self._newest = claim.generation
        except SupersededError:
            if not self._fs.exists(self._paths.lease):
                raise  # without a lease, it is unknown which of the two came later
            self._lease.check_held()
            self._newest = newest_claimed(self._fs, self._paths)
            return None
        finally:
            self._claiming = False
        return claim

    def sweep(self) -> None:
        """Remove what drivers of older generations have staged and not published. Call it after the claim."""
        self._lease.sweep()
        for directory in (self._paths.results, self._paths.comm_plans):
            sweep_temporaries(self._fs, directory)
        for name in self._names(self._paths.all_metrics):
            generation = generation_of(name)
            if generation is not None and self._newest is not None and generation < self._newest:
                sweep_temporaries(self._fs, join(self._paths.all_metrics, name))

    def _check_claims(self) -> None:
        known = self._newest
        if known is None or self._claiming:
            return
        try:
            check_newest(self._fs, self._paths, known)
        except SupersededError:
            # The lease's thread may check while this driver claims: the newer claim may be its own.
            if not self._claiming and self._newest == known:
                raise

    def _names(self, url: str) -> list[str]:
        try:
            return [entry.name for entry in self._fs.list(url) if entry.is_dir]
        except NotFoundError:
            return []
