"""The exchange of six dense layers of 2,048 between hosts at 1 Gbit/s, no compute: several buckets in flight or one.

    python -m benchmarks.exchange_namespaces [--rounds 5] [--steps 5] [--hosts 2] [--backward 0.128]     (as root)

Hosts are network namespaces of this machine (tests/network/hosts.py), with one rank each. A rank computes nothing: it
sleeps through its backward pass of `--backward` seconds and posts each gradient at its time in that pass, so the link
is the limit on a busy machine, too. Figures are seconds from the beginning of the backward pass to the sums, of the
slowest rank: median of the rounds (lowest to highest), in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

from benchmarks.shared.step_models import CLASSES, DENSE_LAYERS, DENSE_UNITS
from benchmarks.shared.step_worker import KEY, Control, hear, say
from benchmarks.train_step import ROOT
from lockstep.training.comm import connect
from lockstep.training.comm.tcp import engine
from lockstep.training.exchange.agreement import CONTROL_WORDS
from lockstep.training.exchange.buckets import lay_out
from lockstep.training.exchange.exchange import Exchange
from lockstep.training.world import World
from tests.network.hosts import Hosts, why_not

FLOAT = np.dtype(np.float32)
LAYERS = [((DENSE_UNITS, DENSE_UNITS), (DENSE_UNITS,))] * DENSE_LAYERS + [((DENSE_UNITS, CLASSES), (CLASSES,))]
SPECS = [(shape, FLOAT) for layer in LAYERS for shape in layer]
AT_A_TIME = (1, engine.CALLS_AT_A_TIME)


def work(rank: int, num_ranks: int, backward_s: float) -> None:
    """One rank: answers {"steps": n, "calls": c} by the seconds of each step."""
    control = Control(os.environ["BENCHMARK_HOSTS"].split(",")[rank])
    comm = connect(World(rank, num_ranks, 0, 1, 1), control, KEY, 60.0, 120.0)
    exchange = Exchange(comm)
    layout = lay_out(SPECS, [], CONTROL_WORDS)
    exchange.use(layout, [str(number) for number in range(len(SPECS))])
    rng = np.random.default_rng(rank)
    gradients = [rng.standard_normal(shape, dtype=np.float32) for shape, _ in SPECS]
    total = sum(gradient.nbytes for gradient in gradients)
    say("ready")
    while True:
        asked = hear()
        engine.CALLS_AT_A_TIME = asked["calls"]
        seconds = []
        for _ in range(asked["steps"]):
            comm.barrier()
            began, done = time.monotonic(), 0
            for bucket in range(len(layout.sizes)):
                posted = [gradients[number] for number in layout.posted(bucket)]
                done += sum(gradient.nbytes for gradient in posted)
                time.sleep(max(0.0, began + backward_s * done / total - time.monotonic()))
                exchange.post(bucket, *posted)
            exchange.finish(np.zeros((), np.float32))
            seconds.append(time.monotonic() - began)
        say(seconds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--backward", type=float, default=0.128)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        work(args.rank, args.hosts, args.backward)
    if (reason := why_not()) is not None:
        raise SystemExit(f"not measured: {reason}")
    taken: dict[int, list[float]] = {calls: [] for calls in AT_A_TIME}
    with Hosts(args.hosts, rate_bits_s=10**9) as hosts:
        command = [sys.executable, "-m", "benchmarks.exchange_namespaces", *sys.argv[1:], "--rank"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
        env = os.environ | {"BENCHMARK_HOSTS": ",".join(hosts.addresses)}
        ranks = [hosts.popen(rank, [*command, str(rank)], env=env, **pipes) for rank in range(args.hosts)]

        def send(document: object) -> None:
            for rank in ranks:
                assert rank.stdin is not None
                rank.stdin.write(json.dumps(document) + "\n")
                rank.stdin.flush()

        def answer(rank: subprocess.Popen[str]) -> Any:
            assert rank.stdout is not None
            return json.loads(rank.stdout.readline())

        send([answer(rank) for rank in ranks])
        assert [answer(rank) for rank in ranks] == ["ready"] * args.hosts
        for number in range(args.rounds + 1):
            for calls in AT_A_TIME:
                send({"steps": args.steps, "calls": calls})
                steps = [answer(rank) for rank in ranks]
                if number:  # the first round warms up
                    taken[calls].append(statistics.median(max(times) for times in zip(*steps, strict=True)))
    size = sum(int(np.prod(shape)) for shape, _ in SPECS) * FLOAT.itemsize
    bound = 2 * (args.hosts - 1) / args.hosts * size * 8 / 1e9
    print(f"{args.hosts} hosts, 1 Gbit/s, {args.rounds} rounds of {args.steps} steps, {os.cpu_count()} cores, ", end="")
    print(f"load {os.getloadavg()[0]:.0f}, Python {platform.python_version()}; bound of the exchange {bound:.3f} s")
    for calls, values in taken.items():
        median, spread = statistics.median(values), f"({min(values):.3f} to {max(values):.3f})"
        print(f"buckets at a time {calls}: {median:.3f} s {spread}")


if __name__ == "__main__":
    main()
