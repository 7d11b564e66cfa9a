"""Which share of a run's time trains it, when its ranks die at random; and where each lost second goes.

    python -m benchmarks.effective_time [--seconds 240] [--mean-time 40] [--every 5] [--seed 0] [--kill ranks|executors]

First a real run of two ranks (`lockstep.training.driver.train.train`). After random times (exponential, with this mean,
by a counter-based generator from the seed; also while ranks start) a random rank of the local launcher is killed, or a
random executor of a standalone master with two workers. The run gives d, what a checkpoint costs; w, from its copy to
its commit; R, from a kill to the next step. T is the time between checkpoints. Every second of the run is one of:
steps that count, repeated steps, restarts, stalls for checkpoints.

Then the same account by a simulation of that run with the same kills, which must agree, and by simulations of long runs
with a failure every 4 hours, 30 minutes and 5 minutes in the mean, at a checkpoint a minute and at the best interval
sqrt(2 d M) (Young, 1974), next to the formula 1 - d/T - (T/2 + R)/M. For each failure that counts half an interval and
one restart, and neither failures within restarts nor checkpoints that are not committed yet.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from pyspark.sql import SparkSession

from benchmarks.shared.shapes import machine
from lockstep.training.config import TrainConfig
from lockstep.training.control.task import Limits
from lockstep.training.driver.stop import EndedByCallerError
from lockstep.training.driver.train import Hooks, train
from lockstep.training.launch.barrier import OnSpark
from lockstep.training.launch.local import OnHost
from lockstep.training.launch.session import Session, SessionLauncher
from lockstep.training.run.metrics import read_history
from tests.spark.standalone import standalone
from tests.training._ranks import living_ranks
from tests.training._tiny import write_table

RANKS, UNITS, RECORDS = 2, 1536, 4096
MEANS_S = {"4 h": 4 * 3600.0, "30 min": 1800.0, "5 min": 300.0}
FAILURES = 20_000  # of each simulation
MINUTE_S = 60.0


def model(signature: Any, options: Any) -> Any:
    """Two dense layers, 2.4 M parameters, with Adam: 28 MB of state."""
    import keras

    inputs = {name: keras.Input(spec.shape, dtype=spec.dtype, name=name) for name, spec in signature.features.items()}
    x = keras.layers.Dense(UNITS, "relu")(keras.layers.Concatenate()(list(inputs.values())))
    x = keras.layers.Dense(UNITS, "relu")(x)
    found = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(x))
    found.compile("adam", "binary_crossentropy", jit_compile=False)
    return found


def gaps(seed: int, mean_s: float) -> Iterator[float]:
    """Times between failures: number i depends on the seed and i alone."""
    for number in itertools.count():
        drawn = np.random.Generator(np.random.Philox(key=seed, counter=number)).random()
        yield -mean_s * math.log1p(-drawn)


@dataclass(slots=True)
class Account:
    """Where the seconds of a run went."""

    useful_s: float = 0.0
    repeated_s: float = 0.0
    restart_s: float = 0.0
    stall_s: float = 0.0
    failures: int = 0

    @property
    def total_s(self) -> float:
        """All of them."""
        return self.useful_s + self.repeated_s + self.restart_s + self.stall_s

    def shares(self) -> str:
        """In per cent: useful, repeated, restart, stall."""
        parts = (self.useful_s, self.repeated_s, self.restart_s, self.stall_s)
        return " | ".join(f"{100 * part / self.total_s:6.2f} %" for part in parts)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds: d, T, R, w of the text above, and a step."""

    checkpoint_s: float
    interval_s: float
    restart_s: float
    commit_s: float
    step_s: float

    def formula(self, mean_s: float) -> float:
        """The useful share of a long run."""
        return 1 - self.checkpoint_s / self.interval_s - (self.interval_s / 2 + self.restart_s) / mean_s


def simulate(costs: Costs, failures: Iterable[float], *, tail_s: float = 0.0) -> Account:
    """A run whose failures come after these times, and end a restart too; without another one for `tail_s` at its end.

    A checkpoint's copy is made after each interval of training, which then stalls, and counts if the training lives
    until its commit. The interval begins again with each restart.
    """
    found = Account()
    restarting = False  # it begins with its first step
    for gap_s in failures:
        found.failures += 1
        _pass(found, costs, gap_s, restarting=restarting, fails=True)
        restarting = True
    if tail_s:
        _pass(found, costs, tail_s, restarting=restarting, fails=False)
    return found


