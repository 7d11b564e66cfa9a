"""Two-level all-reduce between hosts at 1 Gbit/s: the whole against the lower bound, and each level separately.

    python -m benchmarks.two_levels [--hosts 4] [--ranks-per-host 2] [--mib 64] [--rounds 5]     (as root; 1 minute)

Hosts are network namespaces as in benchmarks/namespaces.py, with `ranks-per-host` ranks on each, which share memory.
The bound is 2 (N - 1) / N of the buffer over the rate, for N hosts. `in turn` is the same call with the whole buffer as
one piece: each level begins when the previous one has ended. All hosts compute on this one machine: with more ranks
than cores, shared memory takes several times its share on real hosts, which `in one host` shows, measured on one host
while the others are idle. Times are the slowest rank's: median (lowest to highest) of the rounds, in which the rows
take turns.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.namespaces import OURS_OF_A_PACKET, RATE_BITS_S, cpu_used_s, spread
from lockstep.training.comm import CommOptions, cost
from lockstep.training.comm.hierarchical import HierarchicalCommunicator
from lockstep.training.control.context import RankContext
from lockstep.training.control.task import RankTask
from tests.network.hosts import Hosts, why_not
from tests.network.run_hosts import run_hosts

WHOLE, IN_TURN, BETWEEN = "both levels at once", "in turn", "between leaders alone"
SUM, BACK = "sum in each host", "copy back in each host"
SUM_ALONE, BACK_ALONE = "sum in one host", "copy back in one host"


def measure(context: RankContext) -> dict[str, Any]:
    """A rank: for each row (seconds, CPU seconds) of each round; zeros where the rank has no part in it."""
    comm = context.join(CommOptions(backend="hierarchical", algorithm="hierarchical")).communicator
    assert isinstance(comm, HierarchicalCommunicator)
    inner, outer, first = comm._inner, comm._outer, comm._host == 0
    assert inner is not None
    buf = comm.allocate(context.payload["size"], np.dtype(np.float32))

    def in_turn() -> None:
        with mock.patch.object(cost, "PIECE_BYTES", buf.nbytes):
            comm.all_reduce(buf)

    rows: dict[str, tuple[bool, Callable[[], None]]] = {
        WHOLE: (True, lambda: comm.all_reduce(buf)),
        IN_TURN: (True, in_turn),
        BETWEEN: (outer is not None, lambda: outer.all_reduce(buf) if outer is not None else None),
        SUM: (True, lambda: inner.all_reduce(buf)),
        BACK: (True, lambda: inner.broadcast(buf, 0)),
        SUM_ALONE: (first, lambda: inner.all_reduce(buf)),
        BACK_ALONE: (first, lambda: inner.broadcast(buf, 0)),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
    for _ in range(1 + context.payload["rounds"]):
        for name, (takes_part, call) in rows.items():
            buf[:] = context.world.rank
            comm.barrier()
            began, cpu = time.perf_counter(), cpu_used_s()
            if takes_part:
                call()
            spent = (time.perf_counter() - began, cpu_used_s() - cpu) if takes_part else (0.0, 0.0)
            if name in (WHOLE, IN_TURN):
                assert np.all(buf == sum(range(comm.num_ranks)))
            comm.barrier()
            found[name].append(spent)
    comm.close()
    return {"found": {name: spent[1:] for name, spent in found.items()}}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if (reason := why_not()) is not None:
        raise SystemExit(f"not measured: {reason}")
    size = (args.mib << 20) // 4
    bound_s = 2 * (args.hosts - 1) / args.hosts * size * 4 * 8 / RATE_BITS_S
    with Hosts(args.hosts, rate_bits_s=RATE_BITS_S) as hosts:
        task = RankTask("benchmarks.two_levels:measure", {"size": size, "rounds": args.rounds})
        results = run_hosts(hosts, task, args.hosts * args.ranks_per_host)
        notes = hosts.notes
    print(f"{args.hosts} hosts of {args.ranks_per_host} ranks, 1 Gbit/s, {args.mib} MiB float32, {args.rounds} rounds")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, ", end="")
    print("; ".join((f"NumPy {np.__version__}", *notes)))
    print(f"bound {bound_s:.3f} s; with headers {OURS_OF_A_PACKET:.1%} of it")
    print(f"{'':<28}{'seconds':<26}{'of the bound':<26}CPU s a rank")
    for name in (WHOLE, IN_TURN, BETWEEN, SUM, BACK, SUM_ALONE, BACK_ALONE):
        rounds = list(zip(*(result["found"][name] for result in results), strict=True))
        seconds = [max(spent for spent, _ in ranks) for ranks in rounds]
        cpu = statistics.median(statistics.mean(used for spent, used in ranks if spent) for ranks in rounds)
        shares = spread([bound_s / each for each in seconds], ".1%") if name in (WHOLE, IN_TURN, BETWEEN) else ""
        print(f"{name:<28}{spread(seconds, '.3f'):<26}{shares:<26}{cpu:.3f}")


if __name__ == "__main__":
    main()
