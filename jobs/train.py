"""Train a Keras model on a dataset with N ranks; the same call resumes an interrupted run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.jobs import _train
from lockstep.jobs._cli import JobParser, run_job
from lockstep.jobs._launch import launch_of
from lockstep.jobs._train import config_of
from lockstep.storage.fs import filesystem
from lockstep.training.run.paths import RunPaths

if TYPE_CHECKING:
    from lockstep.training.run.result import RunResult


def parser() -> JobParser:
    """The command line."""
    return _train.parser(__doc__ or "")


def main(argv: Sequence[str]) -> int:
    """Run the job; returns the exit code."""
    args = parser().parse(argv)
    from lockstep.training.driver.dry_run import dry_run
    from lockstep.training.driver.preflight import preflight_before_spark
    from lockstep.training.driver.train import Hooks, train

    config = config_of(args)
    if args.dry_run:
        with launch_of(config.ranks.launcher, "train", args.master, args.code) as launch:
            print(dry_run(config, launch))
        return 0
    checked = preflight_before_spark(config)
    if checked is not None and checked.finished is not None:
        result = checked.finished
    else:
        with launch_of(config.ranks.launcher, "train", args.master, args.code) as launch:
            hooks = Hooks(on_event=args.on_event)
            result = train(config, launch, take_over=args.take_over, hooks=hooks, checked=checked)
    print(result.summary())
    report(result)
    if words := result.best_words():
        print(words)
    return 0


def report(result: RunResult) -> None:
    """Write the run's report unless it exists; an error is only printed, since the run is complete."""
    from lockstep.training.results.report import write_report

    try:
        url = RunPaths(result.run).report(result.generation)
        print(f"report {url if filesystem(url).exists(url) else write_report(result.run)}")
    except Exception as error:
        print(f"the report was not written: {error}\n  next: lockstep report {result.run}", file=sys.stderr)


if __name__ == "__main__":
    run_job(main)
