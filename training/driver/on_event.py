"""The command of --on-event, which gets each event of a run."""

from __future__ import annotations

import json
import logging
import shlex
import socket
import subprocess
import threading
from typing import Any

from lockstep.storage.errors import ConfigError
from lockstep.training.run.status import now_utc

log = logging.getLogger(__name__)
EVENT_LIMIT_S = 30.0


class OnEvent:
    """The command of --on-event: it gets each event as one JSON object on standard input.

    Events are called one after the other by a thread of their own; a command that fails or needs more than
    EVENT_LIMIT_S is logged, and never holds up the run.
    """

    def __init__(self, command: str | None, run: str) -> None:
        """Raises ConfigError for a command that is empty or has an open quote."""
        self._run = run
        try:
            self._command = [] if command is None else shlex.split(command)
        except ValueError as error:
            raise _no_command(command, str(error)) from error
        if command is not None and not self._command:
            raise _no_command(command, "no words")
        self._waiting: list[threading.Thread] = []

    def __call__(self, event: str, **fields: Any) -> None:
        """Call the command with {event, run, host, at} and `fields`; returns at once."""
        if not self._command:
            return
        at = now_utc().isoformat(timespec="seconds")
        document = {"event": event, "run": self._run, "host": socket.gethostname(), "at": at, **fields}
        before = self._waiting[-1] if self._waiting else None
        thread = threading.Thread(target=self._call, args=(document, before), name="on-event", daemon=True)
        self._waiting.append(thread)
        thread.start()

    def finish(self) -> None:
        """Wait for the last event's command, at most its limit."""
        if self._waiting:
            self._waiting[-1].join(EVENT_LIMIT_S)

    def _call(self, document: dict[str, Any], before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        try:
            done = subprocess.run(
                self._command, input=json.dumps(document).encode(), capture_output=True, timeout=EVENT_LIMIT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:  # its arguments may hold secrets, so they are not shown
            log.warning("--on-event %s: %s of %s", document["event"], type(error).__name__, self._command[0])
            return
        if done.returncode:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
            log.warning("--on-event %s: exit code %d: %s", document["event"], done.returncode, *said or ["(silent)"])


def _no_command(command: str | None, why: str) -> ConfigError:
    return ConfigError(
        "--on-event cannot be called",
        got=f"{command!r}: {why}",
        allowed="a command and its arguments, quoted as in a shell",
        next_step="Pass a program that reads one JSON object from standard input, such as --on-event ./notify.sh.",
    )
