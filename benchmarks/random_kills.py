"""Runs with kills, stops and restarts at random moments and world sizes: no sample lost or repeated, the same bits.

    python -m benchmarks.random_kills [--runs 100] [--seed 0] [--keep DIR]

Each run trains a small model with dropout and batch normalisation in real processes (`jobs.train --launcher local`).
Meanwhile ranks and drivers are killed (SIGKILL), terminated (SIGTERM) or paused for seconds (SIGSTOP, SIGCONT) at
random moments; after a driver ends, another one resumes the run, or takes it over from one that is still paused. Two
kinds of runs take turns: with --canonical at a random number of ranks each time (1, 2 or 4), and without at 2 ranks.
Then `jobs.verify` must find the run intact (each sample of each epoch counted once, in the planned batches), each
committed checkpoint must load, and weights, optimizer state and metrics must equal those of the undisturbed run, bit
for bit; with --canonical, those of a run of one rank. Prints one row for each run, and the first failure with its seed,
which repeats the same moments (but not the same scheduling). About 40 s for a run on two idle cores. Exits with 1 if a
run failed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.storage.fs import filesystem
from training.run.checkpoint_division import read_whole
from training.run.lineage import checkpoints, find_tip, read_checkpoint
from training.run.paths import RunPaths
from training.run.result import find_result

ROOT = Path(__file__).resolve().parent.parent
RECORDS, EPOCHS, STEP_S = 400, 12, 0.02
KINDS = ("kill rank", "kill rank", "stop rank", "kill driver", "end driver", "stop driver")
LONGEST_S, WAIT_S = 20.0, 300.0  # from a launch to its last event; for a launch to end


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
    from jobs import verify

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        whole = verify.main([run]) == 0
    found = [] if whole else [line for line in printed.getvalue().splitlines() if line.startswith("WRONG")]
    if "ok    audit" not in printed.getvalue():
        found.append("the audit was not checked")
    fs, paths = filesystem(run), RunPaths(run)
    for ref, url in checkpoints(fs, paths).items():
        read_whole(url, read_checkpoint(fs, url, ref), ("weights", "optimizer"))
    if fingerprint(run) != expected:
        found.append("weights, optimizer state or metrics are not those of the undisturbed run")
    return found


def command(data: str, run: str, ranks: int, *, canonical: bool, take_over: bool = False) -> list[str]:
    """The call of jobs.train."""
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
    return [sys.executable, "-m", "jobs.train", *(str(x) for pair in flags.items() for x in pair), "--audit", *more]


def disturbed(data: str, run: str, log: Path, rng: random.Random, *, canonical: bool) -> list[str]:
    """Train to the end through what the generator says; returns what was done."""
    done: list[str] = []
    drivers: list[subprocess.Popen[bytes]] = []
    try:
        for launch in range(4):
            ranks = rng.choice((1, 2, 2, 4)) if canonical else 2
            with log.open("ab") as out:
                call = command(data, run, ranks, canonical=canonical, take_over=launch > 0)
                drivers.append(subprocess.Popen(call, cwd=ROOT, stdout=out, stderr=out))
            done.append(f"{ranks} ranks")
            # The last launch is left alone, so that the run ends.
            moments = sorted(rng.uniform(0, LONGEST_S) for _ in range(rng.randint(1, 3) if launch < 3 else 0))
            if _disturb(drivers, moments, rng, done):
                break
        # One that was stopped before it had the run takes it over when it wakes: then it is the last, and ends it.
        for driver in drivers:
            _wake(driver)
        ends = [driver.wait(WAIT_S) for driver in drivers]
        done.append(f"exit {0 if 0 in ends else ends[-1]}")
    finally:
        for driver in drivers:
            _wake(driver)
            with contextlib.suppress(subprocess.TimeoutExpired):
                driver.wait(30)
            driver.kill()
            driver.wait()
    return done


def _disturb(
    drivers: Sequence[subprocess.Popen[bytes]], moments: Sequence[float], rng: random.Random, done: list[str]
) -> bool:
    """Do what the generator says at these moments to the last driver; whether it has come to its own end."""
    began, driver = time.monotonic(), drivers[-1]
    for moment in moments:
        with contextlib.suppress(subprocess.TimeoutExpired):
            driver.wait(max(0.0, began + moment - time.monotonic()))
        if driver.poll() is not None:
            return True
        kind, ranks = rng.choice(KINDS), ranks_below(driver.pid)
        chosen = rng.randrange(1 << 16)
        done.append(f"{kind} at {moment:.0f} s")
        if kind.endswith("rank"):
            if ranks:
                _signal_rank(ranks[chosen % len(ranks)], kind, seconds=(0.5, 2.0, 12.0)[chosen % 3])
        elif kind == "stop driver":  # the next one takes over; this one wakes up in its middle
            os.kill(driver.pid, signal.SIGSTOP)
            return False
        else:
            os.kill(driver.pid, signal.SIGKILL if kind == "kill driver" else signal.SIGTERM)
            driver.wait(60)
            return False
        for late in drivers[:-1]:
            _wake(late)
    driver.wait(WAIT_S)
    return True


def _signal_rank(pid: int, kind: str, seconds: float) -> None:
    with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
        os.kill(pid, signal.SIGKILL if kind == "kill rank" else signal.SIGSTOP)
        if kind == "stop rank":
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)


def _wake(driver: subprocess.Popen[bytes]) -> None:
    if driver.poll() is None:
        os.kill(driver.pid, signal.SIGCONT)


def ranks_below(pid: int) -> list[int]:
    """The rank processes among the descendants of a process."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = []
    for child in parents:
        above = child
        while above in parents and above != pid:
            above = parents[above]
        with contextlib.suppress(OSError):
            if above == pid and b"training.rank" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return sorted(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run, plus one for each later run")
    parser.add_argument("--keep", help="folder for failed runs (default: deleted)")
    args = parser.parse_args(argv)
    from tests.training._tiny import write_table

    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        data = f"{folder}/data"
        write_table(data, records={"train": RECORDS, "test": 30})
        expected = {}
        for canonical in (True, False):
            run = f"{folder}/undisturbed-{canonical}"
            call = command(data, run, 1 if canonical else 2, canonical=canonical)
            subprocess.run(call, cwd=ROOT, check=True, capture_output=True, timeout=WAIT_S)
            expected[canonical] = fingerprint(run)
        for seed in range(args.seed, args.seed + args.runs):
            canonical, run, began = seed % 2 == 0, f"{folder}/run-{seed}", time.monotonic()
            log = Path(f"{folder}/run-{seed}.log")
            done = disturbed(data, run, log, random.Random(seed), canonical=canonical)
            wrong = [] if done[-1] == "exit 0" else [f"no driver ended the run: {done[-1]}"]
            wrong = wrong or faults(run, expected[canonical])
            kind = "canonical" if canonical else "plain"
            generations = len(list(Path(run, "generations").glob("*.json")))
            words = f"seed {seed:4} {kind:9} {generations:2} generations {time.monotonic() - began:4.0f} s"
            print(f"{words}  {'; '.join(done)}: {'FAILED' if wrong else 'as undisturbed'}", flush=True)
            for line in wrong if not failed else ():
                print(f"  {line}", flush=True)
            failed += bool(wrong)
            if wrong and args.keep:
                shutil.copytree(run, Path(args.keep, f"run-{seed}"))
                shutil.copy(log, args.keep)
            shutil.rmtree(run, ignore_errors=True)
    print(f"{args.runs} runs, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
