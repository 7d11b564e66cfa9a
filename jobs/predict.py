"""Write a model's prediction for each row of a split, with sample ids, as Parquet: `python -m jobs.predict`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)
if sys.path[0] != ROOT:
    sys.path[:1] = [ROOT]

from jobs._cli import JobParser, check_master, run_job
from jobs._launch import launch_of
from training.results.predict import predict


def parser() -> JobParser:
    """The command line."""
    job = JobParser("predict", __doc__ or "", "predict")
    add = job.add_argument
    text = "predict with the newest model of this run, or its newest checkpoint if it has no model"
    add("--run", required=True, metavar="URL", help=text)
    add("--dataset", required=True, metavar="URL", help="a dataset with the schema of the training data")
    add("--split", default="test", metavar="NAME", help="the split to predict (default test)")
    text = "directory of the Parquet files; must not exist, and appears only when all of them are complete"
    add("--output", required=True, metavar="URL", help=text)
    add("--num-ranks", type=int, default=1, metavar="N", help="processes (default 1)")
    add("--batch", type=int, default=512, metavar="ROWS", help="rows at a time (default 512); changes the last digits")
    text = "this host (default) or a Spark barrier stage"
    add("--launcher", choices=["local", "barrier"], default="local", help=text)
    add("--master", metavar="URL", help="Spark master for --launcher barrier (default: spark-submit's)")
    return job


def main(argv: Sequence[str]) -> int:
    """Write the predictions and print where they are; returns the exit code."""
    args = parser().parse(argv)
    check_master(args)
    names = (args.run, args.dataset, args.split, args.output)
    with launch_of(args.launcher, "predict", args.master) as launch:
        done = predict(*names, launch=launch, num_ranks=args.num_ranks, batch=args.batch)
    print(f"{done.output}: {done.rows} predictions of {done.model}")
    return 0


if __name__ == "__main__":
    run_job(main)
