"""Two hosts at 1 Gbit/s, one rank each: what a step of six dense layers of 2,048 waits for its all-reduce.

    python -m benchmarks.train_namespaces [--rounds 5] [--steps 6]          (as root, with `ip` and `tc`)

Hosts are network namespaces of this machine (tests/network/hosts.py). The bound is 2 (N - 1) / N bytes of gradients by
the link's rate; what the backward pass hides of it can be no more than the backward pass, measured as a step that
updates nothing less an evaluation's step. Exposed is a step with exchange less one of Keras alone, in the same round:
median (lowest to highest).
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys

from benchmarks.train_step import RANKS, Contestant
from tests.network.hosts import Hosts, why_not

RATE_BITS_S = 10**9
BYTES_A_PARAMETER = 4


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    if (reason := why_not()) is not None:
        raise SystemExit(f"not measured: {reason}")
    worker = [sys.executable, "-m", "benchmarks.shared.step_worker"]
    with Hosts(RANKS, rate_bits_s=RATE_BITS_S) as hosts:
        alone = Contestant("ceiling", [*worker, "plain", "dense", "RANK"], {}, needs_places=False)
        places = {"BENCHMARK_HOSTS": ",".join(hosts.addresses)}
        ours = Contestant("lockstep", [*worker, "ours", "dense", "RANK"], places, needs_places=True, popen=hosts.popen)
        bound = 2 * (RANKS - 1) / RANKS * ours.about["parameters"] * BYTES_A_PARAMETER * 8 / RATE_BITS_S
        exposed, backward, allowed = [], [], []
        for number in range(args.rounds + 1):
            forward = alone.seconds_a_step(args.steps, "forward")
            gradients, step = alone.seconds_a_step(args.steps, "gradients"), alone.seconds_a_step(args.steps)
            together = ours.seconds_a_step(args.steps)
            if number:  # the first round warms up
                exposed.append(together - step)
                backward.append(gradients - forward)
                allowed.append((bound - backward[-1]) * 1.1)
        alone.close()
    print(f"{RANKS} hosts, 1 Gbit/s, {args.rounds} rounds, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"bound of the exchange {bound:.3f} s")
    shares = [mine / bar for mine, bar in zip(exposed, allowed, strict=True)]
    rows = {
        "backward pass, s": backward,
        "exposed, s": exposed,
        "(bound - backward) + 10 %, s": allowed,
        "of the bar": shares,
    }
    for name, values in rows.items():
        print(f"{name:<30}{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})")


if __name__ == "__main__":
    main()
