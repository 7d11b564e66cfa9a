"""Every night: a web server's log -> dataset -> verified -> trained -> evaluated, each step by its own spark-submit.

Put this file (or a link to it) into Airflow's DAG folder. Importing it needs Airflow and its Spark provider, but not
Lockstep; the tasks run on the machine that the connection `spark_default` names, with the spark-submit of the PATH.

Each value comes from the DAG run's params, else from the Airflow Variable `lockstep_NAME`, else from DEFAULTS. A DAG
run has its own folder in `root`. Datasets are immutable, so the job refuses a finished `etl` task that is cleared;
`train` resumes from its last checkpoint when it is tried again.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import DAG, Param

HOME = Path(__file__).resolve().parents[2]

DEFAULTS = {
    "home": (str(HOME), "the checkout of Lockstep on the machine that runs spark-submit"),
    "root": ("hdfs:///lockstep/weblog", "where the folder of each DAG run is stored"),
    "input": (
        f"{HOME}/data/weblogs/nasa_access_log_1995-07-09.log.gz",
        "a log file or a folder of them, plain or gzip",
    ),
    "split": ("group:visitor:80/20", "how the log is split into train and test"),
    "max_bad": ("1%", "the largest share of lines that may not parse"),
    "model": ("logistic", "logistic, resnet20, ... or module:function"),
    "num_ranks": ("2", "training processes; a barrier stage needs that many task slots at once"),
    "global_batch": ("256", "samples of one step over all ranks"),
    "epochs": ("2", "passes over the training split"),
    "checkpoint_every": ("200", "steps between checkpoints, seconds as 60s, or auto"),
}


def value(name: str) -> str:
    """The Jinja expression of a setting: param, else Variable, else default."""
    default = DEFAULTS[name][0]
    return f"{{{{ params.{name} or var.value.get('lockstep_{name}', '{default}') }}}}"


# HDFS allows no colon in a name, and a run id holds a time.
FOLDER = value("root") + "/{{ run_id | replace(':', '-') | replace('+', '-') }}"
DATASET = f"{FOLDER}/dataset"
RUN = f"{FOLDER}/run"


def submit(job: str, limit: timedelta, *arguments: str, retries: int = 2) -> SparkSubmitOperator:
    """One job as one spark-submit; it ends with the job's exit code."""
    return SparkSubmitOperator(
        task_id=job.removesuffix("_logs"),
        application=f"{value('home')}/jobs/{job}.py",
        name=f"lockstep-{job}",
        application_args=list(arguments),
        conn_id="spark_default",
        execution_timeout=limit,
        retries=retries,
    )


with DAG(
    dag_id="lockstep_weblog",
    description="Web log to an evaluated model: ETL, verify, train, evaluate",
    schedule="@daily",
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
    default_args={"owner": "lockstep", "retry_delay": timedelta(minutes=2), "retry_exponential_backoff": True},
    dagrun_timeout=timedelta(hours=12),
    params={
        name: Param(None, type=["null", "string"], description=f"{text} (default {default})")
        for name, (default, text) in DEFAULTS.items()
    },
    tags=["lockstep"],
    doc_md=__doc__,
) as dag:
    etl = submit(
        "etl_logs", timedelta(hours=2),
        "--input", value("input"), "--output", DATASET, "--split", value("split"), "--max-bad", value("max_bad"),
    )  # fmt: skip
    # Reading a damaged dataset again does not help.
    verify = submit("verify", timedelta(hours=1), DATASET, retries=0)
    train = submit(
        "train", timedelta(hours=8),
        "--dataset", DATASET, "--run", RUN, "--model", value("model"), "--num-ranks", value("num_ranks"),
        "--global-batch", value("global_batch"), "--epochs", value("epochs"),
        "--checkpoint-every", value("checkpoint_every"),
    )  # fmt: skip
    evaluate = submit("evaluate", timedelta(hours=1), "--run", RUN, "--dataset", DATASET, "--split", "test")
    etl >> verify >> train >> evaluate
