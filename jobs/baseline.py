"""Train a baseline of pyspark.ml on the rows of a dataset, and evaluate it as lockstep evaluate does a model.

With --run, the run's model is evaluated on the same rows, and the report of lockstep report shows both.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial

from lockstep.etl.baseline.config import KINDS, BaselineConfig
from lockstep.jobs._cli import JobParser, print_result, refuse_idle, run_job
from lockstep.spark.session import hadoop_settings_of, spark_session
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import occupied, write_file
from lockstep.storage.settings import set_hadoop_settings
from lockstep.storage.urls import absolute


def parser() -> JobParser:
    """The command line."""
    job = JobParser("baseline", __doc__ or "", "baseline")
    add = job.add_argument
    add("--dataset", required=True, metavar="URL", help="a dataset with a label; clusters need none")
    add("--kind", required=True, metavar="K", help=" | ".join(KINDS))
    add("--split", default="test", metavar="NAME", help="the split to evaluate on (default test)")
    add("--train-split", default="train", metavar="NAME", help="the split, or folds A,B, to train on (default train)")
    add("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="parameters as pyspark.ml has them")
    add("--user", metavar="COLUMN", help="als: the column of users")
    add("--item", metavar="COLUMN", help="als: the column of items")
    add("--rating", metavar="COLUMN", help="als: the column to predict (default: the label)")
    add("--seed", type=int, default=0, metavar="N", help="seed of estimators that draw numbers (default 0)")
    text = "end with exit code 1 if Spark has not fitted and predicted within so many seconds (default 3600)"
    add("--deadline", type=float, default=3600.0, metavar="S", help=text)
    add("--run", metavar="URL", help="also evaluate this run's model on these rows; lockstep report shows both")
    text = "where that model is evaluated (default local)"
    add("--launcher", choices=["local", "barrier"], default="local", help=text)
    add("--output", metavar="FILE.json", help="also write the result there; must not exist")
    job.add_json_flag()
    add("--master", metavar="URL", help="Spark master (default: spark-submit's, else local[*])")
    return job


def main(argv: Sequence[str]) -> int:
    """Print a table or, with --json, the result; returns the exit code."""
    args = parser().parse(argv)
    from lockstep.etl.baseline.plan import check
    from lockstep.etl.baseline.train import train_and_predict
    from lockstep.training.launch.barrier import OnSpark
    from lockstep.training.launch.local import run_local
    from lockstep.training.results import stored_baselines
    from lockstep.training.results.evaluate import EvaluateRequest, evaluate

    config = BaselineConfig(
        dataset=args.dataset, kind=args.kind, split=args.split, train_split=args.train_split,
        settings=tuple(args.set), user=args.user, item=args.item, rating=args.rating, seed=args.seed,
        deadline_s=args.deadline,
    )  # fmt: skip
    plan, model = check(config), None
    output, run = (None if url is None else absolute(url) for url in (args.output, args.run))
    refuse_idle("--launcher", args.launcher != "local" and run is None, "--run")
    labelled = plan.label is not None and plan.label.kind == "label"
    refuse_idle("--run", run is not None and not labelled, "a label, as --rating too")
    if output is not None and filesystem(output).exists(output):
        raise occupied(output)
    if run is not None and args.launcher == "local":  # first: a wrong --run is reported at once
        model = evaluate(EvaluateRequest((run,), config.dataset, config.split), run_local)
    with spark_session("lockstep baseline", args.master) as spark:
        set_hadoop_settings(hadoop_settings_of(spark))
        if run is not None and model is None:
            model = evaluate(EvaluateRequest((run,), config.dataset, config.split), OnSpark(spark))
        found = train_and_predict(spark, config, plan, show=partial(print, file=sys.stderr, flush=True))
    scores = {"metrics": dict(found.metrics), "intervals": {}, "class_counts": None}
    if found.rows is not None:
        scores = stored_baselines.scores_of(
            found.rows, found.classes, probabilities=found.probabilities, kept=found.kept
        )
    result = {**found.about, **scores}
    text = stored_baselines.text(result, model)
    if run is not None and model is not None:
        text += f"\nstored {stored_baselines.store(run, result, model)}; lockstep report {run} shows it"
    if output is not None:
        write_file(filesystem(output), output, (json.dumps(result, sort_keys=True) + "\n").encode())
    print_result(text, result, args.json)
    return 0


if __name__ == "__main__":
    run_job(main)
