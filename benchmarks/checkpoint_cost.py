"""The cost of a checkpoint: how long steps wait, how much the steps during its writing slow down, bytes and MB/s.

    python -m benchmarks.checkpoint_cost [--ranks 1 2] [--checkpoints 5] [--steps-between 30] [--run URL | --distant MS]

Real runs by `lockstep.training.driver.train.train` with ranks as processes of this host: dense layers with Adam, whose
weights and optimizer state take 400 MB in all (`--state-mb`). The cost of a checkpoint is the time that steps wait for
it, plus the time that steps during its writing take longer than the median of the others, all from one run. Its share
of a run with a checkpoint every minute is that cost over 60 s. `--run` puts the runs below a URL, such as one of HDFS,
in place of a temporary folder; `--distant` there and then into moto's S3 behind a proxy that answers MS ms later, where
nothing limits the bytes but these two programs. Takes three minutes on an idle machine with two cores, one a rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.object_reading import distant
from benchmarks.shared.shapes import machine
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import join
from lockstep.training.config import TrainConfig
from lockstep.training.driver.train import Hooks, train
from lockstep.training.launch.local import run_local
from lockstep.training.run.checkpoint import HostBuffer, sha256_of, upload
from lockstep.training.run.metrics import History, read_history
from tests.object_stores.faulty_proxy import Link
from tests.object_stores.server import serving
from tests.training._tiny import write_table

STATE_MB = 400
BATCH = 32
LAYERS = 4


def model(signature: Any, options: Any) -> Any:
    """Dense layers of equal width, as many parameters as make a third of the state."""
    import keras

    width = int((options.extra["state_mb"] * 1e6 / 3 / 4 / LAYERS) ** 0.5)
    inputs = {n: keras.Input(s.shape, dtype=s.dtype, name=n) for n, s in signature.features.items()}
    x = keras.layers.Dense(width)(keras.layers.Concatenate()(list(inputs.values())))
    for _ in range(LAYERS):
        x = keras.layers.Dense(width, activation="relu", use_bias=False)(x)
    made = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(x))
    made.compile(keras.optimizers.Adam(1e-5), "binary_crossentropy", jit_compile=False)
    return made


def durations(history: History) -> dict[int, float]:
    """Step -> seconds from the end of the step before to its own, as rank 0 saw them."""
    rows = history.steps
    return {row["step"]: row["seconds"] - before["seconds"] for before, row in pairwise(rows)}


def measure(root: str, dataset: str, num_ranks: int, steps_between: int, state_mb: int) -> None:
    """One run; prints its checkpoints. The first and the last are left out: they end no step, or begin with tracing."""
    config = TrainConfig(
        datasets=(dataset,),
        run=join(root, f"run-{num_ranks}-{time.time_ns()}"),
        model="benchmarks.checkpoint_cost:model",
        num_ranks=num_ranks,
        global_batch=BATCH,
        epochs=1,
        checkpoint_every=steps_between,
        extra={"state_mb": state_mb},
        launcher="local",
    )
    train(config, run_local, hooks=Hooks(lease_watch_s=0.1))
    history = read_history(config.run)
    rows = history.checkpoints[1:-1]
    if not rows:
        raise SystemExit("no checkpoint but the first and the last: give more --steps-between, each must be written")
    took = durations(history)
    usual = statistics.median(took.values())
    print(
        f"\n{num_ranks} rank{'s' * (num_ranks > 1)}: {len(history.steps)} steps of {usual * 1e3:.0f} ms, "
        f"{len(rows)} checkpoints, {sum(row['skipped'] for row in history.checkpoints)} skipped, "
        f"{rows[0]['bytes'] / 1e6:.0f} MB a rank"
    )
    for name, unit, values in (
        ("the step waits", "ms", [row["blocked_s"] * 1e3 for row in rows]),
        ("written during the steps", "s", [row["written_s"] for row in rows]),
        ("hash, upload and commit", "MB/s a rank", [row["bytes"] / row["written_s"] / 1e6 for row in rows]),
        ("cost in all", "ms", [row["cost_s"] * 1e3 for row in rows]),
        ("of a run with one a minute", "%", [row["cost_s"] / 60 * 100 for row in rows]),
    ):
        print(f"  {name:28} {statistics.median(values):9.2f} {unit}   ({min(values):.2f} to {max(values):.2f})")


def measure_parts(root: str, state_mb: int) -> None:
    """The parts of a writing alone, in this process: seconds by the clock, and of this thread's processor time."""
    tensors = {str(i): np.ones(state_mb * 10**6 // 4 // 8, np.float32) for i in range(8)}
    buffer, fs = HostBuffer(), filesystem(root)
    first, _ = clocked(lambda: buffer.fill(tensors))
    file = buffer.fill(tensors)
    print(f"\nalone, {file.size / 1e6:.0f} MB: into fresh memory {first * 1e3:.0f} ms")
    urls = [join(root, f"part-{number}") for number in range(5)]
    for name, calls in (
        ("copy", [lambda: buffer.fill(tensors)] * 5),
        ("sha256", [lambda: sha256_of(file)] * 3),
        ("write, sync, read back", [lambda url=url: upload(fs, url, file) for url in urls]),
    ):
        wall_s, cpu_s = map(statistics.median, zip(*(clocked(call) for call in calls), strict=True))
        speed = file.size / wall_s / 1e6
        print(f"  {name:28} {wall_s * 1e3:9.0f} ms, of CPU {cpu_s * 1e3:5.0f} ms   {speed:.0f} MB/s")
    for url in urls:
        fs.delete(url)


def clocked(call: Any) -> tuple[float, float]:
    """Seconds that a call takes, and seconds of this thread's processor time."""
    began, cpu = time.perf_counter(), time.thread_time()
    call()
    return time.perf_counter() - began, time.thread_time() - cpu


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--checkpoints", type=int, default=5)
    parser.add_argument("--steps-between", type=int, default=30)
    parser.add_argument("--state-mb", type=int, default=STATE_MB, help="weights and optimizer's state")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--run", metavar="URL")
    where.add_argument("--distant", metavar="MS", type=float)
    args = parser.parse_args(argv)
    print(f"{machine('keras', 'tensorflow')}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        roots = [args.run or folder]
        if args.distant is not None:
            server = stack.enter_context(serving(Path(folder)))
            os.environ.update(server.environment)
            proxy = distant(server.endpoint, Link(args.distant / 1e3))
            os.environ["AWS_ENDPOINT_URL_S3"] = stack.enter_context(proxy)
            roots.append(server.url)
        records = BATCH * args.steps_between * (args.checkpoints + 2)
        write_table(f"{folder}/data", records={"train": records, "test": BATCH}, block_records=64)
        for root in roots:
            print(f"\n{root}")
            if root == roots[0]:
                measure_parts(root, args.state_mb)
            for num_ranks in args.ranks:
                measure(root, f"{folder}/data", num_ranks, args.steps_between, args.state_mb)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
