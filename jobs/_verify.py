"""What jobs.verify prints of the files that are intact."""

from __future__ import annotations

from collections import Counter


class IntactFiles:
    """Prints a line for each of the first `most` intact files of each folder at the top, and how many others it has: a
    run of a week has tens of thousands of files. None: a line for each.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._files: Counter[str] = Counter()

    def add(self, path: str, text: str) -> None:
        """A file is intact."""
        folder = path.partition("/")[0]
        self._files[folder] += 1
        if self._most is None or self._files[folder] <= self._most:
            print(f"ok    {path}: {text}", flush=True)

    def end(self) -> None:
        """Print what was left out."""
        for folder, files in self._files.items():
            if self._most is not None and files > self._most:
                print(f"ok    {folder}: {files - self._most} more files, {files} in all", flush=True)
