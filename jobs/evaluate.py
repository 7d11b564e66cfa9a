"""Evaluate a run's model on a split of a dataset, next to a baseline on the same rows: `python -m jobs.evaluate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)
if sys.path[0] != ROOT:
    sys.path[:1] = [ROOT]

from jobs._cli import JobParser, check_master, run_job
from jobs._session import hadoop_settings_of, spark_session
from lockstep.storage.settings import set_hadoop_settings
from training.launch.barrier import OnSpark
from training.launch.local import run_local
from training.results.evaluate import evaluate, summary


def parser() -> JobParser:
    """The command line."""
    job = JobParser("evaluate", __doc__ or "", "evaluate")
    add = job.add_argument
    add(
        "--run",
        required=True,
        metavar="URL",
        help="the run whose newest model, or else newest checkpoint, is evaluated",
    )
    add("--dataset", required=True, metavar="URL", help="a dataset with the schema that the model was trained on")
    add("--split", default="test", metavar="NAME", help="the split to evaluate on (default test)")
    add("--baseline", metavar="B", help="rate:COLUMN (mean label of each value in what was trained on) | majority")
    add("--num-ranks", type=int, default=1, metavar="N", help="processes (default 1)")
    add(
        "--batch",
        type=int,
        default=512,
        metavar="ROWS",
        help="rows at a time (default 512); changes last digits, and losses divided by a mask or by the weights' sum",
    )
    add(
        "--launcher", choices=["local", "barrier"], default="local", help="this host (default) or a Spark barrier stage"
    )
    add("--master", metavar="URL", help="Spark master for --launcher barrier (default: spark-submit's)")
    return job


def main(argv: Sequence[str]) -> int:
    """Print a table, then the result as one line of JSON (docs/evaluate.md); returns the exit code."""
    args = parser().parse(argv)
    check_master(args)
    call = partial(
        evaluate,
        args.run,
        args.dataset,
        args.split,
        num_ranks=args.num_ranks,
        batch=args.batch,
        baseline=args.baseline,
    )
    if args.launcher == "local":
        result = call(launch=run_local)
    else:
        with spark_session("lockstep evaluate", args.master) as spark:
            set_hadoop_settings(hadoop_settings_of(spark))
            result = call(launch=OnSpark(spark))
    print(summary(result))
    print(json.dumps(result, sort_keys=True))
    return 0


if __name__ == "__main__":
    run_job(main)
