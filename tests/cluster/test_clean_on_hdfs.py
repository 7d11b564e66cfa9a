"""What a killed job leaves on a real HDFS is found by its sign, and a job that is published leaves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

from lockstep.etl.write.staging import Staging, clean, leftovers, remove_refused
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import join

ROOT = Path(__file__).resolve().parents[2]
JOB = """
import sys, time
from lockstep.etl.write.staging import Staging
with Staging(sys.argv[1]) as staging:
    print(staging.root, flush=True)
    time.sleep(600)
"""


def test_a_killed_job_is_cleaned_behind_once_its_sign_is_old(hadoop: Any) -> None:
    folder = join(hadoop.hdfs_url, f"clean-{uuid.uuid4().hex}")
    fs, output = filesystem(folder), join(folder, "out")
    environment = {**os.environ, **hadoop.env, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", JOB, output]
    killed = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    left = killed.stdout.readline().strip()
    killed.kill()
    killed.wait()
    with Staging(output) as staging:
        now_ms = staging.signed_ms()  # by the NameNode's clock
        assert not leftovers(fs, output, now_ms)  # killed a moment ago: nobody can know yet
        found = clean(fs, output, now_ms + 600_000 - 1, dead_after_s=599)
        # Ten minutes on, both are taken for dead: their signs are all that can be known of them.
        assert {item.url for item in found} == {left, staging.root}
    with Staging(output) as staging:
        staging.publish(b"{}")
    assert [entry.name for entry in fs.list(folder)] == ["out"]
    refused = join(folder, "_quarantine-out")  # of a job for `out` that was refused
    with Staging(refused, mode=0o700, part_of=output) as staging:
        staging.publish(None)
    remove_refused(fs, refused, join(folder, "other"))
    assert fs.exists(refused)
    remove_refused(fs, refused, output)
    assert [entry.name for entry in fs.list(folder)] == ["out"]
    fs.delete(folder, recursive=True)
