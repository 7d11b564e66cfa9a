"""Runs and ETL jobs among random faults: no sample lost or repeated, the same bits, clear errors, nothing left over.

    python -m benchmarks.random_kills [--runs 30] [--minutes M] [--seed 0] [--log FILE] [--keep DIR]

Three kinds of runs take turns, by seed: training with --canonical at a random number of ranks each time (1, 2 or 4),
training without at 2 ranks, and an ETL job of a web log. All are real processes (`lockstep train --launcher local`,
`lockstep etl_logs` on Spark with executors or threads). Meanwhile ranks, tasks, executors and drivers are killed,
terminated, crashed or paused; strangers send noise to each port; a second driver comes; between two drivers
checkpoints are flipped or cut, the lease is scrambled, a shard is flipped; shuffle files disappear (benchmarks.faults).
After a driver ends, another one resumes the run, or takes it over from one that is still paused.

Then `lockstep verify` must find the run intact (each sample of each epoch counted once, in the planned batches) or the
dataset whole, each committed checkpoint must load, and weights, optimizer state and metrics, or the dataset's digest,
must equal those of the undisturbed run, bit for bit; with --canonical, those of a run of one rank. Each process must
have ended with 0, by a signal, or with one error of four parts; no process, segment or temporary file may be left.

Prints one row for each run, and what failed with its seed, which repeats the same moments (but not the same
scheduling). --log also adds the rows to a file, whose seeds a later call passes over; --minutes begins no run after
that time. About 40 s for a run on two idle cores. Exits with 1 if a run failed.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import io
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults import (
    MARK,
    OF_A_PROCESS,
    OF_THE_DRIVER,
    OF_THE_RUN,
    flip,
    left,
    lose_shuffle,
    strangers,
    strike,
    unclear,
)
from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.errors import LockstepError
from lockstep.storage.fs import filesystem
from lockstep.training.run.checkpoint_division import read_whole
from lockstep.training.run.lineage import chain_of, find_tip, read_checkpoint
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import find_result

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "data" / "weblogs" / "nasa_access_log_1995-07-09.log.gz"
RECORDS, EPOCHS, STEP_S, LINES = 400, 12, 0.02, 8000
WHILE_TRAINING = (
    *("kill rank", "kill rank", "end rank", "crash rank", "stop rank"),
    *("kill driver", "end driver", "interrupt driver", "stop driver", "strangers", "second driver"),
)
BEFORE_A_DRIVER = (*OF_THE_RUN, "flip shard")
WHILE_ETL = ("kill task", "stop task", "kill executor", "lose shuffle", "strangers", "kill driver", "end driver")
WAIT_S = 900.0  # for a launch to end
UNSIGNED_S = 3600.0  # a staging folder that was signed so long ago belongs to a dead job
MASTERS = ("local[2,4]", "local-cluster[2,1,1024]")


@dataclass
class Campaign:
    """One run among faults: where it is, what was done, and what was wrong."""

    seed: int
    folder: Path
    data: str
    rng: random.Random = field(init=False)
    done: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    drivers: list[tuple[subprocess.Popen[bytes], Path]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.temporary.mkdir(parents=True)

    @property
    def run(self) -> str:
        """The run or the dataset."""
        return str(self.folder / "run")

    @property
    def temporary(self) -> Path:
        """Where its processes keep temporary files."""
        return self.folder / "tmp"

    @property
    def mark(self) -> str:
        """In the environment of its processes."""
        return f"{os.getpid()}-{self.seed}"

    def start(self, call: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a job with output of its own."""
        log = self.folder / f"driver-{len(self.drivers)}.log"
        scratch = dict.fromkeys(("TMPDIR", "SPARK_LOCAL_DIRS"), str(self.temporary))
        environment = {**os.environ, **scratch, MARK: self.mark}
        with log.open("wb") as out:
            driver = subprocess.Popen(call, cwd=ROOT, env=environment, stdout=out, stderr=out)
        self.drivers.append((driver, log))
        return driver

    def wake(self) -> None:
        """Continue each driver that is stopped."""
        for driver, _ in self.drivers:
            if driver.poll() is None:
                os.kill(driver.pid, signal.SIGCONT)

    def close(self) -> None:
        """End each driver, and judge how they ended."""
        for driver, log in self.drivers:
            self.wake()
            with contextlib.suppress(subprocess.TimeoutExpired):
                driver.wait(30)
            if driver.poll() is None:
                self.wrong.append(f"{log.name}: still there")
                driver.kill()
            self.wrong += [f"{log.name}: {what}" for what in unclear(log, driver.wait())]


