"""Every night: the images of the day -> dataset -> verified -> trained -> published if better.

Put this folder (or a link to it) into Airflow's DAG folder. Importing it needs Airflow and its Spark provider, but not
Lockstep.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _daily import daily  # type: ignore[import-not-found]

dag = daily(
    "lockstep_images",
    datetime(2026, 1, 1, tzinfo=UTC),
    "etl_images",
    {
        "root": ("hdfs:///lockstep/images", "where raw images, datasets, runs and models are stored"),
        "metric": ("accuracy:max", "what decides whether a model is better"),
        "source": ("folder", "idx, cifar10, cifar100, folder, tar or parquet"),
        "image_size": ("32x32", "the size that images are brought to"),
        "split": ("80/20", "how the images are split into train and test"),
        "model": ("resnet20", "resnet20 or module:function"),
        "global_batch": ("256", "samples of one step over all ranks"),
        "epochs": ("2", "passes over the training split"),
    },
    ("--split={split}", "--source={source}", "--image-size={image_size}"),
    ("--model={model}", "--global-batch={global_batch}", "--epochs={epochs}"),
    __doc__ or "",
)
