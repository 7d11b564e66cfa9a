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
# # A search for hyper-parameters
#
# This notebook tries layers of several widths and several learning rates on a web server's log, chooses by a validation split,
# and compares the best model with a baseline on the test split. Start it with the project's environment (`.venv`) from the
# folder `notebooks/`; set `LOCKSTEP_LOG` to another log in the Common Log Format to use that one.

# %%
import os
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

import lockstep

log = os.environ.get("LOCKSTEP_LOG", str(Path("../data/weblogs/nasa_access_log_1995-07-09.log.gz").resolve()))
folder = Path(tempfile.mkdtemp(prefix="lockstep-notebook-"))
dataset, search = str(folder / "dataset"), str(folder / "search")
folder

# %% [markdown]
# ## Three splits
#
# Models learn from `train`. The search compares them on `validation`, so the best of many is partly the luckiest there. `test`
# is used once, at the end. All requests of a visitor are in one split.

# %%
with lockstep.spark_session("lockstep search", master="local[2]") as spark:
    manifest = lockstep.write_logs(spark, log, dataset, split="group:visitor:60/20/20")
pd.Series({name: split.records for name, split in manifest.splits.items()}, name="records")

# %% [markdown]
# ## Trials
#
# Each trial is an ordinary run. Two train at once here, each on one rank. Optuna proposes the parameters of the next trial. Interrupt
# the cell when you like: run again, it resumes the search.

# %%
space = {
    "learning_rate": {"low": 1e-4, "high": 1e-1, "log": True},
    "set.width": {"choices": [8, 32, 128]},
}
found = lockstep.tune(
    dataset, search, "mlp", space,
    metric="val_auc:max", validate="validation", trials=4, parallel=2, global_batch=128, epochs=4,
)
pd.DataFrame([{**trial, **trial["parameters"]} for trial in found["trials"]]).drop(columns=["run", "parameters"])

# %% [markdown]
# ## Curves
#
# The dashed lines are the training split: where they part from the others, a model overfits.

# %%
figure, axis = plt.subplots(figsize=(8, 3.5))
for trial in found["trials"]:
    epochs = pd.DataFrame([row["metrics"] for row in lockstep.read_history(trial["run"]).epochs])
    epochs.index += 1
    (line,) = axis.plot(epochs["val_auc"], marker="o", label=f"trial {trial['trial']}: {trial['parameters']}")
    axis.plot(epochs["auc"], linestyle="--", color=line.get_color(), alpha=0.6)
axis.set_xlabel("epochs")
axis.set_ylabel("AUC")
axis.legend(frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# ## The best trial and a baseline on the test split
#
# `rate:page` is the mean label of each page in the training split. Is zero within the interval of the difference, the search has
# found no better model than that.

# %%
evaluation = lockstep.evaluate(found["run"], dataset, "test", baseline="rate:page")
compared = {name: value for name, value in evaluation["difference"].items() if value["interval"]}
pd.DataFrame(
    {
        "best trial": pd.Series(evaluation["metrics"])[list(compared)],
        "rate:page": pd.Series(evaluation["baseline"]["metrics"])[list(compared)],
        "difference": {name: value["value"] for name, value in compared.items()},
        "from": {name: value["interval"][0] for name, value in compared.items()},
        "to": {name: value["interval"][1] for name, value in compared.items()},
    }
)