def model(signature: Any, options: Any) -> Any:
    """A dense network with dropout, batch normalisation and Adam; steps of 20 ms, so that kills meet them."""
    import keras

    class Slow(keras.callbacks.Callback):
        """Sleeps."""

        def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
            """Called after each step."""
            time.sleep(STEP_S)

    inputs = {name: keras.Input(spec.shape, dtype=spec.dtype, name=name) for name, spec in signature.features.items()}
    x = keras.layers.Dense(16)(keras.layers.Concatenate()(list(inputs.values())))
    x = keras.layers.Dropout(0.2)(keras.layers.ReLU()(keras.layers.BatchNormalization(momentum=0.9)(x)))
    found = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(x))
    found.compile("adam", "binary_crossentropy", metrics=["accuracy"], jit_compile=False)
    return found, [Slow()]


def fingerprint(run: str) -> str:
    """sha256 over weights, optimizer state and metrics at the end of a run."""
    fs, paths = filesystem(run), RunPaths(run)
    tip, result = find_tip(fs, paths), find_result(fs, paths)
    assert tip is not None and result is not None, f"{run} has not ended"
    digest = hashlib.sha256(repr((result["steps"], sorted(result["metrics"].items()), result["left_over"])).encode())
    for name, value in sorted(read_whole(tip.url, tip.manifest, ("weights", "optimizer")).items()):
        digest.update(name.encode() + value.tobytes())
    return digest.hexdigest()


def faults(run: str, expected: str) -> list[str]:
    """What is wrong with a run that has ended; `expected` is the undisturbed run's fingerprint."""
    from lockstep.jobs import verify

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        whole = verify.main([run]) == 0
    found = [] if whole else [line for line in printed.getvalue().splitlines() if line.startswith("WRONG")]
    if "ok    audit" not in printed.getvalue():
        found.append("the audit was not checked")
    fs, paths = filesystem(run), RunPaths(run)
    chain, urls = chain_of(fs, paths)  # not one that is damaged and was passed over
    for ref in chain:
        read_whole(urls[ref], read_checkpoint(fs, urls[ref], ref), ("weights", "optimizer"))
    if fingerprint(run) != expected:
        found.append("weights, optimizer state or metrics are not those of the undisturbed run")
    return found


def command(data: str, run: str, ranks: int, *, canonical: bool, take_over: bool = False) -> list[str]:
    """The call of lockstep train."""
    flags = {
        "--dataset": data,
        "--run": run,
        "--model": "benchmarks.random_kills:model",
        "--num-ranks": ranks,
        "--global-batch": 32,
        "--epochs": EPOCHS,
        "--checkpoint-every": 15,
        "--seed": 7,
        "--launcher": "local",
        "--max-restarts": 20,
        "--max-restarts-per-hour": 1000,
    }
    more = [*(["--canonical"] if canonical else []), *(["--take-over"] if take_over else [])]
    return [
        sys.executable,
        "-m",
        "lockstep.jobs.train",
        *(str(x) for pair in flags.items() for x in pair),
        "--audit",
        *more,
    ]


def train_among_faults(one: Campaign, expected: str, seconds: float, *, canonical: bool) -> None:
    """Train to the end through what the generator says, and compare with the undisturbed run, which took `seconds`."""
    try:
        for launch in range(4):
            if launch and one.rng.random() < 0.5:
                before_a_driver(one, canonical=canonical)
            ranks = one.rng.choice((1, 2, 2, 4)) if canonical else 2
            driver = one.start(command(one.data, one.run, ranks, canonical=canonical, take_over=launch > 0))
            one.done.append(f"{ranks} ranks")
            # The last launch is left alone, so that the run ends.
            number = one.rng.randint(1, 3) if launch < 3 else 0
            moments = sorted(one.rng.uniform(0, 1.2) * seconds for _ in range(number))
            if while_it_works(one, driver, moments, WHILE_TRAINING, canonical=canonical) and not driver.returncode:
                break
        # One that was stopped before it had the run takes it over when it wakes: then it is the last, and ends it.
        one.wake()
        ends = [driver.wait(WAIT_S) for driver, _ in one.drivers]
        one.done.append(f"exit {0 if 0 in ends else ends[-1]}")
    finally:
        one.close()
    if 0 not in ends:
        one.wrong.append(f"no driver ended the run: {one.done[-1]}")
    else:
        one.wrong += faults(one.run, expected)


