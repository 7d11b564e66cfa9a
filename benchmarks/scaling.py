"""The cost model against measurements with 2 to 8 ranks of this host, then simulated clusters.

    python -m benchmarks.scaling [--rounds 9] [--mbit 200] [--simulate-only]

Eight processes connect over TCP once; groups of the first N of them are measured in turns, so that a disturbance
affects every N alike. Costs are fitted to FIT_RANKS and FIT_SIZES; all other pairs are predictions. The processes share
the host's cores: a call takes as long as all ranks' work, divided by the cores. Takes about a minute.

With --mbit (as root) each process is on a host of its own, a network namespace with a link so slow that the cores wait
for it: there only the model along the busiest rank's path counts. Three minutes at 200 Mbit/s and 3 rounds.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from benchmarks.shared.scaling_simulated import simulated
from lockstep.training.comm.cost import COUNTS, Counts, LinkCosts, predict_s
from lockstep.training.comm.options import CommOptions
from lockstep.training.comm.tcp.algorithms import ProgramKey, program_of
from lockstep.training.comm.tcp.communicator import TcpCommunicator
from lockstep.training.control.context import RankContext
from lockstep.training.control.task import RankTask
from lockstep.training.launch.local import run_local
from lockstep.training.profiling.bench_comm import timed
from tests.network.hosts import Hosts
from tests.network.run_hosts import run_hosts

MOST_RANKS = 8
RANKS = tuple(range(2, MOST_RANKS + 1))
SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
FIT_RANKS, FIT_SIZES = (2, 4, 6, 8), (4 << 10, 256 << 10, 4 << 20)
WIRE_SIZES = (512 << 10, 1 << 20, 2 << 20, 4 << 20)  # well above the 256 KiB that a shaped link lets through at once
WIRE_FIT_RANKS, WIRE_FIT_SIZES = (2, 4, 8), (512 << 10, 4 << 20)
ROUND_S = 0.02
MAX_CALLS = 50
BAR = 0.15
CACHE_BYTES = 1 << 20  # of one core's own cache: what a larger buffer has beyond it comes from further away
QUANTILE = 0.25  # of the rounds: other work on the machine only adds

Case = tuple[int, str, int]
"""(ranks, algorithm, bytes)"""


def cases(sizes: Sequence[int]) -> list[Case]:
    """All that is measured."""
    return list(itertools.product(RANKS, COUNTS, sizes))


def rank_main(context: RankContext) -> dict[str, Any]:
    """One rank: seconds of each case, a row a round (rank 0's result)."""
    joined = context.join(CommOptions(backend="tcp", algorithm="ring"))
    world = joined.communicator
    groups = {n: world.group(range(n)) for n in RANKS if world.rank < n}
    rounds: list[list[float]] = []
    calls: dict[Case, int] = {}
    for number in range(context.payload["rounds"] + 1):  # the first one connects, and finds how often to call
        context.control.beat(number, "measure")
        times = []
        for case in cases(context.payload["sizes"]):
            n, name, nbytes = case
            if world.rank < n:
                group, buf = groups[n], np.zeros(nbytes // 4, np.float32)
                assert isinstance(group, TcpCommunicator)
                group.choose = lambda nbytes, name=name: name  # type: ignore[misc] # bound now, as it changes
                group.all_reduce(buf)
                seconds = timed(group, buf, calls.get(case, 2))
                calls.setdefault(case, max(2, min(MAX_CALLS, int(ROUND_S / seconds))))
                times.append(seconds)
            world.barrier()  # who is not in the group sleeps here
        rounds.append(times)
    world.close()
    return {"rounds": rounds[1:]} if world.rank == 0 else {}


def work(case: Case) -> Counts:
    """Count the work of all ranks in one call by their programs: frames, their bytes, bytes reduced."""
    n, name, nbytes = case
    key = ProgramKey("all_reduce", name, nbytes // 4, 4)
    programs = [program_of(key, rank, n) for rank in range(n)]
    sends = [send for program in programs for send in program.sends]
    receives = [receive for program in programs for receive in program.receives if receive.combine != "copy"]
    sent, reduced = (sum(part.stop - part.start for part in parts) for parts in (sends, receives))
    return Counts(len(sends), 4 * sent, 4 * reduced)


@dataclass(frozen=True, slots=True)
class CrowdedCosts:
    """One algorithm's costs if ranks share cores, in CPU time of all ranks together.

    In addition to alpha and beta, each rank adds its part of a call, each further process makes a frame more expensive
    because the cores must switch, and bytes beyond the cache cost more. Reduction is part of beta here, since every
    algorithm reduces the same bytes.
    """

    alpha_s: float
    beta_s_per_byte: float
    call_s: float
    switch_s: float
    beyond_s_per_byte: float

    def seconds(self, case: Case, cores: int) -> float:
        """Return the seconds of one call."""
        return float(np.dot(_terms(case), astuple(self))) / cores


def _terms(case: Case) -> np.ndarray:
    """How often each cost is paid: frames, bytes, ranks, frames times ranks, bytes beyond the cache."""
    counts = work(case)
    beyond = counts.bytes * max(0.0, 1 - CACHE_BYTES / case[2])
    return np.array([counts.messages, counts.bytes, case[0], counts.messages * case[0], beyond])


def is_fitted(case: Case) -> bool:
    """Whether the fit has seen this case; the others are predictions."""
    return case[0] in FIT_RANKS and case[2] in FIT_SIZES


def fit(measured: dict[Case, float], name: str, cores: int) -> CrowdedCosts:
    """The costs, none negative, with the least squares of relative errors over the cases to fit."""
    chosen = [case for case in measured if case[1] == name and is_fitted(case)]
    rows = np.array([_terms(case) / cores / measured[case] for case in chosen])
    best: tuple[float, np.ndarray] | None = None
    for used in itertools.product((False, True), repeat=rows.shape[1]):
        columns = [number for number, use in enumerate(used) if use]
        if not columns:
            continue
        found = np.zeros(rows.shape[1])
        found[columns] = np.linalg.lstsq(rows[:, columns], np.ones(len(rows)), rcond=None)[0]
        off = float(np.sum((rows @ found - 1) ** 2))
        if (found >= 0).all() and (best is None or off < best[0]):
            best = off, found
    assert best is not None, "one column alone is never negative"
    return CrowdedCosts(*best[1].tolist())


def wire_costs(measured: dict[Case, float], name: str) -> LinkCosts:
    """alpha and beta of an algorithm on slow links, with the least squares of relative errors; adding takes no time."""
    chosen = [case for case in measured if case[1] == name and case[0] in WIRE_FIT_RANKS and case[2] in WIRE_FIT_SIZES]
    rows = np.array([np.array(COUNTS[name](case[0], case[2])[:2]) / measured[case] for case in chosen])
    alpha, beta = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0].tolist()
    if alpha < 0:
        alpha, beta = 0.0, float(rows[:, 1].sum() / (rows[:, 1] ** 2).sum())
    return LinkCosts(alpha_s=alpha, beta_s_per_byte=beta, gamma_s_per_byte=0.0)


def quartile(rounds: Sequence[Sequence[float]], sizes: Sequence[int]) -> dict[Case, float]:
    """Seconds of each case."""
    return dict(zip(cases(sizes), np.quantile(np.array(rounds), QUANTILE, axis=0).tolist(), strict=True))


def machine(rounds: int) -> str:
    """Where and when."""
    return (
        f"{len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, NumPy {np.__version__}, "
        f"load {os.getloadavg()[0]:.1f}, {rounds} rounds"
    )


def compare(rounds: Sequence[Sequence[float]]) -> None:
    """Print predicted against measured on shared cores."""
    cores, measured = len(os.sched_getaffinity(0)), quartile(rounds, SIZES)
    print(f"{machine(len(rounds))}; fitted on {FIT_RANKS} ranks and {[size >> 10 for size in FIT_SIZES]} KiB")
    costs = {name: fit(measured, name, cores) for name in COUNTS}
    for name, each in costs.items():
        print(
            f"{name:<17} alpha {each.alpha_s * 1e6:.0f} us a frame and {each.switch_s * 1e6:.1f} us more a rank, "
            f"{each.call_s * 1e6:.0f} us a rank's call, beta {each.beta_s_per_byte * 1e9:.2f} ns a byte "
            f"and {each.beyond_s_per_byte * 1e9:.2f} ns more beyond the cache"
        )
    show(measured, SIZES, lambda case: costs[case[1]].seconds(case, cores), is_fitted)


def compare_wire(rounds: Sequence[Sequence[float]], mbit: int) -> None:
    """Print predicted against measured on slow links."""
    measured = quartile(rounds, WIRE_SIZES)
    fitted_to = f"fitted on {WIRE_FIT_RANKS} ranks and {[size >> 10 for size in WIRE_FIT_SIZES]} KiB"
    links = f"{MOST_RANKS} namespaces, {mbit} Mbit/s each ({8e3 / mbit:.1f} ns a byte)"
    print(f"{links}; {machine(len(rounds))}; {fitted_to}")
    costs = {name: wire_costs(measured, name) for name in COUNTS}
    for name, each in costs.items():
        alpha, beta = each.alpha_s * 1e6, each.beta_s_per_byte * 1e9
        print(f"{name:<17} alpha {alpha:.0f} us a message, beta {beta:.2f} ns a byte")
    show(
        measured,
        WIRE_SIZES,
        lambda case: predict_s(case[1], case[0], case[2], costs[case[1]]),
        lambda case: case[0] in WIRE_FIT_RANKS and case[2] in WIRE_FIT_SIZES,
    )


def show(
    measured: dict[Case, float],
    sizes: Sequence[int],
    predict: Callable[[Case], float],
    in_fit: Callable[[Case], bool],
) -> None:
    """The table, and how good the model is."""
    print(f"{'ranks':>5} {'algorithm':<17}" + "".join(f"{size >> 10:>21} KiB" for size in sizes))
    errors: dict[bool, list[float]] = {True: [], False: []}
    for n, name in itertools.product(RANKS, COUNTS):
        line = f"{n:>5} {name:<17}"
        for nbytes in sizes:
            case = (n, name, nbytes)
            predicted = predict(case)
            error = predicted / measured[case] - 1
            errors[in_fit(case)].append(abs(error))
            mark = "*" if in_fit(case) else " "
            line += f"{measured[case] * 1e3:>9.2f} {predicted * 1e3:>7.2f} {error:>+6.0%}{mark}"
        print(line)
    print("milliseconds: measured (lower quartile of rounds, slowest rank), predicted, error; * used in the fit")
    for fitted, values in errors.items():
        within = sum(value <= BAR for value in values) / len(values)
        print(
            f"{'fitted' if fitted else 'predicted'}: {len(values)} cases, "
            f"median error {statistics.median(values):.0%}, "
            f"90 % of them under {np.quantile(values, 0.9):.0%}, worst {max(values):.0%}, within 15 %: {within:.0%}"
        )


def main() -> None:
    """Measure, compare, simulate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mbit", type=int, help="rate of each host's link between network namespaces; needs root")
    parser.add_argument("--simulate-only", action="store_true")
    args = parser.parse_args()
    sizes = list(WIRE_SIZES if args.mbit else SIZES)
    task = RankTask("benchmarks.scaling:rank_main", {"rounds": args.rounds, "sizes": sizes})
    if args.mbit:
        with Hosts(MOST_RANKS, rate_bits_s=args.mbit * 10**6) as hosts:
            compare_wire(run_hosts(hosts, task, MOST_RANKS)[0]["rounds"], args.mbit)
        return
    if not args.simulate_only:
        compare(run_local(task, MOST_RANKS)[0]["rounds"])
    simulated()


if __name__ == "__main__":
    main()
