"""Every night: a web server's log of the day -> dataset -> verified -> trained -> published if better.

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
    "lockstep_weblog",
    datetime(2026, 1, 1, tzinfo=UTC),
    "etl_logs",
    {
        "root": ("hdfs:///lockstep/weblog", "where raw logs, datasets, runs and models are stored"),
        "split": ("group:visitor:80/20", "how the log is split into train and test"),
        "model": ("logistic", "logistic, mlp, ... or module:function"),
        "global_batch": ("256", "samples of one step over all ranks"),
        "epochs": ("2", "passes over the training split"),
    },
    ("--split={split}",),
    ("--model={model}", "--global-batch={global_batch}", "--epochs={epochs}"),
    __doc__ or "",
)