def before_a_driver(one: Campaign, *, canonical: bool) -> None:
    """Change a file of the run, or of the dataset for one launch, which must name it."""
    kind = one.rng.choice(BEFORE_A_DRIVER)
    if kind != "flip shard":
        one.done.append(kind if OF_THE_RUN[kind](one.run, one.rng) else f"no {kind}")
        return
    one.done.append(kind)
    shard = one.rng.choice(sorted(Path(one.data, "split=train").iterdir()))
    whole = shard.read_bytes()
    flip(shard, one.rng)
    try:
        driver = one.start(command(one.data, one.run, 2, canonical=canonical, take_over=True))
        code, (_, log) = driver.wait(WAIT_S), one.drivers[-1]
        if code and shard.name not in log.read_text(errors="replace"):
            one.wrong.append(f"{log.name}: a flipped shard was not named")
    finally:
        shard.write_bytes(whole)


def while_it_works(
    one: Campaign,
    driver: subprocess.Popen[bytes],
    moments: Sequence[float],
    kinds: Sequence[str],
    *,
    canonical: bool = False,
) -> bool:
    """Do what the generator says at these moments to a driver; whether it has come to its own end."""
    began = time.monotonic()
    for moment in moments:
        with contextlib.suppress(subprocess.TimeoutExpired):
            driver.wait(max(0.0, began + moment - time.monotonic()))
        if driver.poll() is not None:
            return True
        kind = one.rng.choice(kinds)
        one.done.append(f"{kind} at {moment:.0f} s")
        if kind in OF_A_PROCESS:
            strike(kind, driver.pid, one.rng)
        elif kind == "strangers":
            strangers(driver.pid, one.rng)
        elif kind == "lose shuffle":
            one.done[-1] += f" ({lose_shuffle(one.temporary)} files)"
        elif kind == "second driver":
            second = one.start(command(one.data, one.run, 2, canonical=canonical))
            code, (_, log) = second.wait(WAIT_S), one.drivers[-1]
            # 0: the run has ended meanwhile. It may also get the run first, and lose it to one with --take-over.
            if code not in (0, 2) and not (code == 1 and "is superseded" in log.read_text(errors="replace")):
                one.wrong.append(f"a second driver ended with {code}")
        else:
            os.kill(driver.pid, OF_THE_DRIVER[kind])
            if kind != "stop driver":  # then the next one takes over; this one wakes up in its middle
                driver.wait(WAIT_S)
            return False
        for late, _ in one.drivers:
            if late is not driver and late.poll() is None:
                os.kill(late.pid, signal.SIGCONT)
    driver.wait(WAIT_S)
    return True


def etl_command(log: Path, output: str, master: str) -> list[str]:
    """The call of lockstep etl_logs, which may follow a job that was killed."""
    call = [sys.executable, "-m", "lockstep.jobs.etl_logs", "--input", str(log), "--output", output, "--master", master]
    return [*call, "--split", "group:visitor:80/20", "--shard-bytes", "100000", "--clean"]


def etl_among_faults(one: Campaign, expected: str, seconds: float) -> None:
    """Make a dataset through what the generator says, compare it with the undisturbed one, and flip one bit of it."""
    code: int | None = None
    try:
        for launch in range(3):
            master = one.rng.choice(MASTERS)
            one.done.append(master)
            driver = one.start(etl_command(Path(one.data), one.run, master))
            number = one.rng.randint(1, 2) if launch < 2 else 0
            moments = sorted(one.rng.uniform(0.3, 1.0) * seconds for _ in range(number))
            while_it_works(one, driver, moments, WHILE_ETL)
            code = driver.wait(WAIT_S)
            if code == 0:
                break
            for sign in one.folder.glob("_staging-*/_job.json"):
                os.utime(sign, (time.time() - UNSIGNED_S,) * 2)
        one.done.append(f"exit {code}")
    finally:
        one.close()
    if code:
        one.wrong.append("no job made the dataset")
        return
    if (found := load_dataset(one.run).digest) != expected:
        one.wrong.append(f"the dataset is {found}, undisturbed {expected}")
    one.wrong += [f"left: {path.name}" for path in one.folder.glob("_staging-*")]
    code, printed = verified(one.run)
    if code:
        one.wrong.append(f"lockstep verify ended with {code}: {printed[-300:]}")
    file = one.rng.choice(sorted(path for path in Path(one.run).rglob("*") if path.is_file()))
    flip(file, one.rng)
    one.done.append("flip published")
    code, printed = verified(one.run)
    if code != 1 or str(file.relative_to(one.run)) not in printed:
        one.wrong.append(f"lockstep verify of a flipped {file.name} ended with {code}: {printed[-300:]}")


