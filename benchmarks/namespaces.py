"""All-reduce between hosts at 1 Gbit/s: each algorithm against the lower bound, and the ring with TLS.

    python -m benchmarks.namespaces [--hosts 4] [--mib 64] [--rounds 5]        (as root, with `ip` and `tc`; 1 minute)

Hosts are network namespaces of this machine, one rank each (tests/network/hosts.py), with tc's tbf limiting what each
sends to 1 Gbit/s. The bound is that of the ring, which no algorithm can beat: 2 (N - 1) / N of the buffer over the
rate. Of the 1,514 bytes of a packet that tbf counts, 14 are Ethernet's, 20 IP's and 32 TCP's, so 1,448 are payload: at
most 95.6 % can be reached. Times are the slowest rank's, as median (lowest to highest) of the rounds, in which the rows
take turns. CPU is that of a rank, for both directions, over the bytes that it sends.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import ssl
import statistics
import sys
import time
from typing import Any

import numpy as np

from lockstep.training.comm import CommOptions
from lockstep.training.control.context import RankContext
from lockstep.training.control.task import RankTask
from tests.network.hosts import Hosts, why_not
from tests.network.run_hosts import run_hosts

RATE_BITS_S = 10**9
OURS_OF_A_PACKET = 1448 / 1514
ALGORITHMS = ("ring", "halving-doubling", "double-tree")
WARM_UP_ROUNDS = 1


def measure(context: RankContext) -> dict[str, Any]:
    """A rank: seconds and CPU seconds of one all_reduce by each algorithm, after one that is not counted."""
    found: dict[str, tuple[float, float]] = {}
    for algorithm in context.payload["algorithms"]:
        comm = context.join(CommOptions(backend="tcp", algorithm=algorithm)).communicator
        buf = comm.allocate(context.payload["size"], np.dtype(np.float32))
        for _ in range(WARM_UP_ROUNDS + 1):
            buf[:] = context.world.rank
            comm.barrier()
            began, cpu = time.perf_counter(), cpu_used_s()
            comm.all_reduce(buf)
            found[algorithm] = time.perf_counter() - began, cpu_used_s() - cpu
        assert np.all(buf == sum(range(comm.num_ranks)))
        comm.close()
    return {"found": found}


def cpu_used_s() -> float:
    """CPU time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if (reason := why_not()) is not None:
        raise SystemExit(f"not measured: {reason}")
    num_ranks, size = args.hosts, (args.mib << 20) // 4
    sent_bytes = 2 * (num_ranks - 1) / num_ranks * size * 4
    bound_s = sent_bytes * 8 / RATE_BITS_S
    rows: dict[str, list[tuple[float, float]]] = {}
    with Hosts(num_ranks, rate_bits_s=RATE_BITS_S) as hosts:
        for _ in range(args.rounds):
            for tls, algorithms in ((False, ALGORITHMS), (True, ALGORITHMS[:1])):
                task = RankTask("benchmarks.namespaces:measure", {"size": size, "algorithms": algorithms}, tls=tls)
                results = run_hosts(hosts, task, num_ranks)
                for algorithm in algorithms:
                    name = f"{algorithm}, TLS" if tls else algorithm
                    times = [result["found"][algorithm] for result in results]
                    slowest, cpu = max(t for t, _ in times), statistics.mean(c for _, c in times)
                    rows.setdefault(name, []).append((slowest, cpu))
        notes = hosts.notes
    print(
        f"{num_ranks} hosts, 1 Gbit/s, {args.mib} MiB float32, {args.rounds} rounds, {os.cpu_count()} cores, ", end=""
    )
    print(f"Python {platform.python_version()}, NumPy {np.__version__}, {ssl.OPENSSL_VERSION}; {'; '.join(notes)}")
    print(
        f"bound {bound_s:.3f} s; with headers {bound_s / OURS_OF_A_PACKET:.3f} s, {OURS_OF_A_PACKET:.1%} of the bound"
    )
    print(f"{'':<24}{'seconds':<26}{'of the bound':<26}{'CPU s/GB sent'}")
    for name, pairs in rows.items():
        seconds, shares = [s for s, _ in pairs], [bound_s / s for s, _ in pairs]
        cpu = statistics.median(c for _, c in pairs) / (sent_bytes / 1e9)
        print(f"{name:<24}{spread(seconds, '.3f'):<26}{spread(shares, '.1%'):<26}{cpu:.2f}")
    best = statistics.median(bound_s / seconds for seconds, _ in rows["ring"])
    print(f"bar: the ring at 90 % of the bound or more: {'reached' if best >= 0.9 else 'MISSED'}", file=sys.stderr)


def spread(values: list[float], form: str) -> str:
    """Median (lowest to highest)."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


if __name__ == "__main__":
    main()
