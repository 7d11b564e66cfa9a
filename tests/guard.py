"""Ends what a test run has started once the run is gone, however it ended: clusters that outlive their command, Spark,
drivers and their ranks.

`python -m tests.guard PARENT TOKEN` waits for the end of its parent process, then kills every process whose environment
bears the token.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

from lockstep.training.launch.process import end_marked

MARK = "LOCKSTEP_TEST_RUN"
ROOT = Path(__file__).resolve().parents[1]
LOOK_EVERY_S = 0.2


def start_guard() -> None:
    """Mark all that this process will start, and start the guard, in a session of its own: no Ctrl-C reaches it."""
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    os.environ[MARK] = token = secrets.token_hex(8)
    command = [sys.executable, "-m", "tests.guard", str(os.getpid()), token]
    subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True).returncode = 0  # nobody waits for it


def main(parent: int, token: str) -> None:
    """Wait, then kill."""
    while os.getppid() == parent:
        time.sleep(LOOK_EVERY_S)
    end_marked(MARK, token)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
