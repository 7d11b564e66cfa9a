"""ETL, verify, train, evaluate and report, for each configuration file, in one Spark session."""

from __future__ import annotations

import datetime
import logging
import secrets
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.jobs._cli import JobParser, run_job
from lockstep.spark.session import hadoop_settings_of, spark_session
from lockstep.storage.errors import ConfigError, DataError
from lockstep.storage.settings import set_hadoop_settings
from lockstep.storage.urls import absolute, join

if TYPE_CHECKING:
    from lockstep.jobs._pipeline import Outcome

KEYS = {
    "name": "names its folder in --out",
    "metric": "the metric of the evaluation that decides, such as auc",
    "at_least": "the value that it must reach, or baseline (the default): that of [evaluate]'s baseline; else exit 1",
}
"""The keys of the table [pipeline]."""
STEPS = "one of [etl_logs], [etl_images] and [etl_table], [train] and [evaluate]"


def parser() -> JobParser:
    """The command line."""
    job = JobParser("pipeline", __doc__ or "", "pipeline")
    keys = "; ".join(f"{key}: {words}" for key, words in KEYS.items())
    job.epilog = f"Each file has the tables {STEPS}, with these jobs' flags as keys, and [pipeline]: {keys}."
    job.add_argument(
        "--out", default=".demo", metavar="URL", help="results are written to a new folder in it (default .demo)"
    )
    job.add_argument("--master", metavar="URL", help="Spark master (default: spark-submit's, else local[*])")
    return job


def new_folder(out: str) -> str:
    """A new folder in `out` for this call: time (UTC) and a few random digits."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    return join(absolute(out), f"{now}-{secrets.token_hex(2)}")


def run(args: Namespace, folder: str) -> list[Outcome]:
    """Run every configured pipeline in one session, after all were checked."""
    from lockstep.jobs._pipeline import Pipeline

    pipelines = [Pipeline.load(path, folder) for path in args.config]
    names = [pipeline.name for pipeline in pipelines]
    if len(set(names)) < len(names):
        raise ConfigError(
            "two pipelines have the same name, so they would share a folder",
            got=", ".join(names),
            allowed="a different name for each [pipeline]",
            next_step="Change `name` in one of the files.",
        )
    for pipeline in pipelines:
        pipeline.check()
    codes = [pipeline.train_args.code for pipeline in pipelines]
    code = next((each for each in codes if each is not None and each.asked), codes[0])
    with spark_session("lockstep pipeline", args.master, code=code) as spark:
        set_hadoop_settings(hadoop_settings_of(spark))
        return [pipeline.run(spark) for pipeline in pipelines]


def main(argv: Sequence[str]) -> int:
    """Run the job; returns the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    job = parser()
    args = job.parse_args(argv)
    if not args.config:
        job.error("--config is missing")
    from lockstep.jobs._pipeline import table

    outcomes = run(args, new_folder(args.out))
    print(table(outcomes))
    short = [outcome for outcome in outcomes if not outcome.good]
    if short:
        raise DataError(
            "a model is worse than its configuration requires",
            got="; ".join(f"{o.name}: {o.metric} {o.value:.4f}" for o in short),
            allowed="; ".join(f"{o.name}: {o.metric} at least {o.bar:.4f} ({o.bar_name})" for o in short),
            next_step="Look at the report's curves; more epochs or another learning rate may be needed.",
        )
    return 0


if __name__ == "__main__":
    run_job(main)
