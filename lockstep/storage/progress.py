"""Progress of long work: a bar on a terminal, a block of lines in a notebook's cell, else a line every few seconds."""

from __future__ import annotations

import math
import sys
import time
from datetime import timedelta
from types import TracebackType
from typing import Any, ClassVar

from tqdm import tqdm

LINE_EVERY_S = 5.0
CELL_EVERY_S = 0.5


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel, which has loaded IPython."""
    if "IPython" not in sys.modules:
        return False
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


class CellBlock:
    """The lines of all work of one cell of a notebook, in one output that is updated in place: the last MOST."""

    MOST = 10
    _newest: ClassVar[CellBlock | None] = None

    def __init__(self, cell: int) -> None:
        self._cell, self._lines = cell, list[str]()
        self._handle: Any = None

    @classmethod
    def here(cls) -> CellBlock:
        """The block of the cell that runs."""
        from IPython.core.getipython import get_ipython

        cell = int(get_ipython().execution_count)  # type: ignore[union-attr]
        if cls._newest is None or cls._newest._cell != cell:
            cls._newest = cls(cell)
        return cls._newest

    def new_line(self) -> int:
        """The number of a new line, for `show`."""
        self._lines.append("")
        return len(self._lines) - 1

    def show(self, number: int, text: str) -> None:
        """Show the block with another text in a line."""
        from IPython.display import display

        self._lines[number] = text
        bundle = {"text/plain": "\n".join(filter(None, self._lines[-self.MOST :]))}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


class Pace:
    """Units of work in a second, from the first unit that is seen to be done: what was there before, and the start, do
    not count. After a restart, which repeats units, it begins again.
    """

    def __init__(self) -> None:
        self._done: int | None = None
        self._first: tuple[float, int] | None = None

    def add(self, done: int) -> None:
        """Note that so many units are done now."""
        if self._done is not None and done < self._done:
            self._first = None
        elif self._done is not None and self._first is None and done > self._done:
            self._first = time.monotonic(), done
        self._done = done

    @property
    def rate(self) -> float:
        """Units a second; 0 if unknown."""
        if self._first is None or self._done is None:
            return 0.0
        seconds = time.monotonic() - self._first[0]
        return (self._done - self._first[1]) / seconds if seconds > 0 else 0.0

    def left(self, total: int) -> str:
        """The time until `total` units are done, at this rate, as H:MM:SS; an empty text if unknown."""
        rate, done = self.rate, self._done or 0
        return f"{timedelta(seconds=math.ceil((total - done) / rate))} left" if rate > 0 and done < total else ""


class Progress:
    """Counts `total` units of work; used as a context manager, safe to update from one thread.

    On a terminal it draws tqdm's bar, in a notebook a line of the cell's block. Elsewhere (a log, CI, Airflow) it
    prints a line every 5 s and one at the end, because a bar's carriage returns make a log unreadable.
    """

    def __init__(self, label: str, total: int | None, unit: str) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._done = 0
        self._note = ""
        self._start = self._last = time.monotonic()
        self._pace = Pace()
        self._block = CellBlock.here() if in_notebook() else None
        self._place = 0 if self._block is None else self._block.new_line()
        on_terminal = self._block is None and sys.stderr.isatty()
        self._bar = tqdm(total=total, desc=label, unit=f" {unit}") if on_terminal else None

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
        self._pace.add(done)
        every_s = LINE_EVERY_S if self._block is None else CELL_EVERY_S
        if self._bar is None and time.monotonic() - self._last >= every_s:
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

    def _more(self) -> list[str]:
        """What else a line has, before the time left."""
        return []

    def _line(self) -> None:
        self._last = time.monotonic()
        words = [f"{self._label}: {self._done} {self._unit}"]
        if self._total:
            words = [f"{self._label}: {self._done}/{self._total} {self._unit} ({self._done / self._total:.0%})"]
        words += [*self._more(), f"{self._last - self._start:.0f} s"]
        words += [self._pace.left(self._total) if self._total else "", self._note]
        line = ", ".join(filter(None, words))
        if self._block is not None:
            self._block.show(self._place, line)
        else:
            print(line, file=sys.stderr, flush=True)
