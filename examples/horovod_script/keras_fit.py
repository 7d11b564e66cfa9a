"""Pictures of clothes by Keras' `fit` on Horovod's ranks, as its documentation shows for MNIST."""

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

keras.utils.set_random_seed(100 + hvd.rank())  # ranks begin with different weights until rank 0's are broadcast
model = keras.Sequential(
    [
        keras.layers.Conv2D(8, 3, strides=2, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.1),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
rate = 0.02 * hvd.size()
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9))
model.compile(loss=keras.losses.SparseCategoricalCrossentropy(), optimizer=optimizer, metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=2, verbose=1),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(os.path.join(args.out, "checkpoint-{epoch}.keras")))

history = model.fit(
    images, labels, batch_size=32, epochs=args.epochs, callbacks=callbacks, verbose=2 if hvd.rank() == 0 else 0
)
np.savez(
    os.path.join(args.out, f"rank-{hvd.rank()}.npz"),
    *model.get_weights(),
    loss=history.history["loss"],
    rate=history.history["lr"],
)
