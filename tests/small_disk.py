"""A disk of a few hundred KiB, to fill up: a tmpfs, which only root may mount."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BALLAST = "ballast"


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """A new disk at `folder`, removed at the end; skips the test where this process may not mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path, left_bytes: int = 0) -> Path:
    """Take all room but `left_bytes` by one file, which is returned."""
    file = disk / BALLAST
    free = os.statvfs(disk)
    with file.open("wb") as ballast:
        os.posix_fallocate(ballast.fileno(), 0, max(1, free.f_bavail * free.f_bsize - left_bytes))
    return file
