"""Two trainings in containers that are too small for them: the errors that end them, as JSON.

Usage: spark-submit --master yarn memory_on_yarn.py DATASET FOLDER, with one executor and the rooms on PYTHONPATH.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lockstep.spark.session import hadoop_settings_of, spark_session
from lockstep.storage.errors import ConfigError
from lockstep.storage.settings import set_hadoop_settings
from lockstep.training.config import TrainConfig
from lockstep.training.driver.train import ENTRY, Hooks, train
from lockstep.training.launch.barrier import OnSpark

DATASET, FOLDER = sys.argv[1:]
HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    found = {}
    with spark_session("too small") as spark:
        for path in (HERE / "hungry.py", HERE.parent / "training" / "_ranks.py"):
            spark.sparkContext.addPyFile(str(path))
        set_hadoop_settings(hadoop_settings_of(spark))
        for name, entry in (("wide", ENTRY), ("greedy", "hungry:greedy")):
            config = TrainConfig(
                datasets=(DATASET,), run=f"{FOLDER}/{name}", model=f"hungry:{name}", num_ranks=1, global_batch=8,
                epochs=8, checkpoint_every=5, batchnorm="local",
            )  # fmt: skip
            try:
                train(config, OnSpark(spark), hooks=Hooks(entry=entry))
            except ConfigError as error:
                found[name] = [error.what, error.got, error.allowed, error.next_step]
    Path(FOLDER, "errors.json").write_text(json.dumps(found))
