"""The cost model against what is measured between 2 to 8 ranks of this host, then simulated clusters.

    python -m benchmarks.scaling [--rounds 9] [--simulate-only]

Eight processes meet over TCP once; groups of the first N of them are measured in turns, so that a disturbance meets
every N alike. Costs are fitted to FIT_RANKS and FIT_SIZES; all other pairs are predictions. The processes share the
host's cores: a call takes as long as all ranks' work, divided by the cores. About a minute.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from training.comm.cost import COUNTS, Counts, LinkCosts, work_of
from training.comm.options import CommOptions
from training.comm.simulate import Cluster, Layer, Workload, ethernet, simulate
from training.comm.tcp import ProgramKey, TcpCommunicator, program_of
from training.launch.context import RankContext
from training.launch.local import run_local
from training.launch.task import RankTask

MOST_RANKS = 8
RANKS = tuple(range(2, MOST_RANKS + 1))
SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
FIT_RANKS, FIT_SIZES = (2, 4, 6, 8), (4 << 10, 256 << 10, 4 << 20)
ROUND_S = 0.02
MAX_CALLS = 50
BAR = 0.15
CACHE_BYTES = 1 << 20  # of one core's own cache: what a larger buffer has beyond it comes from further away
QUANTILE = 0.25  # of the rounds: other work on the machine only adds

Case = tuple[int, str, int]
"""(ranks, algorithm, bytes)"""


def cases() -> list[Case]:
    """All that is measured."""
    return list(itertools.product(RANKS, COUNTS, SIZES))


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
        for case in cases():
            n, name, nbytes = case
            if world.rank < n:
                group, buf = groups[n], np.zeros(nbytes // 4, np.float32)
                assert isinstance(group, TcpCommunicator)
                group.choose = lambda nbytes, name=name: name  # type: ignore[misc] # bound now, as it changes
                seconds = _seconds(group, buf, calls.get(case, 2))
                calls.setdefault(case, max(2, min(MAX_CALLS, int(ROUND_S / seconds))))
                times.append(seconds)
            world.barrier()  # who is not in the group sleeps here
        rounds.append(times)
    world.close()
    return {"rounds": rounds[1:]} if world.rank == 0 else {}


def _seconds(group: TcpCommunicator, buf: np.ndarray, calls: int) -> float:
    group.all_reduce(buf)
    group.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        group.all_reduce(buf)
    seconds = np.array([(time.perf_counter() - began) / calls])
    group.all_reduce(seconds, "max")
    return float(seconds[0])


def work(case: Case) -> Counts:
    """Of all ranks in one call."""
    n, name, nbytes = case
    key = ProgramKey("all_reduce", name, nbytes // 4, 4)
    return work_of([program_of(key, rank, n) for rank in range(n)], 4)


@dataclass(frozen=True, slots=True)
class CrowdedCosts:
    """One algorithm's costs where ranks share cores, in processor time of all ranks together.

    Beside alpha and beta there is what only a crowd pays: a rank's own part of a call, and what a frame costs more with
    each further process that the cores must switch to; and bytes beyond the cache cost more. Reducing is part of beta
    here: every algorithm reduces the same.
    """

    alpha_s: float
    beta_s_per_byte: float
    call_s: float
    switch_s: float
    beyond_s_per_byte: float

    def seconds(self, case: Case, cores: int) -> float:
        """Of one call."""
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


def compare(rounds: Sequence[Sequence[float]]) -> None:
    """Print predicted against measured."""
    cores = len(os.sched_getaffinity(0))
    found = np.quantile(np.array(rounds), QUANTILE, axis=0).tolist()
    measured: dict[Case, float] = dict(zip(cases(), found, strict=True))
    print(
        f"{cores} cores, Python {platform.python_version()}, NumPy {np.__version__}, load {os.getloadavg()[0]:.1f}, "
        f"{len(rounds)} rounds; fitted on {FIT_RANKS} ranks and {[size >> 10 for size in FIT_SIZES]} KiB"
    )
    costs = {name: fit(measured, name, cores) for name in COUNTS}
    for name, each in costs.items():
        print(
            f"{name:<17} alpha {each.alpha_s * 1e6:.0f} us a frame and {each.switch_s * 1e6:.1f} us more a rank, "
            f"{each.call_s * 1e6:.0f} us a rank's call, beta {each.beta_s_per_byte * 1e9:.2f} ns a byte "
            f"and {each.beyond_s_per_byte * 1e9:.2f} ns more beyond the cache"
        )
    print(f"{'ranks':>5} {'algorithm':<17}" + "".join(f"{size >> 10:>21} KiB" for size in SIZES))
    errors: dict[bool, list[float]] = {True: [], False: []}
    for n, name in itertools.product(RANKS, COUNTS):
        line = f"{n:>5} {name:<17}"
        for nbytes in SIZES:
            case = (n, name, nbytes)
            told = costs[name].seconds(case, cores)
            error = told / measured[case] - 1
            errors[is_fitted(case)].append(abs(error))
            mark = "*" if is_fitted(case) else " "
            line += f"{measured[case] * 1e3:>9.2f} {told * 1e3:>7.2f} {error:>+6.0%}{mark}"
        print(line)
    print("milliseconds: measured (lower quartile of rounds, slowest rank), predicted, error; * used in the fit")
    for fitted, values in errors.items():
        within = sum(value <= BAR for value in values) / len(values)
        print(
            f"{'fitted' if fitted else 'predicted'}: {len(values)} cases, "
            f"median error {statistics.median(values):.0%}, "
            f"90 % of them under {np.quantile(values, 0.9):.0%}, worst {max(values):.0%}, within 15 %: {within:.0%}"
        )


# What is simulated. Parameters by stage from the architectures; work by their multiplications (He et al. 2016; Simonyan
# and Zisserman 2015). Steps a second of a P100 at 64 images: TensorFlow's benchmark page of 2017.
RESNET50 = Workload(
    name="ResNet-50, 25.6 M parameters, 64 images in 292 ms (P100)",
    layers=tuple(
        Layer(name=name, gradient_bytes=4 * parameters, work=share)
        for name, parameters, share in (
            ("conv1", 9_536, 0.12),
            ("conv2", 215_808, 0.68),
            ("conv3", 1_219_584, 1.04),
            ("conv4", 7_098_368, 1.47),
            ("conv5", 14_964_736, 0.81),
            ("fc", 2_049_000, 0.002),
        )
    ),
    compute_s=64 / 219,
)
VGG16 = Workload(
    name="VGG-16, 138 M parameters, 64 images in 416 ms (P100)",
    layers=tuple(
        Layer(name=name, gradient_bytes=4 * parameters, work=share)
        for name, parameters, share in (
            ("conv1", 38_720, 1.94),
            ("conv2", 221_440, 2.77),
            ("conv3", 1_475_328, 4.62),
            ("conv4", 5_899_776, 4.62),
            ("conv5", 7_079_424, 1.39),
            ("fc1", 102_764_544, 0.103),
            ("fc2", 16_781_312, 0.017),
            ("fc3", 4_097_000, 0.004),
        )
    ),
    compute_s=64 / 154,
)
RESNET20 = Workload(
    name="ResNet-20, 0.27 M parameters, 64 images in 133 ms (one core)",
    layers=(Layer(name="all", gradient_bytes=4 * 274_442, work=1),),
    compute_s=64 / 480,
)
DENSE = Workload(
    name="six dense layers, 23 M parameters, 128 rows in 107 ms (one core)",
    layers=tuple(Layer(name=str(i), gradient_bytes=4 * (2048 * 2048 + 2048), work=1) for i in range(6)),
    compute_s=128 / 1190,
)
ALPHA_S = 30e-6  # between hosts, of one message, software included: assumed
INNER = LinkCosts(alpha_s=5e-6, beta_s_per_byte=1e-10, gamma_s_per_byte=2e-11)  # 10 GB/s within a host: assumed
GAMMA = 2e-11  # 50 GB/s added: assumed
PER_HOST = 4  # Horovod's hosts had four GPUs


def simulated() -> None:
    """Print efficiencies, labelled as what they are."""
    print("\nSIMULATED, nothing of this was run. Efficiency: samples/s of a rank as a share of one rank alone.")
    print(
        f"{PER_HOST} ranks a host, {ALPHA_S * 1e6:.0f} us a message, the network used wholly, no rank ever late, "
        "overlap as training.buckets does"
    )
    print(f"{'model':<66}{'Gbit/s':>7}" + "".join(f"{n:>12} ranks" for n in (8, 64, 512, 4096)))
    for workload in (RESNET50, VGG16, RESNET20, DENSE):
        for gbit in (25, 100):
            line = f"{workload.name:<66}{gbit:>7}"
            for n in (8, 64, 512, 4096):
                outer = ethernet(gbit, alpha_s=ALPHA_S, gamma_s_per_byte=GAMMA)
                step = simulate(workload, Cluster(num_ranks=n, ranks_per_host=PER_HOST, outer=outer, inner=INNER))
                line += f"{step.efficiency:>9.0%} {step.exposed_s * 1e3:>5.0f} ms"
            print(line)
    print(
        "ms: exposed exchange a step. Published (Sergeev and Del Balso 2018, arXiv:1802.05799): 512 Pascal GPUs, 4 a\n"
        "host, 25 Gbit/s RoCE: 90 % for Inception V3 and ResNet-101, 68 % for VGG-16."
    )


def main() -> None:
    """Measure, compare, simulate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--simulate-only", action="store_true")
    args = parser.parse_args()
    if not args.simulate_only:
        task = RankTask("benchmarks.scaling:rank_main", {"rounds": args.rounds})
        compare(run_local(task, MOST_RANKS)[0]["rounds"])
    simulated()


if __name__ == "__main__":
    main()
