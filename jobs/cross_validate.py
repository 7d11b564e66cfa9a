"""Train and evaluate a model on each fold of a dataset; the same call resumes: `lockstep cross_validate`."""

from __future__ import annotations

from argparse import SUPPRESS
from collections.abc import Sequence

from lockstep.jobs import _train
from lockstep.jobs._cli import JobParser, run_job
from lockstep.jobs._launch import launch_of
from lockstep.process.own_code import imported_here
from lockstep.storage.urls import absolute, join
from lockstep.training.config import flag_of
from lockstep.training.models import check_name
from lockstep.training.search.space import NOT_OF_FOLDS


def parser() -> JobParser:
    """The command line: that of lockstep train, whose --run is the directory of all runs here."""
    without = [flag_of(name) for name in (*NOT_OF_FOLDS, "validate")]
    job = _train.parser(__doc__ or "", "cross_validate", without=without)
    job.add_argument("--validate", default=SUPPRESS, help=SUPPRESS)  # is refused with the reason
    return job


def main(argv: Sequence[str]) -> int:
    """Print a table of the folds; returns the exit code."""
    args = parser().parse(argv)
    from lockstep.training.driver.preflight import all_local
    from lockstep.training.search.folds import RESULT, cross_validate, refuse_validation, runs_of_folds, summary

    config = _train.config_of(args)
    refuse_validation(config)
    check_name(config.model.model, config.model.extra, here=imported_here(config.ranks.launcher))
    if config.ranks.launcher == "barrier" and all_local(config):
        runs_of_folds(config)  # refuses wrong flags before Spark starts
    with launch_of(config.ranks.launcher, "cross_validate", args.master, args.code) as launch:
        result = cross_validate(config, launch, take_over=args.take_over)
    print(summary(result))
    print(f"result {join(absolute(config.run), RESULT)}")
    return 0


if __name__ == "__main__":
    run_job(main)