def _pass(found: Account, costs: Costs, gap_s: float, *, restarting: bool, fails: bool) -> None:
    """Add the time until the next failure, or the end of the run."""
    restart_s = min(gap_s, costs.restart_s) if restarting else 0.0
    found.restart_s += restart_s
    trained_s = gap_s - restart_s
    cycles, rest_s = divmod(trained_s, costs.interval_s + costs.checkpoint_s)
    since_s = min(rest_s, costs.interval_s)  # trained since the last copy
    found.stall_s += cycles * costs.checkpoint_s + rest_s - since_s
    lost_s = 0.0
    if fails:
        lost_s = since_s + (costs.interval_s if cycles and rest_s < costs.commit_s else 0.0)
    found.repeated_s += lost_s
    found.useful_s += cycles * costs.interval_s + since_s - lost_s


@dataclass
class Killed:
    """A launch of which a process is killed after random times, and what its driver saw."""

    seed: int
    mean_s: float
    living: Callable[[], list[int]]
    """Process ids of those that may be killed."""
    steps: list[tuple[float, int, int]] = field(default_factory=list)
    """(when, generation, step) of each step that rank 0 reported."""
    killed_at: list[float] = field(default_factory=list)
    begun: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def launcher(self, kind: type[SessionLauncher], **options: Any) -> SessionLauncher:
        """One of this kind, whose handler keeps the steps."""
        keep = self._watch

        class Watched(kind):  # type: ignore[misc, valid-type] # of a kind that is chosen here
            def session(self, num_ranks: int, limits: Limits) -> Session:
                return keep(kind.session(self, num_ranks, limits))

        return Watched(**options)

    def _watch(self, session: Session) -> Session:
        run = session.run

        def watched(task: Any, generation: int, handler: Any = None, on_steps: Any = None) -> list[dict[str, Any]]:
            on_step = handler.on_step

            def keep(step: int) -> None:
                self.steps.append((time.monotonic(), generation, step))
                self.begun.set()
                on_step(step)

            handler.on_step = keep
            return run(task, generation, handler, on_steps)

        session.run = watched  # type: ignore[method-assign] # to see what the driver sees
        return session

    def kill(self) -> None:
        """Kill a process after each gap, from the first step on, until the run has ended."""
        self.begun.wait()
        at, drawn = time.monotonic(), random.Random(self.seed)
        for gap_s in gaps(self.seed, self.mean_s):
            at += gap_s
            if self.ended.wait(max(0.0, at - time.monotonic())):
                return
            while not (pids := self.living()):  # between two generations there is none
                if self.ended.wait(0.05):
                    return
            with suppress(ProcessLookupError):
                os.kill(drawn.choice(pids), signal.SIGKILL)
                at = time.monotonic()
                self.killed_at.append(at)


@dataclass(frozen=True, slots=True)
class Measured:
    """A real run: its account, its costs, and the gaps between its kills up to its end."""

    account: Account
    costs: Costs
    gaps_s: list[float]
    tail_s: float


def executors() -> list[int]:
    """Process ids of Spark's executors under this process."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            if any("CoarseGrainedExecutorBackend" in word for word in child.cmdline()) and child.name() == "java":
                found.append(child.pid)
    return found


@contextmanager
def spark_on_two_workers(folder: Path) -> Iterator[SparkSession]:
    """A session on a standalone master; it replaces executors without end."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    with standalone(folder) as master:
        builder = SparkSession.builder.master(master).config("spark.executor.memory", "512m")
        builder = builder.config("spark.deploy.maxExecutorRetries", "-1").config("spark.driver.host", "127.0.0.1")
        spark = builder.config("spark.executorEnv.PYTHONPATH", str(Path(__file__).parents[1])).getOrCreate()
        spark.sparkContext.setLogLevel("OFF")
        try:
            yield spark
        finally:
            spark.stop()


