"""The versions that all tests run with."""

from __future__ import annotations

import zipfile
from pathlib import Path

from lockstep.jobs._checks import LISTS, requirements


def pins(path: Path | zipfile.Path = LISTS / "constraints.txt") -> dict[str, str]:
    """Package -> version, as constraints.txt pins them."""
    return {name: text[2:] for name, text in requirements(path).items() if text.startswith("==")}
