"""A training loop of its own on Horovod's ranks, as its documentation shows for TensorFlow 2; in float64."""

from __future__ import annotations

import argparse
import gzip
import os

import keras
import numpy as np
import tensorflow as tf

import lockstep.horovod.tensorflow as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.add_argument("--out", required=True)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

hvd.init()
keras.config.set_floatx("float64")

with gzip.open(os.path.join(args.data, "train-images-idx3-ubyte.gz")) as file:
    images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 784) / np.float64(255)
with gzip.open(os.path.join(args.data, "train-labels-idx1-ubyte.gz")) as file:
    labels = np.frombuffer(file.read(), np.uint8, offset=8).astype(np.int64)

keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((784,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(10)])
first = model.get_weights()
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.SGD(
    0.05 * hvd.size(), momentum=0.875
)  # exact in float32, to which Keras rounds it on its way


@tf.function
def training_step(pictures: tf.Tensor, kinds: tf.Tensor, first_batch: bool) -> tf.Tensor:
    """One step; the first one ends with rank 0's variables everywhere, the optimizer's too."""
    with tf.GradientTape() as tape:
        loss = loss_of(kinds, model(pictures, training=True))
    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)
    return hvd.allreduce(loss, name="loss")


losses = []
batch = 64 // hvd.size()
for step in range(args.steps):
    begin = step * 64 + hvd.rank() * batch  # this rank's part of the global batch of 64
    loss = training_step(images[begin : begin + batch], labels[begin : begin + batch], step == 0)
    losses.append(float(loss))
    if step % 10 == 0 and hvd.rank() == 0:
        print(f"step {step}: loss {losses[-1]:.4f}")
if hvd.rank() == 0:
    with gzip.open(os.path.join(args.data, "t10k-images-idx3-ubyte.gz")) as file:
        unseen = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 784) / np.float64(255)
    with gzip.open(os.path.join(args.data, "t10k-labels-idx1-ubyte.gz")) as file:
        kinds = np.frombuffer(file.read(), np.uint8, offset=8)
    accuracy = (model(unseen).numpy().argmax(1) == kinds).mean()
    print(f"accuracy {accuracy:.4f}, of the most frequent class alone {np.bincount(kinds).max() / len(kinds):.4f}")
    model.save_weights(os.path.join(args.out, "final.weights.h5"))
np.savez(os.path.join(args.out, f"loop-{hvd.rank()}.npz"), *first, *model.get_weights(), loss=losses)
