"""Evaluate a run's model, the mean of several, or each new checkpoint of a run that trains: `lockstep evaluate`.

Metrics with intervals, calibration, a confusion matrix, slices of the rows, and a baseline on the same rows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from lockstep.jobs._cli import JobParser, check_master, print_result, refuse_idle, run_job, which
from lockstep.jobs._launch import add_launch_flags, check_runs, launch_of
from lockstep.storage.errors import require
from lockstep.storage.urls import absolute, several


def parser() -> JobParser:
    """The command line."""
    job = JobParser("evaluate", __doc__ or "", "evaluate")
    add = job.add_argument
    text = (
        "evaluate the newest model of this run, or its newest checkpoint if it has no model; of several runs the mean "
    )
    text += "of their models' probabilities, and each model"
    add("--run", required=True, nargs="+", metavar="URL", help=text)
    add("--dataset", required=True, metavar="URL", help="a dataset with the schema of the training data")
    add("--split", default="test", metavar="NAME", help="the split to evaluate on (default test)")
    add("--where", metavar="CONDITION", help="only samples that meet a condition in SQL (docs/batches.md)")
    text = "evaluate the rows of all datasets that --dataset continues (--append-to) too"
    add("--earlier", action="store_true", help=text)
    text = "a checkpoint in place of the newest model: last, best (by the run's --keep-best) or a step"
    add("--checkpoint", type=which, metavar="last|best|STEP", help=text)
    text = "majority | rate:COLUMN (mean label of each value in the training data); of numbers mean | median"
    add("--baseline", metavar="B", help=text)
    text = "metrics of each value of a stored column, of numbers in quartiles; COLUMN:day or COLUMN:hour of times"
    add("--slice", nargs="+", default=[], metavar="COLUMN", help=text)
    text = "a stored column, such as a visitor: rows of one value depend on each other, so intervals count the values"
    add("--clusters", metavar="COLUMN", help=f"{text} (default: the column of a split by group, if it is stored)")
    text = "write the run's report again, with this evaluation (with --follow its last)"
    add("--report", action="store_true", help=text)
    add("--follow", action="store_true", help="evaluate each checkpoint as the run commits it, until the run ends")
    add("--start-delay", type=float, metavar="S", help="with --follow: seconds before the first look (default 0)")
    add("--throttle", type=float, metavar="S", help="with --follow: seconds from one start to the next (default 0)")
    text = "rows at a time (default 512); changes the last digits, and losses divided by a mask or a sum of weights"
    add("--batch", type=int, default=512, metavar="ROWS", help=text)
    add_launch_flags(job)
    job.add_json_flag()
    return job


def main(argv: Sequence[str]) -> int:
    """Print tables or, with --json, the result (docs/evaluate.md); returns the exit code."""
    args = parser().parse(argv)
    from lockstep.training.results.evaluate import EvaluateRequest, evaluate, summary, without_pictures
    from lockstep.training.results.follow import follow
    from lockstep.training.results.report import write_report

    check_master(args)
    require(not (args.follow and args.checkpoint), "--checkpoint", "--checkpoint with --follow", "one of the two")
    refuse_idle("--start-delay", args.start_delay is not None and not args.follow, "--follow")
    refuse_idle("--throttle", args.throttle is not None and not args.follow, "--follow")
    if len(args.run) > 1:
        for flag, given in (("--follow", args.follow), ("--report", args.report)):
            require(not given, flag, f"{flag} with {len(args.run)} runs", "one --run")
    require(not (args.report and args.where), "--report", "--report with --where", "a report on all samples of a split")
    require(not (args.follow and args.earlier), "--earlier", "--earlier with --follow", "one of the two")
    request = EvaluateRequest(
        several(args.run), args.dataset, args.split,
        num_ranks=args.num_ranks, batch=args.batch, where=args.where, baseline=args.baseline,
        slices=tuple(args.slice), clusters=args.clusters, checkpoint=args.checkpoint, earlier=args.earlier,
        pictures=args.report and not args.follow,
    )  # fmt: skip
    check_runs(args.launcher, *args.run)
    with launch_of(args.launcher, "evaluate", args.master, args.code) as launch:
        if args.follow:
            show = partial(print, file=sys.stderr if args.json else sys.stdout, flush=True)  # also to a pipe, at once
            waits = {"start_delay_s": args.start_delay or 0.0, "throttle_s": args.throttle or 0.0}
            found: Any = follow(request, launch, show=show, **waits)
            last = found[-1]["result"] if found else None
        else:
            found = last = evaluate(request, launch)
    report = f"report {write_report(absolute(args.run[0]), last)}" if args.report else ""
    text = "" if args.follow or last is None else summary(last)  # each look has been shown
    print_result("\n".join(filter(None, [text, report])), without_pictures(found), args.json)
    return 0


if __name__ == "__main__":
    run_job(main)
