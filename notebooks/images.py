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
# # Images, from IDX files to a ResNet and its mistakes
#
# This notebook builds a dataset from 12,000 pictures of garments, trains a ResNet-8 with augmentation on two ranks, evaluates
# it, and shows pictures that it gets wrong. Start it with the project's environment (`.venv`) from the folder `notebooks/`; set
# `LOCKSTEP_IMAGES` to a folder of other IDX files to use those.

# %%
import os
import tempfile
from pathlib import Path

import keras
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import lockstep

images = Path(os.environ.get("LOCKSTEP_IMAGES", "../data/fashion-mnist")).resolve()
names = ["T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Boot"]
folder = Path(tempfile.mkdtemp(prefix="lockstep-notebook-"))
dataset, run = str(folder / "dataset"), str(folder / "run")
folder

# %% [markdown]
# ## A dataset
#
# `split="given"` takes the splits from the files' names: `train-...` and `t10k-...`. Folders of JPEG or PNG files, tar archives,
# CIFAR and Parquet work alike with `source="folder"` and so on.

# %%
with lockstep.spark_session("lockstep images", master="local[2]") as spark:
    manifest = lockstep.write_images(spark, sorted(images.glob("*.gz")), dataset, split="given")
pd.Series({name: split.records for name, split in manifest.splits.items()}, name="images")

# %% [markdown]
# ## What the model sees
#
# Each picture twice: as it is stored, and in the first batch of an epoch with the augmentation of the training below.

# %%
augment = "crop:2 flip"
stored = next(lockstep.data.numpy_batches(dataset, global_batch=128))
changed = next(lockstep.data.numpy_batches(dataset, global_batch=128, augment=augment))
figure, axes = plt.subplots(2, 8, figsize=(8, 2.4))
for column in range(8):
    for row, batch in enumerate([stored, changed]):
        axes[row, column].imshow(batch.x["image"][column, ..., 0], cmap="gray")
        axes[row, column].axis("off")
    axes[0, column].set_title(names[stored.y[column]], fontsize=8)
plt.show()

# %% [markdown]
# ## Training on two ranks
#
# The cell shows the progress and the curves so far. Interrupt it when you like: the same cell resumes at the newest checkpoint,
# and the weights are those of an undisturbed run.

# %%
result = lockstep.train(
    dataset, run, "resnet8", num_ranks=2, global_batch=128, epochs=3, augment=augment, checkpoint_every=50
)
print(result.summary())

# %% [markdown]
# ## On the test images
#
# `majority` always names the most common class of the training images.

# %%
evaluation = lockstep.evaluate(run, dataset, "test", baseline="majority", num_ranks=2)
pd.DataFrame({"model": evaluation["metrics"], "majority": evaluation["baseline"]["metrics"]})

# %% [markdown]
# ## Mistakes
#
# The exported model is plain Keras and loads without Lockstep. These are the wrong answers that it is most sure of.

# %%
model = keras.saving.load_model(f"{result.model}/model.keras")
batches = list(lockstep.data.numpy_batches(dataset, "test", global_batch=8, epochs=1))
pictures, labels = np.concatenate([b.x["image"] for b in batches]), np.concatenate([b.y for b in batches])
shares = model.predict({"image": pictures}, verbose=0)  # (n, 10), each row sums to 1
found, sure = shares.argmax(axis=1), shares.max(axis=1)
wrong = np.flatnonzero(found != labels)
print(f"{len(wrong)} of {len(labels)} are wrong")

figure, axes = plt.subplots(2, 5, figsize=(8, 4))
for axis in axes.flat:
    axis.axis("off")
for axis, index in zip(axes.flat, wrong[np.argsort(-sure[wrong], kind="stable")]):
    axis.imshow(pictures[index, ..., 0], cmap="gray")
    axis.set_title(f"{names[labels[index]]},\nnot {names[found[index]]}", fontsize=8)
plt.show()

# %%
confusion = pd.crosstab(pd.Series(labels, name="label"), pd.Series(found, name="model")).rename(index=dict(enumerate(names)))
confusion
