"""Steps a second of two ranks with one thread and one core each, against the ceiling and against peers, in turns.

    python -m benchmarks.train_step --model resnet20|dense [--rounds 9] [--steps 15]
        [--tf-keras FOLDER]        created by `pip install --no-deps --target FOLDER tf_keras==2.21.0`
        [--torch-python PYTHON]    an interpreter that has PyTorch, such as /usr/bin/python3 with Debian's python3-torch

The ceiling is two processes that train the same model at the same time without any exchange. In a round every
contestant makes `steps` steps while the others wait; its figure is that of its slower rank, and the result is the ratio
to the ceiling of the same round: median (lowest to highest). CPU time is printed with the same ratio: other work on a
shared machine disturbs it less. Peers without their option are named.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.shared.step_models import BATCH_ROWS

ROOT = Path(__file__).resolve().parent.parent
RANKS = 2


def on_this_host(rank: int, argv: list[str], **options: Any) -> subprocess.Popen[str]:
    """Where a rank's process runs, as a rule."""
    return subprocess.Popen(argv, **options)


class Contestant:
    """Its processes, one a core."""

    def __init__(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str],
        needs_places: bool,
        popen: Callable[..., subprocess.Popen[str]] = on_this_host,
    ) -> None:
        self.name = name
        self.cpu_s_a_step = 0.0
        """CPU seconds a step of the slower rank in the last call of `seconds_a_step`."""
        self._processes = [
            popen(
                rank,
                ["taskset", "-c", str(rank), *(word.replace("RANK", str(rank)) for word in command), str(RANKS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {name: value.replace("RANK", str(rank)) for name, value in environment.items()},
                cwd=ROOT,
                text=True,
            )
            for rank in range(RANKS)
        ]
        if needs_places:
            self._tell_all([self._hear(process) for process in self._processes])
        self.about, *_ = [self._hear(process) for process in self._processes]

    def seconds_a_step(self, steps: int, what: str = "steps") -> float:
        """Return the seconds a step of the slower rank; `what` is "steps" or "forward"."""
        self._tell_all({what: steps})
        heard = [self._hear(process) for process in self._processes]
        self.cpu_s_a_step = max(float(each["cpu_s_a_step"]) for each in heard)
        return max(float(each["seconds_a_step"]) for each in heard)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.wait()

    def _tell_all(self, document: Any) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(document) + "\n")
            process.stdin.flush()

    def _hear(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        while line := process.stdout.readline():
            if line.startswith(("{", "[")):
                return json.loads(line)
        raise SystemExit(f"{self.name} ended with {process.wait()}")


def contestants(args: argparse.Namespace) -> list[Contestant]:
    """All that can run here; the others are named."""
    worker = [sys.executable, "-m", "benchmarks.shared.step_worker"]
    found = [
        Contestant("ceiling", [*worker, "plain", args.model, "RANK"], {}, needs_places=False),
        Contestant("lockstep", [*worker, "ours", args.model, "RANK"], {}, needs_places=True),
    ]
    if args.tf_keras:
        paths = {"PYTHONPATH": f"{Path(args.tf_keras).resolve()}"}
        found.append(Contestant("mwms", [*worker, "mwms", args.model, "RANK"], paths, needs_places=True))
    else:
        print("not measured: tf_keras under MultiWorkerMirroredStrategy (give --tf-keras)")
    if args.torch_python:
        script = [args.torch_python, "benchmarks/peers/step_torch.py", args.model, "RANK"]
        found.append(Contestant("ddp", script, {"OMP_NUM_THREADS": "1"}, needs_places=True))
    else:
        print("not measured: PyTorch DDP over gloo (give --torch-python)")
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(BATCH_ROWS), required=True)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--tf-keras")
    parser.add_argument("--torch-python")
    args = parser.parse_args()
    racing = contestants(args)
    seconds: dict[str, list[float]] = {contestant.name: [] for contestant in racing}
    cpu: dict[str, list[float]] = {contestant.name: [] for contestant in racing}
    for number in range(args.rounds + 1):
        for contestant in racing:
            taken = contestant.seconds_a_step(args.steps)
            if number:  # the first round warms up
                seconds[contestant.name].append(taken)
                cpu[contestant.name].append(contestant.cpu_s_a_step)
    print(
        f"{args.model}, batch {BATCH_ROWS[args.model]} a rank, {RANKS} ranks x 1 thread, {args.rounds} rounds of "
        f"{args.steps} steps, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"TensorFlow {version('tensorflow')}, Keras {version('keras')}"
    )
    rows = BATCH_ROWS[args.model]
    for contestant in racing:
        mine = seconds[contestant.name]
        shares = [ceiling / own for ceiling, own in zip(seconds["ceiling"], mine, strict=True)]
        ratios = [other / own for other, own in zip(mine, seconds["lockstep"], strict=True)]
        work = [other / own for other, own in zip(cpu[contestant.name], cpu["lockstep"], strict=True)]
        print(
            f"{contestant.name:<10}{rows / statistics.median(mine):9.1f} samples/s a rank   "
            f"of the ceiling {statistics.median(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})   "
            f"lockstep is {statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f}), "
            f"in CPU time {statistics.median(work):.2f}x ({min(work):.2f} to {max(work):.2f})   "
            f"{contestant.about.get('parameters')} parameters {contestant.about.get('torch', '')}"
        )
        contestant.close()


if __name__ == "__main__":
    main()
