"""Ranks above their container's memory, under a YARN that kills it: refused, or ended with the cause and a flag."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.storage.fs import filesystem
from lockstep.training.run.lineage import read_claims
from lockstep.training.run.paths import RunPaths
from tests.cluster.daemons import Cluster
from tests.cluster.test_jobs import ROOT
from tests.training._tiny import write_table


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_ranks_too_large_are_refused_before_their_first_step_or_ended_at_the_second_kill(
    hadoop: Cluster, tmp_path: Path
) -> None:
    """That a rank fits with the flag that is named: test_jobs.py."""
    hadoop.start_yarn()
    write_table(tmp_path / "data")
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("spark-submit")), *hadoop.submit_conf,
            "--num-executors", "1", "--executor-memory", "1g", "--conf", "spark.executor.memoryOverhead=512m",
            "--driver-memory", "512m", "--conf", "spark.yarn.am.memory=256m",
            str(Path(__file__).with_name("memory_on_yarn.py")), str(tmp_path / "data"), str(tmp_path),
        ],
        cwd=tmp_path, env={**os.environ, **hadoop.env, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    errors = json.loads((tmp_path / "errors.json").read_text())

    what, got, allowed, next_step = errors["wide"]
    assert what == "a rank cannot fit into the memory of an executor's container" and "of 1536 MiB" in got, errors
    assert re.fullmatch(r"3\d\d\d MiB or more", allowed), errors
    assert re.fullmatch(r"Give spark-submit --conf spark\.executor\.memoryOverhead=2\d\d\dm\.", next_step), errors
    assert not list((tmp_path / "wide").glob("metrics/*/*")), "a step was made"

    what, got, allowed, next_step = errors["greedy"]
    assert "killed for their memory a second time" in what, errors
    assert "Container killed by YARN for exceeding physical memory limits" in got and allowed.startswith("1536 MiB")
    assert "--conf spark.executor.memoryOverhead=1280m" in next_step and "step-0000000010.g0002" in next_step
    first = done.stdout[done.stdout.index("generation 1 failed") :]
    assert "rank 0 of 1" in first and "exceeding physical memory limits" in first[:1000]
    claims = read_claims(filesystem(str(tmp_path)), RunPaths(str(tmp_path / "greedy")))
    assert [str(claim.parent) for claim in claims.values()] == ["None", "step-0000000005.g0001"]
