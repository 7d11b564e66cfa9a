"""A walk over a directory: all files, links not entered, and directories that vanish meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.storage.errors import NotFoundError
from lockstep.storage.files.interface import Listing
from lockstep.storage.files.local import LocalFileSystem
from lockstep.storage.fs import walk


class Vanishing(LocalFileSystem):
    """Each directory named `gone` is listed by its parent, and is gone when it is listed itself."""

    def list(self, url: str) -> Listing:
        if url.endswith("/gone"):
            raise NotFoundError(url)
        return super().list(url)


def tree(root: Path) -> str:
    for name in ("b/2", "b/1", "a", "gone/x", "z/deep/er/file"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    (root / "circle").symlink_to(root)
    return str(root)


def test_files_come_sorted_in_each_directory_and_links_are_not_entered(tmp_path: Path) -> None:
    root = tree(tmp_path)
    found = list(walk(LocalFileSystem(), root))
    names = [entry.url.removeprefix(root + "/") for entry in found]
    assert names == ["a", "b/1", "b/2", "circle", "gone/x", "z/deep/er/file"]
    assert [entry.name for entry in found if entry.is_special] == ["circle"]


def test_a_directory_that_vanishes_is_an_error_unless_it_may(tmp_path: Path) -> None:
    root = tree(tmp_path)
    with pytest.raises(NotFoundError):
        list(walk(Vanishing(), root))
    assert [entry.name for entry in walk(Vanishing(), root, may_vanish=True)] == ["a", "1", "2", "circle", "file"]
