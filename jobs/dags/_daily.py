"""What the daily DAGs share: upload -> ETL as an append -> verify -> train from the last model -> publish if better.

Each step is one spark-submit. With the connection `spark_default` on YARN in cluster mode the application survives the
worker and the scheduler: its id is kept before the wait begins, and a later try waits for that application again
(`durable`, `yarn_track_via_rm_api`). If it was lost all the same, the next try of `train` resumes the run.

Each value comes from the DAG run's params, else from the Airflow Variable `DAG_NAME`, else from the DAG file's
defaults. Secrets come by connections only: keytab and principal are in the extra of `spark_default`.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import DAG, CronDataIntervalTimetable, Param

HOME = Path(__file__).resolve().parents[2]
COMMON = {
    "input": ("/var/lib/lockstep/daily", "the folder with a folder for each day, such as 2026-01-31"),
    "home": (str(HOME), "the checkout of Lockstep, or a URL of its jobs, that spark-submit reads"),
    "py_files": ("", "in cluster mode lockstep.zip of `make package`"),
    "archives": ("", "in cluster mode the URL of lockstep-training.tar.gz, then #python"),
    "max_bad": ("1%", "the largest share of records that may be bad"),
    "num_ranks": ("2", "training processes; a barrier stage needs that many task slots at once"),
    "checkpoint_every": ("200", "steps between checkpoints, seconds as 60s, or auto"),
    "metric": ("auc:max", "what decides whether a model is better"),
}


class Submit(SparkSubmitOperator):
    """A spark-submit without those arguments that render to nothing, such as --append-to on the first day."""

    def execute(self, context: Any) -> None:
        """Submit, or wait again for the application of an earlier try."""
        given: Any = self  # the provider has no types
        given.application_args = [argument for argument in given.application_args if argument]
        given.py_files, given.conf = given.py_files or None, {name: text for name, text in given.conf.items() if text}
        # The provider refuses this for any other connection; its hook alone knows master and deploy mode.
        given._yarn_track_via_rm_api = given._get_hook()._is_yarn_cluster_mode
        super().execute(context)


def daily(
    dag_id: str, start: datetime, etl_job: str, defaults: dict[str, tuple[str, str]], etl_flags: tuple[str, ...],
    train_flags: tuple[str, ...], doc: str,
) -> DAG:  # fmt: skip
    """The DAG. A flag as `--split={split}` names a default of `defaults`, the DAG's own or COMMON."""
    known = {**COMMON, **defaults}

    def value(name: str) -> str:
        return f"{{{{ params.{name} or var.value.get('{dag_id}_{name}', '{known[name][0]}') }}}}"

    # A dataset, a run and its name are those of the data interval, never of the try.
    day, root = "{{ data_interval_start | ds }}", value("root")
    before = "prev_data_interval_start_success"
    raw, dataset, run = f"{root}/raw/{day}", f"{root}/datasets/{day}", f"{root}/runs/{day}"

    def since(flag: str, url: str) -> str:
        """`flag` with what the last successful day made; nothing on the first day."""
        return f"{{% if {before} %}}{flag}={url}{{% endif %}}"

    def submit(
        task: str, job: str, hours: int, *arguments: str, retries: int = 2, conn: str = "spark_default"
    ) -> Submit:
        return Submit(
            task_id=task,
            application=f"{value('home')}/jobs/{job}.py",
            name=f"{dag_id}-{task}-{day}",
            py_files=value("py_files"),
            conf={"spark.yarn.dist.archives": value("archives"), "spark.yarn.tags": f"{dag_id}.{task}.{day}"},
            application_args=list(arguments),
            conn_id=conn,
            execution_timeout=timedelta(hours=hours),
            retries=retries,
            depends_on_past=task == "upload",  # a day waits for the day before
        )

    def given(flags: tuple[str, ...]) -> list[str]:
        return [flag.format_map({name: value(name) for name in known}) for flag in flags]

    with DAG(
        dag_id=dag_id,
        description="Yesterday's data to a published model",
        # A run of a day begins after that day; "@daily" alone has intervals without length, which begin at its start.
        schedule=CronDataIntervalTimetable("@daily", timezone="UTC"),
        start_date=start,
        catchup=False,
        max_active_runs=1,
        default_args={"owner": "lockstep", "retry_delay": timedelta(minutes=2), "retry_exponential_backoff": True},
        dagrun_timeout=timedelta(hours=20),
        params={
            name: Param(None, type=["null", "string"], description=f"{text} (default {default})")
            for name, (default, text) in known.items()
        },
        tags=["lockstep"],
        doc_md=doc,
    ) as dag:
        # In this machine's Spark: an application master does not see its files.
        folder = f"{value('input')}/{day}"
        upload = submit("upload", "upload", 2, f"--input={folder}", f"--output={raw}", conn="lockstep_upload")
        etl = submit(
            "etl", etl_job, 2, f"--input={raw}", f"--output={dataset}", f"--max-bad={value('max_bad')}",
            "--if-exists=keep", "--clean", since("--append-to", f"{root}/datasets/{{{{ {before} | ds }}}}"),
            *given(etl_flags),
        )  # fmt: skip
        # Reading a damaged dataset again does not help.
        verify = submit("verify", "verify", 1, dataset, retries=0)
        train = submit(
            "train", "train", 8, f"--dataset={dataset}", f"--run={run}", f"--num-ranks={value('num_ranks')}",
            f"--checkpoint-every={value('checkpoint_every')}", "--audit",
            since("--init-from", f"{root}/models/{dag_id}"), *given(train_flags),
        )  # fmt: skip
        publish = submit(
            "publish", "publish", 1, f"--run={run}", f"--dataset={dataset}", f"--models={root}/models/{dag_id}",
            f"--metric={value('metric')}",
        )  # fmt: skip
        upload >> etl >> verify >> train >> publish
    return dag
