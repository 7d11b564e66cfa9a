"""Folders that were moved or copied on the local disk, by plain file tools."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.moved_contract import Displaces, MovedContract

pytestmark = pytest.mark.slow


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "place")


@pytest.fixture
def displaces(root: str) -> Displaces:
    Path(root).mkdir()

    def go(old: str, new: str, copied: bool) -> None:
        shutil.copytree(old, new) if copied else shutil.move(old, new)

    return go


class TestOnTheLocalDisk(MovedContract):
    """All that the contract says."""
