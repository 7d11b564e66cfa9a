"""Find what bounds a run and what to change: measure steps on synthetic, cached and cold data, on the ranks."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.jobs import _train
from lockstep.jobs._cli import JobParser, print_result, run_job
from lockstep.jobs._launch import launch_of
from lockstep.storage.progress import Progress
from lockstep.training.config import TrainConfig
from lockstep.training.profiling.verdict import ROUNDS

if TYPE_CHECKING:
    from lockstep.training.launch.session import Launch
    from lockstep.training.profiling.profile import Profile

# Flags of a run that do not change its steps.
NOT_OF_A_STEP = (
    "--run", "--epochs", "--verify", "--learning-rate-scaling", "--base-batch", "--warm-up-epochs", "--init-from",
    "--ewc", "--validate", "--validate-every", "--early-stop", "--max-steps",
    "--checkpoint-every", "--keep-checkpoints", "--keep-every", "--keep-best",
    "--audit", "--on-bad-record", "--take-over", "--max-restarts", "--max-restarts-per-hour",
    "--stop-grace", "--min-ranks", "--max-ranks", "--slots-file",
)  # fmt: skip


def parser() -> JobParser:
    """The command line: that of lockstep train without the flags that do not change a step."""
    job = _train.parser(__doc__ or "", "profile_run", without=NOT_OF_A_STEP)
    add = job.add_argument
    job.add_json_flag()
    add("--steps", type=int, metavar="S", help="steps of each kind in a round (default: 16 to 512)")
    add(
        "--rounds",
        type=int,
        default=ROUNDS,
        metavar="R",
        help=f"rounds to measure, after one that is dropped (default {ROUNDS})",
    )
    return job


def main(argv: Sequence[str]) -> int:
    """Print a table and the verdict or, with --json, the result; returns the exit code."""
    args = parser().parse(argv)
    from lockstep.training.profiling.profile import table

    config = config_of(args)
    with launch_of(config.ranks.launcher, "profile_run", args.master, args.code) as launch:
        result = measured(config, args, launch)
    print_result(table(result), result.to_json(), args.json)
    return 0


def config_of(args: Namespace) -> TrainConfig:
    """The configuration of the run to profile, for one epoch."""
    from lockstep.training.profiling.profile import NO_RUN

    known = {name: value for name, value in vars(args).items() if name not in ("steps", "rounds", "json")}
    return _train.config_of(Namespace(**known, run=NO_RUN, epochs=1))


def measured(config: TrainConfig, args: Namespace, launch: Launch) -> Profile:
    """Measure, and show the progress of the rounds."""
    from lockstep.training.profiling.profile import profile

    with Progress("measuring", args.rounds + 1, "rounds") as progress:
        return profile(
            config, launch, steps=args.steps, rounds=args.rounds, on_round=lambda done, _: progress.set(done)
        )


if __name__ == "__main__":
    run_job(main)
