"""The long form of test_appends.py: a day cut at 1, 2 and 5 places, five seeds, with a kill in the middle."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lockstep.storage.dataset.manifest import load_dataset
from tests.etl.conftest import NASA, ROOT, tree
from tests.etl.logs import weblog_oracle as oracle
from tests.etl.logs.test_appends import appended, check_chain, parts_of
from tests.waiting import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(3600)]

FIRST_LINE = 3000  # 97 minutes: the first part is longer than the label's window


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("cuts", [1, 2, 5])
def test_a_day_cut_anywhere_has_the_rows_of_one_job(spark: SparkSession, tmp_path: Path, cuts: int, seed: int) -> None:
    lines = oracle.lines_of(NASA)
    places = sorted(random.Random(f"{cuts} {seed}").sample(range(FIRST_LINE, len(lines)), cuts))
    paths = parts_of(tmp_path, lines, places)
    made = appended(spark, tmp_path, paths)
    check_chain([tmp_path / str(number) for number in range(len(made))], made, lines)
    number = (cuts + 1) // 2
    killed(paths[number], tmp_path / "again", tmp_path / str(number - 1), seconds=0.3 * seed)
    assert tree(tmp_path / "again") == tree(tmp_path / str(number))
    print(f"cut before lines {places}: {[manifest.counts.written for manifest in made]} records, equal to one job's")


def killed(log: Path, output: Path, above: Path, seconds: float) -> None:
    """Append in a process that is killed when it has built for some seconds, and again in one that is not."""
    flags = ["--input", str(log), "--output", str(output), "--append-to", str(above), "--format", "parquet"]
    command = [
        sys.executable,
        "-m",
        "lockstep.jobs.etl_logs",
        *flags,
        "--split",
        "group:visitor:80/20",
        "--master",
        "local[2]",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)

    job = start()
    until(lambda: any(output.parent.glob("_staging-*")) or job.poll() is not None, 300.0)
    time.sleep(seconds)
    ended = job.poll() is not None
    if not ended:
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    if output.exists():  # it was faster than the kill
        load_dataset(str(output))
        return
    assert not ended
    assert start().wait(timeout=600) == 0
