"""What lockstep verify prints of the files that are intact."""

from __future__ import annotations


class IntactFiles:
    """Counts intact files, of which a run of a week has tens of thousands; `shows` prints a line for each."""

    def __init__(self, shows: bool) -> None:
        self._shows, self._files = shows, 0

    def add(self, path: str, text: str) -> None:
        """A file is intact."""
        self._files += 1
        if self._shows:
            print(f"ok    {path}: {text}", flush=True)

    def end(self) -> None:
        """Print how many there are."""
        print(f"ok    {self._files} file{'' if self._files == 1 else 's'}", flush=True)
