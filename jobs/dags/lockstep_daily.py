"""Every day: upload -> ETL as an append -> verify -> train from the last model -> publish the model if it is better.

Two DAGs: `lockstep_weblog` for logs of web servers, `lockstep_images` for images. Put this file (or a link to it) into
Airflow's DAG folder. Importing it needs Airflow and its Spark provider, but not Lockstep.

Each step is one spark-submit. With the connection `spark_default` on YARN in cluster mode the application survives the
worker and the scheduler: its id is kept before the wait begins, and a later try waits for that application again
(`durable`, `yarn_track_via_rm_api`). If it was lost all the same, the next try of `train` resumes the run.

Each value comes from the DAG run's params, else from the Airflow Variable `DAG_NAME`, else from the defaults
below. Secrets come by connections only: keytab and principal are in the extra of `spark_default`.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import requests
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import DAG, CronDataIntervalTimetable, Param
from airflow.sdk.exceptions import AirflowRescheduleException

HOME = Path(__file__).resolve().parents[2]
COMMON = {
    "input": ("/var/lib/lockstep/daily", "the folder with a folder for each day, such as 2026-01-31"),
    "home": (str(HOME), "the checkout of Lockstep, or a URL of its jobs, that spark-submit reads"),
    "py_files": ("", "in cluster mode lockstep.zip of `make package`"),
    "archives": ("", "in cluster mode the URL of lockstep-training.tar.gz, then #python"),
    "max_bad": ("1%", "the largest share of records that may be bad"),
    "num_ranks": ("2", "training processes; a barrier stage needs that many task slots at once"),
    "checkpoint_every": ("200", "steps between checkpoints, seconds as 60s, or auto"),
    "global_batch": ("256", "samples of one step over all ranks"),
    "epochs": ("2", "passes over the training split"),
    "replay": ("", "the share of each batch that is taken from all earlier days, such as 0.25; else none"),
    "ewc": ("", "how much weights that mattered on earlier days are held, such as 5, on the first night 0; else not"),
    "max_drop": ("", "publish no model whose metric fell by more than this on an earlier day; else any better one"),
}


class Submit(SparkSubmitOperator):
    """A spark-submit without those arguments that render to nothing, such as --append-to on the first day."""

    def execute(self, context: Any) -> None:
        """Submit, or wait again for the application of an earlier try."""
        given: Any = self  # the provider has no types
        earlier = context["ti"].get_previous_dagrun(state="running")
        if earlier is not None:  # of a back-fill with several days at once: this day continues that one
            self.log.info("%s has not ended yet: this day waits for it", earlier.run_id)
            raise AirflowRescheduleException(datetime.now(UTC) + timedelta(minutes=1))
        given.application_args = [words for words in given.application_args if words and not words.endswith("=")]
        given.py_files, given.conf = given.py_files or None, {name: text for name, text in given.conf.items() if text}
        hook = given._get_hook()
        # The provider refuses this for any other connection; its hook alone knows master and deploy mode.
        given._yarn_track_via_rm_api = hook._is_yarn_cluster_mode
        if hook._is_yarn_cluster_mode:
            self._find_lost(context["task_state_store"], hook, given.conf["spark.yarn.tags"])
        super().execute(context)

    def _find_lost(self, store: Any, hook: Any, tag: str) -> None:
        """Keep the id of an application that a try started which died before it could keep it."""
        asked = {"applicationTags": tag.lower(), "states": "NEW,NEW_SAVING,SUBMITTED,ACCEPTED,RUNNING"}
        url, auth = f"{hook._get_yarn_rm_base_url()}/ws/v1/cluster/apps", hook._resolved_yarn_rm_auth
        answer = requests.get(url, params=asked, auth=auth, timeout=30)
        answer.raise_for_status()
        for application in (answer.json()["apps"] or {}).get("app", []):
            self.log.info("an earlier try has started %s, which still runs", application["id"])
            store.set(self.external_id_key, application["id"])


class Day:
    """One day of a DAG as templates: its settings, its URLs, and a spark-submit for each step.

    A dataset, a run and their names are those of the data interval, never of the try.
    """

    before = "prev_data_interval_start_success"

    def __init__(self, dag_id: str, known: dict[str, tuple[str, str]]) -> None:
        self.dag_id, self.known = dag_id, known
        self.name, self.root = "{{ data_interval_start | ds }}", self.value("root")
        self.raw, self.dataset, self.run = (f"{self.root}/{kind}/{self.name}" for kind in ("raw", "datasets", "runs"))
        self.models = f"{self.root}/models/{dag_id}"

    def asked(self, name: str) -> str:
        """The expression of a setting's value."""
        return f"(params.{name} or var.value.get('{self.dag_id}_{name}', '{self.known[name][0]}'))"

    def value(self, name: str) -> str:
        """The template of a setting's value."""
        return f"{{{{ {self.asked(name)} }}}}"

    def since(self, flag: str, url: str) -> str:
        """Return `flag` with what the last successful day made; nothing on the first day."""
        return f"{{% if {self.before} %}}{flag}={url}{{% endif %}}"

    def submit(
        self,
        task: str,
        job: str,
        hours: int,
        *arguments: str,
        retries: int = 2,
        here: bool = False,
        executors: str = "",
    ) -> Submit:
        """The task that runs a job, on Airflow's worker if `here`."""
        return Submit(
            task_id=task,
            application=f"{self.value('home')}/jobs/{job}.py",
            name=f"{self.dag_id}-{task}-{self.name}",
            py_files=self.value("py_files"),
            conf={
                "spark.yarn.dist.archives": self.value("archives"),
                "spark.pyspark.python": f"{{% if {self.asked('archives')} %}}./python/bin/python{{% endif %}}",
                "spark.yarn.tags": f"{self.dag_id}.{task}.{self.name}",
                "spark.executor.instances": executors,
            },
            application_args=list(arguments),
            conn_id="lockstep_local" if here else "spark_default",
            execution_timeout=timedelta(hours=hours),
            retries=retries,
            depends_on_past=task == "upload",  # a day waits for the day before
        )


