"""tf.distribute as TensorFlow's guide writes it, with a loop of its own: nothing here knows Lockstep.

`--strategy mirrored` trains on two logical CPU devices of one process, `multi` on the processes that TF_CONFIG names.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os

import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--strategy", choices=["mirrored", "multi"], required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--out", required=True)
parser.add_argument("--steps", type=int, default=12)
args = parser.parse_args()

if args.strategy == "mirrored":
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
else:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
assert strategy.num_replicas_in_sync == 2
task = json.loads(os.environ["TF_CONFIG"])["task"]

import keras  # noqa: E402 - after the strategy, which must be first to see the devices

with gzip.open(os.path.join(args.data, "train-images-idx3-ubyte.gz")) as file:
    images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 784) / np.float32(255)
with gzip.open(os.path.join(args.data, "train-labels-idx1-ubyte.gz")) as file:
    labels = np.frombuffer(file.read(), np.uint8, offset=8).astype(np.int64)
batches = tf.data.Dataset.from_tensor_slices((images[: 64 * args.steps], labels[: 64 * args.steps])).batch(64)
# Each replica takes its half of each global batch.
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
batches = strategy.experimental_distribute_dataset(batches.with_options(options))

with strategy.scope():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((784,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(10)])
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")


@tf.function
def train_step(pictures: tf.Tensor, kinds: tf.Tensor) -> tf.Tensor:
    """One step of all replicas; returns the mean loss of the global batch."""

    def replica_step(pictures: tf.Tensor, kinds: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(kinds, model(pictures, training=True)) / 64
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(replica_step, (pictures, kinds)), axis=None)


losses = [float(train_step(*batch)) for batch in batches]
print(f"{args.strategy}: loss {losses[0]:.4f} to {losses[-1]:.4f}", flush=True)
np.savez(os.path.join(args.out, f"{args.strategy}-{task['index']}.npz"), *model.get_weights(), loss=losses)
