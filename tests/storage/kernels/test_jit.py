"""Compiled kernels: found again from a zip, never in a folder that others write to, and no import compiles."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.spark.session import ship_rooms
from lockstep.storage.kernels import jit

ROOT = Path(__file__).resolve().parents[3]
PLACE = "from lockstep.features import sample_id_kernel as k; print(k.unit_hashes._cache.cache_path)"


def run(code: str, path: str) -> str:
    """What a fresh interpreter prints that imports the rooms from `path` alone."""
    setup = f"import sys; sys.path[:0] = [{path!r}]\n"
    done = subprocess.run([sys.executable, "-c", setup + code], cwd="/", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_rooms_from_a_zip_find_what_the_checkout_has_compiled(tmp_path: Path) -> None:
    assert run(PLACE, ship_rooms(str(tmp_path))) == run(PLACE, str(ROOT)) != "None"


def test_no_import_loads_numba() -> None:
    rooms = "lockstep.etl.write.dataset, lockstep.training.reading.reader, lockstep.features.examples.foreign"
    code = f"import {rooms}; print('numba' in sys.modules)"
    assert run(code, str(ROOT)) == "False"


@pytest.mark.parametrize(("mode", "taken"), [(0o700, True), (0o755, True), (0o775, False), (0o1777, False)])
def test_a_folder_that_others_may_write_to_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, taken: bool
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    first.chmod(mode)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(first))
    monkeypatch.setenv("XDG_CACHE_HOME", str(second))
    jit.cache_folder.cache_clear()
    try:
        assert jit.cache_folder() == (str(first) if taken else str(second / "lockstep"))
    finally:
        jit.cache_folder.cache_clear()


def test_without_a_folder_kernels_work_all_the_same() -> None:
    code = """
import os, tempfile
os.environ.update(HOME="/proc", XDG_CACHE_HOME="/proc")
os.environ.pop("NUMBA_CACHE_DIR", None)
tempfile.tempdir = "/proc"
import numpy as np
from lockstep.storage.kernels import frames
from lockstep.storage.kernels.jit import cache_folder
out = np.zeros(2, dtype=np.int64)
print(cache_folder(), frames.scan(0, 0, out, True), type(frames.scan._cache).__name__)
"""
    assert run(code, str(ROOT)) == "None 0 NullCache"
