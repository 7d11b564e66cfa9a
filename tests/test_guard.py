"""What a test run has started ends with it, even where the run itself is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil

from tests.guard import MARK, ROOT
from tests.training._ranks import lives

KILLED_RUN = """
import subprocess, time
from tests.guard import start_guard

start_guard()
daemon = subprocess.Popen(["sleep", "300"], start_new_session=True)  # as `make cluster` starts its own
print(daemon.pid, flush=True)
time.sleep(300)
"""


def test_daemons_of_a_killed_test_run_are_ended() -> None:
    run = subprocess.Popen([sys.executable, "-c", KILLED_RUN], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    daemon = int(run.stdout.readline())
    assert lives(daemon)
    run.kill()
    run.wait(60)
    run.stdout.close()
    end = time.monotonic() + 60
    while lives(daemon):
        assert time.monotonic() < end, "the daemon outlived the test run"
        time.sleep(0.05)


def test_this_run_has_a_guard() -> None:
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert any("tests.guard" in command and os.environ[MARK] in command for command in commands)
