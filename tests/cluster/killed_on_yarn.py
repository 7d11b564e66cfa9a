"""A training whose application is killed after its first checkpoint: the error that ends it, as JSON.

Usage: spark-submit --master yarn killed_on_yarn.py DATASET RUN FOLDER yes|no, with the rooms on PYTHONPATH.
"""

from __future__ import annotations

import json
import sys
import threading
import urllib.request
from pathlib import Path

from lockstep.spark.session import hadoop_settings_of, spark_session
from lockstep.storage.errors import LockstepError
from lockstep.storage.settings import set_hadoop_settings
from lockstep.training.config import TrainConfig
from lockstep.training.driver.train import Hooks, train
from lockstep.training.launch.barrier import OnSpark
from tests.waiting import until

DATASET, RUN, FOLDER, KILL = sys.argv[1:]
RANKS = Path(__file__).resolve().parents[1] / "training" / "_ranks.py"


def kill(url: str) -> None:
    """As `yarn application -kill`, by the ResourceManager's REST API."""
    until(lambda: any(Path(RUN).glob("checkpoints/step-*")))
    body, head = json.dumps({"state": "KILLED"}).encode(), {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(url, body, head, method="PUT"), timeout=60).close()


if __name__ == "__main__":
    found: dict[str, object] = {}
    with spark_session("killed") as spark:
        spark.sparkContext.addPyFile(str(RANKS))
        set_hadoop_settings(hadoop_settings_of(spark))
        config = TrainConfig(
            datasets=(DATASET,), run=RUN, model="tiny", num_ranks=1, global_batch=8, epochs=2, checkpoint_every=5,
            batchnorm="local",
        )  # fmt: skip
        web = spark.sparkContext._jsc.hadoopConfiguration().get("yarn.resourcemanager.webapp.address")
        application = spark.sparkContext.applicationId
        if KILL == "yes":
            address = f"http://{web}/ws/v1/cluster/apps/{application}/state?user.name=root"
            threading.Thread(target=kill, args=(address,), daemon=True).start()
        try:
            result = train(config, OnSpark(spark), hooks=Hooks(entry="_ranks:train_slowly"))
            found = {"steps": result.steps, "generation": result.generation}
        except LockstepError as error:
            parts = [error.what, error.got, error.allowed, error.next_step]
            found = {"class": type(error).__name__, "parts": parts, "application": application}
    Path(FOLDER, "found.json").write_text(json.dumps(found))
