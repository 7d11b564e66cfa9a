"""Estimate what a run's policy would have earned, from decisions that were logged: `lockstep evaluate_policy`.

IPS, SNIPS and DR with intervals, and the mean reward as logged. The label of the dataset is the action.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.jobs._cli import JobParser, check_master, print_result, run_job, which
from lockstep.jobs._launch import add_launch_flags, check_runs, launch_of


def parser() -> JobParser:
    """The command line."""
    job = JobParser("evaluate_policy", __doc__ or "", "evaluate_policy")
    add = job.add_argument
    add("--run", required=True, metavar="URL", help="the run whose newest model is judged, or its newest checkpoint")
    add("--dataset", required=True, metavar="URL", help="logged decisions, with the schema of the training data")
    add("--split", default="test", metavar="NAME", help="the split to judge on (default test)")
    add("--reward", required=True, metavar="COLUMN", help="the stored column of what the logged action earned")
    text = "the stored column of the probability with which the logged action was taken"
    add("--propensity", required=True, metavar="COLUMN", help=text)
    text = "a stored column, such as a visitor: decisions of one value depend on each other, so intervals count the "
    add("--clusters", metavar="COLUMN", help=f"{text}values (default: the column of a split by group, if it is stored)")
    text = "a checkpoint in place of the newest model: last, best (by the run's --keep-best) or a step"
    add("--checkpoint", type=which, metavar="last|best|STEP", help=text)
    add("--batch", type=int, default=512, metavar="ROWS", help="rows at a time (default 512); changes the last digits")
    add_launch_flags(job)
    job.add_json_flag()
    return job


def main(argv: Sequence[str]) -> int:
    """Print a table or, with --json, the result (docs/logged-decisions.md); returns the exit code."""
    args = parser().parse(argv)
    from lockstep.training.results.policy_value import PolicyRequest, evaluate_policy, summary

    check_master(args)
    request = PolicyRequest(
        args.run, args.dataset, args.split, reward=args.reward, propensity=args.propensity,
        num_ranks=args.num_ranks, batch=args.batch, clusters=args.clusters, checkpoint=args.checkpoint,
    )  # fmt: skip
    check_runs(args.launcher, args.run)
    with launch_of(args.launcher, "evaluate_policy", args.master, args.code) as launch:
        found = evaluate_policy(request, launch)
    print_result(summary(found), found, args.json)
    return 0


if __name__ == "__main__":
    run_job(main)
