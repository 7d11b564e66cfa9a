"""What `lockstep report`, `lockstep verify` and `lockstep runs` take on a run of a week: memory, processor time, bytes
printed.

    python -m benchmarks.long_run [--hours 168] [--folder FOLDER]

Trains two ranks for some steps, and adds what a driver writes in the hours after: a row a step, times of each rank
every second, its use every 5 s, an epoch every 10 minutes, closed parts of metrics and of each rank's log every 30 s.
Then calls each job as a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.shared.shapes import machine
from lockstep.storage.run_layout import part_name
from lockstep.training.run.metrics import PART_EVERY_S, read_history
from lockstep.training.run.paths import RunPaths
from tests.training._tiny import write_table

RANKS, EPOCH_S, USAGE_S = 2, 600, 5


def train(folder: Path) -> str:
    """A finished run with audit and checkpoints."""
    write_table(folder / "data")
    run = str(folder / "run")
    flags = ["--model", "logistic", "--num-ranks", str(RANKS), "--global-batch", "8", "--epochs", "2", "--audit"]
    flags += ["--launcher", "local", "--checkpoint-every", "5"]
    words = [sys.executable, "-m", "lockstep.jobs.train", "--dataset", str(folder / "data"), "--run", run, *flags]
    subprocess.run(words, check=True, capture_output=True)
    return run


def prolong(run: str, hours: float, steps_a_s: int = 1) -> None:
    """Add the rows and lines of `hours` more, as closed parts."""
    history, paths = read_history(run), RunPaths(run)
    first = history.steps[-1]["step"]
    parts = list(Path(paths.metrics(1)).iterdir())
    second = 0
    for number in range(len(parts), len(parts) + int(hours * 3600 / PART_EVERY_S)):
        rows = [row for at in range(int(PART_EVERY_S)) for row in _rows(history, first, second + at, steps_a_s)]
        second += int(PART_EVERY_S)
        text = "".join(f"{json.dumps(row, sort_keys=True, separators=(',', ':'))}\n" for row in rows)
        Path(paths.metrics(1), part_name(number, "jsonl")).write_text(text)
    for rank in range(RANKS):
        folder = Path(paths.log(1, rank))
        there = len(list(folder.iterdir()))
        for number in range(there, there + int(hours * 3600 / PART_EVERY_S)):
            (folder / part_name(number, "log")).write_text(f"epoch {number}: as before\n")


def _rows(history: Any, first: int, second: int, steps_a_s: int) -> Iterator[dict[str, Any]]:
    step = first + second * steps_a_s
    for each in range(step + 1, step + steps_a_s + 1):
        yield {
            **history.steps[-1],
            "step": each,
            "epoch": 2 + second // EPOCH_S,
            "loss": 0.5 + 0.3 * (each * 7919 % 101) / 101,
        }
    for rank in range(RANKS):
        yield {**history.times[-1], "step": step + steps_a_s, "steps": steps_a_s, "rank": rank}
        if second % USAGE_S == 0:
            yield {**history.usage[-1], "step": step + steps_a_s, "rank": rank}
    if second % EPOCH_S == EPOCH_S - 1:
        yield {**history.epochs[-1], "step": step + steps_a_s, "epoch": 2 + second // EPOCH_S}


def measured(words: list[str]) -> str:
    """Peak memory, processor time and printed bytes of a job that ends with 0."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as printed:
        job = subprocess.Popen([sys.executable, "-m", *words], stdout=printed, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(job.pid, 0)
        job.returncode = os.waitstatus_to_exitcode(status)
        length = printed.seek(0, os.SEEK_END)
    seconds = time.monotonic() - began
    assert job.returncode == 0, words
    cpu_s = usage.ru_utime + usage.ru_stime
    return f"{usage.ru_maxrss / 1024:,.0f} MiB at most, {cpu_s:.1f} CPU s, {seconds:.1f} s, {length:,} bytes printed"


def main() -> None:
    """Print a line for each job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=168.0)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        run = str(folder / "run")
        if not (folder / "run").exists():
            run = train(folder)
            prolong(run, args.hours)
        files = [path for path in Path(run).rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        print(f"{machine('numpy')}; {args.hours:g} h of {RANKS} ranks: {len(files):,} files, {size / 2**20:,.0f} MiB")
        for job in (["lockstep.jobs.report", run], ["lockstep.jobs.verify", run], ["lockstep.jobs.runs", run]):
            print(f"{job[0]:<12} {measured(job)}", flush=True)


if __name__ == "__main__":
    main()
