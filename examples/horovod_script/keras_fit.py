"""Pictures of clothes by Keras' `fit` on Horovod's ranks, as its documentation shows for MNIST.

Started again, it continues after the newest checkpoint in `--out`.
"""

from __future__ import annotations

import argparse
import gzip
import os

import keras
import numpy as np

import lockstep.horovod as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.add_argument("--out", required=True)
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()

hvd.init()

with gzip.open(os.path.join(args.data, "train-images-idx3-ubyte.gz")) as file:
    images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28, 1) / np.float32(255)
with gzip.open(os.path.join(args.data, "train-labels-idx1-ubyte.gz")) as file:
    labels = np.frombuffer(file.read(), np.uint8, offset=8)
# Each rank trains on its own part.
images, labels = images[hvd.rank() : 1024 : hvd.size()], labels[hvd.rank() : 1024 : hvd.size()]


def checkpoint(epoch: int) -> str:
    """The file that has the model after `epoch` epochs."""
    return os.path.join(args.out, f"checkpoint-{epoch}.keras")


class Save(keras.callbacks.Callback):
    """Saves the model after each epoch under another name and renames the file, so that a kill tears none."""

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        part = os.path.join(args.out, "part.keras")
        self.model.save(part)
        os.replace(part, checkpoint(epoch + 1))


# The newest checkpoint that rank 0 sees; 0 if there is none.
epoch = max((number for number in range(args.epochs + 1) if os.path.exists(checkpoint(number))), default=0)
epoch = int(hvd.broadcast(epoch, 0, name="epoch"))

keras.utils.set_random_seed(100 + hvd.rank())  # ranks begin with different weights until rank 0's are broadcast
model = keras.Sequential(
    [
        keras.Input((28, 28, 1)),
        keras.layers.Conv2D(8, 3, strides=2, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
rate = 0.02 * hvd.size()
if epoch and hvd.rank() == 0:
    model = hvd.load_model(checkpoint(epoch))  # the callback sends it to the other ranks
else:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9))
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(), optimizer=optimizer, metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=2, verbose=1),
]
if hvd.rank() == 0:
    callbacks += [keras.callbacks.CSVLogger(os.path.join(args.out, "log.csv"), append=epoch > 0), Save()]

history = model.fit(
    images,
    labels,
    batch_size=32,
    epochs=args.epochs,
    initial_epoch=epoch,
    shuffle=False,  # or the order of an epoch depends on the epochs before
    callbacks=callbacks,
    verbose=2 if hvd.rank() == 0 else 0,
)
np.savez(
    os.path.join(args.out, f"rank-{hvd.rank()}.npz"),
    *model.get_weights(),
    loss=history.history["loss"],
    rate=history.history["lr"],
)
