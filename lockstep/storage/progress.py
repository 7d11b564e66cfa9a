"""Progress of long work: a bar on a terminal, a line every few seconds anywhere else."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm

LINE_EVERY_S = 5.0


class Progress:
    """Counts `total` units of work; used as a context manager, safe to update from one thread.

    On a terminal it draws tqdm's bar. Elsewhere (a log, CI, Airflow) it prints a line every 5 s and one at the
    end, because a bar's carriage returns make a log unreadable.
    """

    def __init__(self, label: str, total: int | None, unit: str) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._done = 0
        self._note = ""
        self._start = self._last = time.monotonic()
        self._bar = tqdm(total=total, desc=label, unit=f" {unit}") if sys.stderr.isatty() else None

    def update(self, units: int = 1, note: str | None = None) -> None:
        """Add finished units; `note` is a short text such as the current loss, and stays until the next one."""
        self.set(self._done + units, note)

    def set(self, done: int, note: str | None = None) -> None:
        """Set the number of finished units; after a restart it may be smaller than before."""
        if self._bar is not None:
            self._bar.update(done - self._done)
        if note is not None:
            self._note = note
            if self._bar is not None:
                self._bar.set_postfix_str(note)
        self._done = done
        if self._bar is None and time.monotonic() - self._last >= LINE_EVERY_S:
            self._line()

    def close(self) -> None:
        """End the bar or print the last line."""
        if self._bar is not None:
            self._bar.close()
        else:
            self._line()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _line(self) -> None:
        self._last = time.monotonic()
        seconds = self._last - self._start
        of = f"/{self._total}" if self._total else ""
        note = f", {self._note}" if self._note else ""
        print(f"{self._label}: {self._done}{of} {self._unit}, {seconds:.0f} s{note}", file=sys.stderr, flush=True)
