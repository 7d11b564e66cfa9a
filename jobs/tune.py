"""Search for hyper-parameters: trials are runs of several ranks; the same call resumes a killed search."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.jobs import _train
from lockstep.jobs._cli import JobParser, print_result, read_toml, run_job
from lockstep.jobs._launch import launch_of
from lockstep.training.config import flag_of
from lockstep.training.search.space import ELASTIC, corners, space_of

if TYPE_CHECKING:
    from lockstep.training.search.config import SearchConfig


def parser() -> JobParser:
    """The command line: that of lockstep train, whose flags are the configuration of every trial."""
    job = _train.parser(__doc__ or "", "tune", without=("--run", *map(flag_of, ELASTIC)))
    group = job.add_argument_group("the search (docs/validation.md)")
    add = group.add_argument
    add("--run", required=True, metavar="URL", help="Directory of the search; an existing search is resumed")
    add("--space", required=True, metavar="FILE.toml", help="Parameters: ranges or choices of lockstep train's options")
    add("--metric", required=True, metavar="NAME:max", help="What is best: NAME:max or NAME:min of an epoch's metrics")
    test = "The split that no trial sees: the best trial is evaluated on it (default: test, if trials do not see it)"
    add("--test", metavar="SPLIT", help=test)
    add("--trials", type=int, metavar="T", help="Trials in total (default with --sampler grid: the whole grid)")
    add("--parallel", type=int, default=1, metavar="P", help="Trials at once, each of N ranks (default 1)")
    add("--sampler", choices=("random", "grid", "tpe"), default="tpe", help="What proposes parameters (default tpe)")
    add("--pruner", choices=("none", "median", "hyperband"), default="none",
        help="What ends trials early, by the metric after each epoch (default none)")  # fmt: skip
    job.add_json_flag()
    return job


def main(argv: Sequence[str]) -> int:
    """Print the best trial or, with --json, the content of best.json; returns the exit code."""
    args = parser().parse(argv)
    from lockstep.training.driver.preflight import all_local, check_validation, preflight_before_spark

    config = config_of(args)
    for corner in corners(config.base, config.space, f"{config.root}/trials/check"):
        preflight_before_spark(corner)
    if config.test is not None and all_local(config.base):
        check_validation(config.base, config.test, "--test")
    from lockstep.training.search.tune import summary_of_search, tune  # loads Optuna

    with launch_of(config.base.ranks.launcher, "tune", args.master, args.code) as launch:
        best = tune(config, launch, take_over=args.take_over)
    print_result(summary_of_search(best), best, args.json)
    return 0


def config_of(args: Namespace) -> SearchConfig:
    """The search that the flags give. Raises ConfigError."""
    from lockstep.training.search.config import SearchConfig

    return SearchConfig(
        base=_train.config_of(args),
        space=space_of(read_toml(args.space, "--space"), args.space),
        **{name: getattr(args, name) for name in ("metric", "trials", "parallel", "sampler", "pruner", "test")},
    )


if __name__ == "__main__":
    run_job(main)