def daily(dag_id: str, etl_job: str, defaults: dict[str, tuple[str, str]], etl_flags: tuple[str, ...]) -> DAG:
    """The DAG. A flag as `--split={split}` names a setting of `defaults`, the DAG's own, or of COMMON."""
    known = {**COMMON, **defaults}
    day = Day(dag_id, known)
    value = day.value
    with DAG(
        dag_id=dag_id,
        description="Yesterday's data to a published model",
        # A run of a day begins after that day; "@daily" alone has intervals without length, which begin at its start.
        schedule=CronDataIntervalTimetable("@daily", timezone="UTC"),
        start_date=datetime(2026, 1, 1, tzinfo=UTC),
        catchup=False,
        max_active_runs=1,
        default_args={"owner": "lockstep", "retry_delay": timedelta(minutes=2), "retry_exponential_backoff": True},
        dagrun_timeout=timedelta(hours=20),
        params={
            name: Param(None, type=["null", "string"], description=f"{text} (default {default})")
            for name, (default, text) in known.items()
        },
        tags=["lockstep"],
        doc_md=__doc__,
    ) as dag:
        # On Airflow's worker: an application master does not see its files, and fails without a Spark session.
        folder = f"{value('input')}/{day.name}"
        upload = day.submit("upload", "upload", 2, f"--input={folder}", f"--output={day.raw}", here=True)
        etl = day.submit(
            "etl", etl_job, 2, f"--input={day.raw}", f"--output={day.dataset}", f"--max-bad={value('max_bad')}",
            "--if-exists=keep", "--clean", day.since("--append-to", f"{day.root}/datasets/{{{{ {day.before} | ds }}}}"),
            *(flag.format_map({name: value(name) for name in known}) for flag in etl_flags),
        )  # fmt: skip
        # Reading a damaged dataset again does not help.
        verify = day.submit("verify", "verify", 1, day.dataset, retries=0, here=True)
        train = day.submit(
            "train", "train", 8, f"--dataset={day.dataset}", f"--run={day.run}", f"--num-ranks={value('num_ranks')}",
            f"--checkpoint-every={value('checkpoint_every')}", "--audit",
            f"--model={value('model')}", f"--global-batch={value('global_batch')}", f"--epochs={value('epochs')}",
            f"--replay={value('replay')}", f"--ewc={value('ewc')}", day.since("--init-from", day.models),
            executors=value("num_ranks"),
        )  # fmt: skip
        publish = day.submit(
            "publish", "publish", 1, f"--run={day.run}", f"--dataset={day.dataset}", f"--models={day.models}",
            f"--metric={value('metric')}", f"--max-drop={value('max_drop')}", "--launcher=barrier", executors="1",
        )  # fmt: skip
        upload >> etl >> verify >> train >> publish
    return dag


weblog = daily(
    "lockstep_weblog",
    "etl_logs",
    {
        "root": ("hdfs:///lockstep/weblog", "where raw logs, datasets, runs and models are stored"),
        "split": ("group:visitor:80/20", "how the log is split into train and test"),
        "model": ("logistic", "logistic, mlp, ... or module:function"),
        "metric": ("auc:max", "what decides whether a model is better"),
    },
    ("--split={split}",),
)
images = daily(
    "lockstep_images",
    "etl_images",
    {
        "root": ("hdfs:///lockstep/images", "where raw images, datasets, runs and models are stored"),
        "source": ("folder", "idx, cifar10, cifar100, folder, tar or parquet"),
        "image_size": ("32x32", "the size that images are brought to"),
        "classes": ("", "the names of all classes, as cat,dog; else those of the first day"),
        "split": ("80/20", "how the images are split into train and test"),
        "model": ("resnet20", "resnet20 or module:function"),
        "metric": ("accuracy:max", "what decides whether a model is better"),
    },
    ("--split={split}", "--source={source}", "--image-size={image_size}", "--classes={classes}"),
)
