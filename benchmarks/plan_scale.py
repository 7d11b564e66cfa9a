"""The cost of the epoch plan for 10^9 samples in 10^5 shards: one rank's lanes, from the shard table to the reads.

    python -m benchmarks.plan_scale [--samples N] [--shards N] [--ranks N] [--repeats N]

Shards differ by one record, so that most end in a short block: the worst case for the plan's arithmetic. Measured:
making the plan, all lanes' spans of two epochs, the order and runs of the rank's first windows of both epochs (as in a
run that resumes in the second), and every run of the rank's lanes in one epoch; without and with 8 cache groups. Each
round is a separate process: seconds and the growth of the resident set without tracemalloc, then its peak.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import sys
import time
import tracemalloc
from dataclasses import dataclass

from benchmarks.shared.shapes import machine
from lockstep.training.plan.epoch_plan import EpochPlan

GLOBAL_BATCH, LANES, BLOCK_RECORDS, WINDOW_RECORDS = 1024, 64, 2500, 500


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds from the table to the first windows' runs, and to the last run of the epoch; bytes."""

    start_s: float
    epoch_s: float
    traced_bytes: int
    resident_bytes: int


def shard_table(samples: int, shards: int) -> tuple[int, ...]:
    """Records of each shard: `samples` in all, neighbours one apart."""
    each = samples // shards
    return (*(each + (-1) ** number for number in range(shards - 1)), samples - each * (shards - 1) - (shards - 1) % 2)


def work(table: tuple[int, ...], ranks: int, cache_groups: int | None) -> tuple[float, float]:
    """Seconds to the first windows, and to the end of rank 0's lanes."""
    began = time.perf_counter()
    plan = EpochPlan(
        dataset_digest="ab" * 32,
        split="train",
        shard_records=table,
        block_records=BLOCK_RECORDS,
        seed=7,
        global_batch=GLOBAL_BATCH,
        lanes=LANES,
        window_records=WINDOW_RECORDS,
        cache_groups=cache_groups,
    )
    mine = plan.rank_lanes(0, ranks)
    for epoch in (0, 1):
        spans = [plan.lane_span(epoch, lane) for lane in range(LANES)]
        for lane in mine:
            plan.window_order(epoch, lane, 0)
            plan.runs(epoch, spans[lane][0], spans[lane][0] + WINDOW_RECORDS)
    started = time.perf_counter() - began
    records = sum(run.count for lane in mine for run in plan.runs(0, *plan.lane_span(0, lane)))
    assert abs(records - plan.total * len(mine) // LANES) <= len(mine)
    return started, time.perf_counter() - began


def measure(samples: int, shards: int, ranks: int, cache_groups: int | None) -> Cost:
    """One round; the table itself, which comes from the manifest, is not counted."""
    table = shard_table(samples, shards)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, whole = work(table, ranks, cache_groups)
    resident = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    tracemalloc.start()
    work(table, ranks, cache_groups)
    return Cost(started, whole, tracemalloc.get_traced_memory()[1], resident)


def main(argv: list[str]) -> int:
    """Print one table; exit code 1 where the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10**9)
    parser.add_argument("--shards", type=int, default=10**5)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args(argv)
    print(f"{machine('numpy')}; {args.samples} samples, {args.shards} shards,")
    print(f"{LANES} lanes, rank 0 of {args.ranks}; median (min - max) of {args.repeats} processes")
    print(f"{'cache groups':<14}{'to first windows, s':>28}{'whole epoch, s':>28}{'traced':>12}{'resident':>12}")
    good = True
    for groups in (None, 8):
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            jobs = [(args.samples, args.shards, args.ranks, groups)] * args.repeats
            costs = pool.starmap(measure, jobs, chunksize=1)
        times = [[cost.start_s for cost in costs], [cost.epoch_s for cost in costs]]
        traced, resident = max(c.traced_bytes for c in costs), max(c.resident_bytes for c in costs)
        cells = "".join(f"{f'{statistics.median(t):.3f} ({min(t):.3f} - {max(t):.3f})':>28}" for t in times)
        print(f"{groups or 'none':<14}{cells}{f'{traced / 1e6:.1f} MB':>12}{f'{resident / 1e6:.1f} MB':>12}")
        good &= statistics.median(times[1]) < 1 and max(traced, resident) < 100e6
    print(f"bar: under 1 s and 100 MB: {'met' if good else 'missed'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
