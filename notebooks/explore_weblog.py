# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A web log, from raw lines to a trained model
#
# This notebook builds a dataset from one day of a web server's log, looks at the counts and the quarantined lines,
# trains a logistic regression on two ranks from a cell, and plots its curves. Start it with the project's environment
# (`.venv`) from the folder `notebooks/`; set `LOCKSTEP_LOG` to another log in the Common Log Format to explore that one.

# %%
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

import lockstep

log = os.environ.get("LOCKSTEP_LOG", str(Path("../data/weblogs/nasa_access_log_1995-07-09.log.gz").resolve()))
folder = Path(tempfile.mkdtemp(prefix="lockstep-notebook-"))
dataset, run = str(folder / "dataset"), str(folder / "run")
folder

# %% [markdown]
# ## A session and a dataset
#
# Two task slots are enough: a barrier stage needs one for each rank. To fill the quarantine, three broken lines are
# added to the log. A job fails if more than 1 % of its lines are bad; `max_bad` changes that limit.

# %%
until_the_end = ExitStack()  # the session stays open over several cells; the last cell closes it
spark = until_the_end.enter_context(lockstep.spark_session("lockstep notebook", master="local[2]"))

broken = folder / "broken.log"
broken.write_bytes(b'not a log line\n\xff\xfe\x00 noise\nhost - - [no time] "GET / HTTP/1.0" 200 1\n')
manifest = lockstep.write_logs(spark, [log, str(broken)], dataset, split="group:visitor:80/20")
pd.Series(
    {
        "read": manifest.counts.read,
        "written": manifest.counts.written,
        "quarantined": manifest.counts.quarantined,
        **{f"dropped: {why}": n for why, n in manifest.counts.dropped.items()},
    }
)

# %% [markdown]
# ## Rejected lines
#
# The quarantine has every rejected line with its source, its byte position and a reason.

# %%
quarantine = pd.read_parquet(f"{dataset}/_quarantine")
quarantine[["source", "position", "reason"]]

# %% [markdown]
# ## The shards
#
# The schema declares each column. Vocabularies are stored next to the shards and applied when a shard is read.

# %%
pd.DataFrame(manifest.schema["fields"])[["name", "dtype", "kind"]]

# %%
pd.DataFrame(
    [(name, split.records, len(split.shards), split.block_records) for name, split in manifest.splits.items()],
    columns=["split", "records", "shards", "records of a block"],
)

# %% [markdown]
# ## Training on two ranks
#
# Each rank is a separate process in a barrier stage. In each step the ranks sum their gradients.

# %%
result = lockstep.train(
    dataset, run, "logistic", num_ranks=2, global_batch=128, epochs=2, checkpoint_every=100, spark=spark
)
print(result.summary())

# %% [markdown]
# ## Curves

# %%
history = lockstep.read_history(run)
steps = pd.DataFrame(history.steps).set_index("step")
ax = steps["loss"].plot(alpha=0.3, label="one step", figsize=(8, 3))
steps["loss"].rolling(20, min_periods=1).mean().plot(ax=ax, label="mean of 20 steps")
ax.set_ylabel("loss over the global batch")
ax.legend()
plt.show()

# %%
pd.DataFrame([{"epoch": row["epoch"] + 1, **row["metrics"]} for row in history.epochs]).set_index("epoch")

# %% [markdown]
# ## The model and a baseline on the same rows
#
# `rate:page` is the mean label of each page in the training split: a prediction that ignores the visitor.

# %%
evaluation = lockstep.evaluate(run, dataset, "test", baseline="rate:page")
pd.DataFrame({"model": evaluation["metrics"], evaluation["baseline"]["name"]: evaluation["baseline"]["metrics"]})

# %%
until_the_end.close()
