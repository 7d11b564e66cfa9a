"""Write a model's prediction for each row of a split, with sample ids, as Parquet: `lockstep predict`."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.jobs._cli import JobParser, check_master, names, run_job, which
from lockstep.jobs._launch import add_launch_flags, check_runs, launch_of
from lockstep.storage.urls import several


def parser() -> JobParser:
    """The command line."""
    job = JobParser("predict", __doc__ or "", "predict")
    add = job.add_argument
    text = "predict with the newest model of this run, or its newest checkpoint if it has no model"
    text += "; of several runs the mean of their models' probabilities"
    add("--run", required=True, nargs="+", metavar="URL", help=text)
    text = "a checkpoint instead: last, best (by the run's --keep-best) or a step"
    add("--checkpoint", type=which, metavar="last|best|STEP", help=text)
    add("--dataset", required=True, metavar="URL", help="a dataset with the schema of the training data")
    add("--split", default="test", metavar="NAME", help="the split to predict (default test)")
    text = "directory of the Parquet files; must not exist, and appears only when all of them are complete"
    add("--output", required=True, metavar="URL", help=text)
    text = "stored columns that travel into the predictions, besides the dataset's id columns"
    add("--columns", type=names, default=(), metavar="A,B", help=text)
    add("--batch", type=int, default=512, metavar="ROWS", help="rows at a time (default 512); changes the last digits")
    add_launch_flags(job)
    return job


def main(argv: Sequence[str]) -> int:
    """Write the predictions and print where they are; returns the exit code."""
    args = parser().parse(argv)
    from lockstep.training.results.predict import PredictRequest, predict

    check_master(args)
    request = PredictRequest(
        several(args.run), args.dataset, args.split, args.output,
        num_ranks=args.num_ranks, batch=args.batch, checkpoint=args.checkpoint, columns=several(args.columns),
    )  # fmt: skip
    check_runs(args.launcher, *args.run)
    with launch_of(args.launcher, "predict", args.master, args.code) as launch:
        done = predict(request, launch)
    print(f"{done.output}: {done.rows} predictions of {done.model}")
    return 0


if __name__ == "__main__":
    run_job(main)
