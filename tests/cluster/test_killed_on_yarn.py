"""An application that is killed under a training: one error at once, with YARN's words, and the same call resumes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.storage.fs import filesystem
from lockstep.training.run.lineage import read_claims
from lockstep.training.run.paths import RunPaths
from tests.cluster.daemons import Cluster
from tests.cluster.test_jobs import ROOT
from tests.training._tiny import write_table


def submit(hadoop: Cluster, folder: Path, kill: str) -> tuple[dict[str, Any], str]:
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("spark-submit")), *hadoop.submit_conf,
            "--num-executors", "1", "--driver-memory", "512m", "--conf", "spark.yarn.am.memory=256m",
            str(Path(__file__).with_name("killed_on_yarn.py")), str(folder / "data"), str(folder / "run"), str(folder),
            kill,
        ],
        cwd=folder, env={**os.environ, **hadoop.env, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600,
    )  # fmt: skip
    assert (folder / "found.json").exists(), done.stdout[-6000:]
    return json.loads((folder / "found.json").read_text()), done.stdout


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_killed_application_ends_the_run_at_once_and_the_same_call_resumes(hadoop: Cluster, tmp_path: Path) -> None:
    hadoop.start_yarn()
    write_table(tmp_path / "data")
    found, said = submit(hadoop, tmp_path, "yes")
    assert found.get("class") == "ApplicationEndedError", (found, said[-6000:])
    what, got, _, next_step = found["parts"]
    assert what == f"the application {found['application']} of this driver has ended"
    assert got.startswith("YARN: KILLED: ") and "killed by user" in got, found
    assert f"yarn logs -applicationId {found['application']}" in next_step and "It resumes from step-" in next_step
    assert "resuming from" not in said, "no generation is started in an application that has ended"
    claims = read_claims(filesystem(str(tmp_path)), RunPaths(str(tmp_path / "run")))
    assert len(claims) == 1
    found, said = submit(hadoop, tmp_path, "no")
    assert found == {"steps": 25, "generation": 2}, (found, said[-6000:])
