"""The journal of a search: one small sealed file for each event, numbered, so that a killed driver loses none.

HDFS has no locks and shows an open file as empty, so no file is ever appended to: the next event gets the next number
by a rename that only one driver can win.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.storage.documents import seal, unseal_as
from lockstep.storage.errors import CorruptionError, ExistsError, NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.publish import is_temporary, write_file
from lockstep.storage.urls import join
from lockstep.training.run.lineage import superseded

FORMAT_VERSION = 1
ASKED, EPOCH, PRUNED, ENDED = "asked", "epoch", "pruned", "ended"
"""Parameters were proposed; an epoch's value was judged, and the trial continues, or ends; a trial has ended."""

RESTORE = "Restore the file from a copy, or begin another search in a --run that does not exist yet."


class Journal:
    """The events of the search at `root`, in order: JSON objects with `event` and `trial`."""

    def __init__(self, fs: FileSystem, root: str, confirm: Callable[[], None] | None = None) -> None:
        """`confirm` is called before each event gets its name, and raises if another driver has taken over."""
        self._fs, self._root, self._confirm = fs, root, confirm
        self._directory = join(root, "journal")
        self._written = 0

    def read(self) -> list[dict[str, Any]]:
        """All events. Raises CorruptionError for a damaged one, or a gap in the numbers."""
        try:
            entries = [entry for entry in self._fs.list(self._directory) if not is_temporary(entry.name)]
        except NotFoundError:
            return []
        events = []
        for number, entry in enumerate(sorted(entries, key=lambda one: one.name), 1):
            if entry.name != _name(number):
                raise CorruptionError(
                    "an event of a search is missing",
                    file=join(self._directory, _name(number)),
                    got=f"{entry.name} in its place",
                    allowed="000001.json, 000002.json, ... without a gap, and no other file",
                    next_step=RESTORE,
                )
            data = self._fs.read_bytes(entry.url)
            try:
                events.append(unseal_as("search event", data, entry.url, version=FORMAT_VERSION))
            except CorruptionError as error:
                error.next_step = RESTORE
                raise
        self._written = len(events)
        return events

    def append(self, event: str, trial: int, **more: Any) -> None:
        """Add an event; `read` must have been called. Raises SupersededError if another driver has added one."""
        url = join(self._directory, _name(self._written + 1))
        document = {"format_version": FORMAT_VERSION, "kind": "search event", "event": event, "trial": trial, **more}
        data = seal(document)
        try:
            write_file(self._fs, url, data, confirm=self._confirm)
        except ExistsError:
            if self._fs.read_bytes(url) != data:  # else the answer to our own rename was lost
                raise superseded(self._root, f"{url}, which another driver has written") from None
        self._written += 1


def _name(number: int) -> str:
    return f"{number:06d}.json"
