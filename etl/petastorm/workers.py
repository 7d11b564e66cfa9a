"""The workers of Petastorm's process pool, started so that they see the names too."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.storage.errors import LockstepError

ROOT = str(Path(__file__).resolve().parents[2])
_BOOT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from etl.petastorm.workers import main; main()"


def start_worker(args: Sequence[str], executable: str) -> subprocess.Popen[bytes]:
    """Petastorm's `Popen([PYTHON, "-m", MODULE, FILE])` for a worker of its process pool, with the names enabled."""
    if args[1] != "-m":
        raise LockstepError(
            "Petastorm starts a process that is not one of its workers",
            got=" ".join(args)[:200],
            allowed="PYTHON -m MODULE FILE, as Petastorm 0.13.1 does",
            next_step="Install petastorm==0.13.1, or read without its process pool.",
        )
    return subprocess.Popen([executable, "-c", _BOOT, ROOT, *args[2:]])


def main() -> None:
    """Run the module that the command line names, as `python -m` would."""
    from etl.petastorm.imports import enable

    enable()
    module = sys.argv[1]
    del sys.argv[0]
    runpy.run_module(module, run_name="__main__")
