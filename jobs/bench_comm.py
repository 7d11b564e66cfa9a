"""Measure all_reduce between N ranks: latency and bandwidth by size, backend and algorithm."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

from lockstep.jobs._cli import JobParser, check_master, run_job, size
from lockstep.jobs._launch import launch_of
from lockstep.storage.fs import filesystem
from lockstep.storage.progress import Progress
from lockstep.storage.publish import occupied, write_file
from lockstep.storage.urls import absolute
from lockstep.training.comm.options import Algorithm, Backend

if TYPE_CHECKING:
    from lockstep.training.launch.session import Launch
    from lockstep.training.profiling.bench_comm import BenchConfig, Row

SIZES = ("4K", "64K", "1M", "16M", "64M")


def parser() -> JobParser:
    """The command line."""
    job = JobParser("bench_comm", __doc__ or "", "bench_comm")
    add = job.add_argument
    add("--num-ranks", type=int, required=True, metavar="N", help="processes, 2 or more")
    add("--sizes", type=size, nargs="+", default=list(map(size, SIZES)), metavar="S", help=f"bytes ({' '.join(SIZES)})")
    backends, algorithms = get_args(Backend), get_args(Algorithm)
    add("--backend", nargs="+", dest="backends", choices=backends, default=["auto"], help="one or more (auto)")
    text = "one or more (default: auto, and all of the backend that auto chooses)"
    add("--algorithm", nargs="+", dest="algorithms", choices=algorithms, default=[], help=text)
    add("--trust-network", metavar="IFACE", help="interface that may carry gRPC and NCCL, which are unauthenticated")
    add("--tls", choices=["on", "off"], default="off", help="encrypt between hosts (default off; docs/security.md)")
    add("--rounds", type=int, default=5, metavar="R", help="repetitions, in turns (default 5); the median is shown")
    add("--json", metavar="FILE", help="also write the rows to this file")
    add("--launcher", choices=["barrier", "local"], default="local", help="this host (default) | Spark barrier stage")
    add("--master", metavar="URL", help="Spark master for --launcher barrier (default: spark-submit's)")
    return job


def main(argv: Sequence[str]) -> int:
    """Measure and print the table; returns the exit code, 1 where a sum was wrong."""
    args = parser().parse(argv)
    from lockstep.training.profiling.bench_comm import check, document, table

    check_master(args)
    config = config_of(args)
    target = absolute(args.json) if args.json else None
    if target is not None and filesystem(target).exists(target):
        raise occupied(target)
    with launch_of(args.launcher, "bench_comm", args.master) as launch:
        rows = measured(config, launch)
    print(table(rows, config.num_ranks))
    if target is not None:
        write_file(filesystem(target), target, document(rows, config))
    check(rows)
    return 0


def config_of(args: Namespace) -> BenchConfig:
    """The measurement that the flags define."""
    from lockstep.training.profiling.bench_comm import BenchConfig

    names = ("num_ranks", "sizes", "backends", "algorithms", "trust_network", "tls", "rounds")
    return BenchConfig(**{name: getattr(args, name) for name in names})


def measured(config: BenchConfig, launch: Launch) -> list[Row]:
    """The rows, with a progress bar."""
    from lockstep.training.profiling.bench_comm import bench

    done = 0

    def show(row: Row, total: int) -> None:
        nonlocal done
        done += 1
        note = f"{row.nbytes} bytes by {row.algorithm}: {row.median_s * 1e6:.0f} us"
        progress.set(done, f"{note}, of {total} rows")

    with Progress("measuring", None, "rows") as progress:
        return bench(config, launch, show)


if __name__ == "__main__":
    run_job(main)