def measure(folder: Path, seconds: float, mean_s: float, every_s: float, seed: int, kill: str) -> Measured:
    """Train for some seconds among kills."""
    write_table(folder / "data", records={"train": RECORDS, "test": 8}, block_records=64)
    config = TrainConfig(
        datasets=(str(folder / "data"),), run=str(folder / "run"), model="benchmarks.effective_time:model",
        num_ranks=RANKS, global_batch=64, epochs=100_000, checkpoint_every=f"{every_s:g}s",
        max_restarts=1000, max_restarts_per_hour=10_000, launcher="local" if kill == "ranks" else "barrier",
    )  # fmt: skip
    killed = Killed(seed, mean_s, partial(living_ranks, os.getpid()) if kill == "ranks" else executors)

    def ended() -> EndedByCallerError | None:
        over = killed.steps and time.monotonic() - killed.steps[0][0] > seconds
        return EndedByCallerError("the measurement is over") if over else None

    killer = threading.Thread(target=killed.kill, name="killer")
    killer.start()
    with ExitStack() as stack:
        stack.callback(killer.join)
        stack.callback(killed.begun.set)
        stack.callback(killed.ended.set)
        if kill == "ranks":
            launcher = killed.launcher(OnHost)
        else:
            launcher = killed.launcher(OnSpark, spark=stack.enter_context(spark_on_two_workers(folder)))
        with suppress(EndedByCallerError):
            train(config, launcher, hooks=Hooks(ended=ended))
    return account_of(killed, config, every_s)


def account_of(killed: Killed, config: TrainConfig, every_s: float) -> Measured:
    """From the steps, the kills and the run's own rows of checkpoints."""
    begin, end = killed.steps[0][0], killed.steps[-1][0]
    kills = [at for at in killed.killed_at if at < end]
    by_generation = {
        number: [(at, step) for at, of, step in killed.steps if of == number] for _, number, _ in killed.steps
    }
    trained_s = sum(steps[-1][0] - steps[0][0] for steps in by_generation.values())
    made = sum(steps[-1][1] - steps[0][1] for steps in by_generation.values())
    rows = read_history(config.run).checkpoints
    costs = [float(row["cost_s"]) for row in rows]
    stall_s = sum(costs)
    step_s = (trained_s - stall_s) / made
    useful = killed.steps[-1][2] - killed.steps[0][2]
    restart_s = end - begin - trained_s
    account = Account(useful * step_s, (made - useful) * step_s, restart_s, stall_s, len(kills))
    each = Costs(
        statistics.mean(costs),
        every_s,
        restarts(kills, killed.steps),
        statistics.mean(r["written_s"] for r in rows),
        step_s,
    )
    points = [begin, *kills]
    gaps_s = [after - before for before, after in itertools.pairwise(points)]
    return Measured(account, each, gaps_s, end - points[-1])


def restarts(kills: Sequence[float], steps: Sequence[tuple[float, int, int]]) -> float:
    """The mean time from a kill that no other one follows before it, to the next generation's first step."""
    firsts: dict[int, float] = {}
    for at, generation, _ in steps:
        firsts.setdefault(generation, at)
    found = []
    for at, following in itertools.pairwise([*kills, math.inf]):
        later = [first for first in firsts.values() if first > at]
        if later and min(later) < following:
            found.append(min(later) - at)
    return statistics.mean(found)


HEAD = "| run | useful | repeated steps | restarts | checkpoints | formula |\n| --- | --- | --- | --- | --- | --- |"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0, help="of the real run, from its first step on")
    parser.add_argument("--mean-time", type=float, default=40.0, help="seconds between its kills, in the mean")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between its checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill", choices=("ranks", "executors"), default="ranks")
    args = parser.parse_args(argv)
    print(f"{machine('tensorflow', 'keras')}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(prefix="effective-time-") as folder:
        real = measure(Path(folder), args.seconds, args.mean_time, args.every, args.seed, args.kill)
    costs, account = real.costs, real.account
    print(
        f"{account.total_s:.0f} s with {account.failures} kills of {args.kill}, seed {args.seed}: "
        f"d {1e3 * costs.checkpoint_s:.0f} ms, w {costs.commit_s:.2f} s, R {costs.restart_s:.1f} s, "
        f"a step {1e3 * costs.step_s:.1f} ms\n\n{HEAD}"
    )
    mean_s = account.total_s / max(1, account.failures)
    replayed = simulate(costs, real.gaps_s, tail_s=real.tail_s)
    print(f"| real, T {costs.interval_s:g} s, M {mean_s:.0f} s | {account.shares()} | {costs.formula(mean_s):.2%} |")
    print(f"| the same, simulated | {replayed.shares()} | |")
    for name, mean in MEANS_S.items():
        best_s = math.sqrt(2 * costs.checkpoint_s * mean)
        for interval_s in (MINUTE_S, best_s):
            each = Costs(costs.checkpoint_s, interval_s, costs.restart_s, costs.commit_s, costs.step_s)
            found = simulate(each, itertools.islice(gaps(args.seed, mean), FAILURES))
            print(f"| M {name}, T {interval_s:.1f} s | {found.shares()} | {each.formula(mean):.2%} |", flush=True)


if __name__ == "__main__":
    main()
