"""From SIGKILL of a rank to the next optimizer step of all ranks, and where the seconds go.

    python -m benchmarks.restart_time [--launchers local barrier] [--model resnet20] [--kills 3]

A real run of two ranks by `lockstep.training.driver.train.train` on a small set of 32x32x3 images, for each launcher.
Level 1: one rank is killed; level 2 (barrier, local[2]): the Spark task that supervises it is. Each
generation is killed some steps after its first one. "noticed" is from the kill to the driver's first sight of it; the
other parts are the driver's own account (lockstep.training.launch.session). Printed: each part's median over the kills,
and the whole's median and range. Three minutes on an idle machine; a rank takes a core, so two are wanted.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa

from benchmarks.shared.shapes import machine
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError
from lockstep.training.config import Launcher, TrainConfig
from lockstep.training.control.failures import RankState
from lockstep.training.control.task import Limits
from lockstep.training.driver.train import train
from lockstep.training.launch.barrier import OnSpark
from lockstep.training.launch.local import OnHost
from lockstep.training.launch.session import Restart, Session, SessionLauncher
from lockstep.training.run.result import IN_PLACE, NEW_SUPERVISORS
from tests.training._tiny import write_rows

RANKS = 2
EPOCHS = 10_000  # more than there is time for: the run ends with its last kill
RECORDS = 4096
SCHEMA = Schema(
    (
        Field(name="sample_id", dtype="int64", kind="id"),
        Field(name="image", dtype="uint8", shape=(32, 32, 3)),
        Field(name="label", dtype="int64", kind="label", num_classes=10),
    )
)


class Measured(ConfigError):
    """Ends a run: the driver restarts after no ConfigError."""


@dataclass
class Killer(SessionLauncher):
    """A launch whose ranks are killed: `kills` times a rank, then as often its supervisor where that is a process.

    It keeps the times of each restart as the driver does, and ends the run after the last.
    """

    launch: OnHost | OnSpark
    kills: int
    after_s: float
    """From a generation's first step to its end."""
    supervisors: bool
    killed_at: list[float] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    _called_at: float = 0.0
    _failed: tuple[float, float] = (0.0, 0.0)

    def session(self, num_ranks: int, limits: Limits) -> Session:
        """The launcher's own, with a killer."""
        session = self.launch.session(num_ranks, limits)
        run, usable = session.run, session.usable

        def is_usable() -> bool:
            self._called_at = time.monotonic()
            return usable()

        def watched(task: Any, generation: int, handler: Any = None, on_steps: Any = None) -> list[dict[str, Any]]:
            restart: Restart | None = None
            if self.killed_at:
                level = IN_PLACE if session.began else NEW_SUPERVISORS
                restart = Restart(generation, level, *self._failed, 0.0, self._called_at, time.monotonic())

            def stepped(states: Sequence[RankState]) -> None:
                if restart is not None:
                    restart.stepped(states)
                    self.restarts.append(restart)
                if len(self.killed_at) < self.kills * (1 + self.supervisors):
                    threading.Timer(self.after_s, self._kill, (states[-1].pid,)).start()
                else:
                    session.fail(Measured("all kills are measured"))

            try:
                return run(task, generation, handler, stepped)
            finally:
                self._failed = (session.failed_at or 0.0, time.monotonic())

        session.run, session.usable = watched, is_usable  # type: ignore[method-assign] # to see what the driver sees
        return session

    def _kill(self, rank: int) -> None:
        pid = rank
        if len(self.killed_at) >= self.kills:  # the Spark task's Python worker: above the zygote that forked the rank
            pid = parent_of(parent_of(rank))
        self.killed_at.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)


def parent_of(pid: int) -> int:
    """The parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def write_data(root: Path) -> None:
    """Random images; what a restart costs does not depend on what they show."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (RECORDS, 32 * 32 * 3), dtype=np.uint8)
    columns = [
        pa.array(np.arange(RECORDS) * 7919),
        pa.array([image.tobytes() for image in images], pa.binary()),
        pa.array(rng.integers(0, 10, RECORDS)),
    ]
    rows = pa.RecordBatch.from_arrays(columns, schema=SCHEMA.arrow_schema())
    write_rows(str(root), SCHEMA, rows, {"train": RECORDS}, "tfrecord", 4, 256, 0)


@contextmanager
def launcher(name: Launcher) -> Iterator[OnHost | OnSpark]:
    """The launcher, with a Spark session of its own for the barrier."""
    if name == "local":
        yield OnHost()
        return
    from lockstep.spark.session import spark_session

    with spark_session("restart time", f"local[{RANKS}]") as spark:
        yield OnSpark(spark)


def measure(launch: OnHost | OnSpark, config: TrainConfig, kills: int, *, supervisors: bool) -> None:
    """One run; prints its kills."""
    killer = Killer(launch, kills, 2.0, supervisors)
    with suppress(Measured):
        train(config, killer)
    for level in (IN_PLACE, NEW_SUPERVISORS):
        pairs = [
            (at, restart)
            for at, restart in zip(killer.killed_at, killer.restarts, strict=True)
            if restart.level == level
        ]
        if not pairs:
            continue
        noticed = [restart.failed_at - at for at, restart in pairs]
        totals = [more + (restart.seconds or 0.0) for more, (_, restart) in zip(noticed, pairs, strict=True)]
        parts = {"noticed": statistics.median(noticed)}
        for word in dict.fromkeys(word for _, restart in pairs for word in restart.parts):
            parts[word] = statistics.median(restart.parts.get(word, 0.0) for _, restart in pairs)
        print(
            f"{config.ranks.launcher}, level {level}: {statistics.median(totals):.1f} s "
            f"({min(totals):.1f} to {max(totals):.1f}, {len(totals)} kills)\n  "
            + ", ".join(f"{word} {seconds:.2f}" for word, seconds in parts.items()),
            flush=True,
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launchers", nargs="+", choices=get_args(Launcher), default=["local", "barrier"])
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--kills", type=int, default=3)
    args = parser.parse_args()
    print(f"{machine('tensorflow', 'keras', 'pyspark')}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{args.model}, {RANKS} ranks, global batch {args.global_batch}; level {IN_PLACE}: supervisors stay")
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder, "data"))
        for name in args.launchers:
            with launcher(name) as launch:
                config = TrainConfig(
                    datasets=(str(Path(folder, "data")),),
                    run=str(Path(folder, f"run-{name}")),
                    model=args.model,
                    num_ranks=RANKS,
                    global_batch=args.global_batch,
                    epochs=EPOCHS,
                    checkpoint_every=5,
                    max_restarts=100,
                    max_restarts_per_hour=1000,
                    launcher=name,
                )
                measure(launch, config, args.kills, supervisors=name == "barrier")


if __name__ == "__main__":
    main()