def verified(url: str) -> tuple[int, str]:
    """The exit code and output of lockstep verify, in a process of its own."""
    call = [sys.executable, "-m", "lockstep.jobs.verify", url]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    return done.returncode, done.stdout + done.stderr


class Undisturbed:
    """Runs without faults by kind, each made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        from tests.training._tiny import write_table

        table, log = f"{folder}/data", folder / "access.log"
        write_table(table, records={"train": RECORDS, "test": 30})
        with gzip.open(LOG) as file:
            log.write_bytes(b"".join(line for line, _ in zip(file, range(LINES), strict=False)))
        self.data = {"canonical": table, "plain": table, "etl": str(log)}
        self._calls = {
            "canonical": command(table, f"{folder}/canonical", 1, canonical=True),
            "plain": command(table, f"{folder}/plain", 2, canonical=False),
            "etl": etl_command(log, f"{folder}/etl", MASTERS[0]),
        }
        self._folder = folder
        self._known: dict[str, tuple[str, float]] = {}

    def of(self, kind: str) -> tuple[str, float]:
        """The fingerprint of the run, or the digest of the dataset, and its seconds."""
        if kind not in self._known:
            began = time.monotonic()
            subprocess.run(self._calls[kind], cwd=ROOT, check=True, capture_output=True, timeout=WAIT_S)
            seconds, url = time.monotonic() - began, f"{self._folder}/{kind}"
            self._known[kind] = load_dataset(url).digest if kind == "etl" else fingerprint(url), seconds
            print(f"undisturbed {kind}: {seconds:.0f} s", flush=True)
        return self._known[kind]


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run, plus one for each later run")
    parser.add_argument("--log", type=Path, help="a file that gets each row too; its seeds are passed over")
    parser.add_argument("--keep", help="folder for failed runs (default: deleted)")
    args = parser.parse_args(argv)
    rows = args.log.read_text() if args.log and args.log.exists() else ""
    passed = {int(number) for number in re.findall(r"^seed +([0-9]+) ", rows, re.MULTILINE)}
    seeds = [seed for seed in range(args.seed, args.seed + args.runs) if seed not in passed]
    ran = failed = 0
    begun, segments = time.monotonic(), set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="random-kills-") as folder:
        undisturbed = Undisturbed(Path(folder))
        for seed in seeds:
            if time.monotonic() - begun > args.minutes * 60:
                break
            kind = ("canonical", "plain", "etl")[seed % 3]
            known, began = undisturbed.of(kind), time.monotonic()
            one = Campaign(seed, Path(folder, str(seed)), undisturbed.data[kind])
            try:
                if kind == "etl":
                    etl_among_faults(one, *known)
                else:
                    train_among_faults(one, *known, canonical=kind == "canonical")
            except (subprocess.TimeoutExpired, LockstepError, AssertionError) as error:
                one.wrong.append(f"{type(error).__name__}: {error}")
            killed = any((driver.returncode or 0) < 0 for driver, _ in one.drivers)
            one.wrong += left(one.mark, one.temporary, segments, killed=killed)
            ran, failed = ran + 1, failed + bool(one.wrong)
            result = "FAILED" if one.wrong else "as undisturbed"
            row = f"seed {seed:4} {kind:9} {time.monotonic() - began:4.0f} s  {'; '.join(one.done)}: {result}"
            lines = [row, *(f"  {line}" for line in one.wrong)]
            print("\n".join(lines), flush=True)
            if args.log:
                with args.log.open("a") as file:
                    file.write("\n".join(lines) + "\n")
            if one.wrong and args.keep:
                shutil.copytree(one.folder, Path(args.keep, str(seed)))
            shutil.rmtree(one.folder, ignore_errors=True)
    print(f"{ran} runs, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
