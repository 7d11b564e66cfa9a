"""Where our code is: a checkout, site-packages, or the zip that a cluster's processes import."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOMS = ("lockstep", "pyspark_tfrecord")
"""The names that an installation imports; Spark asks for the second one by its own name."""
ROOT = Path(__file__).resolve().parents[2]
"""The folder or zip file that holds them."""
JOBS = ROOT / "lockstep" / "jobs"
VERSION = "0.1.0"


def python_files() -> Iterator[tuple[str, Path]]:
    """The name below ROOT, as an import spells it, and the file of each of our modules, sorted.

    In a checkout `etl`, `training` and `jobs` are links of `lockstep`; the files are named as parts of it.
    """
    for room in ROOMS:
        for folder, folders, files in os.walk(ROOT / room, followlinks=True):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            for name in sorted(files):
                if name.endswith(".py"):
                    path = Path(folder, name)
                    yield path.relative_to(ROOT).as_posix(), path


def is_linked(folder: Path) -> bool:
    """Whether this is a folder at the top of our checkout that is a part of `lockstep`, and imported by that name."""
    link = ROOT / "lockstep" / folder.name
    return link.is_symlink() and link.resolve() == folder.resolve()
