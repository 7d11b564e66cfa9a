"""The ready transformer at a hundred million parameters: what two ranks hold and how long a step takes, by --zero.

    python -m benchmarks.large_transformer DATASET [--set layers=8 width=1024 heads=16] [--zero 0 2] [--steps 6]

DATASET is that of conf/next_page.toml. Each mode is a run of `lockstep train` on this host, one after another; the
resident memory is the most that a rank reports from its first step to its last, every 5 s, next to what
`lockstep plan_memory` says for weights, gradients, optimizer and layers.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from itertools import pairwise
from statistics import median

from lockstep.jobs._train import setting
from lockstep.training.driver.dry_run import measured_size
from lockstep.training.driver.memory_plan import MIB, Mode, held
from lockstep.training.run.metrics import read_history

RANKS, ROWS = 2, 8


def main() -> None:
    """Train in each mode, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--set", dest="settings", nargs="+", default=["layers=8", "width=1024", "heads=16"])
    parser.add_argument("--zero", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    print(
        f"{RANKS} ranks, {ROWS} rows each a step, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, TensorFlow {version('tensorflow')}, Keras {version('keras')}"
    )
    model = ["--model", "transformer", "--dataset", args.dataset, "--set", *args.settings]
    size = measured_size(args.dataset, "transformer", dict(map(setting, args.settings)), ROWS)
    print(f"{size.weights / 4e6:.1f} M parameters, {size.step_s:.2f} s a step of one rank with all cores", flush=True)
    for stage in args.zero:
        with tempfile.TemporaryDirectory() as folder:
            options = ["--num-ranks", str(RANKS), "--global-batch", str(RANKS * ROWS), "--launcher", "local"]
            options += ["--epochs", "1", "--max-steps", str(args.steps), "--zero", str(stage), "--run", folder]
            subprocess.run([sys.executable, "-m", "lockstep", "train", *model, *options], check=True)
            history = read_history(folder)
        samples = [row for row in history.usage if 1 <= row["step"] < args.steps]
        most = max(row["rss_bytes"] for row in samples)
        times = [row["seconds"] for row in history.steps]
        step_s = median(later - earlier for earlier, later in pairwise(times))
        parts = held(size, Mode(ranks=RANKS, zero=stage))
        planned = ", ".join(f"{name} {value / MIB:,.0f}" for name, value in parts.items())
        print(
            f"--zero {stage}: planned {sum(parts.values()) / MIB:,.0f} MiB ({planned}), resident {most / MIB:,.0f} MiB "
            f"at most of {len(samples)} samples, {step_s:.2f} s a step",
            flush=True,
        )


if __name__ == "__main__":
    main()
