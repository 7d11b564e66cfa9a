"""Publish a run's model under a name if it is better than the one published there: `MODELS/NAME/_current.json`.

Both are evaluated on the same rows: a split of the dataset and of all datasets that it continues.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.jobs._cli import JobParser, check_master, print_result, run_job
from lockstep.jobs._launch import add_launch_flags, check_runs, launch_of
from lockstep.storage.errors import require


def parser() -> JobParser:
    """The command line."""
    job = JobParser("publish", __doc__ or "", "publish")
    add = job.add_argument
    add("--run", required=True, metavar="URL", help="a finished run")
    add("--models", required=True, metavar="URL/NAME", help="the folder of the published model")
    add("--dataset", required=True, metavar="URL", help="evaluate on this dataset and all that it continues")
    add("--split", default="test", metavar="NAME", help="the split to evaluate on (default test)")
    add("--metric", required=True, metavar="METRIC:max", help="what decides: METRIC:max or METRIC:min, as auc:max")
    text = "refuse a better model that is worse by more than X on the rows of one of these datasets (default: any)"
    add("--max-drop", type=float, metavar="X", help=text)
    add("--batch", type=int, default=512, metavar="ROWS", help="rows at a time (default 512)")
    add_launch_flags(job)
    job.add_json_flag()
    return job


def main(argv: Sequence[str]) -> int:
    """Print whether and why or, with --json, the document; returns the exit code, 0 also for a worse model."""
    args = parser().parse(argv)
    from lockstep.training.results.better_model import publish_if_better
    from lockstep.training.results.evaluate import EvaluateRequest

    check_master(args)
    given = args.max_drop is None or 0 <= args.max_drop < float("inf")
    require(given, "--max-drop", str(args.max_drop), "a number from 0 up")
    check_runs(args.launcher, args.run)
    request = EvaluateRequest((args.run,), args.dataset, args.split, num_ranks=args.num_ranks, batch=args.batch)
    with launch_of(args.launcher, "publish", args.master, args.code) as launch:
        found = publish_if_better(request, args.models, args.metric, launch, max_drop=args.max_drop)
    text = f"{'published' if found['published'] else 'not published'} in {args.models}: {found['reason']}"
    print_result(text, found, args.json)
    return 0


if __name__ == "__main__":
    run_job(main)
