"""Measure how a run scales: samples a second at several numbers of ranks, and where the rest of the time went."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.jobs import _train, profile_run
from lockstep.jobs._cli import JobParser, print_result, run_job
from lockstep.jobs._launch import launch_of
from lockstep.storage.progress import Progress
from lockstep.training.profiling.verdict import ROUNDS


def parser() -> JobParser:
    """The command line: that of lockstep profile_run with several numbers of ranks."""
    job = _train.parser(__doc__ or "", "scale", without=(*profile_run.NOT_OF_A_STEP, "--num-ranks"))
    add = job.add_argument
    add("--num-ranks", type=int, nargs="+", required=True, metavar="N", help="numbers of ranks, such as 1 2 4")
    kind = job.add_mutually_exclusive_group()
    kind.add_argument("--strong", action="store_true", help="keep the global batch (default)")
    kind.add_argument("--weak", action="store_true", help="keep the rows of a rank: G is the batch of the fewest ranks")
    job.add_json_flag()
    add("--steps", type=int, metavar="S", help="steps of each kind in a round (default: 16 to 512)")
    add("--rounds", type=int, default=ROUNDS, metavar="R", help=f"rounds at each number (default {ROUNDS})")
    return job


def main(argv: Sequence[str]) -> int:
    """Print the table or, with --json, the points; returns the exit code."""
    args = parser().parse(argv)
    from lockstep.training.profiling.scale import scale, table, to_json

    numbers, weak, steps, rounds = args.num_ranks, args.weak, args.steps, args.rounds
    for name in ("strong", "weak", "num_ranks"):
        delattr(args, name)
    args.num_ranks = min(numbers)
    config = profile_run.config_of(args)
    with (
        launch_of(config.ranks.launcher, "scale", args.master, args.code) as launch,
        Progress("measuring", len(numbers), "points") as bar,
    ):
        found = scale(config, launch, numbers, weak=weak, steps=steps, rounds=rounds, on_point=bar.set)
    print_result(table(found, weak=weak), to_json(found), args.json)
    return 0


if __name__ == "__main__":
    run_job(main)
